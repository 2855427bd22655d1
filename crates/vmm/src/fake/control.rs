//! How a test looks at a fake VM, changes it, and scripts what happens to it.

use super::{FakeState, FakeVm, FakeWatchdog, Incident, OneCommand, Step, lock, set_page};
use crate::{
    AuditFinding, Capabilities, GuestEnd, RollbackPlan, RollbackStep, RunState, VmEvent, VmOrigin,
};
use keyframe_machine::MachineSpec;
use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange, PageSet};
use std::sync::{Arc, Mutex};

/// The test's handle to a [`FakeVm`] and its watchdog.
#[derive(Clone)]
pub struct FakeControl {
    pub(super) shared: Arc<Mutex<FakeState>>,
}

impl FakeControl {
    /// Returns another handle of the VM and its watchdog.
    pub fn attach(&self) -> (FakeVm, FakeWatchdog) {
        let shared = || Arc::clone(&self.shared);
        (FakeVm { shared: shared() }, FakeWatchdog { shared: shared() })
    }

    /// Plans that `incident` happens at the next call of `step` for which none is planned yet.
    pub fn at(&self, step: Step, incident: Incident) {
        lock(&self.shared).script.entry(step).or_default().push_back(incident);
    }

    /// Plans that `hook` runs just before the next call of `step` for which no hook is planned yet.
    /// The hook may use this control.
    pub fn before(&self, step: Step, hook: impl FnOnce() + Send + 'static) {
        lock(&self.shared).hooks.entry(step).or_default().push_back(Box::new(hook));
    }

    /// Sets how Keyframe came to control the VM.
    pub fn set_origin(&self, origin: VmOrigin) {
        lock(&self.shared).origin = origin;
    }

    /// Has the VM say that the kernel writes into pinned pages of its RAM
    /// ([`Vmm::pins_ram`](crate::Vmm::pins_ram)).
    pub fn pin_ram(&self) {
        lock(&self.shared).pins_ram = true;
    }

    /// Has the VM rolled back by a successor, another fake VM
    /// ([`Vmm::succession`](crate::Vmm::succession)).
    pub fn is_succeeded(&self) {
        lock(&self.shared).is_succeeded = true;
    }

    /// Makes the fake VMM support [`Vmm::pause_and_save`](crate::Vmm::pause_and_save).
    pub fn save_in_pause(&self) {
        lock(&self.shared).one_command = OneCommand::Ready;
    }

    /// Returns true if the VMM has ended.
    pub fn has_ended(&self) -> bool {
        lock(&self.shared).exit.is_some()
    }

    /// Returns the steps since the last call, in order.
    pub fn take_steps(&self) -> Vec<Step> {
        std::mem::take(&mut lock(&self.shared).steps)
    }

    /// Returns whether the guest runs.
    pub fn runs(&self) -> bool {
        lock(&self.shared).runs
    }

    /// Returns whether a pause is noted in the VMM ([`Vmm::note_pause`](crate::Vmm::note_pause)).
    pub fn is_pause_noted(&self) -> bool {
        lock(&self.shared).is_pause_noted
    }

    /// Resizes the RAM block, which uses `pages` pages less than it has room for from now on.
    pub fn use_fewer_pages(&self, pages: usize) {
        lock(&self.shared).unused_pages = pages;
    }

    /// Pauses the guest, as another client would.
    pub fn pause(&self) {
        lock(&self.shared).pause();
    }

    /// Resumes the guest, as another client would.
    pub fn resume(&self) {
        lock(&self.shared).resume();
    }

    /// Stops the guest in the run state `state`, as an event of the guest or its disks would.
    pub fn stand(&self, state: RunState) {
        let mut shared = lock(&self.shared);
        shared.pause();
        shared.standing = Some(state);
    }

