//! Generated VMs under the commands of Keyframe, while another client uses their monitor.
//!
//! ```text
//!   line of seed ─▶ run │ attach ─▶ checkpoints, take      beside stop, cont, queries of another client
//!                                ─▶ hot-plug, take, rollback
//!                                ─▶ kill -9 of the engine ─▶ the VM runs on ─▶ attach again
//!                                ─▶ restore
//! ```
//!
//! Keyframe may refuse a VM or a command. It may not end or hang a VM, nor undo what the other client
//! asked for last: the test fails then. `KEYFRAME_LINES` is the number of lines of the soak test,
//! `KEYFRAME_FIRST_LINE` the seed of the first one.

use keyframe_qemu::{Qmp, RunStatus};
use keyframe_tests::{
    Choices, MachineLine, Orphan, PATIENCE, PassSequence, Process, Qemu, TestEnv, number,
    pass_lines, qemus, seed,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long the state of a VM may differ from what its user asked for: a pause lasts some
/// milliseconds, on a busy machine more.
const STATE_PATIENCE: Duration = Duration::from_secs(20);

/// A VM of a generated line, under an engine.
struct Walk {
    env: TestEnv,
    line: MachineLine,
    choices: Choices,
    monitor: PathBuf,
    /// What happened, in a line.
    story: Vec<String>,
}

/// The processes of a walk: the engine, and QEMU if the test started it.
struct Started {
    engine: Process,
    /// QEMU and its console; `None` if the engine started it.
    vm: Option<Process>,
}

impl Started {
    fn console(&mut self) -> &mut Process {
        self.vm.as_mut().unwrap_or(&mut self.engine)
    }
}

fn first_line(text: &str) -> String {
    let line = text.lines().find(|line| line.starts_with("keyframe: ")).or(text.lines().last());
    line.unwrap_or_default().chars().take(160).collect()
}

impl Walk {
    fn new(seed: u64, qemu: &Qemu) -> Self {
        let env = TestEnv::new().with_rehearsals();
        let mut line = MachineLine::generate(seed, qemu, env.path());
        let monitor = env.path().join("user");
        for path in [&monitor, &env.path().join("a")] {
            let socket = format!("unix:{},server=on,wait=off", path.display());
            line.boot.extra.extend(["-qmp".into(), socket]);
        }
        Self { env, line, choices: Choices::new(seed ^ 0x57), monitor, story: Vec::new() }
    }

    fn qmp(&self) -> Qmp {
        Qmp::connect(&self.monitor, PATIENCE).expect("connect to the user's monitor")
    }

    /// Whether QEMU starts the line by itself.
    fn is_accepted_by_qemu(&mut self) -> bool {
        let words = self.line.boot.command();
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            .arg("-S")
            .current_dir(self.env.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("start QEMU");
        let deadline = Instant::now() + PATIENCE;
        let accepted = loop {
            if child.try_wait().expect("wait for QEMU").is_some() || Instant::now() > deadline {
                break false;
            }
            if let Ok(mut qmp) = Qmp::connect(&self.monitor, Duration::from_millis(20)) {
                let _ = qmp.quit();
                break true;
            }
        };
        let _ = child.kill();
        let _ = child.wait();
        for name in ["user", "a", "extra"] {
            let _ = std::fs::remove_file(self.env.path().join(name));
        }
        accepted
    }

    /// Starts the VM under an engine. `None` if Keyframe refuses it; it must be unharmed then.
    fn start(&mut self) -> Option<Started> {
        let attaches = self.choices.happens(2);
        self.story.push(if attaches { "attach" } else { "run" }.into());
        let options = ["--interval", "150ms", "--name", "guest"];
        let mut started = if attaches {
            let words = self.line.boot.command();
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]).current_dir(self.env.path());
            let mut vm = Process::start(command);
            vm.wait_for("KF READY");
            let engine = self.attach(&vm);
            Started { engine, vm: Some(vm) }
        } else {
            Started { engine: self.env.start(&options, &self.line.boot), vm: None }
        };
        let (env, engine) = (&self.env, &mut started.engine);
        let sealed = engine.wait_until(|_| (env.list().len() >= 2).then_some(()));
        if sealed.is_some() {
            return Some(started);
        }
        assert!(!engine.is_running(), "the engine seals nothing; {}", engine.report());
        let refusal = engine.errors();
        assert!(!refusal.contains("panicked"), "{refusal}");
        self.story.push(format!("refused: {}", first_line(&refusal)));
        if let Some(vm) = &mut started.vm {
            assert!(vm.is_running(), "the refused VM has ended; {}", vm.report());
            self.assert_state(true);
            assert_works(vm);
        }
        None
    }

    fn attach(&self, vm: &Process) -> Process {
        let monitor = self.env.path().join("a").display().to_string();
        let options = ["--interval", "150ms", "--name", "guest"];
        let words = self.env.attach_args(&["--qmp", &monitor], vm.pid(), &options);
        Process::start(self.env.command(&words.iter().map(String::as_str).collect::<Vec<_>>()))
    }

    /// Asserts that the VM is, and stays, in the state that its user asked for.
    fn assert_state(&self, runs: bool) {
        let mut qmp = self.qmp();
        let expected = if runs { RunStatus::Running } else { RunStatus::Paused };
        let mut in_state = |patience: Duration| {
            let deadline = Instant::now() + patience;
            loop {
                let status = qmp.status().expect("the VM answers its user's monitor");
                if status == expected || Instant::now() > deadline {
                    break status;
                }
                std::thread::sleep(Duration::from_millis(3));
            }
        };
        for _ in 0..6 {
            let status = in_state(STATE_PATIENCE);
            assert_eq!(status, expected, "not the state that its user asked for last");
            std::thread::sleep(Duration::from_millis(60));
        }
    }

    /// Another client uses the monitor for a while. Returns whether it wants the VM to run.
    fn disturb(&mut self, requests: u64) -> bool {
        let mut qmp = self.qmp();
        let mut runs = true;
        for _ in 0..requests {
            std::thread::sleep(Duration::from_millis(self.choices.below(60)));
            let (command, arguments) = self.request();
            let done = qmp.execute(&command, arguments);
            match (&*command, &done) {
                ("stop", Ok(_)) => runs = false,
                ("cont", Ok(_)) => runs = true,
                ("stop" | "cont", Err(error)) => panic!("the user's {command}: {error}"),
                _ => {}
            }
        }
        runs
    }

    /// A request of the other client.
    fn request(&mut self) -> (String, Option<Value>) {
        let node = self.line.disks.first().cloned();
        match (self.choices.below(10), node) {
            (0..3, _) => ("stop".into(), None),
            (3..6, _) => ("cont".into(), None),
            (6, Some(node)) => {
                let arguments = json!({ "node": node, "name": "users" });
                ("block-dirty-bitmap-add".into(), Some(arguments))
            }
            (7, Some(node)) => {
                let arguments = json!({ "node": node, "name": "users" });
                ("block-dirty-bitmap-remove".into(), Some(arguments))
            }
            _ => {
                let queries =
                    ["query-block", "query-pci", "query-migrate", "query-cpus-fast", "query-jobs"];
                (self.choices.one(&queries).into(), None)
            }
        }
    }

    /// Runs a command that may be refused, and notes how it ended.
    fn attempt(&mut self, args: &[&str]) {
        let output = self.env.run(args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!text.contains("panicked"), "{text}");
        let code = output.status.code().expect("an exit code");
        let result = if code == 0 { "done".into() } else { first_line(&text) };
        self.story.push(format!("{}: {result}", args[0]));
    }
}

