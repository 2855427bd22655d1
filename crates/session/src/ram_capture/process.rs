//! The RAM of a VM whose VMM is a process on this host: reads, write trackers and forked copies.

use super::{RamAccess, StartedTracker, UseOfWindows};
use crate::error::Result;
use crate::event::{Event, EventSink};
use keyframe_capture::ram::{
    ForkFreezer, GuestRam, ProcessDirtyTracker, ProcessFirstWriteMonitor, ProcessPageReader,
    WindowScanner, WriteScanner,
};
use keyframe_capture::{BoxError, DirtyTracker, FirstWriteMonitor, PageReader, RamFreezer};
use keyframe_kernel::Process;
use keyframe_kernel::attach::{
    InjectedUserfaultfd, inject_userfaultfd, inject_userfaultfd_unfiltered,
};
use keyframe_kernel::fault_tracker::FaultTracker;
use keyframe_kernel::fault_window::FaultWindow;
use keyframe_kernel::memory::GuestReader;
use keyframe_kernel::write_tracker::WriteTracker;
use keyframe_units::{HostVirt, PAGE_BYTES, Page, PageIndex, RamLayout};
use keyframe_vmm::{Ability, Unsupported, Vmm};
use std::sync::Arc;

/// A scan of less RAM takes less than 0.1 ms, about as long as a window takes the guest.
const WINDOW_RAM_BYTES_MIN: u64 = 256 << 20;

/// The RAM of one VMM process.
pub struct ProcessRam {
    ram: Arc<GuestRam>,
    process: Process,
    memory: Arc<GuestReader>,
    watches_discards: bool,
    is_pinned: bool,
    traps_unknown_calls: bool,
    /// Whether the VMM may be forked.
    can_fork: Result<(), Unsupported>,
}

impl ProcessRam {
    /// Opens the RAM of `vm`. Error: the VM does not answer, or its memory cannot be inspected.
    pub fn open(vm: &mut dyn Vmm) -> Result<Box<dyn RamAccess>> {
        let watches_discards = vm.discards_ram()?;
        let is_pinned = vm.pins_ram()?;
        let traps_unknown_calls = vm.traps_unknown_calls();
        let can_fork = vm.capabilities().require(Ability::Fork);
        let blocks = vm.ram_blocks()?;
        let hosts = blocks.iter().map(|b| b.host).collect();
        let layout = RamLayout::new(blocks.into_iter().map(|b| b.block).collect())?;
        let opened = Self::of_process(vm.pid(), layout, hosts)?;
        Ok(Box::new(Self { watches_discards, is_pinned, traps_unknown_calls, can_fork, ..opened }))
    }

    /// Opens the RAM of process `pid`, whose blocks `layout` are at the addresses `hosts`, without
    /// asking its VMM. Error: its memory cannot be inspected.
    pub(crate) fn of_process(pid: u32, layout: RamLayout, hosts: Vec<HostVirt>) -> Result<Self> {
        let ram = Arc::new(GuestRam::new(layout, hosts));
        let process = Process::open(pid)?;
        let memory = Arc::new(GuestReader::new(&process, &ram.ranges())?);
        Ok(Self {
            ram,
            process,
            memory,
            watches_discards: false,
            is_pinned: false,
            traps_unknown_calls: false,
            can_fork: Ok(()),
        })
    }

    fn tracker(&self, scan: impl WriteScanner + 'static) -> Box<dyn DirtyTracker> {
        Box::new(ProcessDirtyTracker::new(Arc::clone(&self.ram), Arc::clone(&self.memory), scan))
    }

    /// The windows over the memory of `tracker`; `None` if `windows` permits to go without and they
    /// are not possible or save nothing. Error: they are not possible.
    fn window(&self, tracker: &WriteTracker, windows: UseOfWindows) -> Result<Option<FaultWindow>> {
        let ram_bytes = self.ram.layout().len_pages() * PAGE_BYTES as u64;
        match windows {
            UseOfWindows::Never => Ok(None),
            UseOfWindows::Always => Ok(Some(FaultWindow::new(tracker)?)),
            UseOfWindows::IfUseful if ram_bytes < WINDOW_RAM_BYTES_MIN || self.is_pinned => {
                Ok(None)
            }
            // It is not permitted here, or not exact: the scan in the pause is.
            UseOfWindows::IfUseful => Ok(FaultWindow::new(tracker).ok()),
        }
    }

    fn attach(&self, events: &dyn EventSink<Event>) -> Result<InjectedUserfaultfd> {
        let attached = if self.traps_unknown_calls {
            inject_userfaultfd_unfiltered(&self.process)?
        } else {
            inject_userfaultfd(&self.process)?
        };
        if !attached.guarded {
            events.event(&Event::UnguardedAttach { qemu_pid: self.process.pid() });
        }
        Ok(attached)
    }
}

impl RamAccess for ProcessRam {
    fn layout(&self) -> &RamLayout {
        self.ram.layout()
    }

    fn watches_discards(&self) -> bool {
        self.watches_discards
    }

    fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    fn reader(&self) -> Arc<dyn PageReader> {
        Arc::new(ProcessPageReader::new(Arc::clone(&self.ram), Arc::clone(&self.memory)))
    }

    fn write_page(&self, page: PageIndex, content: &Page) -> Result<(), BoxError> {
        self.ram.write_page(&self.process, page, content)
    }

    fn track_writes(
        &self,
        windows: UseOfWindows,
        events: &dyn EventSink<Event>,
    ) -> Result<StartedTracker> {
        let attached = self.attach(events)?;
        let mut tracker = WriteTracker::new(&self.process, attached.uffd)?;
        tracker.set_watch_discards(self.watches_discards);
        for range in self.ram.ranges() {
            tracker.register(range)?;
        }
        let stopped_ns = Some(attached.stopped_ns);
        let tracker = match self.window(&tracker, windows)? {
            Some(window) => self.tracker(WindowScanner::new(tracker, window)),
            None => self.tracker(tracker),
        };
        Ok(StartedTracker { tracker, stopped_ns })
    }

    fn track_first_writes(
        &self,
        events: &dyn EventSink<Event>,
    ) -> Result<(StartedTracker, Arc<dyn FirstWriteMonitor>)> {
        let attached = self.attach(events)?;
        let mut tracker = FaultTracker::new(&self.process, attached.uffd, attached.user_mode_only)?;
        for range in self.ram.ranges() {
            tracker.register(range)?;
        }
        let tracker = Arc::new(tracker);
        let monitor = ProcessFirstWriteMonitor::new(Arc::clone(&self.ram), Arc::clone(&tracker));
        let stopped_ns = Some(attached.stopped_ns);
        Ok((StartedTracker { tracker: self.tracker(tracker), stopped_ns }, Arc::new(monitor)))
    }

    fn freezer(&self) -> Result<Box<dyn RamFreezer>> {
        self.can_fork.clone()?;
        Ok(Box::new(ForkFreezer::new(Arc::clone(&self.ram), &self.process)?))
    }
}
