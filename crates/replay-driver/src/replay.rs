//! One QEMU that replays a recording from a checkpoint on.
//!
//! ```text
//!   start(n) ─▶ runs from the checkpoint's instruction on ─▶ stands at n ─▶ go_on(m) ...
//!                                                        ├─▶ the log ends, and QEMU with it
//!                                                        └─▶ it has come off the log: stands still and never says so
//! ```
//!
//! A replay that stands takes from the log what QEMU's main loop finds there, also what belongs
//! behind the recording's own going on. So it never stands at its checkpoint, and goes on only from
//! an instruction at which the log has nothing
//! ([`LogIndex::next_unambiguous`](keyframe_replay::log::LogIndex::next_unambiguous)).
//!
//! Invariant: a [`Replay`] that is dropped leaves no QEMU behind.

use super::Source;
use super::passage::{PATIENCE, Passage, Reached};
use keyframe_failure::Failure;
use keyframe_inspect::guest_memory::ReadStop;
use keyframe_inspect::source_of;
use keyframe_qemu::recording::{RecordingClock, RecordingMode, RecordingOptions, recording_line};
use keyframe_qemu::restore::{self, Plan, RamSource, RestoreOptions, Restored, Until};
use keyframe_qemu::{DiskServer, media_of};
use keyframe_replay::interval::RecordedCheckpoint;
use keyframe_store::{LoadedCheckpoint, MachineMeta, Store};
use keyframe_units::{Page, PageIndex, PageRange};
use keyframe_vm_disks::media::Media;
use keyframe_vm_disks::{self as disks, ServedDisks, restored};
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The socket of a replay's disks, in a directory of its own.
pub const SOCKET: &str = "disks.sock";

/// How to replay.
#[derive(Clone, Debug)]
pub struct With {
    /// Words for QEMU behind the recorded ones.
    pub extra: Vec<OsString>,
    /// Where the guest's serial output goes.
    pub console: Option<PathBuf>,
    /// The file that what QEMU says is added to; our standard error without one.
    pub log: Option<PathBuf>,
    /// Bring RAM as it is touched.
    pub lazy: bool,
    /// How long it may stand at one instruction before it counts as having come off its log.
    pub patience: Duration,
}

impl Default for With {
    fn default() -> Self {
        Self { extra: Vec::new(), console: None, log: None, lazy: false, patience: PATIENCE }
    }
}

/// A QEMU that replays.
pub struct Replay {
    alive: Alive,
    passage: Passage,
    /// The checkpoint that it began with.
    pub loaded: Arc<LoadedCheckpoint>,
}

/// A checkpoint's RAM.
pub(super) struct StoredRam(pub Arc<LoadedCheckpoint>);

impl RamSource for StoredRam {
    fn read(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        Ok(self.0.read_pages(range, &mut |page, content| {
            sink(page, content).map_err(ReadStop::Receiver)
        })?)
    }

    fn read_some(
        &self,
        pages: &[PageIndex],
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        Ok(self.0.read_some(pages, &mut |page, content| {
            sink(page, content).map_err(ReadStop::Receiver)
        })?)
    }

    fn wanted_first(&self) -> Vec<PageIndex> {
        self.0.expected_first()
    }
}

impl Replay {
    /// Starts QEMU at `place`, and lets it run to `until`.
    pub fn start(
        source: &Source,
        place: RecordedCheckpoint,
        until: Until,
        with: &With,
    ) -> Result<Self, Failure> {
        let passage = Passage {
            icount: place.icount,
            until,
            holds: source.holds()?,
            log: source.log().into(),
            patience: with.patience,
        };
        let Started { restored, disks, loaded } = begin(source, place, passage.next_stop(), with)?;
        Ok(Self { alive: Alive { restored, disks }, passage, loaded })
    }

    /// Its QEMU.
    pub fn restored(&mut self) -> &mut Restored {
        &mut self.alive.restored
    }

    /// Its disks.
    pub fn served(&mut self) -> Option<&mut ServedDisks> {
        self.alive.disks.as_mut().map(|(served, _)| served)
    }

