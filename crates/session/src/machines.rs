//! The VMs of a session as the checkpoint cycle's one machine: one VM alone, or a group that is
//! checkpointed at one instant.
//!
//! ```text
//!   prepare_pause      the disks are ready to be cut; the network between members stands still, and what was sent to them has arrived
//!   hold               all members at once; if one cannot be stopped, the others run again; the disks are cut
//!   save_device_state  of all; then the packets that are on their way
//!   release            all, once what their disks promised is durable; then the network
//! ```
//!
//! Every member has been stopped before any runs again, and nothing is delivered meanwhile. So no
//! member has seen a packet that its sender has not sent yet, and a packet that was sent and not
//! received is in the checkpoint.
//!
//! Invariant: a member that another client had paused stays paused. Whichever step fails, each
//! member that ran before runs again.

mod guest_end;

use super::recording::Position;
use super::session_vm::SessionVm;
use crate::error::{Result, error_chain};
use crate::lans::Lans;
use crate::watchdog_keeper::WatchdogHealth;
use guest_end::SeenEnd;
use keyframe_capture::group::{join_device_states, split_device_states};
use keyframe_capture::machine::pause_in_steps;
use keyframe_capture::{
    BoxError, CaptureError, Machine, PauseRecord, PauseSteps, PauseVerdict, PauseWork, StopOutcome,
};
use keyframe_disk_capture::DiskCapture;
use keyframe_qemu::MachineChange;
use keyframe_units::{RamBlock, RamLayout};
use keyframe_vmm::{RunState, VmEvent, Vmm, VmmErrorKind, VmmKind};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// The longest time from the failure of a VM's monitor to its end.
const EXIT_WAIT: Duration = Duration::from_secs(2);

/// A VM with its name.
pub type NamedVm = (String, Box<dyn Vmm>);

/// One VM of a session.
pub struct Member {
    /// Its name.
    pub name: String,
    /// The VM and the watchdog of its pauses.
    pub vm: SessionVm,
    /// True if its guest runs, or is to run.
    pub runs: bool,
    /// In which state it stands still. `None` if that is not known yet.
    standing: Option<RunState>,
    /// True if its VMM did not answer when it was asked for that state.
    is_mute: bool,
    shut_down: bool,
    /// Why it stands still although its user wants it to run; `None` if it does not.
    halt: Option<Halt>,
    /// The left-out disk whose error has stopped the VM, until the engine has told its user.
    full_disk: Option<String>,
    guest_end: Option<SeenEnd>,
    ended: Option<ExitStatus>,
    /// The result of stopping the VM, during a pause.
    stopped: Option<StopOutcome>,
    watchdog: WatchdogHealth,
}

/// Why a VM stands still although its user wants it to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Halt {
    /// QEMU has stopped it for want of space for a write of its guest.
    Space,
    /// QEMU has stopped it for want of space on a disk that its user left out, and its user is to
    /// resume it.
    LeftOutDisk,
    /// [`Machines::suspend`] has paused it.
    Suspended,
}

impl Member {
    /// Makes the member `name` of a session from a VM that has not ended. `runs` is true if its
    /// guest runs, or is to run.
    pub fn new(name: String, vm: SessionVm, runs: bool) -> Self {
        Self {
            name,
            vm,
            runs,
            standing: None,
            is_mute: false,
            shut_down: false,
            halt: None,
            full_disk: None,
            guest_end: None,
            ended: None,
            stopped: None,
            watchdog: WatchdogHealth::default(),
        }
    }

    /// Returns the same member, with the health of its watchdog.
    #[must_use]
    pub fn watched_by(self, watchdog: WatchdogHealth) -> Self {
        Self { watchdog, ..self }
    }
}

/// The networks and disks of VMs, which are paused and resumed together with them.
#[derive(Default)]
pub struct Peripherals {
    /// The networks between them. `None` if there are none.
    pub lans: Option<Lans>,
    /// Their disks. `None` if no disk is captured.
    pub disks: Option<Box<dyn DiskCapture>>,
}

impl Peripherals {
    /// Ends the networks. Also ends the disks, unless the VMs keep running with them (`keeps`).
    /// Returns the directory of the guests' writes, if they are not in the images. Error: the disks
    /// or the networks do not end in good order.
    pub fn release(self, keeps: bool) -> Result<Option<std::path::PathBuf>> {
        if let Some(lans) = self.lans {
            lans.end();
        }
        match self.disks {
            Some(disks) if keeps => Ok(disks.keep()),
            Some(disks) => Ok(disks.end()?),
            None => Ok(None),
        }
    }
}

