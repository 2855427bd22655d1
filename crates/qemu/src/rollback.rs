//! Restores a checkpoint in a running QEMU: process, monitors, consoles and networks stay the
//! same.
//!
//! ```text
//!   check ─▶ ... ─▶ paused ─▶ image: [ram: differing pages │ devices] ─ add-fd ─▶ blockdev-add ─▶ snapshot-load ─▶ blockdev-del ─▶ paused
//!                                     as an internal snapshot (qcow2)                 └ QEMU resets the machine, then reads the snapshot
//!   engine tells:  Prepares                                                        Resets?   Loads        Loaded
//! ```
//!
//! A VM in a run state in which `cont` resumes it only after a reset (`shutdown`) is reset first. If
//! the target's VM stood still, the VM is brought into the same run state first, and stays in it.
//!
//! `snapshot-load` is the only command by which stock QEMU loads a machine's state without
//! `-incoming` (`xen-load-devices-state` aborts). Keyframe makes the image that holds the snapshot
//! and attaches it to no device. The VM's own disks are not touched.
//!
//! Invariants: the VM is paused before and after, also if the rollback fails. After a failure the
//! machine is in an unknown state: it must be rolled back again, to any checkpoint, before it runs.
//!
//! After a load QEMU has forgotten the code that TCG had translated. So the caller may write
//! further pages of the paused VM's RAM directly.
//!
//! A second load while the VM stands still crashes QEMU as the VM goes on, if the VM has a writable
//! flash chip (`pflash_cfi01`): each load leaves a handler for the first instant of running, which
//! frees the other one. So a later load leaves the chips out. The reset has put them into the state
//! that most chips are in; the caller restores their contents, which are RAM blocks.
//!
//! The engine tells the watchdog each step before it takes it. If the engine dies, the watchdog
//! ends the load in the engine's place ([`rescue`]).
//!
//! `target` must list the pages that the reset overwrites ([`Vm::reset_pages`]): devices may read them as
//! they are loaded. A reset may write to further pages of RAM. The caller compares RAM with the
//! checkpoint.

mod load_plan;
mod migration_settings;
mod obstacle;
pub(crate) mod rescue;
mod reset;
mod stand;

pub use obstacle::RollbackObstacle;

use crate::standstill::stood_still;
use crate::stream::{self, DeltaPages, FlashActivity, MigrationHead, snapshot_image};
use crate::{Error, Qmp, Result, Vm};
use keyframe_units::PAGE_BYTES;
use keyframe_vmm::{RollbackStep, TellStep};
use load_plan::LoadPlan;
use migration_settings::MigrationSettings;
use reset::Reset;
use serde_json::{Value, json};
use stand::require_state;
use std::borrow::Cow;
use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// The name of the descriptor set with the image.
const FD_NAME: &str = "keyframe-rollback";
const NODE: &str = "keyframe-rollback";
const JOB: &str = "keyframe-rollback";
/// The longest time that QEMU may take to load a state, and the extra time for each GiB of pages.
const LOAD_TIMEOUT: Duration = Duration::from_mins(1);
const LOAD_TIMEOUT_GIB: Duration = Duration::from_mins(1);
const LOOK_EVERY: Duration = Duration::from_millis(2);

pub use keyframe_vmm::RollbackTarget as Target;

impl Vm {
    /// Checks that the VM can be rolled back to a checkpoint with `device_state` now. Changes
    /// nothing.
    ///
    /// Errors: [`Error::RollbackObstacle`] with the reason why it cannot be rolled back;
    /// `device_state` is malformed; QEMU does not answer.
    pub fn check_rollback(&mut self, device_state: &[u8]) -> Result<()> {
        if let Some(obstacle) = RollbackObstacle::find(self.qmp())? {
            return Err(obstacle.refuse());
        }
        let (processor, machine_type) = (self.processor()?, self.machine_type()?);
        if processor.told_page_bits().is_some() && !processor.knows_machine(&machine_type) {
            return Err(RollbackObstacle::PageSize { machine_type }.refuse());
        }
        self.check_can_stand(device_state)?;
        if self.qmp().stands_since_load()
            && stream::flash_activity(device_state)? != FlashActivity::Reset
        {
            return Err(RollbackObstacle::Flash.refuse());
        }
        Ok(())
    }