    /// Waits until it is where it runs to.
    pub fn arrive(
        &mut self,
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<Reached, Failure> {
        self.passage.arrive(&mut self.alive.restored, interrupted, tell)
    }

    /// Lets it run on from where it stands to `until`, and waits until it is there.
    pub fn go_on(
        &mut self,
        until: Until,
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<Reached, Failure> {
        self.passage.go_on(&mut self.alive.restored, until, interrupted, tell)
    }

    /// Ends QEMU in good order, so that a plugin writes what it has.
    pub fn end(self) -> Result<(), Failure> {
        self.alive.end()
    }
}

/// The disks of a VM, and the directory of their socket.
pub type Disks = Option<(ServedDisks, tempfile::TempDir)>;

/// A QEMU and its disks, which end with this.
pub(super) struct Alive {
    pub restored: Restored,
    pub disks: Disks,
}

impl Alive {
    /// Ends QEMU in good order.
    pub fn end(mut self) -> Result<(), Failure> {
        let killed = self.restored.kill().map_err(|e| Failure::qemu(&e));
        let closed =
            self.disks.take().map_or(Ok(()), |(served, _folder)| served.end(false).map(drop));
        killed.and(closed.map_err(Failure::from))
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        // It is the error that led here that is told.
        let _ = self.restored.kill();
        if let Some((served, _folder)) = self.disks.take() {
            let _ = served.end(false);
        }
    }
}

/// A QEMU that has been started at a checkpoint of a recording.
pub struct Started {
    /// It.
    pub restored: Restored,
    /// Its disks, and the directory of their socket.
    pub disks: Disks,
    /// The checkpoint.
    pub loaded: Arc<LoadedCheckpoint>,
}

/// Starts QEMU at `place`, and lets it run to `until`.
pub fn begin(
    source: &Source,
    place: RecordedCheckpoint,
    until: Until,
    with: &With,
) -> Result<Started, Failure> {
    let loaded =
        source.store.load(place.checkpoint).map_err(|e| Failure::store(&e, source.store.path()))?;
    let loaded = Arc::new(loaded);
    let mut disks = serve(&source.store, &loaded)?;
    let server = server(&disks);
    let mut restored_from = source_of(&loaded.meta.machine, &loaded.meta.ram);
    let media = serve_media(&restored_from.machine);
    let machine = &mut restored_from.machine;
    let media_server = media.as_ref().map(Media::server);
    let words = machine.user_command.split_off(1.min(machine.user_command.len()));
    let recording = RecordingOptions {
        mode: RecordingMode::Replay,
        log: source.log(),
        disks: server.as_ref(),
        media: media_server.as_ref(),
        qemu_version: &machine.vmm_version,
        console: with.console.as_deref(),
        clock: RecordingClock::Same(&loaded.meta.machine.full_command),
    };
    let line = recording_line(&words, recording).map_err(|e| Failure::qemu(&e.into()))?;
    machine.user_command.extend(line.words);
    let options =
        RestoreOptions { replays: Some(until), log: with.log.clone(), ..RestoreOptions::default() };
    let plan =
        Plan::new(restored_from, with.extra.clone(), options).map_err(|e| Failure::qemu(&e))?;
    let ram = Arc::new(StoredRam(Arc::clone(&loaded)));
    let restored = if with.lazy {
        restore::start_lazy(plan, ram, &loaded.device_state)
    } else {
        restore::start(plan, &*ram, &loaded.device_state)
    };
    let mut restored = restored.map_err(|e| Failure::qemu(&e))?;
    let core = restored.vm().core();
    if let (Some((served, _)), Some(core)) = (&mut disks, core) {
        served.disks.answer_on(core).map_err(|e| Failure::new(keyframe_failure::chain(&e)))?;
    }
    if let Some(mut media) = media {
        core.map_or(Ok(()), |core| media.answer_on(core))?;
        restored.vm().accompany(media);
    }
    Ok(Started { restored, disks, loaded })
}

/// The disks as they were at the checkpoint; what the VM writes is thrown away.
pub(super) fn serve(store: &Store, loaded: &LoadedCheckpoint) -> Result<Disks, Failure> {
    if loaded.meta.disks.is_empty() {
        return Ok(None);
    }
    restored::require_all(loaded.id, &loaded.meta)?;
    let mut wanted = restored::disks_of_checkpoint(store, loaded.id, &loaded.meta)?;
    for disk in &mut wanted {
        disk.temporary = true;
    }
    let folder = tempfile::Builder::new().prefix("keyframe-replay-").tempdir();
    let folder = folder.map_err(|e| Failure::new(format!("make a directory for a socket: {e}")))?;
    let socket = folder.path().join(SOCKET);
    let served = disks::serve(store, &loaded.meta.vm, Some(loaded.id.0), wanted, &socket)?;
    Ok(Some((served, folder)))
}

/// The media that the guest can only read; none where QEMU has to read them itself.
fn serve_media(machine: &MachineMeta) -> Option<Media> {
    let media = media_of(machine.user_command.get(1..)?).ok()?;
    Media::serve(&media, &machine.directory(), &std::env::temp_dir()).ok()?
}

/// Who serves them.
pub(super) fn server(disks: &Disks) -> Option<DiskServer> {
    let (_, folder) = disks.as_ref()?;
    Some(DiskServer { socket: folder.path().join(SOCKET), prefix: String::new() })
}
