//! The strategies and the tracker of a session: which there are on this VM, and why not the others.

use super::Options;
use super::faults::{Fault, FaultyReader, FaultyTracker};
use crate::control::{Strategy as Name, TrackerKind};
use crate::failure::{Failure, chain};
use keyframe_capture::compare::CompareTracker;
use keyframe_capture::parallel::ParallelReader;
use keyframe_capture::ram::{ForkFreezer, GuestRam, ProcessPages, RamFaults, RamTracker};
use keyframe_capture::strategy::{Auto, CopyOnWrite, Fork, Precopy, Prescan, StopCopy, Strategy};
use keyframe_capture::{Cycle, PageReader, Pool, Tracker};
use keyframe_kernel::Process;
use keyframe_kernel::attach::{Attached, inject_userfaultfd};
use keyframe_kernel::fault_tracker::FaultTracker;
use keyframe_kernel::memory::GuestReader;
use keyframe_kernel::track::WriteTracker;
use keyframe_qemu::Vm;
use keyframe_units::{PAGE_BYTES, RamLayout};
use std::sync::Arc;

/// A VM that is tracked, and how its pages can be copied.
pub struct Copying {
    /// The capture.
    pub cycle: Cycle,
    /// The ways to copy.
    pub strategies: Strategies,
    /// The RAM blocks.
    pub layout: RamLayout,
    /// Whether discarded RAM is found.
    pub watches_discards: bool,
    /// How long QEMU's main thread was stopped to take hold of its memory.
    pub stopped_ns: Option<u64>,
}

impl Copying {
    /// Finds the RAM of `vm` and begins to track it. `watches_discards`: it has devices that discard RAM.
    pub fn start(vm: &mut Vm, options: &Options, watches_discards: bool) -> Result<Self, Failure> {
        let blocks = vm.ram_blocks().map_err(|e| Failure::qemu(&e))?;
        let hosts = blocks.iter().map(|b| b.host).collect();
        let layout = RamLayout::new(blocks.into_iter().map(|b| b.block).collect())
            .map_err(|e| Failure::new(format!("QEMU's list of RAM blocks: {e}")))?;
        let ram = Arc::new(GuestRam::new(layout.clone(), hosts));
        let process = Process::open(vm.pid()).map_err(|e| Failure::kernel(&e))?;
        let memory = Arc::new(GuestReader::new(&process, &ram.ranges()).map_err(|e| Failure::kernel(&e))?);
        let plain: Arc<dyn PageReader> = Arc::new(ProcessPages::new(Arc::clone(&ram), Arc::clone(&memory)));
        let parallel: Arc<dyn PageReader> = match options.copy_threads {
            Some(1) => plain,
            Some(threads) => Arc::new(ParallelReader::new(plain, threads).map_err(|e| no_threads(&e))?),
            None => {
                Arc::new(ParallelReader::adaptive(plain, copy_threads_max()).map_err(|e| no_threads(&e))?)
            }
        };
        let reader = faulty(parallel, options.fault.as_ref());
        let (mut cow, mut stopped_ns) = (None, None);
        let tracker: Box<dyn Tracker> = match options.tracker_kind()? {
            TrackerKind::Compare => {
                let key = random_key()?;
                Box::new(CompareTracker::new(Arc::clone(&reader), layout.len_pages(), key))
            }
            TrackerKind::Sync => {
                let (tracker, ns) = fault_tracker(&process, &ram)?;
                stopped_ns = Some(ns);
                let writes = RamFaults::new(Arc::clone(&ram), Arc::clone(&tracker));
                cow = Some(CopyOnWrite::new(Arc::new(writes)));
                Box::new(RamTracker::new(Arc::clone(&ram), memory, tracker))
            }
            TrackerKind::WriteProtect | TrackerKind::Auto => {
                let (tracker, ns) = write_tracker(&process, &ram, watches_discards)?;
                stopped_ns = Some(ns);
                Box::new(RamTracker::new(Arc::clone(&ram), memory, tracker))
            }
        };
        let tracker = match &options.fault {
            Some(fault) => Box::new(FaultyTracker(tracker, fault.clone())),
            None => tracker,
        };
        let pool = Pool::new(staging_pages(options, &layout));
        let cycle = Cycle::new(layout.clone(), tracker, reader, pool);
        let mut strategies = Strategies {
            auto: Auto::default(),
            precopy: Precopy::default(),
            prescan: Prescan,
            stop_copy: StopCopy,
            cow,
            fork: None,
            fork_source: (ram, process),
        };
        // What this VM does not allow is refused here: a launched guest has not run yet.
        strategies.get(options.strategy)?;
        Ok(Self { cycle, strategies, layout, watches_discards, stopped_ns })
    }
}

