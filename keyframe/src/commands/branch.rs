//! `keyframe branch`: several VMs from one checkpoint, which share the RAM that none of them has
//! written.
//!
//! ```text
//!   checkpoint ─▶ RAM, filled once ─┬─▶ web-1  QEMU, paused ┐
//!                                   ├─▶ web-2  QEMU, paused ├─ all loaded? ─▶ all run ─▶ until all have ended, or Ctrl-C
//!                                   └─▶ web-3  QEMU, paused ┘  one failed: all are ended
//!                  disks: image and checkpoint in common, an overlay and a process that serves them for each
//! ```
//!
//! Left out: groups.

mod by_restorer;

use super::restore::{Accel, refuse_recorded, tell_elsewhere};
use super::shown_vm::{self, ShownVm};
use super::{MovedArg, ReadyArg, StoreArg, TapArg, vmms, warn_untold};
use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::output;
use crate::rights;
use keyframe_inspect::guest_memory::{Guest, StoredPages};
use keyframe_inspect::source_of;
use keyframe_machine::VmmKind;
use keyframe_qemu::restore::{self, Lineage, Plan, RestoreOptions, Restored, SharedRam};
use keyframe_qemu::restore::{CloneConsole, CloneOptions, clone_line};
use keyframe_session::control::OnExit;
use keyframe_session::readiness::ReadyNotifier;
use keyframe_session::run_dir::{Origin, RunDir, RunKind, VmmProcess, monitor_in};
use keyframe_store::{CheckpointId, LoadedCheckpoint, Store};
use keyframe_vm_disks::checkpoint_disks::CheckpointDisks;
use keyframe_vm_disks::{moved_images, restored};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Start clones of a checkpoint that share what they do not write
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Each clone is a QEMU of its own with the command line that the checkpoint kept. It has a directory with a monitor socket, a
socket for each console (serial.sock, agent.sock and so on), and a file with each console's output: see --json. Clones cannot
share everything: networks other than `user` are disconnected, and a vmgenid device gets a fresh id. The EXTRA arguments are added to each command line.
{number} and {name} in them stand for the clone's number and name.

A running guest keeps its MAC and IP addresses, host name and machine id. Clones that share a network have to change them
themselves. A guest with a vmgenid device notices that it is a clone, and renews its random numbers.

A clone of Firecracker's VM has its API at api.sock in its directory, and its output in console.log. Firecracker changes its
generation id by itself, also with --exact. Each clone needs a tap of its own for each network card: in --tap, %d stands for
the number of the clone.

Each clone has disks of its own, as they were at the checkpoint. No other VM sees its writes. They are deleted when the clone
ends, unless you give --keep-disks.

All clones end with this command (Ctrl-C), unless you give --on-exit keep. A single clone ends by its monitor or its process
id. You can take checkpoints of a clone: they descend from this checkpoint (keyframe list --tree).

Connect to a clone's console with: keyframe console NAME

Examples:
  keyframe branch --store S latest -n 3
  keyframe branch --store S clean -n 2 --name test -- -netdev tap,id=net0,ifname=tap{number},script=no,downscript=no
  keyframe branch --store S clean -n 2 --tap eth0=tap%d
  keyframe attach --store S test-1                       # checkpoints of a clone"
)]
#[expect(clippy::struct_excessive_bools, reason = "they are flags of a command line")]
pub struct Branch {
    #[command(flatten)]
    store: StoreArg,
    /// A number, a tag or `latest`
    checkpoint: String,
    /// How many clones
    #[arg(long, short = 'n', value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1000))]
    count: u32,
    /// The clones are named PREFIX-1, PREFIX-2, ... [default: the VM's name, with numbers that are
    /// free]
    #[arg(long, value_name = "PREFIX")]
    name: Option<String>,
    /// Change nothing of the VM's identity: the same generation id in all clones
    #[arg(long)]
    exact: bool,
    /// Leave the clones paused at the instant of the checkpoint
    #[arg(long)]
    paused: bool,
    /// Another binary of the VMM; of QEMU, of the same series (7.2.9 for 7.2.22) or a later one
    #[arg(long, visible_alias = "vmm", value_name = "PATH")]
    qemu: Option<PathBuf>,
    /// Run them under this accelerator instead of the checkpoint's
    #[arg(long, value_enum)]
    accel: Option<Accel>,
    /// Keep what the clones have written to their disks when they have ended
    #[arg(long)]
    keep_disks: bool,
    /// What to do with clones that still run when this command ends
    #[arg(long, value_enum, default_value = "kill")]
    on_exit: OnExit,
    /// Print a JSON array of the clones, once all are there
    #[arg(long)]
    json: bool,
    /// Give the clones read-only disks and CDs that have changed since the checkpoint as they are
    /// now
    #[arg(long)]
    changed_as_now: bool,
    #[command(flatten)]
    moved: MovedArg,
    #[command(flatten)]
    taps: TapArg,
    #[command(flatten)]
    ready: ReadyArg,
    /// Put what the clones write to their disks into this directory instead of the store [default
    /// for a store that cannot be written: the runtime directory; for Firecracker, which gets copies
    /// of its drives: a directory beside the first one]
    #[arg(long, value_name = "DIR")]
    work_dir: Option<PathBuf>,
    /// Report errors only
    #[arg(long, short)]
    quiet: bool,
    /// Arguments for each QEMU, after those that the checkpoint kept
    #[arg(last = true, value_name = "EXTRA QEMU ARGS")]
    extra: Vec<OsString>,
}

