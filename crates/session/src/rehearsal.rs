//! A rehearsal of a restore: a second QEMU loads the first checkpoint of a run and is ended again.
//! It shows at the start of a run whether its checkpoints can be restored.
//!
//! ```text
//!   sealed ─▶ line of a clone, its disks empty ─▶ QEMU -S loads the devices ─▶ ended ─▶ reported as sealed
//!               └─ cannot stand beside the VM      └─ QEMU refuses them
//!                   ▼                                ▼
//!                  not rehearsed, with the reason   removed again; no more checkpoints are taken
//! ```
//!
//! The second QEMU reads nothing of RAM but the pages that devices need while they are loaded
//! (rings of virtio). It never runs, writes nothing outside a temporary directory, and has no
//! network. The encoder's thread rehearses, so no pause is longer. The cost is one start of QEMU,
//! which is some tenths of a second of one processor.
//!
//! A QEMU that does not start, or takes too long, may fail for a reason of this host at this time.
//! So that is only a warning.
//!
//! Not rehearsed: groups, recordings, and lines with devices that two QEMUs cannot have
//! ([`rehearsal_obstacle`]).

use crate::event::{Event, SharedEventSink, shared};
use keyframe_capture::BoxError;
use keyframe_inspect::guest_memory::CheckpointRam;
use keyframe_inspect::source_of;
use keyframe_qemu::DiskServer;
use keyframe_qemu::cmdline::{
    CloneOptions, clone_line, options, rehearsal_obstacle, without_other_user,
};
use keyframe_qemu::restore::{self, Plan, RestoreOptions, RestorePurpose};
use keyframe_scratch_directory::ScratchDirectory;
use keyframe_store::{CheckpointId, LoadedCheckpoint, Meta, Store};
use keyframe_units::elapsed_ns;
use keyframe_vm_disks::restored;
use keyframe_vmm::{PlanOptions, RamSource, RestoreRam, Restorer, VmmErrorKind, VmmKind};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// The most bytes of QEMU's messages that an error holds.
const MESSAGE_BYTES_MAX: usize = 400;

/// The VMM refuses to load a checkpoint that it has just saved.
#[derive(Debug, thiserror::Error)]
#[error("{vmm} cannot load the checkpoint that it has just saved: {}{said}", crate::error::error_chain(&**source))]
pub struct NotRestorable {
    /// The VMM.
    vmm: VmmKind,
    /// The driver's error.
    #[source]
    source: BoxError,
    /// The VMM's own message; empty if it has none.
    said: String,
}

/// What restores a checkpoint for a rehearsal.
pub(crate) enum Rehearser {
    /// A second QEMU beside the VM, whose line is changed so that it may stand there.
    Qemu,
    /// The restorer of the VM's driver.
    Restorer(Box<dyn Restorer + Send>),
}

/// A rehearsal that waits for the first checkpoint of a run.
pub(crate) struct Rehearsal {
    pub store: Store,
    pub events: SharedEventSink,
    pub rehearser: Rehearser,
}

/// The outcome of a rehearsal that found nothing wrong with the checkpoint.
enum Outcome {
    Loaded,
    /// It was not possible.
    Omitted(String),
    /// It failed, perhaps for a reason of this host.
    Doubtful(BoxError),
}

impl Rehearsal {
    /// Restores checkpoint `id` without running it. Tells an event if the rehearsal was not
    /// possible or leaves doubts. Error: the checkpoint cannot be restored.
    pub fn of(&self, id: CheckpointId) -> Result<(), NotRestorable> {
        let began = Instant::now();
        match self.outcome(id)? {
            Outcome::Loaded => {
                let vmm = match &self.rehearser {
                    Rehearser::Qemu => VmmKind::Qemu,
                    Rehearser::Restorer(restorer) => restorer.capabilities().vmm(),
                };
                self.events.event(&Event::Rehearsed { vmm, took_ns: elapsed_ns(began) });
            }
            Outcome::Omitted(reason) => self.events.event(&Event::NotRehearsed { reason }),
            Outcome::Doubtful(error) => {
                self.events.event(&Event::RehearsalFailed { error: shared(error) });
            }
        }
        Ok(())
    }