/// A tracker, and how long QEMU's main thread was stopped for it.
type Stopped<T> = Result<(T, u64), Failure>;

fn take_hold(process: &Process) -> Result<Attached, Failure> {
    let attached = inject_userfaultfd(process).map_err(|e| Failure::kernel(&e))?;
    crate::output::warn_unguarded(&attached, process.pid());
    Ok(attached)
}

fn write_tracker(process: &Process, ram: &GuestRam, watches_discards: bool) -> Stopped<WriteTracker> {
    let attached = take_hold(process)?;
    let mut tracker = WriteTracker::new(process, attached.uffd).map_err(|e| Failure::kernel(&e))?;
    tracker.set_watch_discards(watches_discards);
    for range in ram.ranges() {
        tracker.register(range).map_err(|e| Failure::kernel(&e))?;
    }
    Ok((tracker, attached.stopped_ns))
}

fn fault_tracker(process: &Process, ram: &GuestRam) -> Stopped<Arc<FaultTracker>> {
    let attached = take_hold(process)?;
    let mut tracker = FaultTracker::new(process, attached.uffd, attached.user_mode_only)
        .map_err(|e| Failure::kernel(&e))?;
    for range in ram.ranges() {
        tracker.register(range).map_err(|e| Failure::kernel(&e))?;
    }
    Ok((Arc::new(tracker), attached.stopped_ns))
}

/// The ways to copy that this VM allows.
pub struct Strategies {
    auto: Auto,
    precopy: Precopy,
    prescan: Prescan,
    stop_copy: StopCopy,
    /// With its tracker alone.
    cow: Option<CopyOnWrite>,
    /// Looked into when it is first asked for.
    fork: Option<Fork>,
    fork_source: (Arc<GuestRam>, Process),
}

impl Strategies {
    /// Pre-copy leaves no more than `target_pages` to the pause, if it can.
    pub fn tune(&mut self, target_pages: u64) {
        self.precopy.policy.target_pages = target_pages;
        self.auto.precopy.policy.target_pages = target_pages;
    }

    /// Lets go of the tracker: of the same RAM there can be only one.
    pub fn untrack(&mut self) {
        (self.cow, self.fork) = (None, None);
    }

    /// The one of that name, or why it cannot be.
    pub fn get(&mut self, name: Name) -> Result<&mut dyn Strategy, Failure> {
        Ok(match name {
            Name::Auto => &mut self.auto,
            Name::Precopy => &mut self.precopy,
            Name::PreScan => &mut self.prescan,
            Name::StopCopy => &mut self.stop_copy,
            Name::Cow => self.cow.as_mut().ok_or_else(|| {
                Failure::new("copy-on-write has to answer the guest's first writes itself, and this run's tracker does not")
                    .fix("start the run with --strategy cow, or --tracker sync")
            })?,
            Name::Fork => {
                if self.fork.is_none() {
                    let (ram, process) = &self.fork_source;
                    let freezer =
                        ForkFreezer::new(Arc::clone(ram), process).map_err(|e| Failure::kernel(&e))?;
                    self.fork = Some(Fork::new(Box::new(freezer)));
                }
                self.fork.as_mut().ok_or_else(|| Failure::new("no fork"))?
            }
        })
    }
}

fn no_threads(error: &keyframe_capture::BoxError) -> Failure {
    Failure::new(format!("start the copying threads: {error}"))
}

/// More threads than this do not copy faster: memory is the limit.
fn copy_threads_max() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().min(8))
}

fn faulty(reader: Arc<dyn PageReader>, fault: Option<&Fault>) -> Arc<dyn PageReader> {
    match fault {
        Some(fault) => Arc::new(FaultyReader(reader, fault.clone())),
        None => reader,
    }
}

/// Memory for copied pages: as large as RAM where that is at most a quarter of what is free.
fn staging_pages(options: &Options, layout: &RamLayout) -> u64 {
    const MIB_PAGES: u64 = (1 << 20) / PAGE_BYTES as u64;
    match options.staging_mib {
        Some(mib) => mib.saturating_mul(MIB_PAGES),
        None => layout.len_pages().min(available_memory_bytes() / 4 / PAGE_BYTES as u64).max(64 * MIB_PAGES),
    }
}

fn available_memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .find_map(|l| l.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map_or(1 << 30, |kib| kib.saturating_mul(1024))
}

fn random_key() -> Result<[u8; 32], Failure> {
    use std::io::Read;
    let mut key = [0; 32];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut key))
        .map_err(|e| Failure::new(format!("read /dev/urandom: {}", chain(&e))))?;
    Ok(key)
}
