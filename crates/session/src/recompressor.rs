//! Recompression beside a run: packs that are not written to any more are written anew, as small as
//! they get.
//!
//! ```text
//!   look ─▶ are there enough bytes in cold packs? ─ no ─▶ rest
//!    ▲                   │ yes
//!    │                   ▼
//!    └── rest ◀── one part of them ─▶ new packs ─▶ the writer follows with its next checkpoint ─▶ maps ─▶ old packs gone
//! ```
//!
//! A thread of its own at the lowest priority: it gets the core when no other thread wants it, and
//! rests three times as long as it has worked. It has nothing in common with the engine but the
//! store's files; the writer follows after the pause, as it follows any prune.
//!
//! Invariants: at most one part is at work, of a pack or so; what is not done when the run ends is
//! left to `keyframe prune --recompress`, and said. It may be killed at any instant, as a prune
//! may. Not here: what recompression is (the store's prune).

use super::SessionOptions;
use crate::control::RecompressorStatus;
use crate::control::server::SharedStatus;
use crate::error::{self, Result, error_chain};
use crate::event::{Event, EventSink, SharedEventSink};
use keyframe_store::{Error, PruneOptions, Store};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// When packs are recompressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Recompress {
    /// While the run goes on, when there is time
    Idle,
    /// The run does not; keyframe prune --recompress does
    #[default]
    Never,
}

/// The time between two checks of the store.
const LOOK: Duration = Duration::from_secs(5);
/// The number of bytes that are recompressed at a time. Fewer are not worth a prune, which the
/// writer has to follow.
const PART_BYTES: u64 = 64 << 20;
/// The ratio of its rest to its work.
const RESTS: u32 = 3;
/// Where checkpoints are further apart than this, it is tried again later.
const ANSWER_WAIT: Duration = Duration::from_secs(20);
/// The time that the recompression in progress gets to complete at the end of a run.
const END_WAIT: Duration = Duration::from_secs(3);
/// Nice value of the thread.
const NICE: i32 = 19;

/// A recompression on a thread of its own. Dropping it ends the thread.
pub struct Recompressor {
    store: Store,
    stop: Option<Sender<()>>,
    ended: Receiver<()>,
}

impl Recompressor {
    /// Starts the recompression of `store` on a thread. Returns `None` if the options forbid it, if
    /// the session is a flight recorder, whose packs are soon removed, or if the store is remote,
    /// so that all old packs would have to be read over the network. `status` shows the progress,
    /// or why the recompression is off. Error: the thread cannot be started.
    pub fn start(
        store: &Store,
        options: &SessionOptions,
        status: &SharedStatus,
    ) -> Result<Option<Self>> {
        if options.recompress == Recompress::Never {
            return Ok(None);
        }
        let off = if options.keep_within.is_some() {
            Some("what --keep-within keeps is soon gone")
        } else {
            store.is_remote().then_some("the store is on another host")
        };
        let shown = Shown { status: Arc::clone(status), off: off.map(String::from) };
        shown.change(|_| {});
        if off.is_some() {
            return Ok(None);
        }
        let (stop, stopped) = channel();
        let (end, ended) = channel();
        let (work, events) = (store.clone(), Arc::clone(&options.events));
        let thread = std::thread::Builder::new().name("recompressor".into());
        let spawned = thread.spawn(move || {
            until_stopped(&work, &stopped, &shown, &events);
            drop(end);
        });
        spawned.map_err(|e| error::Error::io("start the thread that recompresses", e))?;
        Ok(Some(Self { store: store.clone(), stop: Some(stop), ended }))
    }

    /// Ends the thread, and emits an event if data is left to recompress.
    pub fn finish(mut self, events: &dyn EventSink<Event>) {
        self.end();
        let left_bytes = self.store.cold_bytes().unwrap_or(0);
        if left_bytes >= PART_BYTES {
            events.event(&Event::NotRecompressed { bytes: left_bytes });
        }
    }

    fn end(&mut self) {
        // Answered by the thread's end. One that takes longer may be killed with the process.
        if self.stop.take().is_some() {
            let _ = self.ended.recv_timeout(END_WAIT);
        }
    }
}

impl Drop for Recompressor {
    fn drop(&mut self) {
        self.end();
    }
}

/// The state for `keyframe status`.
struct Shown {
    status: SharedStatus,
    off: Option<String>,
}

impl Shown {
    fn change(&self, change: impl FnOnce(&mut RecompressorStatus)) {
        if let Ok(mut status) = self.status.lock() {
            let first =
                || RecompressorStatus { off: self.off.clone(), ..RecompressorStatus::default() };
            change(status.recompressor.get_or_insert_with(first));
        }
    }
}

fn until_stopped(store: &Store, stopped: &Receiver<()>, shown: &Shown, events: &SharedEventSink) {
    // What is not permitted stays as it is.
    let _ = rustix::process::setpriority_process(None, NICE);
    let (mut rest, mut said) = (LOOK, String::new());
    while matches!(stopped.recv_timeout(rest), Err(RecvTimeoutError::Timeout)) {
        let began = Instant::now();
        let looked = look(store, shown);
        shown.change(|status| {
            status.at_work = false;
            status.last_error =
                looked.as_ref().err().filter(|e| !is_taken(e)).map(|e| error_chain(e));
        });
        match looked {
            Ok(()) => said.clear(),
            Err(error) if is_taken(&error) => said.clear(),
            // Once, not at every look.
            Err(error) => {
                let text = error_chain(&error);
                if text != said {
                    events.event(&Event::RecompressionFailed {
                        store: store.path().to_owned(),
                        error: Arc::new(error),
                    });
                }
                said = text;
            }
        }
        rest = (began.elapsed() * RESTS).max(LOOK);
    }
}

/// True if another process prunes.
fn is_taken(error: &Error) -> bool {
    matches!(error, Error::Locked { .. })
}

fn look(store: &Store, shown: &Shown) -> Result<(), Error> {
    let cold_bytes = store.cold_bytes()?;
    shown.change(|status| {
        (status.cold_bytes, status.at_work) = (cold_bytes, cold_bytes >= PART_BYTES);
    });
    if cold_bytes < PART_BYTES {
        return Ok(());
    }
    // Nothing is copied for the space alone.
    let options = PruneOptions {
        max_unused: 1.0,
        wait: ANSWER_WAIT,
        recompress_bytes: PART_BYTES,
        dry_run: false,
    };
    let report = store.prune(&options, &mut |_| {})?;
    let cold_bytes = store.cold_bytes()?;
    shown.change(|status| {
        status.recompressed_packs += report.recompressed_packs;
        status.cold_bytes = cold_bytes;
    });
    Ok(())
}
