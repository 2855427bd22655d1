//! `keyframe restore`: a checkpoint comes to life in a fresh process of its VMM.

mod by_restorer;
mod group;

use super::shown_vm::{self, ShownVm};
use super::{MovedArg, ReadyArg, StoreArg, TapArg, vmms, warn_unlisted, warn_untold};
use crate::failure::{DONE, FAILED, Failure, Outcome, WARNED};
use crate::output;
use crate::progress;
use crate::rights;
use indicatif::ProgressBar;
use keyframe_inspect::loading_ram::LoadingRam;
use keyframe_inspect::source_of;
use keyframe_machine::VmmKind;
use keyframe_qemu::restore::lazy::Residency;
use keyframe_qemu::restore::{self, Lineage, Plan, RestoreOptions, Restored};
use keyframe_qemu::{Accelerator, DiskServer};
use keyframe_session::readiness::ReadyNotifier;
use keyframe_session::run_dir::{Origin, RunDir, RunKind, VmmProcess, monitor_in};
use keyframe_store::{MachineMeta, Meta, Store};
use keyframe_units::{CheckpointId, RamLayout};
use keyframe_vm_disks::checkpoint_disks::CheckpointDisks;
use keyframe_vm_disks::{moved_images, restored};
use std::cell::Cell;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bring a checkpoint to life in a fresh QEMU or Firecracker, in the foreground
#[derive(clap::Args, Debug)]
#[command(
    after_help = "QEMU runs with the command line that the checkpoint kept, followed by the EXTRA arguments. These may change where the VM's
consoles, monitors and networks go, but not the machine. Images and sockets with a relative path are looked for in the
directory in which the VM was started.

With --lazy the VM runs before its RAM is loaded. A page is loaded when the VM touches it. Meanwhile the other pages are
loaded, first those that the VM touched in its last restore. The VM ends with this command until the command reports that all
pages are there.

The guest's clock continues from the checkpoint. To correct it, have the guest ask for the time (chronyc makestep, hwclock -s).

The VM's disks are as they were at the checkpoint. Disks that were left out of it are missing (see --left-out-as-now). The
VM's writes go neither to the images nor to the checkpoint. They are deleted when the VM ends, unless you give --keep-disks.

What the VM's line writes to, listens at or locks is not taken from the first VM: log files are appended to, or new ones are
made; sockets in use get another name; a port in use is an error that names the option to replace it.

A checkpoint of Firecracker's VM is restored by a Firecracker of the same version. EXTRA are options of Firecracker then. The
tap of each network card must be there and free; --tap names another one.

With --accel a checkpoint taken under KVM continues under TCG, or the other way round. Keyframe refuses a guest that uses a
feature of KVM alone (kvmclock), and a processor that lacks a feature that the guest may use.

Examples:
  keyframe restore --store S latest
  keyframe restore --store S 12 --paused -- -qmp unix:/tmp/q.sock,server=on,wait=off
  keyframe restore --store S latest --lazy
  keyframe restore --store S latest --name trial --json --paused
  keyframe restore --store S latest --accel tcg
  keyframe restore --store S latest --image /old/disk.qcow2=/new/disk.qcow2
  keyframe restore --store S latest --tap eth0=tap1
  keyframe restore --store S before-upgrade --qemu /opt/qemu/bin/qemu-system-x86_64"
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub struct Restore {
    #[command(flatten)]
    store: StoreArg,
    /// A number, a tag or `latest`
    checkpoint: String,
    /// Let the VM run at once and bring its RAM as it is needed
    #[arg(long)]
    lazy: bool,
    /// Leave the VM paused at the instant of the checkpoint (continue it with `cont` in a monitor, or
    /// through the API of Firecracker)
    #[arg(long)]
    paused: bool,
    /// Another binary of the VMM; of QEMU, of the same series (7.2.9 for 7.2.22) or a later one
    #[arg(long, visible_alias = "vmm", value_name = "PATH")]
    qemu: Option<PathBuf>,
    /// Run it under this accelerator instead of the checkpoint's
    #[arg(long, value_enum)]
    accel: Option<Accel>,
    /// Of a group: a network between its VMs is at another socket than it was; may be given several
    /// times
    #[arg(long, value_name = "OLD=NEW")]
    lan: Vec<String>,
    /// Keep what the VM writes to its disks when it has ended
    #[arg(long)]
    keep_disks: bool,
    /// Give the VM disks that were left out of the checkpoint as their images are now, which need
    /// not fit its RAM
    #[arg(long)]
    left_out_as_now: bool,
    /// Give the VM read-only disks and CDs that have changed since the checkpoint as they are now
    #[arg(long)]
    changed_as_now: bool,
    #[command(flatten)]
    moved: MovedArg,
    #[command(flatten)]
    taps: TapArg,
    /// The name by which status and stop find the VM [default: its name, with a number if another VM
    /// has it]
    #[arg(long)]
    name: Option<String>,
    /// Print the VM as JSON when it is ready, in the form of an entry of `branch --json`. The guest's
    /// console may share standard output; --ready-fd writes the same JSON to a descriptor of its own
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ready: ReadyArg,
    /// Put what the VM writes to its disks into this directory instead of the store [default for a
    /// store that cannot be written: the runtime directory; for Firecracker, which gets copies of
    /// its drives: a directory beside the first one]
    #[arg(long, value_name = "DIR")]
    work_dir: Option<PathBuf>,
    /// Report errors only
    #[arg(long, short)]
    quiet: bool,
    /// Arguments for QEMU, after those that the checkpoint kept
    #[arg(last = true, value_name = "EXTRA QEMU ARGS")]
    extra: Vec<OsString>,
}

