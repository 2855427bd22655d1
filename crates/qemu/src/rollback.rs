//! Restores a checkpoint in a running QEMU: process, monitors, consoles and networks stay the
//! same.
//!
//! ```text
//!   paused ─▶ image: [ram: differing pages │ devices]  ─ add-fd ─▶ blockdev-add ─▶ snapshot-load ─▶ blockdev-del ─▶ paused
//!                      as an internal snapshot (qcow2)                 └ QEMU resets the machine, then reads the snapshot
//! ```
//!
//! `snapshot-load` is the only command by which stock QEMU loads a machine's state without
//! `-incoming` (`xen-load-devices-state` aborts). Keyframe makes the image that holds the snapshot
//! and attaches it to no device. The VM's own disks are not touched.
//!
//! Invariants: the VM is paused before and after, also if the rollback fails. After a failure the
//! machine is in an unknown state: it must be rolled back again, to any checkpoint, before it runs.
//!
//! Left out: QEMU's reset may write ROMs to pages of RAM that `target` does not list. The caller
//! compares RAM with the checkpoint.

mod image;

use crate::stream::{self, DeltaPages, MigrationHead};
use crate::{Error, Qmp, Result, Vm};
use serde_json::{Value, json};
use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

const NODE: &str = "keyframe-rollback";
const JOB: &str = "keyframe-rollback";
/// The longest time that QEMU may take to load a state, and the extra time for each GiB of pages.
const LOAD_TIMEOUT: Duration = Duration::from_mins(1);
const LOAD_TIMEOUT_GIB: Duration = Duration::from_mins(1);
const LOOK_EVERY: Duration = Duration::from_millis(2);

pub use keyframe_vmm::RollbackTarget as Target;

impl Vm {
    /// Rolls the paused VM back to `target`. The VM stays paused. The state passes through `file`,
    /// which is empty before and becomes as large as the pages.
    ///
    /// Errors: [`Error::Rollback`] if QEMU refuses the state; [`Error::Timeout`]; errors of reading
    /// `target` and of writing `file`.
    pub fn roll_back(&mut self, target: &Target<'_>, mut file: File) -> Result<()> {
        // A restored QEMU does not expect a configuration section: its line turns it off.
        let bare = self
            .full_command()
            .iter()
            .any(|word| word.contains("migration.send-configuration=off"));
        let head = MigrationHead { machine_type: target.machine_type };
        let head = (!bare).then_some(&head);
        image::write(&mut file, |out| {
            let delta = DeltaPages { layout: target.layout, pages: target.pages, ram: target.ram };
            Ok(stream::write_delta(head, target.device_state, delta, out)?)
        })?;
        let gib = target.pages.len() as u64 >> 18;
        let patience = LOAD_TIMEOUT
            + LOAD_TIMEOUT_GIB * u32::try_from(gib).unwrap_or(u32::MAX / 2).min(1 << 16);
        load(self.qmp(), &file, patience)
    }
}

/// Adds the image to QEMU, has QEMU load its snapshot, and removes the image.
fn load(qmp: &mut Qmp, file: &File, patience: Duration) -> Result<()> {
    let answer =
        qmp.execute_passing("add-fd", json!({ "opaque": "keyframe-rollback" }), file.as_fd())?;
    let Some(set) = answer.get("fdset-id").and_then(Value::as_u64) else {
        return Err(qmp.unexpected("add-fd", &answer));
    };
    let path = format!("/dev/fdset/{set}");
    let node = json!({ "driver": "qcow2", "node-name": NODE,
        "file": { "driver": "file", "filename": path, "locking": "off" } });
    let loaded = qmp.execute("blockdev-add", Some(node)).and_then(|_| {
        let loaded = run_job(qmp, patience);
        let removed = qmp.execute("blockdev-del", Some(json!({ "node-name": NODE })));
        loaded.and_then(|()| removed.map(drop))
    });
    let removed = qmp.execute("remove-fd", Some(json!({ "fdset-id": set })));
    loaded.and_then(|()| removed.map(drop))
}

/// QEMU answers no command while it loads.
fn run_job(qmp: &mut Qmp, patience: Duration) -> Result<()> {
    let before = qmp.set_timeout(patience);
    let loaded = start_job(qmp).and_then(|()| await_job(qmp, patience));
    qmp.set_timeout(before);
    loaded
}

fn start_job(qmp: &mut Qmp) -> Result<()> {
    let job = json!({ "job-id": JOB, "tag": image::SNAPSHOT, "vmstate": NODE, "devices": [NODE] });
    qmp.execute("snapshot-load", Some(job)).map(drop)
}

fn await_job(qmp: &mut Qmp, patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        let answer = qmp.execute("query-jobs", None)?;
        let jobs = answer.as_array().into_iter().flatten();
        let Some(job) =
            jobs.into_iter().find(|job| job.get("id").and_then(Value::as_str) == Some(JOB))
        else {
            return Err(qmp.unexpected("query-jobs", &answer));
        };
        if job.get("status").and_then(Value::as_str) == Some("concluded") {
            let problem = job.get("error").and_then(Value::as_str).map(str::to_owned);
            qmp.execute("job-dismiss", Some(json!({ "id": JOB })))?;
            return problem.map_or(Ok(()), |problem| Err(Error::Rollback { problem }));
        }
        if Instant::now() >= deadline {
            return Err(Error::Rollback {
                problem: format!("it has not loaded its state within {} s", patience.as_secs()),
            });
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
