use super::*;
use crate::fake::{FakeControl, FakeVm, Incident, Step};
use crate::{Capabilities, VmmErrorKind, VmmKind};

const LIMIT: Duration = Duration::from_millis(100);

fn watched() -> (WatchedVm, FakeControl) {
    let (vm, watchdog, control) = FakeVm::new(4);
    (WatchedVm::new(Box::new(vm), Box::new(watchdog), LIMIT), control)
}

#[test]
fn a_pause_holds_looks_and_releases_in_order() {
    let (mut vm, control) = watched();
    let mut pause = vm.pause().unwrap();
    assert!(pause.was_running() && !control.runs() && control.is_watchdog_armed());
    assert!(control.is_pause_noted());
    assert_eq!(pause.save_devices().unwrap(), b"devices");
    assert_eq!(pause.release().unwrap(), PauseVerdict::Undisturbed);
    assert!(control.runs() && !control.is_watchdog_armed() && !control.is_pause_noted());
    let expected =
        [Step::Arm, Step::Stop, Step::SaveDevices, Step::Resume, Step::Disarm, Step::RanMeanwhile];
    assert_eq!(control.take_steps(), expected);
}

#[test]
fn dropping_the_guard_ends_the_pause() {
    let (mut vm, control) = watched();
    drop(vm.pause().unwrap());
    assert!(control.runs() && !control.is_watchdog_armed());
}

#[test]
fn a_panic_during_the_look_ends_the_pause() {
    let (mut vm, control) = watched();
    let look = std::panic::AssertUnwindSafe(|| {
        let _pause = vm.pause().unwrap();
        panic!("the look fails");
    });
    assert!(std::panic::catch_unwind(look).is_err());
    assert!(control.runs() && !control.is_watchdog_armed());
}

#[test]
fn a_vm_that_another_client_paused_stays_paused() {
    let (mut vm, control) = watched();
    control.pause();
    let pause = vm.pause().unwrap();
    assert!(!pause.was_running());
    assert!(!control.is_watchdog_armed(), "the watchdog would resume it");
    assert!(!control.is_pause_noted(), "the next engine would resume it");
    assert_eq!(pause.release().unwrap(), PauseVerdict::Undisturbed);
    assert!(!control.runs());
}

#[test]
fn a_vm_that_ran_during_the_pause_is_reported() {
    for incident in [Incident::ResumedByOther, Incident::WatchdogFires] {
        let (mut vm, control) = watched();
        control.at(Step::SaveDevices, incident);
        let mut pause = vm.pause().unwrap();
        let _ = pause.save_devices().unwrap();
        assert_eq!(pause.release().unwrap(), PauseVerdict::RanMeanwhile);
        assert!(control.runs());
    }
}

#[test]
fn a_failed_stop_leaves_the_vm_running() {
    for incident in [Incident::Fail("busy".into()), Incident::LoseAnswer] {
        let (mut vm, control) = watched();
        control.at(Step::Stop, incident);
        assert!(vm.pause().is_err());
        assert!(control.runs() && !control.is_watchdog_armed());
    }
}

#[test]
fn a_stop_whose_monitor_is_lost_is_rescued_by_the_watchdog() {
    let (mut vm, control) = watched();
    control.at(Step::Stop, Incident::LoseAnswer);
    control.at(Step::Resume, Incident::LoseMonitor);
    let error = vm.pause().err().unwrap();
    assert_eq!(error.kind(), VmmErrorKind::Timeout, "the first error is reported");
    assert!(control.runs() && control.is_watchdog_armed() && !control.is_pause_noted());
    assert!(control.take_steps().ends_with(&[Step::ResumeNow, Step::ResumeByNewConnection]));
}

#[test]
fn a_release_whose_monitor_is_lost_is_rescued_and_reported() {
    let (mut vm, control) = watched();
    let pause = vm.pause().unwrap();
    control.lose_monitor();
    assert_eq!(pause.release().unwrap_err().kind(), VmmErrorKind::MonitorLost);
    assert!(control.runs() && !control.is_watchdog_armed() && !control.is_pause_noted());
}