/// The values of `--accel`.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Accel {
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

/// A checkpoint's RAM, with the progress of its reading.
struct RestoredRam {
    source: Arc<LoadingRam>,
    bar: ProgressBar,
}

impl Restore {
    /// Restores and waits for the VM's end.
    pub fn run(&self) -> Outcome {
        let ready = self.ready.take()?;
        let began = Instant::now();
        let store = self.store.open()?;
        let id = store.resolve(&self.checkpoint).map_err(|e| self.store.failure(&e))?;
        let head = store.load_unmapped(id).map_err(|e| self.store.failure(&e))?;
        let (mut meta, device_state) = (head.meta.clone(), head.device_state.clone());
        let (hidden, ram_bytes) = (self.quiet || self.lazy, Some(meta.ram.len_bytes()));
        let bar = progress::bar(hidden, ram_bytes, "restoring {wide_bar} {bytes}/{total_bytes}");
        let shown = bar.clone();
        let source = LoadingRam::new(head, rights::files_only, move |bytes| shown.inc(bytes))
            .map_err(|e| Failure::new(format!("start a thread: {e}")))?;
        let ram = RestoredRam { source, bar };
        let interrupted = keyframe_session::interrupt::interruption()?;
        refuse_recorded(&meta, id)?;
        moved_images::apply(&self.moved.image, &mut meta)?;
        if let Some(restorer) = vmms::restorer(meta.machine.vmm) {
            super::changed_files::check(&meta, self.changed_as_now)?;
            let lineage = Lineage { store: store.id().into(), checkpoint: id };
            let place = &Place::claim(self, &meta.vm, &store, ready)?;
            let (meta, ram) = (&meta, &ram);
            let device_state = &*device_state;
            let kept = by_restorer::Kept { id, meta, device_state, ram, lineage, place, began };
            return by_restorer::restore(self, &store, &*restorer, kept, &interrupted);
        }
        self.taps.refuse_for_qemu()?;
        self.require_disks(id, &meta)?;
        super::changed_files::check(&meta, self.changed_as_now)?;
        let place = Place::claim(self, &meta.vm, &store, ready)?;
        let disks = RestoredDisks::serve(&store, id, &meta, self.work_dir.as_deref())?;
        let lineage = Lineage { store: store.id().into(), checkpoint: id };
        let what = (id, &meta, &*device_state, &lineage);
        let outcome = self.run_restored(what, &ram, &disks, &place, &interrupted, began);
        disks.end(self, outcome)
    }

