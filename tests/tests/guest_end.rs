//! Tests the last checkpoint of a guest that ends: `run` and `attach` take it and tag it before QEMU
//! ends. QEMU ends as its command line says, also if the engine was killed or has left before.

use keyframe_tests::{Boot, ExternalVm, Process, TestEnv, wait_until};
use rustix::process::Signal;

fn idle(extra: &[&str]) -> Boot {
    let mut boot = Boot::new("hash kf.mib=8");
    boot.mem_mib = 96;
    boot.with(extra)
}

fn attach(env: &TestEnv, vm: &ExternalVm) -> Process {
    let options = ["--interval", "300ms", "--name", "guest"];
    let args = env.attach_args(&["--qmp", &vm.socket("a")], vm.console.pid(), &options);
    let engine = Process::start(env.command(&args.iter().map(String::as_str).collect::<Vec<_>>()));
    wait_until("a checkpoint", || !env.list().is_empty());
    engine
}

/// Asserts that the newest checkpoint has `tag`, and that the store is whole.
fn assert_last(env: &TestEnv, tag: &str) {
    let list = env.list();
    let last = list.last().expect("a checkpoint");
    assert_eq!(last["tags"], serde_json::json!([tag]), "{last}");
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
}

#[test]
fn a_run_takes_a_last_checkpoint_of_a_guest_that_ends() {
    let ends = [
        ("poweroff", &[][..], "guest-powered-off", "powered off"),
        ("reboot", &["-no-reboot"][..], "guest-reset", "reset"),
    ];
    for (command, extra, tag, word) in ends {
        let env = TestEnv::new();
        let mut run = env.start(&["--interval", "none", "--name", "guest"], &idle(extra));
        run.wait_for("KF READY");
        run.type_line(command);
        let exit = run.wait();
        assert!(exit.success(), "{exit}: {}", run.report());
        let errors = run.errors();
        assert!(errors.contains(&format!("; the guest was {word}")), "{}", run.report());
        assert_last(&env, tag);
    }
}

#[test]
fn a_panic_is_in_the_last_checkpoint_and_in_the_exit_code() {
    let env = TestEnv::new();
    let mut vm = ExternalVm::start(&env, &idle(&["-device", "pvpanic"]));
    vm.console.wait_for("KF READY");
    let mut engine = attach(&env, &vm);
    // The small guest has no driver for the device: the monitor writes to its port.
    let panic = serde_json::json!({ "command-line": "o /b 0x505 1" });
    vm.monitor().execute("human-monitor-command", Some(panic)).unwrap();
    assert!(vm.console.wait().success(), "{}", vm.console.report());
    assert_eq!(engine.wait().code(), Some(4), "{}", engine.report());
    assert!(engine.errors().contains("; the guest panicked"), "{}", engine.report());
    assert_last(&env, "guest-panicked");
}

#[test]
fn an_attached_vm_ends_with_its_guest_after_its_last_checkpoint() {
    let env = TestEnv::new();
    let mut vm = ExternalVm::start(&env, &idle(&[]));
    vm.console.wait_for("KF READY");
    let mut engine = attach(&env, &vm);
    vm.console.type_line("poweroff");
    assert!(vm.console.wait().success(), "{}", vm.console.report());
    assert!(engine.wait().success(), "{}", engine.report());
    assert_last(&env, "guest-powered-off");
}

#[test]
fn a_vm_whose_engine_is_gone_ends_with_its_guest() {
    for killed in [true, false] {
        let env = TestEnv::new();
        let mut vm = ExternalVm::start(&env, &idle(&["-no-reboot"]));
        vm.console.wait_for("KF READY");
        let mut engine = attach(&env, &vm);
        if killed {
            engine.signal(Signal::KILL);
            engine.wait();
            // The watchdog has set back what the engine had set.
            wait_until("the watchdog has ended", || env.run(&["status"]).status.success());
        } else {
            env.ok(&["stop"]);
            engine.wait();
        }
        vm.console.type_line("reboot");
        let exit = vm.console.wait();
        assert!(exit.success(), "killed: {killed}: {exit}: {}", vm.console.report());
    }
}