#[test]
fn a_vm_that_ends_during_the_pause_is_reported_as_gone() {
    let (mut vm, control) = watched();
    let mut pause = vm.pause().unwrap();
    control.at(Step::SaveDevices, Incident::End(3));
    assert_eq!(pause.save_devices().unwrap_err().kind(), VmmErrorKind::MonitorLost);
    drop(pause);
    assert!(!control.is_watchdog_armed());
    assert_eq!(vm.vm_mut().exit().unwrap().unwrap().status().code(), Some(3));
}

#[test]
fn a_standstill_holds_the_vm_over_several_pauses() {
    let (mut vm, control) = watched();
    assert!(vm.begin_standstill().unwrap());
    for _ in 0..2 {
        let pause = vm.pause().unwrap();
        assert!(!pause.was_running());
        assert_eq!(pause.release().unwrap(), PauseVerdict::Undisturbed);
        assert!(!control.runs() && control.is_watchdog_armed());
    }
    vm.forbid_running().unwrap();
    assert!(control.is_running_forbidden() && !control.is_pause_noted());
    vm.allow_running().unwrap();
    assert!(!control.is_running_forbidden() && control.is_watchdog_armed());
    assert!(control.is_pause_noted());
    vm.end_standstill().unwrap();
    assert!(control.runs() && !control.is_watchdog_armed());
}

#[test]
fn the_end_of_a_standstill_says_whether_the_watchdog_ended_it_before() {
    let (mut vm, control) = watched();
    for (incident, expected) in [
        (None, PauseVerdict::Undisturbed),
        (Some(Incident::WatchdogFires), PauseVerdict::RanMeanwhile),
    ] {
        assert!(!vm.is_in_standstill() && vm.begin_standstill().unwrap());
        assert!(vm.is_in_standstill());
        if let Some(incident) = incident {
            control.at(Step::Resume, incident);
        }
        assert_eq!(vm.end_standstill().unwrap(), expected);
        assert!(control.runs() && !control.is_watchdog_armed());
    }
}

#[test]
fn a_standstill_of_a_paused_vm_leaves_it_paused() {
    let (mut vm, control) = watched();
    control.pause();
    assert!(!vm.begin_standstill().unwrap());
    vm.forbid_running().unwrap();
    vm.allow_running().unwrap();
    vm.end_standstill().unwrap();
    assert!(!control.runs() && !control.is_watchdog_armed());
}

#[test]
fn a_standstill_that_the_watchdog_ended_cannot_be_rolled_back() {
    let (mut vm, control) = watched();
    assert!(vm.begin_standstill().unwrap());
    control.at(Step::ForbidRunning, Incident::WatchdogFires);
    assert!(vm.forbid_running().is_err());
    assert!(control.runs() && !control.is_watchdog_armed());
}

#[test]
fn fake_capabilities_can_be_set() {
    let (vm, _watchdog, control) = FakeVm::new(1);
    control.set_capabilities(Capabilities::all(VmmKind::Firecracker));
    assert_eq!(vm.kind(), VmmKind::Firecracker);
}

#[test]
fn a_standstill_whose_watchdog_cannot_be_extended_ends_at_once() {
    let (mut vm, control) = watched();
    // The first arming is that of the stop.
    control.before(Step::Stop, {
        let control = control.clone();
        move || control.at(Step::Arm, Incident::Fail("the watchdog has ended".into()))
    });
    let error = vm.begin_standstill().unwrap_err();
    assert_eq!(error.to_string(), "the watchdog has ended");
    assert!(control.runs());
}

fn watched_by_one_command() -> (WatchedVm, FakeControl) {
    let (vm, control) = watched();
    control.save_in_pause();
    (vm.with_form(PauseForm::OneCommand), control)
}

