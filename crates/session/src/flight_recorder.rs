//! A flight recorder. While a run goes on, it forgets checkpoints that are too old, and gives their
//! space back.
//!
//! ```text
//!   look ─▶ new checkpoints read ─▶ those older than --keep-within ─▶ forgotten ─▶ a part of all? ─▶ prune ─▶ rest
//!    ▲                                                                                 │ not yet             │
//!    └─────────────────────────────────────────────────────────────────────────────────┴────────────────────┘
//! ```
//!
//! A thread of its own, at the lowest priority that still gets its turn, or at the encoder's if it
//! falls behind. It has nothing in common with the engine but the store's files and the
//! checkpoints that a rollback holds. The writer follows a prune with its next checkpoint, after
//! the pause.
//!
//! Invariants: only checkpoints of this very run are taken, never what was there before; never the
//! newest, a tagged or a pinned one, one that a disk's overlay stands on or that a rollback goes
//! to. Whatever fails is said, and tried again at a later look. It may be killed at any instant, as
//! forgetting and pruning may.

use super::SessionOptions;
use crate::control::RecorderStatus;
use crate::control::server::SharedStatus;
use crate::error::{Error, Result, error_chain};
use crate::event::{Event, SharedEventSink};
use keyframe_locks::IgnorePoison;
use keyframe_scheduling::PruneSchedule;
use keyframe_store::{
    CheckpointId, Error as StoreError, PruneOptions, Retention, RetentionCandidate, Sealed, Store,
};
use keyframe_units::{duration_ns, elapsed_ns};
use keyframe_vm_disks::forget;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The longest pack of a run with a recorder, in bytes. The space of an open pack cannot be
/// reclaimed.
pub const PACK_BYTES_MAX: u64 = 64 << 20;
/// More copying than this is not worth the space.
const MAX_UNUSED: f64 = 0.25;
/// Nice value of the thread.
const NICE: i32 = 19;
/// Where checkpoints are further apart than this, a prune is tried again at the next look.
const ANSWER_WAIT: Duration = Duration::from_secs(20);
/// The time that a prune gets to complete at the end of a run.
const END_WAIT: Duration = Duration::from_secs(3);

/// A flight recorder at work, on a thread of its own. Dropping it ends the thread.
pub struct FlightRecorder {
    stop: Option<Sender<()>>,
    ended: Receiver<()>,
    held: Arc<Mutex<BTreeSet<CheckpointId>>>,
}

impl FlightRecorder {
    /// Starts a recorder that forgets old checkpoints of the run of `vm` in `store` and shows its
    /// state in `status`. Returns `None` if the options ask for no recorder. Error: the thread
    /// cannot be started.
    pub fn start(
        store: &Store,
        vm: &str,
        options: &SessionOptions,
        status: &SharedStatus,
    ) -> Result<Option<Self>> {
        let Some(within) = options.keep_within else { return Ok(None) };
        let before = store.ids().map_err(|e| Error::store(store.path(), e))?.last().copied();
        let (stop, stopped) = channel();
        let (end, ended) = channel();
        let held = Arc::<Mutex<BTreeSet<_>>>::default();
        let within_ns = duration_ns(within);
        let work = Work {
            store: store.clone(),
            vm: vm.into(),
            rules: Retention { within: Some(within), ..Retention::default() },
            before,
            known: BTreeMap::new(),
            held: Arc::clone(&held),
            schedule: PruneSchedule::new(within_ns),
            born: Instant::now(),
            said: None,
            shown: RecorderStatus { keep_within_ns: within_ns, ..RecorderStatus::default() },
            status: Arc::clone(status),
            events: Arc::clone(&options.events),
        };
        work.show();
        let thread = std::thread::Builder::new().name("recorder".into());
        let spawned = thread.spawn(move || {
            work.until_stopped(&stopped);
            drop(end);
        });
        spawned.map_err(|e| Error::io("start the recorder's thread", e))?;
        Ok(Some(Self { stop: Some(stop), ended, held }))
    }

    /// Keeps checkpoint `id` for the rest of this run: a rollback goes to it, and the next
    /// checkpoint builds on it.
    pub fn hold(&self, id: CheckpointId) {
        self.held.lock().ignore_poison().insert(id);
    }
}

impl Drop for FlightRecorder {
    fn drop(&mut self) {
        self.stop = None;
        // Answered by the thread's end. One that takes longer may be killed with the process.
        let _ = self.ended.recv_timeout(END_WAIT);
    }
}

/// Lowers the priority of the calling thread: a little if the recorder is behind, to the lowest
/// otherwise. Ignores errors.
fn set_priority(is_behind: bool) {
    if is_behind {
        keyframe_kernel::priority::lower_current_thread();
    } else {
        let _ = rustix::process::setpriority_process(None, NICE);
    }
}

