//! The rollback of an engine that has died.

use super::*;
use keyframe_pause_watchdog::{plan_line, step_line};
use keyframe_vmm::{
    RescuedVm, RollbackPlan, RollbackRescuer, RollbackStep, VmmError, VmmErrorKind,
};

/// Notes what is asked of it.
#[derive(Clone, Default)]
pub struct Rescuer {
    /// What was asked.
    asked: Arc<Mutex<Vec<String>>>,
    /// Fails to exchange disks or to compare RAM.
    fails: bool,
}

impl Rescuer {
    fn note(&self, what: &str, words: &str) -> Result<(), VmmError> {
        self.asked.lock().unwrap().push(format!("{what} {words}"));
        let fails = self.fails && what != "tidy";
        let error = || VmmError::new(VmmErrorKind::Other, "no space", None);
        if fails { Err(error()) } else { Ok(()) }
    }
}

impl RollbackRescuer for Rescuer {
    fn undo(&mut self, words: &str) -> Result<(), VmmError> {
        self.note("undo", words)
    }

    fn complete(&mut self, words: &str) -> Result<(), VmmError> {
        self.note("complete", words)
    }

    fn tidy(&mut self, words: &str) {
        let _ = self.note("tidy", words);
    }

    fn tell(&mut self, _: &str, rescued: Result<RescuedVm, &VmmError>) {
        let told = rescued.map_or_else(ToString::to_string, |rescued| format!("{rescued:?}"));
        self.asked.lock().unwrap().push(told);
    }
}

/// What became of a VM.
#[derive(Debug, PartialEq, Eq)]
struct Rescued {
    asked: Vec<String>,
    conts: u32,
    quits: u32,
    commands: Vec<String>,
}

/// Ends the rollback of an engine that told `plan` and `steps`, and died while QEMU had `jobs`.
fn rescue(plan: &RollbackPlan, steps: &[RollbackStep], jobs: &[Value], fails: bool) -> Rescued {
    let (_dir, path, machine) = monitor();
    machine.lock().unwrap().jobs = jobs.to_vec();
    let steps: String = steps.iter().map(step_line).collect();
    let orders = [&*plan_line(Some(plan)), "B\n", &steps].concat();
    let mut rescuer = Rescuer { fails, ..Rescuer::default() };
    let (commands, mut engine) = std::io::pipe().unwrap();
    engine.write_all(orders.as_bytes()).unwrap();
    drop(engine);
    let ended = run(Watched::by_monitor(path), commands, std::io::sink(), &mut rescuer);
    let machine = machine.lock().unwrap();
    assert_eq!(matches!(ended, Err(Error::PutDown { .. })), machine.quits > 0, "{ended:?}");
    let asked = rescuer.asked.lock().unwrap().clone();
    let commands = machine.commands.clone();
    Rescued { asked, conts: machine.conts, quits: machine.quits, commands }
}

fn plan() -> RollbackPlan {
    RollbackPlan { ran: true, runs: true, is_intact: true, words: "w".into() }
}

fn prepares() -> RollbackStep {
    let load = r#"{"patience":{"secs":9,"nanos":0},"reset":null,"actions":{"reboot":"","shutdown":""},
        "settings":{"capabilities":["multifd"],"mode":null}}"#;
    RollbackStep::Prepares(load.replace('\n', ""))
}

fn job(error: &Value) -> Value {
    json!({ "id": "keyframe-rollback", "status": "concluded", "error": error })
}

#[test]
fn a_vm_into_which_nothing_was_loaded_is_as_it_was() {
    for steps in [vec![], vec![prepares()], vec![prepares(), RollbackStep::Loads]] {
        let rescued = rescue(&plan(), &steps, &[], false);
        assert_eq!(rescued.asked, ["undo w", "tidy w", "AsItWas"], "{steps:?}");
        assert_eq!((rescued.conts, rescued.quits), (1, 0), "{steps:?}");
        let has = |name: &str| rescued.commands.iter().any(|command| command == name);
        assert!(has("blockdev-del") && !has("snapshot-load"), "{:?}", rescued.commands);
        assert_eq!(has("migrate-set-capabilities"), !steps.is_empty(), "the user's settings");
    }
    let paused = RollbackPlan { ran: false, ..plan() };
    assert_eq!(rescue(&paused, &[], &[], false).conts, 0, "its user had paused it");
}

#[test]
fn a_vm_into_which_the_state_was_loaded_becomes_the_checkpoint() {
    let loaded = [prepares(), RollbackStep::Loads, RollbackStep::Loaded];
    for (steps, jobs) in [(&loaded[..], vec![]), (&loaded[..2], vec![job(&Value::Null)])] {
        let rescued = rescue(&plan(), steps, &jobs, false);
        assert_eq!(rescued.asked, ["complete w", "tidy w", "RolledBack"]);
        assert_eq!((rescued.conts, rescued.quits), (1, 0));
    }
    let stands = RollbackPlan { runs: false, ..plan() };
    assert_eq!(rescue(&stands, &loaded, &[], false).conts, 0, "the checkpoint's VM stood still");
}

/// The image is in QEMU, and only its load makes the machine whole.
#[test]
fn a_machine_that_nothing_puts_back_is_loaded() {
    let changed = RollbackPlan { is_intact: false, ..plan() };
    let reset = [prepares(), RollbackStep::Resets, RollbackStep::Loads];
    let begun = [prepares(), RollbackStep::Loads];
    for (plan, steps) in [(plan(), &reset[..]), (changed, &begun[..])] {
        let rescued = rescue(&plan, steps, &[], false);
        assert_eq!(rescued.asked, ["complete w", "tidy w", "RolledBack"]);
        let loads = rescued.commands.iter().filter(|command| *command == "snapshot-load");
        assert_eq!((loads.count(), rescued.conts, rescued.quits), (1, 1, 0));
    }
}

#[test]
fn a_vm_whose_rollback_cannot_be_ended_never_runs() {
    let begun = [prepares(), RollbackStep::Loads];
    let failed = [&begun[..], &[RollbackStep::Failed]].concat();
    let loaded = [&begun[..], &[RollbackStep::Loaded]].concat();
    let changed = RollbackPlan { is_intact: false, ..plan() };
    let cases = [
        (plan(), &failed[..], vec![], false, "could not load"),
        (plan(), &begun[..], vec![job(&"bad state".into())], false, "bad state"),
        (plan(), &loaded[..], vec![], true, "no space"),
        // It was on its way back to what it was.
        (changed, &begun[..1], vec![], false, "no state was loaded"),
    ];
    for (plan, steps, jobs, fails, why) in cases {
        let rescued = rescue(&plan, steps, &jobs, fails);
        assert_eq!((rescued.conts, rescued.quits), (0, 1), "{why}");
        let told = rescued.asked.last().unwrap();
        assert!(told.contains(why), "{told}");
    }
}

#[test]
fn the_disks_of_a_rollback_that_has_ended_are_tidied() {
    let (_dir, path, machine) = monitor();
    let (commands, mut engine) = std::io::pipe().unwrap();
    let plan = plan_line(Some(&plan()));
    engine.write_all([&*plan, "B\nD\n"].concat().as_bytes()).unwrap();
    drop(engine);
    let mut rescuer = Rescuer::default();
    run(Watched::by_monitor(path), commands, std::io::sink(), &mut rescuer).unwrap();
    assert_eq!(*rescuer.asked.lock().unwrap(), ["tidy w"]);
    assert_eq!(machine.lock().unwrap().conts, 0);
}
