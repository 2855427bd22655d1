//! Restores a checkpoint in a new QEMU.
//!
//! ```text
//!   Plan ──▶ memfds ──▶ QEMU -S -incoming ──▶ same machine? same RAM blocks? ──▶ devices and small blocks ──▶ cont
//!              ▲              (starts while the memfds are being filled)              through a socket
//!              └─ pages from the store, a thread each core
//! ```
//!
//! A lazy restore leaves the memfds empty: once QEMU answers, its RAM is marked as missing, and
//! each page is loaded when the VM touches it ([`lazy`]).
//!
//! Invariants:
//! 1. Nothing is loaded into a machine that is not the checkpoint's: type and RAM blocks are
//!    compared before.
//! 2. A restore that fails leaves no process behind.
//! 3. Only [`Restored::kill`] ends QEMU. Dropping a [`Restored`] leaves the guest running. The
//!    exception is a lazy restore: it ends with this process until all of its RAM is there.
//!
//! Left out: the content of disks, which a disk server provides.

mod binary_choice;
mod crossing;
mod host_probe;
pub mod lazy;
mod machine;
mod plan;
mod prepared;
mod private_ram;
mod ram_loading;
mod restore_options;
mod shared;
mod socket_pair;
mod stand_in;

pub use binary_choice::replay_binary;
pub use keyframe_machine::{Accelerator, Lineage, RamSource};
pub use keyframe_qemu_cmdline::{CloneConsole, CloneLine, CloneOptions, clone_line};
pub use keyframe_vmm::RestoreSource;
pub use plan::{Plan, backends_as_made};
pub use prepared::{Prepared, PreparedRam, prepare};
pub use restore_options::{ReplayStart, RestoreOptions, RestorePurpose, Until};
pub use shared::{SharedRam, start_shared};

use crate::lifetime::Lifetime;
use crate::spawn;
use crate::statefile::StateFile;
use crate::stream::{self, StreamBlock};
use crate::thread_affinity::{self, LogRole, SingleCore};
use crate::vm::{Origin, Vm, inherited_path, memfd, monitor_config, socket_config};
use crate::{Error, Qmp, Result, RunStatus, accelerator_check, eventfd_coalesce};
use crossing::Crossing;
use keyframe_machine::read_ascending;
use keyframe_qemu_cmdline::{
    Argument, CommandLineError, LineWord, backend_object, isolated_tap, lineage_mark,
    private_backend_object, with_tap_descriptors,
};
use keyframe_ram_loading::Memory;
use keyframe_units::elapsed_ns;
use keyframe_units::{BlockKind, PAGE_BYTES, Page, PageRange};
use lazy::{Lazy, SharedSource};
use machine::check_machine;
use socket_pair::SocketPair;
use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufWriter};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// How long QEMU may take to read devices and small blocks.
const LOAD_TIMEOUT: Duration = Duration::from_mins(1);
const WHILE_STARTING: &str = "before the checkpoint was given to it";
pub(crate) const WHILE_LOADING: &str = "while it read the checkpoint's devices";

/// Returns the placeholder, in an added argument, for the path of a file that holds guest RAM.
/// `backend` counts the RAM blocks of the layout that have a memory backend, from 0.
pub fn ram_file(backend: usize) -> String {
    format!("/keyframe-ram-{backend}.")
}

/// A VM that was restored from a checkpoint.
pub struct Restored {
    // Behind `vm` in vain: what is left of the serving is to end after QEMU was.
    vm: Vm,
    lazy: Option<Lazy>,
    process_ns: u64,
    ready_ns: u64,
    filled_ns: Option<u64>,
}

impl Restored {
    /// Returns the time from the call of [`start`] until QEMU's process answered, in nanoseconds.
    pub fn process_ns(&self) -> u64 {
        self.process_ns
    }

    /// Returns the time from the call of [`start`] until the VM ran, or with `paused` until it
    /// could run, in nanoseconds.
    pub fn ready_ns(&self) -> u64 {
        self.ready_ns
    }

