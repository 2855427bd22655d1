//! The strategies and the tracker of a session: which there are on this VM, and why not the others.

use super::Options;
use super::event::{Event, EventSink};
use super::faults::{Fault, FaultyReader, FaultyTracker};
use super::machines::group_layout;
use crate::control::{Strategy as Name, TrackerKind};
use crate::error::{Error, Result};
use keyframe_capture::compare::CompareTracker;
use keyframe_capture::group::{GroupFirstWriteMonitor, GroupFreezer, GroupReader, GroupTracker};
use keyframe_capture::parallel::ParallelPageReader;
use keyframe_capture::ram::{
    ForkFreezer, GuestRam, ProcessDirtyTracker, ProcessFirstWriteMonitor, ProcessPageReader,
    WriteScanner,
};
use keyframe_capture::strategy::{
    AutoStrategy, CopyOnWriteStrategy, CopyStrategy, ForkStrategy, PrecopyStrategy,
    PrescanStrategy, StopCopyStrategy,
};
use keyframe_capture::{
    CaptureCycle, DirtyTracker, FirstWriteMonitor, PageReader, RamFreezer, StagingPool,
};
use keyframe_kernel::Process;
use keyframe_kernel::attach::{Attached, inject_userfaultfd};
use keyframe_kernel::fault_tracker::FaultTracker;
use keyframe_kernel::memory::GuestReader;
use keyframe_kernel::write_tracker::WriteTracker;
use keyframe_units::{PAGE_BYTES, RamLayout};
use keyframe_vmm::Vmm;
use std::sync::Arc;

/// A VM that is tracked, and how its pages can be copied.
pub struct RamCapture {
    /// The capture.
    pub cycle: CaptureCycle,
    /// The ways to copy.
    pub strategies: Strategies,
    /// The RAM blocks.
    pub layout: RamLayout,
    /// Of each VM, whether discarded RAM is found.
    pub watches_discards: Vec<bool>,
    /// How long QEMU's main thread was stopped to take hold of its memory.
    pub stopped_ns: Option<u64>,
}

impl RamCapture {
    /// Finds the RAM of `vms` and begins to track it. They come with their names, which are those
    /// of a group's members where `is_group`.
    pub fn start(
        vms: &mut [(&str, &mut dyn Vmm)],
        is_group: bool,
        options: &Options,
    ) -> Result<Self> {
        let mut ways = Vec::with_capacity(vms.len());
        for (_, vm) in vms.iter_mut() {
            ways.push(GuestRamAccess::into_ram(&mut **vm)?);
        }
        let layout = if is_group {
            let named: Vec<_> = vms
                .iter()
                .zip(&ways)
                .map(|((name, _), w)| (*name, w.ram.layout().clone()))
                .collect();
            group_layout(&named)?
        } else {
            ways.first().map(|w| w.ram.layout().clone()).ok_or(Error::NoVm)?
        };
        let watches_discards = ways.iter().map(|w| w.watches_discards).collect();
        let plain = one(ways.iter().map(|w| (w.len_pages(), w.pages())).collect(), |all| {
            Arc::new(GroupReader::new(all))
        });
        let parallel: Arc<dyn PageReader> = match options.copy_threads {
            Some(1) => plain,
            Some(threads) => {
                Arc::new(ParallelPageReader::new(plain, threads).map_err(Error::CopyThreads)?)
            }
            None => Arc::new(
                ParallelPageReader::adaptive(plain, copy_threads_max())
                    .map_err(Error::CopyThreads)?,
            ),
        };
        let reader = faulty(parallel, options.fault.as_ref());
        let (mut cow, mut stopped_ns) = (None, None);
        let tracker: Box<dyn DirtyTracker> = match options.tracker_kind()? {
            TrackerKind::Compare => {
                let key = random_key()?;
                Box::new(CompareTracker::new(Arc::clone(&reader), layout.len_pages(), key))
            }
            TrackerKind::Sync => {
                let (mut trackers, mut writes) = (Vec::new(), Vec::new());
                for way in &ways {
                    let (tracker, ns) = fault_tracker(&way.process, &way.ram, &*options.events)?;
                    stopped_ns = stopped_ns.max(Some(ns));
                    let told: Arc<dyn FirstWriteMonitor> = Arc::new(ProcessFirstWriteMonitor::new(
                        Arc::clone(&way.ram),
                        Arc::clone(&tracker),
                    ));
                    writes.push((way.len_pages(), told));
                    trackers.push((way.len_pages(), way.tracker(tracker)));
                }
                cow = Some(CopyOnWriteStrategy::new(one(writes, |all| {
                    Arc::new(GroupFirstWriteMonitor::new(all))
                })));
                one(trackers, |all| Box::new(GroupTracker::new(all)))
            }
            TrackerKind::WriteProtect | TrackerKind::Auto => {
                let mut trackers = Vec::new();
                for way in &ways {
                    let (tracker, ns) = write_tracker(way, &*options.events)?;
                    stopped_ns = stopped_ns.max(Some(ns));
                    trackers.push((way.len_pages(), way.tracker(tracker)));
                }
                one(trackers, |all| Box::new(GroupTracker::new(all)))
            }
        };
        let tracker = match &options.fault {
            Some(fault) => Box::new(FaultyTracker(tracker, fault.clone())),
            None => tracker,
        };
        let pool = StagingPool::new(staging_pages(options, &layout));
        let cycle = CaptureCycle::new(layout.clone(), tracker, reader, pool);
        let mut strategies = Strategies {
            auto: AutoStrategy::default(),
            precopy: PrecopyStrategy::default(),
            prescan: PrescanStrategy,
            stop_copy: StopCopyStrategy,
            cow,
            fork: None,
            ways,
        };
        // What this VM does not allow is refused here: a launched guest has not run yet.
        strategies.get(options.strategy)?;
        Ok(Self { cycle, strategies, layout, watches_discards, stopped_ns })
    }
}