/// All VMs of a session.
pub struct Machines {
    members: Vec<Member>,
    is_group: bool,
    /// The networks between them.
    lans: Option<Lans>,
    /// The capture of the VMs' disks; `None` if no disk is captured.
    pub disks: Option<Box<dyn DiskCapture>>,
}

impl Machines {
    /// Makes the machines of a session from `members`: one VM, or with `is_group` those of a group.
    pub fn new(mut members: Vec<Member>, is_group: bool, peripherals: Peripherals) -> Self {
        if peripherals.disks.as_ref().is_some_and(|disks| disks.cuts_by_monitor()) {
            for member in &mut members {
                member.vm.pause_by_separate_commands();
            }
        }
        Self { members, is_group, lans: peripherals.lans, disks: peripherals.disks }
    }

    /// Returns the VMs.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Returns the VMM of the first VM.
    pub fn vmm(&self) -> VmmKind {
        self.members.first().map_or(VmmKind::Qemu, |member| member.vm.vm().kind())
    }

    /// Returns the VMs.
    pub fn members_mut(&mut self) -> &mut [Member] {
        &mut self.members
    }

    /// Returns the capture of the disks and the VMs that own them; `None` if no disk is captured.
    pub fn storage(&mut self) -> Option<(&mut dyn DiskCapture, Vec<&mut dyn Vmm>)> {
        let disks = self.disks.as_mut()?;
        let vms = self.members.iter_mut().map(|member| member.vm.vm_mut()).collect();
        Some((&mut **disks as &mut dyn DiskCapture, vms))
    }

    /// Returns whether the VMs are a group.
    pub fn is_group(&self) -> bool {
        self.is_group
    }

    /// Returns true if another program started the VMs.
    pub fn is_attached(&self) -> bool {
        self.members.iter().any(|m| m.vm.is_attached())
    }

    /// Returns a place that the next pause of a recorded or counted VM fills with the VM's
    /// instruction count; `None` if the VM is neither.
    pub fn mark(&mut self) -> Option<Position> {
        self.members.first_mut()?.vm.mark()
    }

    /// Returns whether any of the VMs runs.
    pub fn run(&self) -> bool {
        self.members.iter().any(|m| m.runs)
    }

    /// Returns true if a VM stands still and its VMM did not answer when it was asked why.
    pub fn stand_mute(&self) -> bool {
        self.members.iter().any(|m| !m.runs && m.is_mute && m.ended.is_none())
    }

    /// Returns the run state of the first VM that does not run; [`RunState::Paused`] if all VMs run
    /// or if that state is not known yet.
    pub fn standing(&self) -> &RunState {
        let standing = self.members.iter().find(|m| !m.runs).and_then(|m| m.standing.as_ref());
        standing.unwrap_or(&RunState::Paused)
    }

    /// Resumes the launched VMs that are to run. Error: a VM does not answer.
    pub fn start(&mut self) -> Result<()> {
        for member in self.members.iter_mut().filter(|m| m.runs && !m.vm.is_attached()) {
            member.vm.vm_mut().resume()?;
        }
        Ok(())
    }

    /// Pauses the VMs that run. A VM whose QEMU does not answer in time is paused too: QEMU pauses
    /// first, and then waits for its disks.
    pub fn suspend(&mut self) {
        for member in self.members.iter_mut().filter(|m| m.runs && m.ended.is_none()) {
            member.halt = Some(Halt::Suspended);
            let _ = member.vm.vm_mut().stop();
            member.runs = false;
        }
    }

    /// Resumes the VMs that [`Machines::suspend`] paused.
    pub fn go_on(&mut self) {
        for member in
            self.members.iter_mut().filter(|m| m.halt == Some(Halt::Suspended) && m.ended.is_none())
        {
            member.halt = None;
            member.runs = member.vm.vm_mut().resume().is_ok();
        }
    }

    /// Returns true if a VM stands because of its disks, or has ended.
    pub fn are_halted(&self) -> bool {
        self.members.iter().any(|m| !m.runs && (m.halt.is_some() || m.ended.is_some()))
    }

    /// Returns true if a VM was stopped for want of space for a write of its guest, and still
    /// stands.
    pub fn wait_for_space(&self) -> bool {
        let io_error = RunState::Other("io-error".into());
        let stands = |m: &&Member| m.halt == Some(Halt::Space) && !m.runs && m.ended.is_none();
        self.members.iter().filter(stands).any(|m| m.standing.as_ref() == Some(&io_error))
    }