    /// Returns the time of copying the RAM out of the store, in nanoseconds. QEMU starts at the
    /// same time. `None` for a lazy restore.
    pub fn filled_ns(&self) -> Option<u64> {
        self.filled_ns
    }

    /// Returns QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.vm.pid()
    }

    /// Returns the exit status of QEMU; `None` if it runs. For a lazy restore this call also
    /// releases the VM once all pages are there, so call it from time to time. Errors: those of
    /// [`Lazy::settle`].
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        if let Some(lazy) = &mut self.lazy {
            lazy.settle()?;
        }
        self.vm.try_wait()
    }

    /// Returns the server of the RAM of a lazy restore; `None` for another restore.
    pub fn lazy(&self) -> Option<&Lazy> {
        self.lazy.as_ref()
    }

    /// Ends QEMU as [`Vm::kill`] does. Errors: those of [`Vm::kill`].
    pub fn kill(&mut self) -> Result<()> {
        self.vm.kill()
    }

    /// Returns the handle of the VM.
    pub fn vm(&mut self) -> &mut Vm {
        &mut self.vm
    }

    /// The VM, and for a lazy restore the server of its RAM.
    pub(crate) fn into_parts(self) -> (Vm, Option<Lazy>) {
        (self.vm, self.lazy)
    }

    /// Returns the handle of the VM, and drops the rest. Do not call this for a lazy restore before
    /// all of its RAM is there.
    pub fn into_vm(self) -> Vm {
        self.vm
    }
}

/// Starts QEMU as planned, loads RAM from `ram` and devices from `device_state`, and resumes the
/// VM.
///
/// Errors: [`Error::Exited`] if QEMU ends meanwhile (its standard error says why);
/// [`Error::DifferentMachine`] if the started VM is another machine than that of the checkpoint;
/// [`Error::Stream`] if `device_state` is malformed; [`Error::Timeout`] if QEMU does not answer in
/// time; those of `ram`. After an error no process is left.
pub fn start(mut plan: Plan, ram: &dyn RamSource, device_state: &[u8]) -> Result<Restored> {
    if needs_private(&plan) {
        match start_with(&mut plan, &Ram::Private(ram), device_state) {
            // A host that lets no process look into another one cannot checkpoint the VM either.
            Err(error) if is_forbidden(&error) => {}
            other => return other,
        }
    }
    start_with(&mut plan, &Ram::Eager(ram), device_state)
}

/// Starts QEMU as [`start`] does, but the VM runs before its RAM is there, and waits for each
/// missing page that it touches. The calling thread must live until all pages are there
/// ([`lazy::Residency`]): until then the kernel ends QEMU together with the thread.
///
/// Errors: those of [`start`]; [`Error::Memory`] if the kernel does not let this process serve
/// QEMU's memory.
pub fn start_lazy(mut plan: Plan, ram: SharedSource, device_state: &[u8]) -> Result<Restored> {
    let ram = if needs_private(&plan) { Ram::LazyPrivate(ram) } else { Ram::Lazy(ram) };
    start_with(&mut plan, &ram, device_state)
}

/// True if the VM could not be checkpointed with shared RAM ([`private_ram`]).
fn needs_private(plan: &Plan) -> bool {
    plan.replays.is_none() && keyframe_qemu_audit::line_discards(&plan.arguments)
}

/// True if the kernel does not let this process look into QEMU's memory.
fn is_forbidden(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
}

/// The source of the RAM, and the time at which it is loaded.
enum Ram<'a> {
    Eager(&'a dyn RamSource),
    Shared(&'a SharedRam, &'a dyn RamSource),
    Lazy(SharedSource),
    /// The same as `Eager`, into private memory of QEMU's own.
    Private(&'a dyn RamSource),
    /// The same as `Lazy`, into private memory of QEMU's own.
    LazyPrivate(SharedSource),
}

impl Ram<'_> {
    fn source(&self) -> &dyn RamSource {
        match self {
            Self::Eager(source) | Self::Private(source) | Self::Shared(_, source) => *source,
            Self::Lazy(source) | Self::LazyPrivate(source) => &**source,
        }
    }
}