    /// Rolls the paused VM back to `target`. The VM stays paused, or stands still in the run state
    /// of `target` if that one's VM stood still. QEMU reads the state from `file`, which must be
    /// empty and becomes about as large as the pages of `target`. After an error the machine is in
    /// an unknown state: roll it back to a checkpoint before it runs. This function calls `tell`
    /// before each step.
    ///
    /// Errors: [`Error::Rollback`] if QEMU refuses the state; [`Error::RollbackObstacle`] if a
    /// flash chip cannot take its state now; [`Error::Timeout`]; errors of the monitor, of reading
    /// `target` and of writing `file`.
    pub fn roll_back(
        &mut self,
        target: &Target<'_>,
        mut file: File,
        tell: TellStep<'_>,
    ) -> Result<()> {
        // A restored QEMU does not expect a configuration section: its line turns it off.
        let bare = self
            .full_command()
            .iter()
            .any(|word| word.contains("migration.send-configuration=off"));
        let processor = self.processor()?;
        let head = MigrationHead { machine_type: target.machine_type, processor };
        let head = (!bare).then_some(&head);
        let reset = Reset::before_load(self.qmp().status()?.name(), target.device_state);
        let devices = self.loadable(target.device_state, reset.as_ref())?;
        let about_bytes = (devices.len() + target.pages.len() * (PAGE_BYTES + 8)) as u64;
        let failed = |e| Error::io("write the machine's state to a temporary image")(e);
        snapshot_image::write(&mut file, about_bytes, failed, |out| {
            let delta = DeltaPages { layout: target.layout, pages: target.pages, ram: target.ram };
            Ok(stream::write_delta(head, &devices, delta, out)?)
        })?;
        let gib = target.pages.len() as u64 >> 18;
        let patience = LOAD_TIMEOUT
            + LOAD_TIMEOUT_GIB * u32::try_from(gib).unwrap_or(u32::MAX / 2).min(1 << 16);
        let plan = LoadPlan {
            patience,
            reset,
            actions: self.line_actions(),
            settings: MigrationSettings::of_user(self.qmp())?,
        };
        let qmp = self.qmp();
        tell_step(tell, RollbackStep::Prepares(plan.words()))?;
        plan.settings.suspend(qmp)?;
        let loaded = load(qmp, &file, &plan, tell);
        let resumed = plan.settings.resume(qmp);
        loaded.and(resumed)?;
        stood_still(target.device_state).map_or(Ok(()), |state| require_state(qmp, &state))
    }

    /// The part of `device_state` that QEMU may load after `reset`.
    fn loadable<'a>(
        &mut self,
        device_state: &'a [u8],
        reset: Option<&Reset>,
    ) -> Result<Cow<'a, [u8]>> {
        let runs_before = matches!(reset, Some(Reset::Stand(_)));
        let is_cut = if self.qmp().stands_since_load() && !runs_before {
            if stream::flash_activity(device_state)? == FlashActivity::Busy {
                return Err(RollbackObstacle::Flash.refuse());
            }
            true
        } else {
            // The VM's user, who paused it, may have loaded a snapshot since.
            (runs_before || !self.qmp().stopped_by_us())
                && stream::flash_activity(device_state).is_ok_and(|a| a == FlashActivity::Reset)
        };
        Ok(if is_cut { stream::without_flash(device_state)?.into() } else { device_state.into() })
    }
}

/// Tells the watchdog `step`. Error: the watchdog has ended.
fn tell_step(tell: TellStep<'_>, step: RollbackStep) -> Result<()> {
    tell(step).map_err(|error| Error::Watchdog { problem: error.to_string() })
}

