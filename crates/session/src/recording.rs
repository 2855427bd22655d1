//! A VM that is recorded, or replays a recording, while checkpoints are taken of it.
//!
//! ```text
//!   no request under way? ─▶ stop ─▶ still none? ─▶ icount ─▶ ... the checkpoint as of any VM ...
//!    ▲ a moment │ one is       ▲          │ one is
//!    └──────────┘              └── cont ◀─┘ a moment
//! ```
//!
//! Requests are those of disks, and packets that a network card is to send.

use crate::error::{Error, Result};
use crate::event::{Event, EventSink};
use keyframe_capture::BoxError;
use keyframe_qemu::VirtioQueues;
use keyframe_qemu::{Invocation, QemuIdentity, Qmp};
use keyframe_store::MachineMeta;
use keyframe_units::CheckpointId;
use keyframe_vm_disks::media::Media;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The longest time for which a checkpoint waits until no request is under way.
const BUSY_MAX: Duration = Duration::from_secs(5);
/// The time for which the VM runs between two checks.
const MOMENT: Duration = Duration::from_micros(500);

/// A place for the instruction count of a checkpoint, which the pause fills and the seal reads.
pub type Position = Arc<OnceLock<u64>>;

/// The options of a recorded VM.
#[derive(Clone, Debug)]
pub struct RecordingOptions {
    /// The recording's id.
    pub recording: String,
    /// The path of QEMU's log.
    pub log: PathBuf,
    /// Becomes true when QEMU loses parts of its log, because the log has no space. No interval has
    /// a later checkpoint, so none is taken.
    pub has_lost_log: Arc<AtomicBool>,
    /// The machine as the recording's checkpoints describe it, if the VM replays the recording.
    pub machine: Option<MachineMeta>,
    /// The checkpoint with which the replay began and whose disks it has. `None` if the VM does not
    /// replay a recording.
    pub begin: Option<CheckpointId>,
}

impl RecordingOptions {
    /// Makes the command line of the only VM in `starting` record into the log, and serves its
    /// media. Relative paths of the line begin in the first directory; the socket of the media is
    /// made in the second one. Returns the server of the media; `None` if there are none.
    ///
    /// Errors: a machine that cannot be recorded exactly; the server of its media cannot be
    /// started.
    pub fn prepare(
        &self,
        starting: &mut [(Invocation, QemuIdentity)],
        (directory, run_dir): (&Path, &Path),
        events: &dyn EventSink<Event>,
    ) -> Result<Option<Media>> {
        let [(line, _)] = starting else { return Err(Error::GroupRecorded) };
        let media = Media::serve(&line.media(), directory, run_dir).unwrap_or_else(|error| {
            let error = Arc::new(Error::from(error));
            events.event(&Event::MediaNotServed { error });
            None
        });
        if let Some(media) = &media {
            line.serve_media(&media.server());
        }
        for note in line.record(&self.log)? {
            events.event(&Event::RecordingNote(note));
        }
        Ok(media)
    }
}

/// A recorded VM whose disks or network cards always had requests under way.
#[derive(Debug, thiserror::Error)]
#[error(
    "the guest's disks and network cards have had requests under way for {seconds} s without a \
     moment's rest: there a recording cannot be cut"
)]
struct AlwaysBusy {
    seconds: u64,
}

/// The request queues of the disks and network cards of a recorded VM.
#[derive(Debug, Default)]
pub struct RequestQueues(Option<VirtioQueues>);

impl RequestQueues {
    /// Waits, while the VM runs, until no disk or network request is under way, but at most
    /// [`BUSY_MAX`]. So the VM need not be stopped and resumed again, which costs the guest more
    /// time. Error: QEMU does not answer.
    pub fn await_rest(&mut self, qmp: &mut Qmp) -> Result<(), BoxError> {
        let began = Instant::now();
        while self.are_busy(qmp)? && began.elapsed() < BUSY_MAX {
            std::thread::sleep(MOMENT);
        }
        Ok(())
    }

    /// Lets a VM that has just been stopped run on until no request is under way at its stop.
    /// Error: QEMU does not answer.
    pub fn settle(&mut self, qmp: &mut Qmp) -> Result<(), BoxError> {
        let began = Instant::now();
        while self.are_busy(qmp)? {
            if began.elapsed() > BUSY_MAX {
                return Err(AlwaysBusy { seconds: BUSY_MAX.as_secs() }.into());
            }
            qmp.cont()?;
            std::thread::sleep(MOMENT);
            self.await_rest(qmp)?;
            qmp.stop()?;
        }
        Ok(())
    }

    /// Returns whether a request of a disk or network card is under way. Error: QEMU does not
    /// answer.
    pub fn are_busy(&mut self, qmp: &mut Qmp) -> Result<bool, BoxError> {
        let queues = match &mut self.0 {
            Some(queues) => queues,
            none => none.insert(VirtioQueues::find(qmp)?),
        };
        Ok(queues.are_busy(qmp)?)
    }
}