fn start_with(plan: &mut Plan, ram: &Ram<'_>, device_state: &[u8]) -> Result<Restored> {
    let started = Instant::now();
    stream::check(device_state)?;
    plan.pin_accelerator(device_state)?;
    let crossing = Crossing::of(plan, device_state)?;
    let device_state = crossing.as_ref().map_or(device_state, |c| &c.device_state);
    let processor = plan.source.machine.processor;
    let counted = plan.counts.then(|| stream::count_instructions(device_state, processor));
    let counted = counted.transpose()?;
    let device_state = counted.as_deref().unwrap_or(device_state);
    let due = plan.replay_shift().map(|shift| stream::with_due_timer(device_state, shift));
    let due = due.transpose()?;
    let device_state = due.as_deref().unwrap_or(device_state);
    let mut starting = Starting::new(plan, ram, started)?;
    let state = StateFile::new(&plan.arguments)?;
    let (mut child, full_command) = starting.spawn(plan, &state, crossing.as_ref())?;
    match starting.load(plan, &mut child, ram, device_state, crossing.as_ref()) {
        Ok(Loaded { qmp, lazy, single_core, process_ns, ready_ns, filled_ns }) => {
            let lines = (plan.source.machine.user_command.clone(), full_command);
            let mut vm =
                Vm::from_parts(Lifetime::Child(child), qmp, state, lines, Origin::Restored);
            vm.set_single_core(single_core);
            Ok(Restored { vm, lazy, process_ns, ready_ns, filled_ns })
        }
        Err(error) => {
            let _ = spawn::kill(&mut child);
            Err(error)
        }
    }
}

/// A started QEMU with its parts.
struct Loaded {
    qmp: Qmp,
    lazy: Option<Lazy>,
    single_core: Option<SingleCore>,
    process_ns: u64,
    ready_ns: u64,
    filled_ns: Option<u64>,
}

/// The resources of a restore until the VM runs.
struct Starting {
    /// Empty if QEMU has private memory of its own.
    memories: Vec<Memory>,
    /// True if QEMU maps the memories shared: its writes go to them.
    is_shared: bool,
    monitor: SocketPair,
    incoming: SocketPair,
    started: Instant,
    /// The time until QEMU's process answered, in nanoseconds.
    process_ns: Cell<u64>,
}

impl Starting {
    fn new(plan: &Plan, ram: &Ram<'_>, started: Instant) -> Result<Self> {
        let memories = match ram {
            Ram::Shared(shared, _) => shared.memories(plan)?,
            Ram::Private(_) | Ram::LazyPrivate(_) => Vec::new(),
            Ram::Eager(_) | Ram::Lazy(_) => {
                Memory::of_backends(&plan.source.ram, rustix::fs::MemfdFlags::CLOEXEC)?
            }
        };
        let is_shared = !matches!(ram, Ram::Shared(..));
        let (monitor, incoming) = (SocketPair::new()?, SocketPair::new()?);
        let process_ns = Cell::new(0);
        Ok(Self { memories, is_shared, monitor, incoming, started, process_ns })
    }