    /// Returns the name of a disk that a user left out, if QEMU has stopped a VM because that disk
    /// has no space. Returns it once for each such stop.
    pub fn take_full_disk(&mut self) -> Option<String> {
        self.members.iter_mut().find_map(|member| member.full_disk.take())
    }

    /// Resumes the VMs that were stopped for want of space. Their guests' writes are repeated.
    /// Error: a VM does not answer.
    pub fn repeat_writes(&mut self) -> Result<()> {
        for member in self.members.iter_mut().filter(|m| m.halt == Some(Halt::Space) && !m.runs) {
            member.vm.vm_mut().resume()?;
        }
        Ok(())
    }

    /// Drains the events of the VMs' monitors and updates their run states.
    pub fn look(&mut self) {
        for member in &mut self.members {
            let Ok(events) = member.vm.vm_mut().drain_events() else { continue };
            if !events.is_empty() {
                (member.standing, member.is_mute) = (None, false);
            }
            for event in events {
                match event {
                    VmEvent::Paused => member.runs = false,
                    VmEvent::ShutDown => (member.runs, member.shut_down) = (false, true),
                    VmEvent::Resumed => {
                        member.runs = true;
                        member.halt = member.halt.filter(|halt| *halt == Halt::Suspended);
                    }
                    // If several disks were full, the user's counts.
                    VmEvent::DiskFull if member.halt == Some(Halt::LeftOutDisk) => {}
                    VmEvent::DiskFull => member.halt = Some(Halt::Space),
                    VmEvent::LeftOutDiskFull(disk) => {
                        // QEMU sends the event for each write that had no space.
                        if member.halt != Some(Halt::LeftOutDisk) {
                            member.full_disk = Some(disk);
                        }
                        member.halt = Some(Halt::LeftOutDisk);
                    }
                    VmEvent::GuestEnded(end) => {
                        (member.runs, member.shut_down) = (false, true);
                        member.note_end(end, true);
                    }
                    VmEvent::GuestFailed(end) => member.note_end(end, false),
                }
            }
            if !member.runs && member.standing.is_none() && member.ended.is_none() {
                // Asked once: a VM that does not answer is not to be waited for at each look. QEMU does
                // not answer if it waits for its disks in a pause.
                let state =
                    are_served(self.disks.as_deref()).then(|| member.vm.vm_mut().run_state());
                let state = state.and_then(Result::ok);
                member.is_mute = state.is_none();
                member.standing = Some(state.unwrap_or(RunState::Paused));
            }
        }
    }

