//! Against a monitor made here that knows `stop`, `cont` and `query-status`, and against pipes in
//! place of an engine.

mod rollbacks;

use super::*;
use crate::EndHold;
use keyframe_pause_watchdog::LOOK_EVERY;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A machine: whether it runs, and how often it was continued.
#[derive(Default)]
struct Machine {
    running: bool,
    conts: u32,
    quits: u32,
    /// Its guest has ended, and it stands still.
    has_ended: bool,
    /// The arguments of each `set-action`.
    actions: Vec<Value>,
    /// QEMU's jobs.
    jobs: Vec<Value>,
    /// All commands.
    commands: Vec<String>,
}

type Shared = Arc<Mutex<Machine>>;

fn monitor() -> (tempfile::TempDir, PathBuf, Shared) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("watchdog.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let machine = Shared::default();
    let shared = Arc::clone(&machine);
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut out = stream.try_clone().unwrap();
        writeln!(out, r#"{{"QMP": {{}}}}"#).unwrap();
        for line in BufReader::new(stream).lines() {
            let Ok(line) = line else { return };
            let message: Value = serde_json::from_str(&line).unwrap();
            let mut machine = shared.lock().unwrap();
            let command = message["execute"].as_str().unwrap();
            machine.commands.push(command.to_owned());
            let answer = match command {
                "query-jobs" => Value::from(machine.jobs.clone()),
                "job-dismiss" => {
                    machine.jobs.clear();
                    json!({})
                }
                "snapshot-load" => {
                    machine.jobs.push(json!({ "id": "keyframe-rollback", "status": "concluded" }));
                    json!({})
                }
                "add-fd" => json!({ "fdset-id": 5, "fd": 9 }),
                "query-status" if machine.has_ended => json!({ "status": "shutdown" }),
                "set-action" => {
                    machine.actions.push(message["arguments"].clone());
                    json!({})
                }
                "query-status" => {
                    json!({ "status": if machine.running { "running" } else { "paused" } })
                }
                "cont" => {
                    machine.running = true;
                    machine.conts += 1;
                    json!({})
                }
                "query-fdsets"
                | "query-named-block-nodes"
                | "query-block-jobs"
                | "query-block-exports"
                | "query-block" => json!([]),
                "quit" => {
                    machine.quits += 1;
                    return;
                }
                // It has no exports, jobs, nodes or descriptor sets.
                list if list.starts_with("query-") => json!([]),
                _ => json!({}),
            };
            writeln!(out, "{}", json!({ "return": answer, "id": message["id"] })).unwrap();
        }
    });
    (dir, path, machine)
}

/// The runner in a thread, with the engine's ends of its pipes.
fn runner(path: &Path) -> (std::fs::File, BufReader<std::fs::File>, JoinHandle<Result<()>>) {
    runner_of(Watched::by_monitor(path.to_owned()))
}

fn runner_of(
    watched: Watched,
) -> (std::fs::File, BufReader<std::fs::File>, JoinHandle<Result<()>>) {
    let pipe = || {
        let (r, w) = std::io::pipe().unwrap();
        (std::fs::File::from(OwnedFd::from(r)), std::fs::File::from(OwnedFd::from(w)))
    };
    let ((commands, orders), (answers, reports)) = (pipe(), pipe());
    let thread = std::thread::spawn(move || {
        run(watched, commands, reports, &mut rollbacks::Rescuer::default())
    });
    (orders, BufReader::new(answers), thread)
}

