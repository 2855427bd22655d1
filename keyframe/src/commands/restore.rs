//! `keyframe restore`: a checkpoint comes to life in a fresh QEMU.

mod group;

use super::StoreArg;
use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::output;
use indicatif::{ProgressBar, ProgressStyle};
use keyframe_qemu::Accelerator;
use keyframe_qemu::restore::{self, Plan, RamSource, RestoreOptions, RestoreSource};
use keyframe_store::{Loaded, MachineMeta};
use keyframe_units::{Page, PageIndex, PageRange, RamLayout};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bring a checkpoint to life in a fresh QEMU, in the foreground
#[derive(clap::Args, Debug)]
#[command(
    after_help = "QEMU runs with the command line that the checkpoint kept; EXTRA arguments are added to it. They may change where
the VM's consoles, monitors and networks go, but not the machine. Images and sockets that the line names by a
relative path are looked for in the directory that the VM was started in.

With --accel a checkpoint taken under KVM goes on under TCG, or the other way. What could not be right is refused: a guest
that uses what only KVM has (kvmclock), and a processor that lacks what the guest may use.

Examples:
  keyframe restore --store S latest
  keyframe restore --store S 12 --paused -- -qmp unix:/tmp/q.sock,server=on,wait=off
  keyframe restore --store S latest --accel tcg
  keyframe restore --store S before-upgrade --qemu /opt/qemu/bin/qemu-system-x86_64"
)]
pub struct Restore {
    #[command(flatten)]
    store: StoreArg,
    /// A number, a tag or `latest`
    checkpoint: String,
    /// Leave the VM paused at the instant of the checkpoint (continue it with `cont` in a monitor)
    #[arg(long)]
    paused: bool,
    /// Another QEMU binary of the same version
    #[arg(long, value_name = "PATH")]
    qemu: Option<PathBuf>,
    /// Run it under this accelerator, whichever it ran under before
    #[arg(long, value_enum)]
    accel: Option<Accel>,
    /// Say nothing but errors
    #[arg(long, short)]
    quiet: bool,
    /// Arguments for QEMU, behind those that the checkpoint kept
    #[arg(last = true, value_name = "EXTRA QEMU ARGS")]
    extra: Vec<OsString>,
}

/// What `--accel` takes.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Accel {
    Kvm,
    Tcg,
}

impl From<Accel> for Accelerator {
    fn from(accel: Accel) -> Self {
        match accel {
            Accel::Kvm => Self::Kvm,
            Accel::Tcg => Self::Tcg,
        }
    }
}

/// A checkpoint's RAM, with progress.
struct StoredRam<'a> {
    loaded: &'a Loaded,
    bar: ProgressBar,
    /// Why the store could not be read, where it was that.
    failed: Mutex<Option<keyframe_store::Error>>,
}

/// A QEMU that ends at its start has said why, but not that another accelerator can take over.
fn with_hint(error: &keyframe_qemu::Error, under_kvm: bool) -> Failure {
    let failure = Failure::qemu(error);
    if !under_kvm || !matches!(error, keyframe_qemu::Error::Exited { .. }) {
        return failure;
    }
    failure.fix("where it is KVM that this host lacks (keyframe doctor), restore it without: --accel tcg")
}

/// What ends the reading of pages: the store, or whoever takes them.
enum Stop {
    Store(keyframe_store::Error),
    Taker(std::io::Error),
}

impl From<keyframe_store::Error> for Stop {
    fn from(error: keyframe_store::Error) -> Self {
        Self::Store(error)
    }
}

impl RamSource for StoredRam<'_> {
    fn read(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let read =
            self.loaded.read_pages(range, &mut |page, content| sink(page, content).map_err(Stop::Taker));
        self.bar.inc(range.len_bytes());
        match read {
            Ok(()) => Ok(()),
            Err(Stop::Taker(error)) => Err(error),
            Err(Stop::Store(error)) => {
                let text = crate::failure::chain(&error);
                if let Ok(mut failed) = self.failed.lock() {
                    *failed = Some(error);
                }
                Err(std::io::Error::other(text))
            }
        }
    }
}

impl Restore {
    /// Restores and waits for the VM's end.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let id = store.resolve(&self.checkpoint).map_err(|e| self.store.failure(&e))?;
        let loaded = store.load(id).map_err(|e| self.store.failure(&e))?;
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&interrupted))
                .map_err(|e| Failure::new(format!("catch signal {signal}: {e}")))?;
        }
        let bar =
            if self.quiet { ProgressBar::hidden() } else { ProgressBar::new(loaded.meta.ram.len_bytes()) };
        if let Ok(style) = ProgressStyle::with_template("restoring {wide_bar} {bytes}/{total_bytes}") {
            bar.set_style(style);
        }
        let ram = StoredRam { loaded: &loaded, bar, failed: Mutex::default() };
        if !loaded.meta.members.is_empty() {
            return group::restore(self, &loaded, &ram, &interrupted);
        }
        let plan = self.plan(&loaded)?;
        let under_kvm = plan.named_accelerator() == Some(Accelerator::Kvm);
        let mut restored = restore::start(plan, &ram, &loaded.device_state).map_err(|e| {
            let failed = ram.failed.lock().ok().and_then(|mut failed| failed.take());
            failed.map_or_else(|| with_hint(&e, under_kvm), |e| self.store.failure(&e))
        })?;
        ram.bar.finish_and_clear();
        if !self.quiet {
            let state = if self.paused { "paused" } else { "running" };
            eprintln!(
                "keyframe: checkpoint {id} of VM {} is {state} after {} (QEMU {})",
                loaded.meta.vm,
                output::duration(restored.ready_ns()),
                restored.pid()
            );
        }
        drop(loaded);
        loop {
            if let Some(exit) = restored.try_wait().map_err(|e| Failure::qemu(&e))? {
                if exit.success() {
                    return Ok(DONE);
                }
                eprintln!("keyframe: QEMU ended with {exit}");
                return Ok(FAILED);
            }
            if interrupted.load(Ordering::Relaxed) {
                restored.kill().map_err(|e| Failure::qemu(&e))?;
                return Ok(DONE);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn plan(&self, loaded: &Loaded) -> Result<Plan, Failure> {
        self.plan_of(&loaded.meta.machine, &loaded.meta.ram, self.extra.clone(), self.paused)
    }

    fn plan_of(
        &self,
        machine: &MachineMeta,
        ram: &RamLayout,
        extra: Vec<OsString>,
        paused: bool,
    ) -> Result<Plan, Failure> {
        let source = RestoreSource {
            user_command: machine.user_command.clone(),
            qemu_path: machine.qemu_path.clone().into(),
            qemu_version: machine.qemu_version.clone(),
            qemu_blake3: machine.qemu_blake3.clone(),
            machine_type: machine.machine_type.clone(),
            working_directory: machine.working_directory.clone().into(),
            ram: ram.clone(),
            cpu_lacks: machine.cpu_lacks.clone(),
        };
        let accelerator = self.accel.map(Accelerator::from);
        let options = RestoreOptions { qemu: self.qemu.clone(), paused, accelerator };
        let plan = Plan::new(source, extra, options).map_err(|e| Failure::qemu(&e))?;
        for note in plan.notes() {
            eprintln!("keyframe: note: {note}");
        }
        Ok(plan)
    }
}
