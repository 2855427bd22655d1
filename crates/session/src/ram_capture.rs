//! The capture of a session's RAM: the tracker, the strategies that this VM allows, and why it does
//! not allow the others.
//!
//! ```text
//!   OpenRam ─▶ RamAccess, one for each VM ─▶ tracker, reader, freezer ─▶ CaptureCycle, Strategies
//! ```
//!
//! [`RamAccess`] is the door to a VM's RAM. [`process::ProcessRam`] is the one of a VMM process;
//! tests have one over RAM in their own memory.

pub mod process;

use super::SessionOptions;
use super::event::{Event, EventSink};
use super::faults::{Fault, FaultyReader, FaultyTracker};
use super::machines::group_layout;
use super::memory_guard::{GuestMemory, MemoryGuard};
use crate::control::{Strategy as Name, TrackerKind};
use crate::error::{Error, Result};
use keyframe_capture::compare::CompareTracker;
use keyframe_capture::group::{
    GroupFirstWriteMonitor, GroupFreezer, GroupReader, GroupTracker, MemberPort,
};
use keyframe_capture::parallel::ParallelPageReader;
use keyframe_capture::strategy::{
    AutoStrategy, CopyOnWriteStrategy, CopyStrategy, ForkStrategy, PausedScanStrategy,
    PrecopyStrategy, PrescanStrategy, StopCopyStrategy,
};
use keyframe_capture::{
    BoxError, CaptureCycle, DirtyTracker, FirstWriteMonitor, PageReader, RamFreezer, StagingPool,
};
use keyframe_units::{PAGE_BYTES, Page, PageIndex, RamLayout};
use keyframe_vmm::Vmm;
use process::ProcessRam;
use std::sync::Arc;

/// Pages of one MiB.
const MIB_PAGES: u64 = (1 << 20) / PAGE_BYTES as u64;

/// A function that opens the RAM of a VM. Error: the VM does not answer, or its memory cannot be
/// inspected.
pub type OpenRam = fn(&mut dyn Vmm) -> Result<Box<dyn RamAccess>>;

/// The opened RAM of one VM.
pub trait RamAccess: Send {
    /// Returns the layout of the VM's RAM blocks.
    fn layout(&self) -> &RamLayout;

    /// Returns true if devices of the VM can discard RAM, and the tracker sees that.
    fn watches_discards(&self) -> bool;

    /// Returns true if the kernel writes into pinned pages of the RAM while the VM runs: write
    /// protection sees that only if scans are in pauses.
    fn is_pinned(&self) -> bool {
        false
    }

    /// Returns a reader of the RAM as it is at each read.
    fn reader(&self) -> Arc<dyn PageReader>;

    /// Writes `content` to `page` of the paused VM's RAM. The tracker reports the page afterwards.
    /// Error: the VM has ended, or its memory cannot be written.
    fn write_page(&self, page: PageIndex, content: &Page) -> Result<(), BoxError>;

    /// Begins to track writes by asynchronous write protection, with windows as `windows` says.
    /// Error: the kernel cannot track the VM's memory.
    fn track_writes(
        &self,
        windows: UseOfWindows,
        events: &dyn EventSink<Event>,
    ) -> Result<StartedTracker>;

    /// Begins to track writes so that each first write waits for an answer, which copy-on-write
    /// needs. Error: the kernel cannot track the VM's memory.
    fn track_first_writes(
        &self,
        events: &dyn EventSink<Event>,
    ) -> Result<(StartedTracker, Arc<dyn FirstWriteMonitor>)>;

    /// Prepares to freeze the RAM by forking the VMM. Error: the VM's memory cannot be frozen by a
    /// fork.
    fn freezer(&self) -> Result<Box<dyn RamFreezer>>;
}

/// Whether page faults name the last pages of a checkpoint, in place of a scan in the pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UseOfWindows {
    /// They do not.
    Never,
    /// They do if that is possible, exact and saves time.
    IfUseful,
    /// They do, or the VM is refused.
    Always,
}

/// A tracker of written pages that has begun to track.
pub struct StartedTracker {
    /// The tracker.
    pub tracker: Box<dyn DirtyTracker>,
    /// The time for which the attach stopped the VMM's main thread, in nanoseconds. `None` if there
    /// was no attach.
    pub stopped_ns: Option<u64>,
}