/// A clone that is about to be, and its place.
struct Place {
    number: u32,
    name: String,
    directory: RunDir,
    /// Known once its command line is.
    consoles: Vec<CloneConsole>,
    /// A process for each clone: it ends with it, or outlives this command with it.
    disks: Option<CheckpointDisks>,
}

impl Place {
    /// Makes a name for a console's socket that says what the console is.
    fn name_console(&self, console: &CloneConsole) -> Result<(), Failure> {
        let name = self.directory.path().join(format!("{}.sock", console.name));
        let target = console.socket.file_name().unwrap_or_default();
        if name == console.socket {
            return Ok(());
        }
        std::os::unix::fs::symlink(target, &name)
            .map_err(|e| Failure::new(format!("name a console {}: {e}", name.display())))
    }
}

/// A clone that is there.
struct Alive {
    place: Place,
    vm: Restored,
    ended: bool,
}

impl Branch {
    /// Starts the clones and waits for their ends.
    pub fn run(&self) -> Outcome {
        let ready = self.ready.take()?;
        let began = Instant::now();
        let store = self.store.open()?;
        let id = store.resolve(&self.checkpoint).map_err(|e| self.store.failure(&e))?;
        let mut loaded = store.load(id).map_err(|e| self.store.failure(&e))?;
        refuse_recorded(&loaded.meta, id)?;
        moved_images::apply(&self.moved.image, &mut loaded.meta)?;
        if let Some(restorer) = vmms::restorer(loaded.meta.machine.vmm) {
            return by_restorer::branch(self, &store, &loaded, &*restorer, (began, ready));
        }
        self.taps.refuse_for_qemu()?;
        super::changed_files::check(&loaded.meta, self.changed_as_now)?;
        if !loaded.meta.members.is_empty() {
            return Err(Failure::new(format!(
                "checkpoint {id} is a group's, which is not branched"
            ))
            .fix("restore it: all members come to life together"));
        }
        let interrupted = keyframe_session::interrupt::interruption()?;
        let mut places = self.places(&store, &loaded)?;
        let lineage = Lineage { store: store.id().into(), checkpoint: id };
        let (mut plans, mut notes) = (Vec::with_capacity(places.len()), BTreeSet::new());
        for place in &mut places {
            plans.push(self.plan(place, &loaded, &lineage, &mut notes)?);
        }
        for note in notes {
            eprintln!("keyframe: note: {note}");
        }
        let mut clones = self.start(&loaded, places, plans, &interrupted)?;
        for clone in &clones {
            let process = VmmProcess { vmm: VmmKind::Qemu, pid: clone.vm.pid() };
            clone.place.directory.tell(Origin::new(RunKind::Clone, &store, id), process)?;
        }
        self.tell(&clones, began, id, ready)?;
        let ended = self.wait(&mut clones, &interrupted);
        self.end(clones, ended)
    }

    fn places(&self, store: &Store, loaded: &LoadedCheckpoint) -> Result<Vec<Place>, Failure> {
        restored::require_all(loaded.id, &loaded.meta)?;
        let place = |(number, directory): (u32, RunDir)| {
            let name = directory.name();
            let socket = directory.path().join("disks.sock");
            let (what, work_dir) = ((loaded.id, &loaded.meta), self.work_dir.as_deref());
            let disks = CheckpointDisks::serve(store, what, &name, work_dir, socket)?;
            disks.iter().for_each(tell_elsewhere);
            Ok(Place { number, name, directory, consoles: Vec::new(), disks })
        };
        self.claim(&loaded.meta.vm)?.into_iter().map(place).collect()
    }

