//! `keyframe doctor`: can this machine do it, and if not, what is missing?

mod self_test;

use super::restore::Accel;
use crate::failure::{DONE, FAILED, Outcome};
use crate::output;
use keyframe_replay_driver::QemuSupport;
use serde::Serialize;

/// Find out whether this machine has all that Keyframe needs
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Exit code 0: everything needed is here. 1: something is missing; each line says how to get it.

With --self-test Keyframe runs a small guest of its own, which needs no kernel and no disk, on your QEMU, kernel and
processor. It takes checkpoints by every strategy and of every kind of RAM, restores, branches and rolls back, and compares
all pages. Under TCG it also records, verifies and analyses a run. This takes about half a minute. Exit code 0: all was exact.

Examples:
  keyframe doctor
  keyframe doctor --json
  keyframe doctor --self-test
  keyframe doctor --self-test --qemu /opt/qemu/bin/qemu-system-x86_64 --accel kvm"
)]
pub struct Doctor {
    /// Test Keyframe itself on this machine: every strategy, every way back, a recording
    #[arg(long)]
    self_test: bool,
    /// The QEMU to look at
    #[arg(long, value_name = "PATH", default_value = "qemu-system-x86_64")]
    qemu: String,
    /// The accelerator of the self-test
    #[arg(long, value_enum, default_value = "tcg", requires = "self_test")]
    accel: Accel,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    ready: bool,
    items: Vec<Item>,
}

#[derive(Serialize)]
struct Item {
    name: String,
    available: bool,
    required: bool,
    detail: String,
    fix: Option<String>,
}

impl Doctor {
    /// Probes and reports.
    pub fn run(&self) -> Outcome {
        if self.self_test {
            return self_test::run(&self.qemu, self.accel.into(), self.json);
        }
        let mut items: Vec<Item> = keyframe_kernel::host_features::probe()
            .items
            .into_iter()
            .map(|f| Item {
                name: f.name.to_string(),
                available: f.available,
                required: f.required,
                detail: f.detail,
                fix: f.fix,
            })
            .collect();
        items.push(qemu(&self.qemu));
        let ready = items.iter().all(|i| i.available || !i.required);
        if self.json {
            output::json(&Report { ready, items })?;
        } else {
            for item in &items {
                let mark = match (item.available, item.required) {
                    (true, _) => "ok     ",
                    (false, true) => "MISSING",
                    (false, false) => "absent ",
                };
                output::print_line(&format!("{mark}  {:<28} {}", item.name, item.detail))?;
                if let (false, Some(fix)) = (item.available, &item.fix) {
                    output::print_line(&format!("         {:<28} fix: {fix}", ""))?;
                }
            }
            output::print_line(if ready {
                "ready: keyframe run --store STORE -- qemu-system-x86_64 ... (or firecracker ...)"
            } else {
                "not ready: see the lines marked MISSING"
            })?;
        }
        Ok(if ready { DONE } else { FAILED })
    }
}

/// What Keyframe can do with the QEMU `name`.
fn qemu(name: &str) -> Item {
    let (available, detail) = match QemuSupport::of(name) {
        Ok(support) => (support.is_complete(), support.to_string()),
        Err(error) => (false, error.to_string()),
    };
    let fix =
        "install it (Debian: apt-get install qemu-system-x86), or name another one with --qemu";
    Item { name: name.into(), available, required: true, detail, fix: Some(fix.into()) }
}
