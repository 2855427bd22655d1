//! A held VM is released on every path.

use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Records its calls and fails the one that it is told to.
#[derive(Default)]
struct ScriptedMachine {
    calls: Vec<&'static str>,
    fails: Option<&'static str>,
    ran_meanwhile: bool,
}

impl ScriptedMachine {
    fn call(&mut self, name: &'static str) -> Result<(), BoxError> {
        self.calls.push(name);
        if self.fails == Some(name) { Err("injected".into()) } else { Ok(()) }
    }
}

impl PauseSteps for ScriptedMachine {
    fn prepare_pause(&mut self) -> Result<(), BoxError> {
        self.call("prepare")
    }
    fn hold(&mut self) -> Result<StopOutcome, BoxError> {
        self.call("stop").map(|()| StopOutcome::Stopped)
    }
    fn save_device_state(&mut self) -> Result<Vec<u8>, BoxError> {
        self.call("save").map(|()| b"devices".to_vec())
    }
    fn release(&mut self, stopped: StopOutcome) -> Result<(), BoxError> {
        assert_eq!(stopped, StopOutcome::Stopped);
        self.call("resume")
    }
    fn finish_pause(&mut self, _: StopOutcome) -> Result<PauseVerdict, BoxError> {
        let by =
            if self.ran_meanwhile { PauseVerdict::RanMeanwhile } else { PauseVerdict::Undisturbed };
        self.call("finish").map(|()| by)
    }
}

/// Records the phases; its look does what `look` says.
struct RecordingWork<'a> {
    phases: Vec<CapturePhase>,
    look: &'a mut dyn FnMut() -> Result<(), CaptureError>,
}

impl PauseWork for RecordingWork<'_> {
    fn reached(&mut self, phase: CapturePhase) {
        self.phases.push(phase);
    }
    fn look(&mut self) -> Result<(), CaptureError> {
        (self.look)()
    }
}

fn pause(
    machine: &mut ScriptedMachine,
    look: &mut dyn FnMut() -> Result<(), CaptureError>,
) -> Result<PauseRecord, CaptureError> {
    let mut work = RecordingWork { phases: Vec::new(), look };
    let paused = pause_in_steps(machine, &mut work);
    if machine.calls.contains(&"finish") {
        assert!(work.phases.contains(&CapturePhase::Resumed), "{:?}", work.phases);
    }
    paused
}

const WHOLE: [&str; 5] = ["prepare", "stop", "save", "resume", "finish"];

#[test]
fn a_pause_prepares_holds_saves_looks_and_releases() {
    let mut machine = ScriptedMachine::default();
    let mut looked = 0;
    let paused = pause(&mut machine, &mut || {
        looked += 1;
        Ok(())
    });
    assert_eq!((paused.unwrap().device_state, looked), (b"devices".to_vec(), 1));
    assert_eq!(machine.calls, WHOLE);
}

#[test]
fn a_step_that_fails_after_the_stop_releases_the_vm_and_is_the_error() {
    let expected = [
        ("prepare", "prepare the pause: injected", &WHOLE[..1]),
        ("stop", "pause the VM: injected", &WHOLE[..2]),
        ("save", "save the device state: injected", &WHOLE[..]),
        ("resume", "resume the VM: injected", &WHOLE[..]),
        ("finish", "find out whether the VM ran in the pause: injected", &WHOLE[..]),
    ];
    for (fails, text, calls) in expected {
        let mut machine = ScriptedMachine { fails: Some(fails), ..ScriptedMachine::default() };
        let error = pause(&mut machine, &mut || Ok(())).unwrap_err();
        assert_eq!(error.to_string(), text);
        assert_eq!(machine.calls, calls);
    }
}

#[test]
fn a_look_that_fails_or_panics_releases_the_vm() {
    let mut machine = ScriptedMachine::default();
    let error = pause(&mut machine, &mut || Err(CaptureError::OtherRam)).unwrap_err();
    assert!(matches!(error, CaptureError::OtherRam), "{error}");
    assert_eq!(machine.calls, WHOLE);
    let mut machine = ScriptedMachine::default();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let mut look = || panic!("injected");
        let mut work = RecordingWork { phases: Vec::new(), look: &mut look };
        pause_in_steps(&mut machine, &mut work)
    }));
    assert!(panicked.is_err());
    assert_eq!(machine.calls, WHOLE);
}

#[test]
fn a_vm_that_ran_during_the_pause_makes_it_torn() {
    let mut machine = ScriptedMachine { ran_meanwhile: true, ..ScriptedMachine::default() };
    let error = pause(&mut machine, &mut || Ok(())).unwrap_err();
    assert!(matches!(error, CaptureError::Torn), "{error}");
}