    fn run_restored(
        &self,
        (id, meta, device_state, lineage): (CheckpointId, &Meta, &[u8], &Lineage),
        ram: &RestoredRam,
        disks: &RestoredDisks,
        place: &Place,
        interrupted: &AtomicBool,
        began: Instant,
    ) -> Outcome {
        if !meta.members.is_empty() {
            let group = group::Kept { lineage, id, meta, device_state, ram, disks, place, began };
            return group::restore(self, &group, interrupted);
        }
        let writes = disks.directory();
        let (disks, monitor) = (disks.server(meta, "")?, place.monitor());
        let beside = Beside { disks, lineage, spawned: Some(rights::trace_only), monitor };
        let plan = self.plan(&meta.machine, &meta.ram, self.extra.clone(), self.paused, beside)?;
        let under_kvm = plan.named_accelerator() == Some(Accelerator::Kvm);
        let before_ns = keyframe_units::elapsed_ns(began);
        let started = if self.lazy {
            restore::start_lazy(plan, Arc::clone(&ram.source) as _, device_state)
        } else {
            restore::start(plan, &*ram.source, device_state)
        };
        let mut restored = started.map_err(|e| self.failure(&e, &ram.source, under_kvm))?;
        ram.bar.finish_and_clear();
        let monitor = place.monitor();
        // A VM whose guest had ended stands.
        let state = restored.vm().qmp().status();
        let shown = ShownVm {
            monitor: monitor.as_deref().map(shown_vm::text),
            consoles: shown_vm::of_restored(restored.vm().console_sockets().unwrap_or_default()),
            disks: writes.map(shown_vm::text),
            state: state.as_ref().map_or("running", keyframe_qemu::RunStatus::name).into(),
            ..place.shown(id, restored.pid())
        };
        if let Err(failure) = place.tell(self, id, VmmKind::Qemu, &shown) {
            // The user gets the first error.
            let _ = restored.kill();
            return Err(failure);
        }
        self.say(|| {
            let state = state.as_ref().map_or("running", keyframe_qemu::RunStatus::name);
            let after = output::duration(before_ns + restored.ready_ns());
            let qemu = restored.pid();
            let filled = restored.filled_ns().map(output::duration);
            let filled =
                filled.map(|filled| format!(", its RAM filled in {filled}")).unwrap_or_default();
            format!(
                "checkpoint {id} of VM {} is {state} after {after}{filled} (QEMU {qemu})",
                meta.vm
            )
        });
        let mut watch = Watch {
            restore: self,
            restored,
            ram: Arc::clone(&ram.source),
            before_ns,
            told: false,
            warned: false,
        };
        let ended = watch.until_the_end(interrupted);
        watch.keep_working_set();
        ended
    }

    /// Says which disks the checkpoint lacks, and refuses unless it was told to do without.
    fn require_disks(&self, id: CheckpointId, meta: &Meta) -> Result<(), Failure> {
        let Err(lacking) = restored::require_all(id, meta) else { return Ok(()) };
        if self.left_out_as_now {
            eprintln!("keyframe: warning: {lacking}; they are as their images are now");
            for disk in restored::opened_by_qemu(meta)? {
                let name = &disk.name;
                eprintln!("keyframe: warning: QEMU opens disk {name} itself and writes to it");
            }
            return Ok(());
        }
        Err(Failure::from(lacking).fix(
            "if the present content of the images will do, say --left-out-as-now; a VM that writes \
             to them is likely to find them damaged",
        ))
    }

    fn say(&self, line: impl FnOnce() -> String) {
        if !self.quiet {
            eprintln!("keyframe: {}", line());
        }
    }

    /// Why the restore failed: the store, where it was that.
    fn failure(&self, error: &keyframe_qemu::Error, ram: &LoadingRam, under_kvm: bool) -> Failure {
        let failed = ram.failed();
        match (failed, error) {
            // It names the page, and the store's error behind it.
            (Some(store), keyframe_qemu::Error::PageLost { .. }) => {
                Failure::new(crate::failure::chain(error)).with_fix(self.store.failure(&store).fix)
            }
            (Some(store), _) => self.store.failure(&store),
            (None, error) => with_hint(error, under_kvm),
        }
    }

    fn plan(
        &self,
        machine: &MachineMeta,
        ram: &RamLayout,
        extra: Vec<OsString>,
        paused: bool,
        beside: Beside<'_>,
    ) -> Result<Plan, Failure> {
        let source = source_of(machine, ram);
        let accelerator = self.accel.map(Accelerator::from);
        let Beside { disks, lineage, spawned, monitor } = beside;
        let lineage = Some(lineage.clone());
        let qemu = self.qemu.clone();
        let options = RestoreOptions {
            qemu,
            accepts_later: true,
            paused,
            accelerator,
            disks,
            lineage,
            spawned,
            monitor,
            lazy: self.lazy,
            ..RestoreOptions::default()
        };
        let plan = Plan::new(source, extra, options).map_err(|e| Failure::qemu(&e))?;
        for note in plan.notes() {
            eprintln!("keyframe: note: {note}");
        }
        Ok(plan)
    }
}