/// Adds the image to QEMU, has QEMU load its snapshot, and removes the image.
fn load(qmp: &mut Qmp, file: &File, plan: &LoadPlan, tell: TellStep<'_>) -> Result<()> {
    let set = qmp.add_fd(FD_NAME, file.as_fd())?;
    let path = format!("/dev/fdset/{set}");
    let node = json!({ "driver": "qcow2", "node-name": NODE,
        "file": { "driver": "file", "filename": path, "locking": "off" } });
    // An engine that died as it added its image may have left it.
    let added = qmp.execute("blockdev-add", Some(node.clone())).or_else(|error| {
        remove_node(qmp).map_err(|_| error)?;
        qmp.execute("blockdev-add", Some(node))
    });
    let loaded = added.and_then(|_| {
        let loaded = reset_and_load(qmp, plan, tell);
        let removed = remove_node(qmp);
        loaded.and(removed)
    });
    let removed = qmp.execute("remove-fd", Some(json!({ "fdset-id": set })));
    loaded.and_then(|()| removed.map(drop))
}

/// Removes the image's block node.
fn remove_node(qmp: &mut Qmp) -> Result<()> {
    qmp.execute("blockdev-del", Some(json!({ "node-name": NODE }))).map(drop)
}

fn reset_and_load(qmp: &mut Qmp, plan: &LoadPlan, tell: TellStep<'_>) -> Result<()> {
    if let Some(reset) = &plan.reset {
        tell_step(tell, RollbackStep::Resets)?;
        reset.carry_out(qmp, &plan.actions)?;
    }
    qmp.note_load();
    tell_step(tell, RollbackStep::Loads)?;
    let before = qmp.set_timeout(plan.patience);
    // QEMU answers no command while it loads.
    let loaded = start_job(qmp).and_then(|()| await_job(qmp, plan.patience));
    qmp.set_timeout(before);
    // While the job is there, a process that ends the rollback sees how it ended.
    let step = if loaded.is_ok() { RollbackStep::Loaded } else { RollbackStep::Failed };
    let noted = tell_step(tell, step);
    // A load that was refused has no job.
    let dismissed = dismiss_job(qmp);
    loaded.and(noted).and(dismissed)
}

fn start_job(qmp: &mut Qmp) -> Result<()> {
    let job = json!({ "job-id": JOB, "tag": snapshot_image::SNAPSHOT, "vmstate": NODE, "devices": [NODE] });
    qmp.execute("snapshot-load", Some(job)).map(drop)
}

fn dismiss_job(qmp: &mut Qmp) -> Result<()> {
    qmp.execute("job-dismiss", Some(json!({ "id": JOB }))).map(drop)
}

/// Waits until QEMU's job has ended, and leaves it to be dismissed. Error: the job has failed.
fn await_job(qmp: &mut Qmp, patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        let Some(job) = find_job(qmp)? else {
            return Err(Error::Rollback { problem: "its job has gone".into() });
        };
        if let Some(ended) = job.ended {
            return ended.map_err(|problem| Error::Rollback { problem });
        }
        if Instant::now() >= deadline {
            return Err(Error::Rollback {
                problem: format!("it has not loaded its state within {} s", patience.as_secs()),
            });
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// QEMU's job that loads a state.
struct LoadJob {
    /// How it has ended; `None` while it is under way.
    ended: Option<std::result::Result<(), String>>,
}

/// The job that loads a state, if QEMU has it.
fn find_job(qmp: &mut Qmp) -> Result<Option<LoadJob>> {
    let answer = qmp.execute("query-jobs", None)?;
    let Some(jobs) = answer.as_array() else { return Err(qmp.unexpected("query-jobs", &answer)) };
    let ours = |job: &&Value| job.get("id").and_then(Value::as_str) == Some(JOB);
    Ok(jobs.iter().find(ours).map(|job| {
        let has_ended = job.get("status").and_then(Value::as_str) == Some("concluded");
        let problem = job.get("error").and_then(Value::as_str).map(str::to_owned);
        LoadJob { ended: has_ended.then(|| problem.map_or(Ok(()), Err)) }
    }))
}