fn wait_for(machine: &Shared, what: impl Fn(&Machine) -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_mins(2);
    while Instant::now() < deadline {
        if what(&machine.lock().unwrap()) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// One that it left between two states must not run; one that got over it is as any other.
#[test]
fn an_engine_that_dies_between_two_states_takes_its_vm_along() {
    let (_dir, path, machine) = monitor();
    let (mut orders, _answers, thread) = runner(&path);
    orders.write_all(b"A600000\nD\nB\n").unwrap();
    drop(orders);
    assert!(matches!(thread.join().unwrap(), Err(Error::PutDown { .. })));
    let ended = machine.lock().unwrap();
    assert_eq!((ended.conts, ended.quits), (0, 1));
    drop(ended);

    let (_dir, path, machine) = monitor();
    let (mut orders, _answers, _thread) = runner(&path);
    orders.write_all(b"B\nA600000\n").unwrap();
    drop(orders);
    assert!(wait_for(&machine, |m| m.conts == 1), "the VM stays paused");
    assert_eq!(machine.lock().unwrap().quits, 0);
}

#[test]
fn an_engine_that_dies_in_a_pause_leaves_no_vm_paused() {
    let (_dir, path, machine) = monitor();
    let (mut orders, _answers, thread) = runner(&path);
    orders.write_all(b"A600000\n").unwrap();
    drop(orders);
    assert!(wait_for(&machine, |m| m.conts == 1), "the VM stays paused");
    thread.join().unwrap().unwrap();
}

/// QEMU ends with its guest again, at once if the guest has ended meanwhile. An engine that has
/// left in good order has done it itself.
#[test]
fn an_engine_that_dies_leaves_no_vm_that_outlives_its_guest() {
    for (has_ended, in_pause) in [(false, false), (true, false), (false, true)] {
        let (_dir, path, machine) = monitor();
        machine.lock().unwrap().has_ended = has_ended;
        let hold = EndHold::parse("shutdown,panic,watchdog");
        let watched = Watched { hold, ..Watched::by_monitor(path) };
        let (mut orders, _answers, thread) = runner_of(watched);
        orders.write_all(if in_pause { b"A600000\n" } else { b"D\n" }).unwrap();
        drop(orders);
        thread.join().unwrap().unwrap();
        let machine = machine.lock().unwrap();
        assert_eq!(machine.actions, [json!({ "shutdown": "poweroff", "watchdog": "poweroff" })]);
        assert_eq!(machine.quits, u32::from(has_ended));
    }
    let (_dir, path, machine) = monitor();
    let hold = EndHold::parse("shutdown");
    let (mut orders, _answers, thread) = runner_of(Watched { hold, ..Watched::by_monitor(path) });
    orders.write_all(b"D\nE\n").unwrap();
    drop(orders);
    thread.join().unwrap().unwrap();
    assert!(machine.lock().unwrap().actions.is_empty());
}

#[test]
fn a_stop_that_arrives_after_the_engines_death_is_undone_too() {
    let (_dir, path, machine) = monitor();
    machine.lock().unwrap().running = true;
    let (mut orders, answers, thread) = runner(&path);
    orders.write_all(b"D\nA600000\n").unwrap();
    let mut line = String::new();
    let mut answers = answers;
    answers.read_line(&mut line).unwrap();
    drop(orders);
    std::thread::sleep(LOOK_EVERY * 3);
    assert_eq!(machine.lock().unwrap().conts, 0, "a running VM is left alone");
    machine.lock().unwrap().running = false;
    assert!(wait_for(&machine, |m| m.conts == 1), "the VM stays paused");
    thread.join().unwrap().unwrap();
}

#[test]
fn an_engine_that_ends_disarmed_leaves_a_paused_vm_paused() {
    let (_dir, path, machine) = monitor();
    let (mut orders, _answers, thread) = runner(&path);
    orders.write_all(b"A600000\nD\n").unwrap();
    drop(orders);
    thread.join().unwrap().unwrap();
    assert_eq!(machine.lock().unwrap().conts, 0);
}

#[test]
fn a_pause_beyond_its_limit_is_ended_and_the_engine_learns_it() {
    let (_dir, path, machine) = monitor();
    let (mut orders, mut answers, thread) = runner(&path);
    orders.write_all(b"A1\n").unwrap();
    assert!(wait_for(&machine, |m| m.conts == 1), "the VM stays paused");
    // An engine that stalls before its stop reaches QEMU is no better.
    machine.lock().unwrap().running = false;
    assert!(wait_for(&machine, |m| m.conts == 2), "the second pause stays");
    orders.write_all(b"D\n").unwrap();
    let mut told = Vec::new();
    while told.last().is_none_or(|last: &String| last != "K\n") {
        let mut line = String::new();
        assert!(answers.read_line(&mut line).unwrap() > 0, "no answer after {told:?}");
        told.push(line);
    }
    assert!(told.contains(&"F\n".to_owned()), "{told:?}");
    // Disarmed: a stop now is not a pause of the engine.
    machine.lock().unwrap().running = false;
    drop(orders);
    thread.join().unwrap().unwrap();
    assert_eq!(machine.lock().unwrap().conts, 2);
}

#[test]
fn an_order_that_is_none_ends_the_watch_after_the_pause_is_ended() {
    let long = "A".repeat(100);
    let (_dir, path, machine) = monitor();
    let (mut orders, _answers, thread) = runner(&path);
    orders.write_all(format!("A600000\n{long}\n").as_bytes()).unwrap();
    assert!(wait_for(&machine, |m| m.conts > 0), "the VM stays paused");
    assert!(matches!(thread.join().unwrap(), Err(Error::Watchdog { .. })));
}

#[test]
fn the_end_of_qemu_ends_the_watchdog() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("watchdog.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"{\"QMP\": {}}\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
        stream.write_all(b"{\"return\": {}, \"id\": 1}\n").unwrap();
    });
    let (orders, _answers, thread) = runner(&path);
    server.join().unwrap();
    thread.join().unwrap().unwrap();
    drop(orders);
}