    /// The number and the directory of each clone of VM `vm`.
    fn claim(&self, vm: &str) -> Result<Vec<(u32, RunDir)>, Failure> {
        let mut claimed: Vec<(u32, RunDir)> = Vec::new();
        for number in 1..=self.count {
            let after = claimed.last().map_or(0, |(number, _)| *number);
            claimed.push(match &self.name {
                Some(prefix) => (number, RunDir::claim_clone(&format!("{prefix}-{number}"))?),
                None => RunDir::claim_next_clone(vm, after)?,
            });
        }
        Ok(claimed)
    }

    fn plan(
        &self,
        place: &mut Place,
        loaded: &LoadedCheckpoint,
        lineage: &Lineage,
        notes: &mut BTreeSet<String>,
    ) -> Result<Plan, Failure> {
        let of_clone = |word: &OsString| match word.to_str() {
            Some(text) => Ok(["{number}", "{n}"]
                .iter()
                .fold(text.to_owned(), |text, word| text.replace(word, &place.number.to_string()))
                .replace("{name}", &place.name)),
            None => {
                Err(Failure::new(format!("an argument for QEMU is not UTF-8: {}", word.display())))
            }
        };
        let extra = self.extra.iter().map(of_clone).collect::<Result<Vec<_>, _>>()?;
        let mut source = source_of(&loaded.meta.machine, &loaded.meta.ram);
        let cloned = CloneOptions { directory: place.directory.path(), exact: self.exact };
        let own = clone_line(&source.machine.user_command, &extra, cloned)
            .map_err(|e| Failure::qemu(&e.into()))?;
        source.machine.user_command = own.words;
        for console in &own.consoles {
            place.name_console(console)?;
        }
        place.consoles = own.consoles;
        let options = RestoreOptions {
            qemu: self.qemu.clone(),
            accepts_later: true,
            // They run when all are there.
            paused: true,
            accelerator: self.accel.map(Into::into),
            disks: place.disks.as_ref().map(|disks| disks.server(&loaded.meta, "")).transpose()?,
            lineage: Some(lineage.clone()),
            monitor: Some(monitor_in(place.directory.path(), VmmKind::Qemu)),
            ..RestoreOptions::default()
        };
        let extra = extra.into_iter().map(OsString::from).collect();
        let plan = Plan::new(source, extra, options).map_err(|e| Failure::qemu(&e))?;
        notes.extend(own.notes.into_iter().chain(plan.notes().iter().cloned()));
        Ok(plan)
    }