    fn outcome(&self, id: CheckpointId) -> Result<Outcome, NotRestorable> {
        let loaded = match self.store.load(id) {
            Ok(loaded) => Arc::new(loaded),
            Err(error) => return Ok(Outcome::Doubtful(error.into())),
        };
        let place = match ScratchDirectory::new("rehearsal") {
            Ok(place) => place,
            Err(error) => return Ok(Outcome::Doubtful(error.into())),
        };
        let log = place.path().join("log");
        let ram = Arc::new(CheckpointRam(Arc::clone(&loaded)));
        if let Rehearser::Restorer(restorer) = &self.rehearser {
            return by_restorer(&**restorer, &loaded, &*ram, &log);
        }
        let restored = match plan(&loaded.meta, place.path(), &log) {
            Ok(Ok(plan)) => restore::start_lazy(plan, ram, &loaded.device_state),
            Ok(Err(error)) => Err(error),
            Err(reason) => return Ok(Outcome::Omitted(reason)),
        };
        match restored {
            Ok(mut restored) => {
                // If this fails, dropping `restored` ends QEMU.
                let _ = restored.kill();
                Ok(Outcome::Loaded)
            }
            Err(error @ keyframe_qemu::Error::Memory { .. }) => {
                Ok(Outcome::Omitted(crate::error::error_chain(&error)))
            }
            Err(error) => {
                let is_refused = error.is_of_checkpoint();
                failed(VmmKind::Qemu, is_refused, error.into(), &log)
            }
        }
    }
}

/// Restores `loaded` by `restorer` without running it, and ends it again.
fn by_restorer(
    restorer: &dyn Restorer,
    loaded: &LoadedCheckpoint,
    ram: &dyn RamSource,
    log: &Path,
) -> Result<Outcome, NotRestorable> {
    let vmm = restorer.capabilities().vmm();
    let options = PlanOptions {
        paused: true,
        log: Some(log.into()),
        is_rehearsal: true,
        ..PlanOptions::default()
    };
    let source = source_of(&loaded.meta.machine, &loaded.meta.ram);
    let restored = restorer
        .plan(source, options)
        .and_then(|plan| plan.start(RestoreRam::Eager(ram), &loaded.device_state));
    match restored {
        Ok(mut restored) => {
            let _ = restored.vm.end();
            Ok(Outcome::Loaded)
        }
        Err(error) => {
            let is_refused = error.kind() == VmmErrorKind::StateRefused;
            failed(vmm, is_refused, error.into(), log)
        }
    }
}

/// Returns the outcome of a rehearsal that failed with `source`: an error if `vmm` has refused the
/// checkpoint, doubts otherwise. `log` has the messages of `vmm`.
fn failed(
    vmm: VmmKind,
    is_refused: bool,
    source: BoxError,
    log: &Path,
) -> Result<Outcome, NotRestorable> {
    let said = said(vmm, log);
    if is_refused {
        return Err(NotRestorable { vmm, source, said });
    }
    let text = format!("{}{said}", crate::error::error_chain(&*source));
    Ok(Outcome::Doubtful(text.into()))
}

/// Plans the restore of a checkpoint beside its running VM. `Err`: the reason why no rehearsal is
/// possible. `Err` inside: the plan's error.
fn plan(meta: &Meta, place: &Path, log: &Path) -> Result<keyframe_qemu::Result<Plan>, String> {
    if !meta.members.is_empty() {
        return Err("the VMs are a group".into());
    }
    if let Some(disk) = meta.disks.iter().find(|disk| disk.left_out) {
        return Err(format!("disk {}, which was left out, is in use by the VM", disk.name));
    }
    let words = &meta.machine.user_command;
    let line = match options::parse(words.get(1..).unwrap_or_default()) {
        Ok(line) => line,
        Err(error) => return Ok(Err(error.into())),
    };
    if let Some(obstacle) = rehearsal_obstacle(&line) {
        return Err(format!("two QEMUs cannot have {} at the same time", obstacle.display()));
    }
    let none = ["-display".to_owned(), "none".to_owned()];
    let clone = CloneOptions { directory: place, exact: true };
    let own = clone_line(words, &none, clone).map_err(|error| error.to_string())?;
    let mut machine = meta.machine.clone();
    machine.user_command = without_other_user(&own.words).map_err(|error| error.to_string())?;
    let disks = meta.disks.iter().map(|disk| (disk.name.clone(), disk.disk_bytes));
    let disks = disks.collect::<BTreeMap<_, _>>();
    let has_disks = !disks.is_empty();
    let server = match restored::server(meta, place.join("disks"), "") {
        Ok(server) => has_disks.then_some(DiskServer { empty_disks: Some(disks), ..server }),
        Err(error) => return Err(crate::error::error_chain(&error)),
    };
    let options = RestoreOptions {
        paused: true,
        lazy: true,
        log: Some(log.into()),
        disks: server,
        purpose: RestorePurpose::Rehearsal,
        ..RestoreOptions::default()
    };
    Ok(Plan::new(source_of(&machine, &meta.ram), none.map(Into::into).to_vec(), options))
}

/// The end of the messages of `vmm` in `log`, as the end of a sentence.
fn said(vmm: VmmKind, log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(
        text.get(text.len().saturating_sub(MESSAGE_BYTES_MAX)..).unwrap_or_default(),
    )
    .replace('\n', "; ");
    let text = text.trim_matches([';', ' ']);
    if text.is_empty() { String::new() } else { format!(" ({vmm} says: {text})") }
}