#[test]
fn a_pause_by_one_command_sends_no_stop_and_no_resume() {
    let (mut vm, control) = watched_by_one_command();
    let mut pause = vm.pause().unwrap();
    assert!(pause.was_running() && !control.runs() && control.is_watchdog_armed());
    assert_eq!(pause.save_devices().unwrap(), b"devices");
    assert_eq!(pause.release().unwrap(), PauseVerdict::Undisturbed);
    assert!(control.runs() && !control.is_watchdog_armed());
    let expected =
        [Step::Arm, Step::PauseAndSave, Step::EndSavedPause, Step::Disarm, Step::RanMeanwhile];
    assert_eq!(control.take_steps(), expected);
}

#[test]
fn a_vmm_without_such_a_command_is_paused_by_separate_commands() {
    let (vm, control) = watched();
    let mut vm = vm.with_form(PauseForm::OneCommand);
    for _ in 0..2 {
        let mut pause = vm.pause().unwrap();
        assert_eq!(pause.save_devices().unwrap(), b"devices");
        assert_eq!(pause.release().unwrap(), PauseVerdict::Undisturbed);
        assert!(control.runs() && !control.is_watchdog_armed());
    }
    let steps = control.take_steps();
    assert!(steps.contains(&Step::Stop) && !steps.contains(&Step::PauseAndSave));
}

#[test]
fn one_command_leaves_a_paused_vm_paused_and_disarms_the_watchdog() {
    let (mut vm, control) = watched_by_one_command();
    control.pause();
    let pause = vm.pause().unwrap();
    assert!(!pause.was_running());
    assert_eq!(pause.release().unwrap(), PauseVerdict::Undisturbed);
    assert!(!control.runs() && !control.is_watchdog_armed());
}

#[test]
fn one_command_that_fails_is_ended_by_the_watchdog() {
    for incident in [Incident::LoseAnswer, Incident::LoseMonitor] {
        let (mut vm, control) = watched_by_one_command();
        control.at(Step::PauseAndSave, incident);
        assert!(vm.pause().is_err());
        assert!(control.runs());
        assert!(control.take_steps().ends_with(&[Step::ResumeNow]), "no client's pause is undone");
    }
}

#[test]
fn a_monitor_that_is_lost_in_one_command_is_reported_and_the_vm_runs() {
    let (mut vm, control) = watched_by_one_command();
    let pause = vm.pause().unwrap();
    control.lose_monitor();
    assert_eq!(pause.release().unwrap_err().kind(), VmmErrorKind::MonitorLost);
    assert!(control.runs());
}

#[test]
fn a_watchdog_that_ends_one_command_makes_the_pause_torn() {
    let (mut vm, control) = watched_by_one_command();
    let pause = vm.pause().unwrap();
    control.at(Step::EndSavedPause, Incident::WatchdogFires);
    assert_eq!(pause.release().unwrap(), PauseVerdict::RanMeanwhile);
    assert!(control.runs());
}

#[test]
fn a_standstill_is_not_paused_by_one_command() {
    let (mut vm, control) = watched_by_one_command();
    assert!(vm.begin_standstill().unwrap());
    assert_eq!(vm.pause().unwrap().release().unwrap(), PauseVerdict::Undisturbed);
    assert!(!control.runs());
    vm.end_standstill().unwrap();
    assert!(control.runs());
    assert!(!control.take_steps().contains(&Step::PauseAndSave));
}

#[test]
fn a_look_ends_whatever_happens_to_the_resume() {
    let (mut vm, control) = watched();
    vm.begin_look().unwrap();
    assert!(!control.runs() && control.is_watchdog_armed() && control.is_pause_noted());
    assert_eq!(vm.end_look().unwrap(), PauseVerdict::Undisturbed);
    assert!(control.runs() && !control.is_watchdog_armed() && !control.is_pause_noted());

    vm.begin_look().unwrap();
    control.at(Step::Resume, Incident::Fail("busy".into()));
    assert!(vm.end_look().is_err());
    assert!(control.runs() && !control.is_watchdog_armed() && !control.is_pause_noted());

    control.pause();
    vm.begin_look().unwrap();
    assert_eq!(vm.end_look().unwrap(), PauseVerdict::Undisturbed);
    assert!(!control.runs(), "its user has paused it");
}