/// Tells where the VM's writes are, if that is neither the store nor the user's choice.
pub(super) fn tell_elsewhere(disks: &CheckpointDisks) {
    if let Some(path) = disks.elsewhere() {
        eprintln!(
            "keyframe: note: the store cannot be written: what the VM writes to its disks is in {} \
             (choose another directory with --work-dir)",
            path.display()
        );
    }
}

/// The disks of a checkpoint, served to the VMs that come from it.
struct RestoredDisks {
    disks: Option<CheckpointDisks>,
    /// Of their socket: paths of sockets have to be short, so it is not in the store.
    _folder: tempfile::TempDir,
}

impl RestoredDisks {
    fn serve(
        store: &Store,
        id: CheckpointId,
        meta: &Meta,
        work_dir: Option<&Path>,
    ) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("keyframe-disks-").tempdir();
        let folder =
            folder.map_err(|e| Failure::new(format!("make a directory for a socket: {e}")))?;
        let socket = folder.path().join("disks.sock");
        let disks = CheckpointDisks::serve(store, (id, meta), &meta.vm, work_dir, socket)?;
        disks.iter().for_each(tell_elsewhere);
        Ok(Self { disks, _folder: folder })
    }

    /// The directory of what the VMs write to their disks.
    fn directory(&self) -> Option<&Path> {
        self.disks.as_ref().and_then(CheckpointDisks::directory)
    }

    /// The server of the disks, for a VM whose disk names begin with `prefix`.
    fn server(&self, meta: &Meta, prefix: &str) -> Result<Option<DiskServer>, Failure> {
        Ok(self.disks.as_ref().map(|disks| disks.server(meta, prefix)).transpose()?)
    }

    /// After the VMs' end.
    fn end(self, command: &Restore, outcome: Outcome) -> Outcome {
        let kept = self.disks.map_or(Ok(None), |disks| disks.end(command.keep_disks));
        let outcome = outcome?;
        if let Some(place) = kept? {
            command
                .say(|| format!("what the VM has written to its disks is in {}", place.display()));
        }
        Ok(outcome)
    }
}

/// The directory in which `keyframe status` and `keyframe stop` find the VM.
struct Place {
    /// A VM runs without one, too.
    directory: Option<RunDir>,
    /// The name in the checkpoint, for a VM without a directory.
    vm: String,
    store: Store,
    ready: Cell<ReadyNotifier>,
}

impl Place {
    /// Claims it by the name of the user's choice, or by one that is free.
    fn claim(
        command: &Restore,
        vm: &str,
        store: &Store,
        ready: ReadyNotifier,
    ) -> Result<Self, Failure> {
        let directory = match &command.name {
            Some(name) => Some(RunDir::claim_restored_as(name)?),
            None => RunDir::claim_restored(vm).inspect_err(warn_unlisted).ok(),
        };
        let ready = Cell::new(ready);
        Ok(Self { directory, vm: vm.into(), store: store.clone(), ready })
    }

    /// The socket of a monitor for other programs.
    fn monitor(&self) -> Option<PathBuf> {
        let directory = self.directory.as_ref()?;
        Some(monitor_in(directory.path(), VmmKind::Qemu))
    }

    /// The VM of `id` in process `pid`.
    fn shown(&self, id: CheckpointId, pid: u32) -> ShownVm {
        let name = self.directory.as_ref().map_or_else(|| self.vm.clone(), RunDir::name);
        ShownVm::new(name, self.directory.as_ref(), id.0, pid)
    }

    /// Says that the VM is there: to `keyframe status`, and to programs that wait for it.
    fn tell(
        &self,
        command: &Restore,
        id: CheckpointId,
        vmm: VmmKind,
        shown: &ShownVm,
    ) -> Result<(), Failure> {
        if let Some(directory) = &self.directory {
            let origin = Origin::new(RunKind::Restored, &self.store, id);
            let process = VmmProcess { vmm, pid: shown.qemu_pid };
            let _ = directory.tell(origin, process).inspect_err(warn_unlisted);
        }
        if command.json {
            output::json(shown)?;
        }
        warn_untold(self.ready.take().notify(shown));
        Ok(())
    }
}