/// The state of the recorder's thread.
struct Work {
    store: Store,
    vm: String,
    rules: Retention,
    /// The newest checkpoint from before.
    before: Option<CheckpointId>,
    /// The run's checkpoints, by number; their tags are looked up each time.
    known: BTreeMap<CheckpointId, RetentionCandidate>,
    held: Arc<Mutex<BTreeSet<CheckpointId>>>,
    schedule: PruneSchedule,
    born: Instant,
    /// The last reported failure; `None` after a success.
    said: Option<String>,
    /// The state for `keyframe status`.
    shown: RecorderStatus,
    status: SharedStatus,
    events: SharedEventSink,
}

impl Work {
    fn show(&self) {
        if let Ok(mut status) = self.status.lock() {
            status.recorder = Some(self.shown.clone());
        }
    }

    fn until_stopped(mut self, stopped: &Receiver<()>) {
        set_priority(false);
        let look = Duration::from_nanos(self.schedule.look_ns());
        while matches!(stopped.recv_timeout(look), Err(RecvTimeoutError::Timeout)) {
            let looked = self.look();
            self.shown.kept = self.known.len() as u64;
            let text = looked.as_ref().err().map(|e| self.text(e));
            self.shown.last_error.clone_from(&text);
            self.show();
            // Once, not at every look.
            if let Err(error) = looked
                && text != self.said
            {
                let store = self.store.path().to_owned();
                self.events.event(&Event::FlightRecorderFailed { store, error: Arc::new(error) });
            }
            self.said = text;
        }
    }

    fn look(&mut self) -> Result<()> {
        let now_ns = |work: &Self| elapsed_ns(work.born);
        let gone = self.old()?;
        if !gone.is_empty() {
            let events = &self.events;
            forget::forget(&self.store, &gone, &mut |clone, error| {
                let error: Arc<std::io::Error> = Arc::new(std::io::Error::other(error.to_string()));
                events.event(&Event::CloneKept { clone: clone.to_owned(), error });
            })?;
            self.known.retain(|id, _| !gone.contains(id));
            self.shown.forgotten += gone.len() as u64;
        }
        let began_ns = now_ns(self);
        let kept = self.known.len() as u64;
        if self.schedule.record_forgotten(began_ns, gone.len() as u64, kept) {
            set_priority(self.schedule.is_behind(kept));
            let options = PruneOptions {
                max_unused: MAX_UNUSED,
                wait: ANSWER_WAIT,
                ..PruneOptions::default()
            };
            let pruned = self.store.prune(&options, &mut |_| {});
            let all = pruned.as_ref().is_ok_and(|report| report.postponed_packs == 0);
            set_priority(false);
            self.schedule.record_prune(began_ns, now_ns(self), all);
            match pruned {
                Ok(report) => {
                    self.shown.freed_packs += report.removed_packs + report.rewritten_packs;
                }
                // Another process prunes.
                Err(StoreError::Locked { .. }) => {}
                Err(error) => return Err(self.failure(error)),
            }
        }
        Ok(())
    }

    /// Returns the checkpoints that may be forgotten. Reads only checkpoints that are new since the
    /// last call.
    fn old(&mut self) -> Result<BTreeSet<CheckpointId>> {
        let ids = self.store.ids().map_err(|e| self.failure(e))?;
        let there: BTreeSet<CheckpointId> =
            ids.into_iter().filter(|id| Some(*id) > self.before).collect();
        self.known.retain(|id, _| there.contains(id));
        for id in &there {
            if self.known.contains_key(id) {
                continue;
            }
            match self.store.sealed(*id) {
                Ok(sealed) if sealed.meta.vm == self.vm => {
                    self.known.insert(*id, RetentionCandidate::from(&sealed));
                }
                Ok(_) | Err(StoreError::UnknownCheckpoint { .. }) => {}
                Err(error) => return Err(self.failure(error)),
            }
        }
        let mut tags = self.store.tags_of_checkpoints().map_err(|e| self.failure(e))?;
        for (id, moment) in &mut self.known {
            let of = tags.remove(id).unwrap_or_default();
            (moment.tags, moment.pinned) = Sealed::split_tags(*id, &of);
        }
        let moments: Vec<RetentionCandidate> = self.known.values().cloned().collect();
        let mut standing: BTreeSet<CheckpointId> =
            forget::checkpoints_under_overlays(&self.store)?.into_keys().collect();
        standing.extend(self.held.lock().ignore_poison().iter());
        let verdicts = self.rules.judge(&moments, &standing);
        Ok(verdicts
            .into_iter()
            .filter(|verdict| verdict.kept.is_empty())
            .map(|verdict| verdict.id)
            .collect())
    }

    fn text(&self, error: &Error) -> String {
        format!("{}: {}", self.store.path().display(), error_chain(error))
    }

    fn failure(&self, error: StoreError) -> Error {
        Error::store(self.store.path(), error)
    }
}