/// Asserts that the guest goes on, and that its own checks find nothing.
fn assert_works(console: &mut Process) {
    let before = console.lines().len();
    let grown = console.wait_until(|p| (pass_lines(&p.lines()[before..]).len() >= 2).then_some(()));
    assert!(grown.is_some(), "the guest stands still; {}", console.report());
    let errors: Vec<String> =
        console.lines().into_iter().filter(|line| line.contains("KF ERROR")).collect();
    assert!(errors.is_empty(), "{errors:?}");
}

/// Walks with the line of `seed`. Returns what happened; `None` if QEMU refuses the line.
fn walk(seed: u64, qemu: &Qemu) -> Option<String> {
    let mut walk = Walk::new(seed, qemu);
    println!("line {seed} on QEMU {}: {}", qemu.label, walk.line.text());
    if !walk.is_accepted_by_qemu() {
        return None;
    }
    let Some(mut started) = walk.start() else { return Some(walk.story.join("; ")) };

    let runs = walk.disturb(20);
    walk.assert_state(runs);
    if !runs {
        walk.qmp().cont().expect("the user resumes the VM");
    }
    assert_works(started.console());
    walk.attempt(&["take", "--name", "guest"]);
    walk.assert_state(true);
    let first = number(&walk.env.list()[0], "id").to_string();

    if walk.line.has_pci {
        let plugged = json!({ "driver": "virtio-rng-pci", "id": "plugged" });
        let plugged = walk.qmp().execute("device_add", Some(plugged));
        walk.story.push(format!("plug: {}", if plugged.is_ok() { "done" } else { "refused" }));
        walk.attempt(&["take", "--name", "guest"]);
        walk.assert_state(true);
    }
    walk.attempt(&["rollback", &first, "--name", "guest"]);
    walk.assert_state(true);
    assert_works(started.console());

    kill_engine(&mut walk, started);
    let output = walk.env.run(&["check", "--store", &walk.env.store()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    restore(&mut walk);
    Some(walk.story.join("; "))
}

/// Kills the engine. The VM must run on, and an attached one can be attached to again.
fn kill_engine(walk: &mut Walk, mut started: Started) {
    let orphan = started.vm.is_none().then(|| Orphan::of(&walk.env, &mut started.engine, "guest"));
    let pid = Pid::from_raw(started.engine.pid().cast_signed()).expect("a pid");
    kill_process(pid, Signal::KILL).expect("kill the engine");
    started.engine.wait();
    walk.assert_state(true);
    let Some(mut vm) = started.vm else {
        let orphan = orphan.expect("the VM of the run");
        assert!(orphan.is_running(), "the VM has ended with its engine");
        orphan.kill();
        return;
    };
    assert_works(&mut vm);
    let before = walk.env.list().len();
    // The watchdog of the killed engine may hold the monitor for some seconds.
    let deadline = Instant::now() + PATIENCE;
    let mut engine = loop {
        let mut engine = walk.attach(&vm);
        let env = &walk.env;
        if engine.wait_until(|_| (env.list().len() > before).then_some(())).is_some() {
            break engine;
        }
        let text = engine.errors();
        assert!(!text.contains("panicked") && Instant::now() < deadline, "attach again: {text}");
        walk.assert_state(true);
        if text.contains("it was plugged in after the VM's start") {
            walk.story.push("attach again: refused, because a device was plugged in".into());
            assert_works(&mut vm);
            return;
        }
        std::thread::sleep(Duration::from_millis(300));
    };
    engine.signal(Signal::INT);
    engine.wait();
    walk.assert_state(true);
    assert_works(&mut vm);
}

/// Restores the newest checkpoint. It may be refused; a restored guest must go on exactly.
fn restore(walk: &mut Walk) {
    let mut restored = walk.env.restore("latest", &[]);
    let went_on = restored.wait_until(|p| (pass_lines(&p.lines()).len() >= 3).then_some(()));
    if went_on.is_none() {
        assert!(!restored.is_running(), "the restored guest stands still; {}", restored.report());
        let text = restored.errors();
        assert!(!text.contains("panicked"), "{text}");
        walk.story.push(format!("restore: {}", first_line(&text)));
        return;
    }
    let dirty = walk.line.dirty;
    PassSequence::new(1024, dirty).check(&pass_lines(&restored.lines()), 3);
    walk.story.push("restore: done".into());
}

/// Walks with `count` lines from seed `first` on.
fn walk_all(first: u64, count: u64) {
    let qemus = qemus();
    let mut walked = 0;
    for seed in first.. {
        let qemu = &qemus[seed as usize % qemus.len()];
        match walk(seed, qemu) {
            Some(story) => {
                walked += 1;
                println!("line {seed} on QEMU {}: {story}", qemu.label);
            }
            None => println!("line {seed} on QEMU {}: QEMU refuses it", qemu.label),
        }
        if walked == count {
            return;
        }
        assert!(seed < first + 20 * count, "QEMU refuses most of the lines");
    }
}

#[test]
fn no_generated_vm_is_harmed() {
    walk_all(seed() * 1000, 10);
}

#[test]
fn no_generated_vm_is_harmed_of_the_second_ten() {
    walk_all(seed() * 1000 + 300, 10);
}

#[test]
fn no_generated_vm_is_harmed_of_the_third_ten() {
    walk_all(seed() * 1000 + 600, 10);
}

#[test]
#[ignore = "takes hours: make soak"]
fn soak_generated_vms() {
    let from_environment = |name: &str, otherwise: u64| {
        std::env::var(name)
            .map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
    };
    walk_all(
        from_environment("KEYFRAME_FIRST_LINE", 1_000_000),
        from_environment("KEYFRAME_LINES", 1000),
    );
}