    fn spawn(
        &mut self,
        plan: &Plan,
        state: &StateFile,
        crossing: Option<&Crossing>,
    ) -> Result<(Child, Vec<String>)> {
        let monitor = self.monitor.give_away("monitor")?;
        let incoming = self.incoming.give_away("incoming stream")?;
        let number = spawn::number(&monitor).to_string();
        let mut config = monitor_config("keyframe-qmp", &[("fd", &number)]);
        if let Some(path) = &plan.monitor {
            config += &socket_config(&[("keyframe-attach", path.clone())])?;
        }
        let config = memfd("monitors", &config)?;
        let memories: Vec<(usize, OwnedFd)> = self
            .memories
            .iter()
            .map(|memory| Ok((memory.block, OwnedFd::from(memory.file.try_clone()?))))
            .collect::<io::Result<_>>()
            .map_err(Error::io("duplicate a descriptor of the VM's memory"))?;

        let mut words = self.machine_words(plan, &memories)?;
        words.extend(crossing.iter().flat_map(|c| c.words.clone()));
        words.extend(
            ["-S", "-global", "migration.send-configuration=off", "-machine", "suppress-vmdesc=on"]
                .map(String::from),
        );
        if plan.replays.is_some() {
            // After a migration a network card announces itself through the guest. The recording
            // has no such packet.
            words.extend(["-global", "migration.announce-rounds=0"].map(String::from));
        }
        words.extend(state.arguments_of(plan.lineage.as_ref().map(lineage_mark)));
        words.extend(["-readconfig".into(), inherited_path(&config)]);
        words.extend(["-incoming".into(), format!("fd:{}", spawn::number(&incoming))]);

        let taps = isolated_taps(&mut words)?;
        let stand_ins = stand_in::make_stand_ins(&mut words, &plan.source.ram)?;
        let mut command = Command::new(&plan.binary);
        command.args(words.iter().skip(1));
        let preloaded = prepare_process(&mut command, plan)?;
        let mut descriptors = vec![&config, &state.write_end, &monitor, &incoming];
        descriptors.extend(memories.iter().map(|(_, fd)| fd).chain(&preloaded).chain(&taps));
        descriptors.extend(&stand_ins);
        let child = spawn::start(&mut command, &descriptors)?;
        if let Some(spawned) = plan.spawned {
            spawned();
        }
        Ok((child, words))
    }

    /// The binary and the arguments of the machine, with the paths of its memories, followed by the
    /// plan's added arguments.
    fn machine_words(&self, plan: &Plan, memories: &[(usize, OwnedFd)]) -> Result<Vec<String>> {
        let mut words = vec![plan.binary.to_string_lossy().into_owned()];
        for word in &plan.words {
            match word {
                LineWord::Plain(word) => {
                    let named = memories.iter().enumerate().fold(
                        word.clone(),
                        |word, (number, (_, file))| {
                            word.replace(&ram_file(number), &inherited_path(file))
                        },
                    );
                    words.push(named);
                }
                LineWord::Backend(number) => {
                    words.extend(backend_words(plan, *number, memories, self.is_shared)?);
                }
            }
        }
        words.extend(plan.added.iter().cloned());
        Ok(words)
    }

    /// The main RAM of the started QEMU, whose process id is `pid`.
    fn main_ram(&self, plan: &Plan, qmp: &mut Qmp, pid: u32) -> Result<Vec<Memory>> {
        if self.memories.is_empty() {
            return private_ram::memories(qmp, pid, &plan.source.ram);
        }
        let copies = self.memories.iter().map(Memory::try_clone).collect::<io::Result<_>>();
        copies.map_err(Error::io("duplicate a descriptor of the VM's memory"))
    }