/// The capture of the RAM of a session's VMs.
pub struct RamCapture {
    /// The checkpoint cycle.
    pub cycle: CaptureCycle,
    /// The strategies that these VMs allow.
    pub strategies: Strategies,
    /// The RAM blocks.
    pub layout: RamLayout,
    /// For each VM: true if the tracker reports discarded RAM.
    pub watches_discards: Vec<bool>,
    /// The time for which the attach stopped QEMU's main thread, in nanoseconds. `None` if there
    /// was no attach.
    pub stopped_ns: Option<u64>,
    /// Limits the memory of the capture.
    pub memory: MemoryGuard,
    open: OpenRam,
}

impl RamCapture {
    /// Finds the RAM of `vms`, which are processes on this host, and begins to track it. Each VM
    /// comes with its name; with `is_group`, the names tell the RAM blocks of a group apart. Error:
    /// the kernel cannot track a VM's memory.
    pub fn start(
        vms: &mut [(&str, &mut dyn Vmm)],
        is_group: bool,
        options: &SessionOptions,
    ) -> Result<Self> {
        Self::start_with(ProcessRam::open, vms, is_group, options)
    }

    /// Begins to track the RAM of `vms` as [`Self::start`] does, with RAM that `open` opens. With
    /// `is_group`, the VMs are those of a group. Errors: those of [`Self::start`].
    pub fn start_with(
        open: OpenRam,
        vms: &mut [(&str, &mut dyn Vmm)],
        is_group: bool,
        options: &SessionOptions,
    ) -> Result<Self> {
        let mut rams = Vec::with_capacity(vms.len());
        for (_, vm) in vms.iter_mut() {
            rams.push(open(&mut **vm)?);
        }
        let layout = if is_group {
            let members = vms.iter().zip(&rams);
            let named: Vec<_> =
                members.map(|((name, _), ram)| (*name, ram.layout().clone())).collect();
            group_layout(&named)?
        } else {
            rams.first().map(|ram| ram.layout().clone()).ok_or(Error::NoVm)?
        };
        let watches_discards = rams.iter().map(|ram| ram.watches_discards()).collect();
        let scans = scans(&rams, options)?;
        let reader = reader(&rams, options)?;
        let tracking = Tracking::start(&rams, &reader, &layout, options)?;
        let guests = vms.iter().zip(&rams).map(|((_, vm), ram)| GuestMemory {
            pid: Some(vm.pid()),
            ram_bytes: ram.layout().len_pages() * PAGE_BYTES as u64,
        });
        let wanted =
            options.staging_mib.map_or(layout.len_pages(), |mib| mib.saturating_mul(MIB_PAGES));
        let memory = MemoryGuard::new(guests.collect(), wanted);
        let pool = StagingPool::new(staging_pages(options, wanted, memory.left_bytes()));
        let cycle = CaptureCycle::new(layout.clone(), tracking.tracker, reader, pool);
        let mut strategies = Strategies {
            auto: AutoStrategy::default(),
            precopy: PrecopyStrategy::default(),
            prescan: PrescanStrategy,
            stop_copy: StopCopyStrategy,
            cow: tracking.cow,
            fork: None,
            paused_scan: PausedScanStrategy,
            scans,
            rams,
        };
        // A strategy that this VM does not allow is refused here: a launched guest has not run yet.
        strategies.get(options.strategy)?;
        let stopped_ns = tracking.stopped_ns;
        Ok(Self { cycle, strategies, layout, watches_discards, stopped_ns, memory, open })
    }

    /// Begins anew with the RAM that `vms` have now, opened in the same way. With `is_group`, the
    /// VMs are those of a group. Errors: those of [`Self::start`].
    pub fn restart(
        &self,
        vms: &mut [(&str, &mut dyn Vmm)],
        is_group: bool,
        options: &SessionOptions,
    ) -> Result<Self> {
        Self::start_with(self.open, vms, is_group, options)
    }
}

/// When the RAM may be scanned for written pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scans {
    /// At any time.
    AnyTime,
    /// Only while the VMs are paused.
    InPauses,
}

/// Decides when the RAM of the VMs `rams` may be scanned. Error: the tracker of `options` cannot do
/// that.
fn scans(rams: &[Box<dyn RamAccess>], options: &SessionOptions) -> Result<Scans> {
    if !rams.iter().any(|ram| ram.is_pinned()) {
        return Ok(Scans::AnyTime);
    }
    match options.tracker_kind()? {
        // It finds what was written, however it was written.
        TrackerKind::Compare => Ok(Scans::AnyTime),
        TrackerKind::Sync => {
            let by_strategy = options.strategy == Name::Cow;
            let option = if by_strategy { "--strategy" } else { "--tracker" };
            Err(Error::ScansInPauses { option })
        }
        TrackerKind::Window => Err(Error::ScansInPauses { option: "--tracker" }),
        TrackerKind::WriteProtect | TrackerKind::Auto => Ok(Scans::InPauses),
    }
}