    /// All of them, or none.
    fn start(
        &self,
        loaded: &LoadedCheckpoint,
        places: Vec<Place>,
        plans: Vec<Plan>,
        interrupted: &AtomicBool,
    ) -> Result<Vec<Alive>, Failure> {
        let guest = Guest::choose(loaded, None)?;
        let pages = StoredPages::new(loaded, &guest);
        let failure = |e: &keyframe_qemu::Error| match pages.failed() {
            Some(error) => self.store.failure(&error),
            None => Failure::qemu(e),
        };
        let filled = std::thread::scope(|scope| {
            let filling = scope.spawn(|| {
                rights::files_only();
                SharedRam::fill(&loaded.meta.ram, &pages, interrupted)
            });
            filling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        let shared = filled.map_err(|e| failure(&e))?;
        let mut clones: Vec<Alive> = Vec::with_capacity(places.len());
        let mut started = Ok(());
        for (place, plan) in places.into_iter().zip(plans) {
            if interrupted.load(Ordering::Relaxed) {
                started = Err(Failure::new("interrupted: no clone was left running"));
                break;
            }
            match restore::start_shared(plan, &shared, &pages, &loaded.device_state) {
                Ok(vm) => clones.push(Alive { place, vm, ended: false }),
                Err(error) => {
                    started = Err(failure(&error).about(&place.name));
                    break;
                }
            }
        }
        rights::trace_only();
        if started.is_ok() && !self.paused {
            let ran = clones.iter_mut().try_for_each(|clone| clone.vm.vm().qmp().start_loaded());
            started = ran.map_err(|e| Failure::qemu(&e));
        }
        if let Err(error) = started {
            // The user gets the first error.
            let _ = kill(&mut clones);
            return Err(error);
        }
        Ok(clones)
    }

    fn tell(
        &self,
        clones: &[Alive],
        began: Instant,
        id: CheckpointId,
        ready: ReadyNotifier,
    ) -> Result<(), Failure> {
        let shown = |Alive { place, vm, .. }: &Alive| {
            let directory = place.directory.path();
            let disks = place.disks.as_ref().and_then(CheckpointDisks::directory);
            ShownVm {
                number: Some(place.number),
                monitor: Some(shown_vm::text(&monitor_in(directory, VmmKind::Qemu))),
                consoles: shown_vm::of_clone(&place.consoles),
                disks: disks.map(shown_vm::text),
                ..ShownVm::new(place.name.clone(), Some(&place.directory), id.0, vm.pid())
            }
        };
        self.show(clones.iter().map(shown).collect(), ready)?;
        if !self.quiet {
            let after_ns = keyframe_units::elapsed_ns(began);
            let (count, after) = (clones.len(), output::duration(after_ns));
            let state = if self.paused { "paused" } else { "running" };
            eprintln!("keyframe: {count} clones of checkpoint {id} are {state} after {after}");
            for Alive { place, vm, .. } in clones {
                let (name, pid, directory) = (&place.name, vm.pid(), place.directory.path());
                eprintln!(
                    "keyframe: clone {name}: QEMU {pid}, sockets and consoles in {}",
                    directory.display()
                );
            }
        }
        Ok(())
    }

    /// Shows the clones to programs that wait for them.
    fn show(&self, clones: Vec<ShownVm>, ready: ReadyNotifier) -> Result<(), Failure> {
        let clones: Vec<_> = clones.into_iter().map(|clone| clone.paused(self.paused)).collect();
        if self.json {
            output::json(&clones)?;
        }
        warn_untold(ready.notify(&clones));
        Ok(())
    }

    /// Ends the clones that still run, or keeps them, as the options say.
    fn end(&self, mut clones: Vec<Alive>, ended: Outcome) -> Outcome {
        if self.on_exit == OnExit::Keep {
            for mut clone in clones.into_iter().filter(|clone| !clone.ended) {
                clone.place.directory.keep();
                let (name, pid) = (&clone.place.name, clone.vm.pid());
                if !self.quiet {
                    eprintln!("keyframe: clone {name} runs on: QEMU {pid}");
                }
                let left = clone.place.disks.take().and_then(CheckpointDisks::leave);
                if let Some(path) = left.filter(|_| !self.quiet) {
                    eprintln!(
                        "keyframe: what clone {name} writes to its disks is in {}",
                        path.display()
                    );
                }
            }
            return ended;
        }
        let killed = kill(&mut clones).map_err(|e| Failure::qemu(&e));
        let closed: Vec<_> = clones.iter_mut().map(|clone| self.end_disks(clone)).collect();
        killed.and(closed.into_iter().collect::<Result<(), Failure>>())?;
        ended
    }

    fn end_disks(&self, clone: &mut Alive) -> Result<(), Failure> {
        let kept = clone.place.disks.take().map_or(Ok(None), |disks| disks.end(self.keep_disks))?;
        if let Some(path) = kept.filter(|_| !self.quiet) {
            let name = &clone.place.name;
            eprintln!(
                "keyframe: what clone {name} has written to its disks is in {}",
                path.display()
            );
        }
        Ok(())
    }

    /// Waits until all have ended, or until interrupted.
    fn wait(&self, clones: &mut [Alive], interrupted: &AtomicBool) -> Outcome {
        let mut failed = false;
        while clones.iter().any(|clone| !clone.ended) && !interrupted.load(Ordering::Relaxed) {
            for clone in clones.iter_mut().filter(|clone| !clone.ended) {
                // No other client reads the events, and QEMU keeps events that are not read.
                let _ = clone.vm.vm().qmp().drain_events();
                if let Some(exit) = clone.vm.try_wait().map_err(|e| Failure::qemu(&e))? {
                    clone.ended = true;
                    clone.place.directory.untell();
                    failed |= !exit.success();
                    eprintln!("keyframe: clone {} ended with {exit}", clone.place.name);
                    self.end_disks(clone)?;
                }
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(if failed { FAILED } else { DONE })
    }
}

/// Ends them all, whatever becomes of the others; the first error.
fn kill(clones: &mut [Alive]) -> keyframe_qemu::Result<()> {
    let killed: Vec<_> = clones.iter_mut().map(|clone| clone.vm.kill()).collect();
    killed.into_iter().collect()
}