    /// Stops the guest because a write had no space: on the disk `left_out`, which its user left
    /// out, or on another one. `events` is the number of writes that failed.
    pub fn run_out_of_space(&self, left_out: Option<&str>, events: usize) {
        let full = || match left_out {
            Some(disk) => VmEvent::LeftOutDiskFull(disk.to_owned()),
            None => VmEvent::DiskFull,
        };
        lock(&self.shared).events.extend(std::iter::repeat_with(full).take(events));
        self.stand(RunState::Other("io-error".into()));
    }

    /// Ends the VMM with the exit code `code`.
    pub fn end(&self, code: i32) {
        lock(&self.shared).end(code);
    }

    /// Ends the guest. The VMM stands still then if it is held ([`crate::Vmm::hold_end`]).
    pub fn end_guest(&self, end: GuestEnd) {
        lock(&self.shared).end_guest(end);
    }

    /// Returns true if the VMM stands still when the guest ends.
    pub fn is_held(&self) -> bool {
        lock(&self.shared).at_end.is_held
    }

    /// Makes all operations on the monitor fail from here on; the guest runs on.
    pub fn lose_monitor(&self) {
        lock(&self.shared).monitor_lost = true;
    }

    /// Returns whether a watchdog is armed.
    pub fn is_watchdog_armed(&self) -> bool {
        lock(&self.shared).watchdog.is_armed
    }

    /// Returns whether the VM must not run
    /// ([`forbid_running`](crate::PauseWatchdog::forbid_running)).
    pub fn is_running_forbidden(&self) -> bool {
        lock(&self.shared).watchdog.running_forbidden
    }

    /// Returns the plan of the rollback that is under way, and the steps that the engine has told
    /// since the plan.
    pub fn rollback(&self) -> (Option<RollbackPlan>, Vec<RollbackStep>) {
        let state = lock(&self.shared);
        (state.watchdog.plan.clone(), state.watchdog.steps.clone())
    }

    /// Sets the audit's findings.
    pub fn set_findings(&self, findings: Vec<AuditFinding>) {
        lock(&self.shared).findings = findings;
    }

    /// Sets the machine's description.
    pub fn set_spec(&self, spec: MachineSpec) {
        lock(&self.shared).spec = spec;
    }

    /// Sets the VM's abilities.
    pub fn set_capabilities(&self, capabilities: Capabilities) {
        lock(&self.shared).capabilities = capabilities;
    }

    /// Sets the state of all devices.
    pub fn set_device_state(&self, device_state: Vec<u8>) {
        lock(&self.shared).device_state = device_state;
    }

    /// Makes each reset of the machine, such as that of a rollback, write this page.
    pub fn write_at_reset(&self, page: PageIndex, content: &Page) {
        lock(&self.shared).reset_writes.insert(page, *content);
    }

    /// Returns RAM as it was when a rollback last loaded the devices.
    pub fn ram_at_load(&self) -> Vec<Page> {
        lock(&self.shared).ram_at_load.clone()
    }

    /// Writes a page of guest RAM, as the guest would, and notes it as dirty.
    pub fn write_page(&self, page: PageIndex, content: &Page) {
        set_page(&mut lock(&self.shared), page, content);
    }

    /// Returns the pages written since the last call.
    pub fn take_dirty(&self) -> PageSet {
        let mut state = lock(&self.shared);
        let clean = PageSet::new(state.ram.len() as u64);
        std::mem::replace(&mut state.dirty, clean)
    }

    /// Returns the number of pages of guest RAM.
    pub fn len_pages(&self) -> u64 {
        lock(&self.shared).ram.len() as u64
    }

    /// Copies the pages of `ranges`, one after the other, into `dst`.
    ///
    /// # Panics
    ///
    /// If a range lies outside guest RAM, or `dst` is shorter than the ranges.
    pub fn read_pages(&self, ranges: &[PageRange], dst: &mut [u8]) {
        let state = lock(&self.shared);
        let pages = ranges.iter().flat_map(|range| range.iter());
        for (page, out) in pages.zip(dst.chunks_exact_mut(PAGE_BYTES)) {
            out.copy_from_slice(&state.ram[page.0 as usize]);
        }
    }
}