/// A reader of the RAM of all VMs, with the threads and the fault of `options`.
fn reader(rams: &[Box<dyn RamAccess>], options: &SessionOptions) -> Result<Arc<dyn PageReader>> {
    let port = |ram: &dyn RamAccess| MemberPort {
        len_pages: ram.layout().len_pages(),
        port: ram.reader(),
    };
    let all = rams.iter().map(|ram| port(&**ram)).collect();
    let plain = one(all, |all| Arc::new(GroupReader::new(all)));
    let parallel: Arc<dyn PageReader> = match options.copy_threads {
        Some(1) => plain,
        Some(threads) => {
            Arc::new(ParallelPageReader::new(plain, threads).map_err(Error::CopyThreads)?)
        }
        None => {
            let reader = ParallelPageReader::adaptive(plain, copy_threads_max());
            Arc::new(reader.map_err(Error::CopyThreads)?)
        }
    };
    Ok(faulty(parallel, options.fault.as_ref()))
}

/// The tracker of all VMs.
struct Tracking {
    tracker: Box<dyn DirtyTracker>,
    /// Present if the tracker answers first writes.
    cow: Option<CopyOnWriteStrategy>,
    stopped_ns: Option<u64>,
}

impl Tracking {
    /// Starts the tracker that `options` ask for.
    fn start(
        rams: &[Box<dyn RamAccess>],
        reader: &Arc<dyn PageReader>,
        layout: &RamLayout,
        options: &SessionOptions,
    ) -> Result<Self> {
        let mut tracking = match options.tracker_kind()? {
            TrackerKind::Compare => {
                let key = random_key()?;
                let tracker = CompareTracker::new(Arc::clone(reader), layout.len_pages(), key);
                Self { tracker: Box::new(tracker), cow: None, stopped_ns: None }
            }
            TrackerKind::Sync => Self::of_first_writes(rams, &*options.events)?,
            TrackerKind::WriteProtect => {
                Self::of_writes(rams, UseOfWindows::Never, &*options.events)?
            }
            TrackerKind::Auto => Self::of_writes(rams, UseOfWindows::IfUseful, &*options.events)?,
            TrackerKind::Window => Self::of_writes(rams, UseOfWindows::Always, &*options.events)?,
        };
        if let Some(fault) = &options.fault {
            tracking.tracker = Box::new(FaultyTracker(tracking.tracker, fault.clone()));
        }
        Ok(tracking)
    }

    fn of_writes(
        rams: &[Box<dyn RamAccess>],
        windows: UseOfWindows,
        events: &dyn EventSink<Event>,
    ) -> Result<Self> {
        let (mut trackers, mut stopped_ns) = (Vec::new(), None);
        for ram in rams {
            let started = ram.track_writes(windows, events)?;
            stopped_ns = stopped_ns.max(started.stopped_ns);
            let len_pages = ram.layout().len_pages();
            trackers.push(MemberPort { len_pages, port: started.tracker });
        }
        let tracker = one(trackers, |all| Box::new(GroupTracker::new(all)));
        Ok(Self { tracker, cow: None, stopped_ns })
    }

    fn of_first_writes(rams: &[Box<dyn RamAccess>], events: &dyn EventSink<Event>) -> Result<Self> {
        let (mut trackers, mut monitors, mut stopped_ns) = (Vec::new(), Vec::new(), None);
        for ram in rams {
            let (started, monitor) = ram.track_first_writes(events)?;
            stopped_ns = stopped_ns.max(started.stopped_ns);
            let len_pages = ram.layout().len_pages();
            trackers.push(MemberPort { len_pages, port: started.tracker });
            monitors.push(MemberPort { len_pages, port: monitor });
        }
        let monitor = one(monitors, |all| Arc::new(GroupFirstWriteMonitor::new(all)));
        let tracker = one(trackers, |all| Box::new(GroupTracker::new(all)));
        Ok(Self { tracker, cow: Some(CopyOnWriteStrategy::new(monitor)), stopped_ns })
    }
}

/// Returns the only port as it is; several ports as `group` makes them one.
fn one<T>(mut members: Vec<MemberPort<T>>, group: impl FnOnce(Vec<MemberPort<T>>) -> T) -> T {
    match (members.pop(), members.is_empty()) {
        (Some(only), true) => only.port,
        (last, _) => group(members.into_iter().chain(last).collect()),
    }
}