    /// Does all steps after the start, until the VM runs. Returns the time at which it did.
    ///
    /// This process's ends of the socket pairs outlive the call, so that a QEMU that is about to be
    /// killed does not first report a broken stream.
    fn load(
        &self,
        plan: &Plan,
        child: &mut Child,
        ram: &Ram<'_>,
        device_state: &[u8],
        crossing: Option<&Crossing>,
    ) -> Result<Loaded> {
        let incoming =
            self.incoming.ours.try_clone().map_err(Error::io("duplicate a socket to QEMU"))?;
        let (mut qmp, mut lazy, filled_ns) = self.load_ram(plan, child, ram, crossing)?;
        let mut single_core = None;
        if let Some(ReplayStart { until, network_may_be_late }) = plan.replays {
            let role = LogRole::Replays { network_may_be_late };
            single_core = SingleCore::begin(&mut qmp, child.id(), &plan.arguments, role);
            if let Until::Instruction(icount) = until {
                qmp.replay_break(icount)?;
            }
            // Of a VM that waits for its state, it says that it is to run as soon as it has it.
            qmp.cont()?;
        }
        let loaded = send(&UnixStream::from(incoming), plan, ram.source(), device_state)
            .map_err(|e| spawn::exited_instead(e, child, WHILE_LOADING))
            .and_then(|()| wait_until_loaded(&mut qmp, child));
        // QEMU's end may be for a page that it needed, which says more.
        if let (Err(_), Some(lazy)) = (&loaded, &mut lazy) {
            lazy.settle()?;
        }
        loaded?;
        qmp.note_load();
        if !plan.paused && plan.replays.is_none() {
            qmp.start_loaded()?;
        }
        let ready_ns = elapsed_ns(self.started);
        if let Some(lazy) = lazy.as_mut().filter(|_| !plan.is_rehearsal) {
            lazy.prefetch()?;
        }
        let process_ns = self.process_ns.get();
        Ok(Loaded { qmp, lazy, single_core, process_ns, ready_ns, filled_ns })
    }

    /// Waits until QEMU answers, and compares it with the checkpoint's machine.
    fn meet(&self, plan: &Plan, child: &mut Child, crossing: Option<&Crossing>) -> Result<Qmp> {
        let monitor =
            self.monitor.ours.try_clone().map_err(Error::io("duplicate a socket to QEMU"))?;
        let mut qmp = connect(monitor, child, &plan.arguments)?;
        self.process_ns.set(elapsed_ns(self.started));
        check_machine(&mut qmp, plan)?;
        if let Some(to) = crossing.map(|c| c.to) {
            accelerator_check::check_processors(
                &mut qmp,
                to,
                plan.source.machine.missing_cpu_features.as_deref(),
            )?;
        }
        Ok(qmp)
    }
}

fn backend_words(
    plan: &Plan,
    number: usize,
    memories: &[(usize, OwnedFd)],
    is_shared: bool,
) -> Result<[String; 2]> {
    let block = plan.source.ram.blocks().get(number);
    let memory = memories.iter().find(|(n, _)| *n == number);
    match (block, memory) {
        (Some(block), Some((_, fd))) => {
            Ok(["-object".into(), backend_object(block, &inherited_path(fd), is_shared)])
        }
        (Some(block), None) if memories.is_empty() => {
            Ok(["-object".into(), private_backend_object(block)])
        }
        _ => Err(Error::Source {
            what: "RAM layout".into(),
            problem: format!("it has no backend block {number}"),
        }),
    }
}

fn connect(ours: OwnedFd, child: &mut Child, line: &[Argument]) -> Result<Qmp> {
    rustix::io::ioctl_fionbio(&ours, true)
        .map_err(Error::io("make QEMU's monitor non-blocking"))?;
    let name = format!("of pid {}", child.id());
    let wait = spawn::start_timeout(line);
    Qmp::over(ours, &name, wait, &mut || spawn::alive(child, WHILE_STARTING))
        .map_err(|e| spawn::waits_instead(spawn::exited_instead(e, child, WHILE_STARTING), line))
}

/// Sets what the process of a restored QEMU inherits beside its descriptors: a replay's library,
/// core and death signal, the log of its standard error, and the working directory. Returns the
/// descriptor of the library.
fn prepare_process(command: &mut Command, plan: &Plan) -> Result<Option<OwnedFd>> {
    let preloaded = plan.replays.map(|_| eventfd_coalesce::prepare(command)).transpose()?;
    if let Some(ReplayStart { network_may_be_late, .. }) = plan.replays {
        let role = LogRole::Replays { network_may_be_late };
        thread_affinity::prepare(command, &plan.arguments, role);
    }
    // A signal to the terminal's session must not reach a replay. A rehearsal has no use without
    // this process.
    if plan.replays.is_some() || plan.is_rehearsal {
        keyframe_kernel::child_setup::kill_with_parent(command);
    }
    if let Some(path) = &plan.log {
        let log = File::options().create(true).append(true).open(path);
        command.stderr(log.map_err(Error::io(format!("open {}", path.display())))?);
    }
    if let Some(directory) = &plan.working_directory {
        command.current_dir(directory);
    }
    Ok(preloaded)
}