/// The inputs of a plan besides the machine.
struct Beside<'a> {
    disks: Option<DiskServer>,
    lineage: &'a Lineage,
    spawned: Option<fn()>,
    /// The socket of a monitor for other programs.
    monitor: Option<PathBuf>,
}

/// A recorded machine's devices go on only where its instructions are counted and its log is fed to
/// it.
pub fn refuse_recorded(meta: &Meta, id: CheckpointId) -> Result<(), Failure> {
    let Some(recorded) = &meta.machine.recorded else { return Ok(()) };
    Err(Failure::new(format!("checkpoint {id} is of a recording, and goes on only in a replay"))
        .fix(format!("bring it up there: keyframe goto REC --icount {}", recorded.icount)))
}

fn with_hint(error: &keyframe_qemu::Error, under_kvm: bool) -> Failure {
    let failure = Failure::qemu(error);
    if !under_kvm || !matches!(error, keyframe_qemu::Error::Exited { .. }) {
        return failure;
    }
    failure.fix(
        "where it is KVM that this host lacks (keyframe doctor), restore it without: --accel tcg",
    )
}

/// A VM that runs, and what is left to say about it.
struct Watch<'a> {
    restore: &'a Restore,
    restored: Restored,
    ram: Arc<LoadingRam>,
    /// From the command to the restore's beginning.
    before_ns: u64,
    told: bool,
    warned: bool,
}

impl Watch<'_> {
    fn until_the_end(&mut self, interrupted: &AtomicBool) -> Outcome {
        loop {
            let ended = self.restored.try_wait().map_err(|error| {
                let _ = self.restored.kill();
                self.restore.failure(&error, &self.ram, false)
            })?;
            self.tell();
            if let Some(exit) = ended {
                if !exit.success() {
                    eprintln!("keyframe: QEMU ended with {exit}");
                    return Ok(FAILED);
                }
                let unreadable = self.residency().is_some_and(|r| r.unreadable_pages > 0);
                return Ok(if unreadable { WARNED } else { DONE });
            }
            if interrupted.load(Ordering::Relaxed) {
                self.restored.kill().map_err(|e| Failure::qemu(&e))?;
                return Ok(DONE);
            }
            std::thread::sleep(Duration::from_millis(if self.told { 50 } else { 5 }));
        }
    }

    fn residency(&self) -> Option<Residency> {
        self.restored.lazy().map(restore::lazy::Lazy::residency)
    }

    /// Says once that all RAM is there, or that some of it never will be.
    fn tell(&mut self) {
        if self.told {
            return;
        }
        let Some(residency) = self.residency() else {
            self.told = true;
            return;
        };
        if let Some(why) = residency.held_by.filter(|_| !self.warned) {
            eprintln!(
                "keyframe: warning: all of the VM's RAM is there, but it still ends with this command: {why}"
            );
            self.warned = true;
        }
        if let Some(resident_ns) = residency.resident_ns.filter(|_| residency.settled) {
            let after = output::duration(self.before_ns + resident_ns);
            let (waited, fetched) = (residency.served_pages, residency.prefetched_pages);
            let expected = residency.expected_pages;
            self.restore.say(|| {
                format!(
                    "all of its RAM is there after {after}; it waited for {waited} pages, {fetched} came before it asked \
                     ({expected} were expected first)"
                )
            });
            self.keep_working_set();
            self.told = true;
        } else if residency.prefetched && residency.unreadable_pages > 0 {
            let (count, what) =
                (residency.unreadable_pages, "of the checkpoint's pages cannot be read");
            eprintln!("keyframe: warning: {count} {what}; the VM runs until it needs one of them");
            for (page, why) in &residency.unreadable {
                eprintln!("keyframe: page {}: {why}", page.0);
            }
            self.told = true;
        }
    }

    /// Stores the working set for the next restore. Ignores errors, for example of a read-only
    /// store.
    fn keep_working_set(&self) {
        if let (Some(lazy), Ok(loaded)) = (self.restored.lazy(), self.ram.loaded()) {
            let _ = loaded.keep_working_set(&lazy.touched());
        }
    }
}