    /// Returns the exit status of the VMs once all have ended: the first failure, if one failed;
    /// `None` while one runs. Error: the kernel does not tell.
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        for member in self.members.iter_mut().filter(|m| m.ended.is_none()) {
            let stays = member.stays_at_its_end();
            let vm = member.vm.vm_mut();
            let mut ended = vm.exit()?;
            if ended.is_none() && std::mem::take(&mut member.shut_down) && !stays {
                ended = vm.finish_shutdown()?;
            }
            if let Some(exit) = ended {
                (member.ended, member.runs) = (Some(exit.status()), false);
            }
        }
        let ends: Option<Vec<ExitStatus>> = self.members.iter().map(|m| m.ended).collect();
        Ok(ends.and_then(|ends| ends.iter().find(|e| !e.success()).or(ends.first()).copied()))
    }

    /// Returns the name of a member that has ended while others have not; `None` if there is none.
    pub fn lost(&self) -> Option<&str> {
        let lost = self.members.iter().find(|m| m.ended.is_some())?;
        self.members.iter().any(|m| m.ended.is_none()).then_some(&*lost.name)
    }

    /// Returns true if the newest look has found a machine that differs from its description.
    pub fn are_changed(&self) -> bool {
        self.members.iter().any(|member| member.vm.changes().is_some())
    }

    /// Returns the changes of all machines that the newest look has found.
    pub fn changes(&self) -> Vec<MachineChange> {
        self.members.iter().filter_map(|member| member.vm.changes()).flatten().cloned().collect()
    }

    /// Returns true if the networks between the members are dead.
    pub fn have_lost_network(&mut self) -> bool {
        self.lans.as_mut().is_some_and(Lans::is_lost)
    }

    /// Returns true if a member has no watchdog, and none can be started.
    pub fn have_lost_watchdog(&self) -> bool {
        self.members.iter().any(|member| member.watchdog.is_lost())
    }

    /// Returns the process id of a VMM that runs and has closed its monitor; `None` if there is
    /// none.
    pub fn without_monitor(&mut self) -> Option<u32> {
        self.members.iter_mut().filter(|m| m.ended.is_none()).find_map(|member| {
            let state = member.vm.vm_mut().run_state();
            let is_lost = state.is_err_and(|error| error.kind() == VmmErrorKind::MonitorLost);
            is_lost.then(|| member.vm.pid())
        })
    }

    /// Returns true if a VM has ended. If a VM's monitor fails, waits up to two seconds for its
    /// end.
    pub fn any_has_ended(&mut self) -> bool {
        self.look();
        if self.members.iter().any(|m| m.shut_down || m.ended.is_some()) {
            return true;
        }
        let are_served = are_served(self.disks.as_deref());
        let deadline = Instant::now() + EXIT_WAIT;
        self.members.iter_mut().any(|member| {
            let vm = member.vm.vm_mut();
            let wait = deadline.saturating_duration_since(Instant::now());
            // QEMU may wait for its disks, and answer nothing.
            let may_have_ended = !are_served || vm.run_state().is_err();
            may_have_ended && matches!(vm.wait_exit(wait), Ok(Some(_)))
        })
    }

    /// Applies `operation` to each member, and to all at the same time if there are several.
    fn each<T: Send>(&mut self, operation: impl Fn(&mut Member) -> T + Sync) -> Vec<T> {
        if let [member] = &mut self.members[..] {
            return vec![operation(member)];
        }
        std::thread::scope(|scope| {
            let operation = &operation;
            let threads: Vec<_> =
                self.members.iter_mut().map(|m| scope.spawn(move || operation(m))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, T>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        })
    }

    /// All results, or the first error; for a group with the member's name.
    fn all<T>(&self, results: Vec<Result<T, BoxError>>) -> Result<Vec<T>, BoxError> {
        let named = |(result, member): (Result<T, BoxError>, &Member)| match result {
            Err(e) if self.is_group => {
                Err(format!("VM {}: {}", member.name, error_chain(&*e)).into())
            }
            other => other,
        };
        results.into_iter().zip(&self.members).map(named).collect()
    }

    /// Ends the watchdogs. Returns the VMs with their names, and their networks and disks.
    pub fn into_vms(self) -> (Vec<NamedVm>, Peripherals) {
        let peripherals = Peripherals { lans: self.lans, disks: self.disks };
        (self.members.into_iter().map(|m| (m.name, m.vm.into_vm())).collect(), peripherals)
    }

    fn release_lans(&mut self) {
        if let Some(lans) = &mut self.lans {
            lans.release();
        }
    }
}

/// Whether each disk that Keyframe serves has a process that does so.
fn are_served(disks: Option<&dyn DiskCapture>) -> bool {
    disks.is_none_or(|disks| disks.outage().is_none())
}

/// Returns the RAM blocks of all members as the layout of one VM. Error: the layouts together are
/// too large, or two RAM blocks have one name.
pub fn group_layout(
    members: &[(&str, RamLayout)],
) -> Result<RamLayout, keyframe_units::LayoutError> {
    let of_member = |(name, layout): &(&str, RamLayout)| {
        let rename =
            |block: &RamBlock| RamBlock { name: format!("{name}/{}", block.name), ..block.clone() };
        layout.blocks().iter().map(rename).collect::<Vec<_>>()
    };
    RamLayout::new(members.iter().flat_map(of_member).collect())
}

impl Machine for Machines {
    fn ram_layout(&mut self) -> Result<RamLayout, BoxError> {
        let layouts = self.each(|m| m.vm.ram_layout());
        let mut layouts = self.all(layouts)?;
        if !self.is_group && layouts.len() == 1 {
            return Ok(layouts.remove(0));
        }
        let named: Vec<_> = self.members.iter().map(|m| &*m.name).zip(layouts).collect();
        Ok(group_layout(&named)?)
    }

    fn pause(&mut self, work: &mut dyn PauseWork) -> Result<PauseRecord, CaptureError> {
        pause_in_steps(self, work)
    }

