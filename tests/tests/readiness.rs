//! Tests what programs rely on: that a command tells when its VM is ready, what it tells about
//! restored VMs and clones, and the kinds of errors.

use keyframe_tests::{Boot, Process, TestEnv, is_gone, number, wait_until};
use rustix::process::Signal;
use serde_json::Value;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Starts `keyframe WORDS --ready-fd 3 REST`; descriptor 3 is `file`, as a shell opens it.
fn start_with_ready(env: &TestEnv, words: &[&str], rest: &[&str], file: &Path) -> Process {
    let keyframe = env.command(&[words, &["--ready-fd", "3"], rest].concat());
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec 3>\"$0\"; exec \"$@\""]).arg(file).arg(keyframe.get_program());
    shell.args(keyframe.get_args()).current_dir(env.path());
    for (name, value) in keyframe.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    Process::start(shell)
}

/// Waits until the command has told that its VM is ready, and returns what it told.
fn await_ready(process: &mut Process, file: &Path) -> Value {
    let told = process.wait_until(|_| {
        let text = std::fs::read_to_string(file).ok()?;
        text.ends_with('\n').then_some(text)
    });
    let told = told.unwrap_or_else(|| panic!("not ready; {}", process.report()));
    assert_eq!(told.matches('\n').count(), 1, "{told}");
    serde_json::from_str(&told).unwrap()
}

fn boot() -> Boot {
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    boot
}

/// Starts `keyframe run OPTIONS` of a VM named `guest`, with `file` as its descriptor 3.
fn run_with_ready(env: &TestEnv, options: &[&str], file: &Path) -> Process {
    let store = env.store();
    let words =
        [&["run", "--store", &store, "--name", "guest", "--no-rehearsal"], options].concat();
    let line = boot().command();
    let rest: Vec<&str> = std::iter::once("--").chain(line.iter().map(String::as_str)).collect();
    start_with_ready(env, &words, &rest, file)
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no {key} in {value}"))
}

fn is_socket(path: &str) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

#[test]
fn a_run_tells_that_it_is_ready() {
    let mut env = TestEnv::new();
    let manager = env.path().join("notify");
    let manager_socket = UnixDatagram::bind(&manager).unwrap();
    manager_socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    env.set("NOTIFY_SOCKET", manager.to_str().unwrap());
    let file = env.path().join("ready");
    let mut run = run_with_ready(&env, &["--interval", "1h"], &file);
    let told = await_ready(&mut run, &file);
    assert_eq!((text(&told, "vm"), text(&told, "state")), ("guest", "running"));
    assert_eq!((number(&told, "sealed"), number(&told["last"], "epoch")), (1, 0));
    let mut message = [0; 64];
    let count = manager_socket.recv(&mut message).unwrap();
    assert_eq!(&message[..count], b"READY=1\n");
    // All that it promises is there.
    assert_eq!(env.list().len(), 1);
    let status = env.json(&["status", "--json"]);
    assert_eq!(number(&status[0], "qemu_pid"), number(&told, "qemu_pid"));
    let taken = env.json(&["take", "--json"]);
    assert_eq!(number(&taken, "parent"), number(&told["last"], "id"));
    assert_eq!(&taken["parent"], &env.list()[1]["parent"]);
    // QEMU has not inherited the descriptor.
    let pid = number(&told, "qemu_pid");
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let targets = descriptors.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    assert!(targets.into_iter().all(|target| target != file));
    env.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
}

#[test]
fn a_run_without_an_interval_is_ready_before_it_has_a_checkpoint() {
    let env = TestEnv::new();
    let file = env.path().join("ready");
    let mut run = run_with_ready(&env, &["--interval", "none"], &file);
    let told = await_ready(&mut run, &file);
    assert_eq!((number(&told, "sealed"), text(&told, "state")), (0, "running"));
    let taken = env.json(&["take", "--json"]);
    assert!(taken.as_object().unwrap().contains_key("parent") && taken["parent"].is_null());
    run.signal(Signal::INT);
    assert!(run.wait().success(), "{}", run.report());
}