/// The ways into the RAM of one VM.
struct GuestRamAccess {
    ram: Arc<GuestRam>,
    process: Process,
    memory: Arc<GuestReader>,
    /// It has devices that discard RAM.
    watches_discards: bool,
}

impl GuestRamAccess {
    fn into_ram(vm: &mut dyn Vmm) -> Result<Self> {
        let watches_discards = vm.discards_ram()?;
        let blocks = vm.ram_blocks()?;
        let hosts = blocks.iter().map(|b| b.host).collect();
        let layout = RamLayout::new(blocks.into_iter().map(|b| b.block).collect())?;
        let ram = Arc::new(GuestRam::new(layout, hosts));
        let process = Process::open(vm.pid())?;
        let memory = Arc::new(GuestReader::new(&process, &ram.ranges())?);
        Ok(Self { ram, process, memory, watches_discards })
    }

    fn len_pages(&self) -> u64 {
        self.ram.layout().len_pages()
    }

    fn pages(&self) -> Arc<dyn PageReader> {
        Arc::new(ProcessPageReader::new(Arc::clone(&self.ram), Arc::clone(&self.memory)))
    }

    fn tracker(&self, scan: impl WriteScanner + 'static) -> Box<dyn DirtyTracker> {
        Box::new(ProcessDirtyTracker::new(Arc::clone(&self.ram), Arc::clone(&self.memory), scan))
    }
}

/// The only one as it is; several, each with the number of its pages, as `group` makes them one.
fn one<T>(mut members: Vec<(u64, T)>, group: impl FnOnce(Vec<(u64, T)>) -> T) -> T {
    match (members.pop(), members.is_empty()) {
        (Some((_, only)), true) => only,
        (last, _) => group(members.into_iter().chain(last).collect()),
    }
}

/// A tracker, and how long QEMU's main thread was stopped for it.
type Stopped<T> = Result<(T, u64)>;

fn take_hold(process: &Process, events: &dyn EventSink) -> Result<Attached> {
    let attached = inject_userfaultfd(process)?;
    if !attached.guarded {
        events.event(&Event::UnguardedAttach { qemu_pid: process.pid() });
    }
    Ok(attached)
}

fn write_tracker(way: &GuestRamAccess, events: &dyn EventSink) -> Stopped<WriteTracker> {
    let attached = take_hold(&way.process, events)?;
    let mut tracker = WriteTracker::new(&way.process, attached.uffd)?;
    tracker.set_watch_discards(way.watches_discards);
    for range in way.ram.ranges() {
        tracker.register(range)?;
    }
    Ok((tracker, attached.stopped_ns))
}

fn fault_tracker(
    process: &Process,
    ram: &GuestRam,
    events: &dyn EventSink,
) -> Stopped<Arc<FaultTracker>> {
    let attached = take_hold(process, events)?;
    let mut tracker = FaultTracker::new(process, attached.uffd, attached.user_mode_only)?;
    for range in ram.ranges() {
        tracker.register(range)?;
    }
    Ok((Arc::new(tracker), attached.stopped_ns))
}

/// The ways to copy that this VM allows.
pub struct Strategies {
    auto: AutoStrategy,
    precopy: PrecopyStrategy,
    prescan: PrescanStrategy,
    stop_copy: StopCopyStrategy,
    /// With its tracker alone.
    cow: Option<CopyOnWriteStrategy>,
    /// Looked into when it is first asked for.
    fork: Option<ForkStrategy>,
    ways: Vec<GuestRamAccess>,
}

impl Strategies {
    /// The RAM of the first VM, as it is in this moment.
    pub fn ram(&self) -> Option<Arc<dyn PageReader>> {
        self.ways.first().map(GuestRamAccess::pages)
    }

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
    pub fn get(&mut self, name: Name) -> Result<&mut dyn CopyStrategy> {
        Ok(match name {
            Name::Auto => &mut self.auto,
            Name::Precopy => &mut self.precopy,
            Name::PreScan => &mut self.prescan,
            Name::StopCopy => &mut self.stop_copy,
            Name::Cow => self.cow.as_mut().ok_or(Error::NoCopyOnWrite)?,
            Name::Fork => match &mut self.fork {
                Some(fork) => fork,
                none => {
                    let freezer = |way: &GuestRamAccess| -> Result<(u64, Box<dyn RamFreezer>)> {
                        let freezer = ForkFreezer::new(Arc::clone(&way.ram), &way.process);
                        Ok((way.len_pages(), Box::new(freezer?)))
                    };
                    let freezers = self.ways.iter().map(freezer).collect::<Result<_>>()?;
                    none.insert(ForkStrategy::new(one(freezers, |all| {
                        Box::new(GroupFreezer::new(all))
                    })))
                }
            },
        })
    }
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
        None => layout
            .len_pages()
            .min(available_memory_bytes() / 4 / PAGE_BYTES as u64)
            .max(64 * MIB_PAGES),
    }
}

fn available_memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .find_map(|l| {
            l.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        })
        .map_or(1 << 30, |kib| kib.saturating_mul(1024))
}

fn random_key() -> Result<[u8; 32]> {
    let mut key = [0; 32];
    getrandom::fill(&mut key)
        .map_err(|e| Error::io("read the kernel's random number generator", e.into()))?;
    Ok(key)
}