    fn stand_still(
        &mut self,
        work: &mut dyn FnMut() -> Result<(), CaptureError>,
    ) -> Result<(), CaptureError> {
        let failed = |operation| move |source| CaptureError::Machine { operation, source };
        // Within a standstill the VM is paused already, and is to stay so.
        let has_own_stop = !self.members.iter().any(|member| member.vm.is_in_standstill());
        let mut begun = 0;
        let mut paused = Ok(());
        for member in self.members.iter_mut().filter(|_| has_own_stop) {
            paused = member.vm.begin_scan();
            if paused.is_err() {
                break;
            }
            begun += 1;
        }
        let worked = paused.map_err(failed("pause the VM for a scan"));
        let worked = worked.and_then(|()| work());
        let members = self.members.iter_mut().take(begun);
        let ended: Vec<_> = members.map(|member| member.vm.end_scan()).collect();
        worked?;
        let verdicts = self.all(ended).map_err(failed("resume the VM"))?;
        let ran = self.each(|member| Ok(member.vm.vm_mut().ran_meanwhile()?));
        let ran = self.all(ran).map_err(failed("find out whether the VM ran in a scan"))?;
        if ran.contains(&true) || verdicts.contains(&PauseVerdict::RanMeanwhile) {
            return Err(CaptureError::Torn);
        }
        Ok(())
    }
}

impl PauseSteps for Machines {
    fn prepare_pause(&mut self) -> Result<(), BoxError> {
        if let Some(lans) = &mut self.lans {
            lans.hold()?;
        }
        let ready = self.disks.as_mut().map_or(Ok(()), |disks| disks.before_stop());
        // Last, since what it waits for lasts a moment only.
        let ready = ready.and_then(|()| {
            let rested = self.members.iter_mut().try_for_each(|m| m.vm.prepare_pause());
            if let (Err(_), Some((disks, mut vms))) = (&rested, self.storage()) {
                let _ = disks.resumed(&mut vms);
            }
            rested
        });
        if ready.is_err() {
            self.release_lans();
        }
        ready
    }

    fn hold(&mut self) -> Result<StopOutcome, BoxError> {
        let results = self.each(|member| {
            let stopped = member.vm.hold();
            member.stopped = stopped.as_ref().ok().copied();
            stopped
        });
        let stopped = self.all(results);
        let cut = if stopped.is_ok() {
            self.storage().map_or(Ok(()), |(disks, mut vms)| disks.cut(&mut vms))
        } else {
            Ok(())
        };
        match cut.and(stopped) {
            Ok(stopped) if stopped.contains(&StopOutcome::Stopped) => Ok(StopOutcome::Stopped),
            Ok(_) => Ok(StopOutcome::AlreadyPaused),
            Err(error) => {
                // One that failed to stop has been let run already.
                let _ = self.release(StopOutcome::Stopped);
                let _ = self.finish_pause(StopOutcome::Stopped);
                Err(error)
            }
        }
    }

    fn save_device_state(&mut self) -> Result<Vec<u8>, BoxError> {
        let states = self.each(|member| member.vm.save_device_state());
        let mut states = self.all(states)?;
        if !self.is_group && states.len() == 1 {
            return Ok(states.remove(0));
        }
        states.push(match &mut self.lans {
            Some(lans) => lans.collect()?,
            None => Vec::new(),
        });
        Ok(join_device_states(&states))
    }

    fn complete_device_state(&mut self, device_state: &mut Vec<u8>) {
        if !self.is_group
            && let [member] = &mut self.members[..]
        {
            return member.vm.complete_device_state(device_state);
        }
        let Some(states) = split_device_states(device_state) else { return };
        let mut states: Vec<_> = states.into_iter().map(<[u8]>::to_vec).collect();
        // The last one is that of the network.
        for (member, state) in self.members.iter_mut().zip(&mut states) {
            member.vm.complete_device_state(state);
        }
        *device_state = join_device_states(&states);
    }

    fn release(&mut self, _: StopOutcome) -> Result<(), BoxError> {
        let settled = self.disks.as_mut().map_or(Ok(()), |disks| disks.settled());
        // The VMs are resumed also if the disks failed: a guest learns of a failed disk at its next
        // flush, and a guest that stays paused is worse.
        let resumed = self.each(|member| match member.stopped {
            Some(stopped) => member.vm.release(stopped),
            None => Ok(()),
        });
        self.all(resumed).and(settled)
    }

    fn finish_pause(&mut self, _: StopOutcome) -> Result<PauseVerdict, BoxError> {
        // Whatever comes next, the guests' network is not kept waiting.
        self.release_lans();
        let by = self.each(|member| match member.stopped.take() {
            Some(stopped) => member.vm.finish_pause(stopped),
            None => Ok(PauseVerdict::Undisturbed),
        });
        let exported = self.storage().map_or(Ok(()), |(disks, mut vms)| disks.resumed(&mut vms));
        let by = self.all(by)?;
        exported?;
        Ok(if by.contains(&PauseVerdict::RanMeanwhile) {
            PauseVerdict::RanMeanwhile
        } else {
            PauseVerdict::Undisturbed
        })
    }
}