/// The strategies to copy pages that a VM allows.
pub struct Strategies {
    auto: AutoStrategy,
    precopy: PrecopyStrategy,
    prescan: PrescanStrategy,
    stop_copy: StopCopyStrategy,
    /// Present if the tracker answers first writes.
    cow: Option<CopyOnWriteStrategy>,
    /// Prepared at its first use.
    fork: Option<ForkStrategy>,
    paused_scan: PausedScanStrategy,
    scans: Scans,
    rams: Vec<Box<dyn RamAccess>>,
}

impl Strategies {
    /// Returns a reader of the first VM's RAM as it is at each read; `None` if there is no VM.
    pub fn ram(&self) -> Option<Arc<dyn PageReader>> {
        self.rams.first().map(|ram| ram.reader())
    }

    /// Writes a page of the first VM's RAM, while the VM is paused. The tracker reports the page
    /// afterwards. Error: the VM has ended, or its memory cannot be written.
    pub fn write_page(&self, page: PageIndex, content: &Page) -> Result<(), BoxError> {
        let ram = self.rams.first().ok_or(Error::NoVm)?;
        ram.write_page(page, content)
    }

    /// Returns true if the RAM is scanned while the guest runs, by a tracker that does not see
    /// writes into pinned pages. Error: the strategy does not work with the tracker that `options`
    /// name.
    pub fn miss_pinned_writes(&self, options: &SessionOptions) -> Result<bool> {
        let finds_all = options.tracker_kind()? == TrackerKind::Compare;
        Ok(self.scans == Scans::AnyTime && !finds_all)
    }

    /// Sets the number of pages that pre-copy may leave to the pause to `target_pages`.
    pub fn tune(&mut self, target_pages: u64) {
        self.precopy.policy.target_pages = target_pages;
        self.auto.precopy.policy.target_pages = target_pages;
    }

    /// Ends the trackers, because the same RAM can have only one.
    pub fn untrack(&mut self) {
        (self.cow, self.fork) = (None, None);
    }

    /// Returns the strategy with the name `name`. Error: the reason why this VM does not allow it.
    pub fn get(&mut self, name: Name) -> Result<&mut dyn CopyStrategy> {
        if self.scans == Scans::InPauses {
            return match name {
                Name::Auto | Name::Precopy | Name::PreScan | Name::StopCopy => {
                    Ok(&mut self.paused_scan)
                }
                Name::Cow | Name::Fork => Err(Error::ScansInPauses { option: "--strategy" }),
            };
        }
        Ok(match name {
            Name::Auto => &mut self.auto,
            Name::Precopy => &mut self.precopy,
            Name::PreScan => &mut self.prescan,
            Name::StopCopy => &mut self.stop_copy,
            Name::Cow => self.cow.as_mut().ok_or(Error::NoCopyOnWrite)?,
            Name::Fork => match &mut self.fork {
                Some(fork) => fork,
                none => {
                    let freezers =
                        self.rams.iter().map(|ram| freezer(&**ram)).collect::<Result<_>>()?;
                    none.insert(ForkStrategy::new(one(freezers, |all| {
                        Box::new(GroupFreezer::new(all))
                    })))
                }
            },
        })
    }
}

/// A freezer of one VM's RAM, with the number of its pages.
fn freezer(ram: &dyn RamAccess) -> Result<MemberPort<Box<dyn RamFreezer>>> {
    Ok(MemberPort { len_pages: ram.layout().len_pages(), port: ram.freezer()? })
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

/// Memory for copied pages: what `options` ask for; without that as large as RAM (`wanted` pages),
/// if that is at most a quarter of the `left_bytes` that the VMs leave.
fn staging_pages(options: &SessionOptions, wanted: u64, left_bytes: u64) -> u64 {
    if options.staging_mib.is_some() {
        return wanted;
    }
    let share = left_bytes / 4 / PAGE_BYTES as u64;
    // A pause may find many more pages than the RAM of a small guest suggests.
    let least = share.clamp(16 * MIB_PAGES, 64 * MIB_PAGES);
    wanted.min(share).max(least)
}

fn random_key() -> Result<[u8; 32]> {
    let mut key = [0; 32];
    getrandom::fill(&mut key)
        .map_err(|e| Error::io("read the kernel's random number generator", e.into()))?;
    Ok(key)
}