#[test]
fn a_command_that_fails_tells_nothing_but_the_kind_of_its_error() {
    let env = TestEnv::new();
    let file = env.path().join("ready");
    let words = ["restore", "--store", "nowhere", "1", "--json"];
    let mut failed = start_with_ready(&env, &words, &[], &file);
    assert_eq!(failed.wait().code(), Some(10));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "");
    let error: Value = serde_json::from_str(&failed.errors()).unwrap();
    assert_eq!(text(&error["error"], "kind"), "no_store");
    assert!(text(&error["error"], "fix").contains("keyframe init nowhere"));
    let no_vm = r#"{"error":{"kind":"no_vm","message":"no VM named x runs under Keyframe""#;
    env.refused(&["take", "--json", "--name", "x"], 1, &[no_vm]);
    env.refused(&["take", "--name", "x"], 1, &["keyframe: no VM named x", "\n  fix: "]);
    env.refused(&["list", "--json", "--nonsense"], 2, &[r#"{"error":{"kind":"usage""#]);
    let store = env.store();
    let unknown = ["show", "7", "--json", "--store", &store];
    env.refused(&unknown, 1, &[r#""kind":"unknown_checkpoint""#]);
    let closed = ["run", "--store", &store, "--ready-fd", "77", "--", "qemu-system-x86_64"];
    env.refused(&closed, 1, &["--ready-fd 77", "open it when you start"]);
}

#[test]
fn restored_vms_and_clones_are_told_with_their_names_and_sockets() {
    let env = TestEnv::new();
    let mut run = env.start(&["--interval", "none", "--name", "guest"], &boot());
    run.wait_for("KF READY");
    env.ok(&["take", "--tag", "seed"]);

    let (file, other_file) = (env.path().join("ready"), env.path().join("other"));
    let store = env.store();
    let words = ["restore", "--store", &store, "seed", "--paused", "--name", "trial"];
    let serial = format!("unix:{}/serial,server=on,wait=off", env.path().display());
    let mut restored =
        start_with_ready(&env, &words, &["--", "-chardev", "null,id=n", "-serial", &serial], &file);
    let told = await_ready(&mut restored, &file);
    assert_eq!((text(&told, "name"), text(&told, "state")), ("trial", "paused"));
    assert_eq!(number(&told, "checkpoint"), 1);
    assert!(is_socket(text(&told, "monitor")), "{told}");
    let console = text(&told["consoles"]["serial"], "socket");
    assert!(is_socket(console) && console.ends_with("/serial"), "{told}");
    env.refused(&words, 1, &["a VM named trial", "\n  fix: "]);
    // Without a name of its own, it does not get that of the VM that runs.
    let words = ["restore", "--store", &store, "seed", "--paused"];
    let mut other = start_with_ready(&env, &words, &[], &other_file);
    assert_eq!(text(&await_ready(&mut other, &other_file), "name"), "guest-2");
    for (name, process) in [("trial", &mut restored), ("guest-2", &mut other)] {
        env.ok(&["stop", "--name", name]);
        assert!(process.wait().success(), "{}", process.report());
    }

    // Two branches of one checkpoint.
    let (mut first, one) = env.branch(&["seed", "-n", "2", "--paused"]);
    let (mut second, two) = env.branch(&["seed", "--paused"]);
    let names: Vec<&str> = one.iter().chain(&two).map(|clone| text(clone, "name")).collect();
    assert_eq!(names, ["guest-1", "guest-2", "guest-3"]);
    assert_eq!(number(&two[0], "number"), 3);
    for clone in one.iter().chain(&two) {
        let serial = &clone["consoles"]["serial"];
        assert!(is_socket(text(serial, "socket")) && is_socket(text(clone, "monitor")), "{clone}");
        assert!(Path::new(text(serial, "log")).is_file(), "{clone}");
    }

    // An engine attaches to a clone, and has its name.
    let clone = &one[0];
    let pid = number(clone, "qemu_pid") as u32;
    let attach = |by_name: bool| {
        let options = ["--interval", "none"];
        let mut words = env.attach_args(&["--qmp", text(clone, "monitor")], pid, &options);
        if by_name {
            words.retain(|word| word != "--qmp" && *word != text(clone, "monitor"));
            *words.last_mut().expect("the process id") = "guest-1".into();
        }
        let process =
            Process::start(env.command(&words.iter().map(String::as_str).collect::<Vec<_>>()));
        wait_until("the engine runs", || {
            env.json(&["status", "--json"]).as_array().is_some_and(|all| {
                all.iter().any(|vm| vm["vm"] == "guest-1" && vm["kind"].is_null())
            })
        });
        process
    };
    let mut engine = attach(true);
    let said = env.run(&["stop", "--name", "guest-1"]);
    assert!(said.status.success());
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("a clone of that name") && said.contains("--on-exit kill"), "{said}");
    assert!(engine.wait().success() && !is_gone(pid));
    let mut engine = attach(false);
    env.ok(&["stop", "--name", "guest-1", "--on-exit", "kill"]);
    assert!(engine.wait().success(), "{}", engine.report());
    wait_until("the clone has ended", || is_gone(pid));
    for process in [&mut first, &mut second] {
        process.signal(Signal::INT);
        assert!(process.wait().success(), "{}", process.report());
    }
    env.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
}