/// Makes the taps that lead nowhere, and writes the numbers of their descriptors into `words`.
fn isolated_taps(words: &mut [String]) -> Result<Vec<OwnedFd>> {
    let mut all = Vec::new();
    for word in words {
        let Some(queues) = isolated_tap(word) else { continue };
        let taps = keyframe_kernel::isolated_tap::isolated_tap(queues).map_err(|error| {
            CommandLineError::Argument {
                argument: format!("-netdev {}", word.split(",fds=").next().unwrap_or_default()),
                reason: format!(
                    "the guest's card needs a tap, and no unconnected one could be made: {error}"
                ),
                fix: "give each VM a tap of its own after -- (`-netdev \
                      tap,id=ID,ifname=tap{number},script=no,downscript=no`), or run this as root"
                    .into(),
            }
        })?;
        let numbers: Vec<i32> = taps.iter().map(spawn::number).collect();
        *word = with_tap_descriptors(word, &numbers);
        all.extend(taps);
    }
    Ok(all)
}

/// Sends the devices and the small blocks.
fn send(socket: &UnixStream, plan: &Plan, ram: &dyn RamSource, device_state: &[u8]) -> Result<()> {
    let operation = "send the checkpoint's devices to QEMU";
    let moved = plan.moved_networks.as_ref();
    let moved = moved.map(|to| stream::renumber_user_networks(device_state, to)).transpose()?;
    let device_state = moved.as_deref().unwrap_or(device_state);
    socket.set_write_timeout(Some(LOAD_TIMEOUT)).map_err(Error::io(operation))?;
    let layout = &plan.source.ram;
    let of_stream = layout.blocks().iter().enumerate().filter(|(_, b)| b.kind == BlockKind::Stream);
    let mut readers: Vec<_> = of_stream
        .map(|(number, block)| {
            let range =
                PageRange::new(layout.pages_of(number).first, block.used_bytes / PAGE_BYTES as u64);
            let reader = move |sink: &mut dyn FnMut(u64, &Page) -> io::Result<()>| {
                read_ascending(ram, range, sink)
            };
            (block, reader)
        })
        .collect();
    let mut blocks: Vec<StreamBlock<'_>> = readers
        .iter_mut()
        .map(|(block, reader)| StreamBlock {
            name: &block.name,
            used_bytes: block.used_bytes,
            pages: reader,
        })
        .collect();
    let mut out = BufWriter::with_capacity(256 << 10, socket);
    stream::splice_ram(device_state, &mut blocks, &mut out)?;
    out.into_inner().map_err(|e| Error::io(operation)(e.into_error()))?;
    socket.shutdown(Shutdown::Write).map_err(Error::io(operation))
}

fn wait_until_loaded(qmp: &mut Qmp, child: &mut Child) -> Result<()> {
    let deadline = Instant::now() + LOAD_TIMEOUT;
    loop {
        match qmp.status() {
            Ok(RunStatus::InMigrate) => {}
            Ok(_) => return Ok(()),
            Err(e) => return Err(spawn::exited_instead(e, child, WHILE_LOADING)),
        }
        spawn::alive(child, WHILE_LOADING)?;
        if Instant::now() >= deadline {
            return Err(Error::Timeout {
                monitor: format!("of pid {}", child.id()),
                operation: "load the checkpoint's devices".into(),
                waited_ms: LOAD_TIMEOUT.as_millis() as u64,
            });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests;
