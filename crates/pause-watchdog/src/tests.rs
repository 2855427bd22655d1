//! The engine's side over a shell script, and the state machine. The runner is tested with each
//! driver's rescuer.

use super::*;
use std::process::{ChildStdin, Command, Stdio};

/// An order that is none is refused, whatever its length.
#[test]
fn an_order_that_is_none_is_refused() {
    let long = "A".repeat(100);
    for bad in ["X", "A", "A-1", "Dx", "", "\u{e9}", &long, "A99999999999999999999999"] {
        let lines = Lines::default().push(format!("{bad}\n").as_bytes());
        assert!(lines.iter().any(|line| parse(line).is_err()), "{bad:?}");
    }
}

/// The engine's side, over a shell script in the watchdog's place.
fn engine(script: &str) -> Result<Watchdog, Error> {
    let mut command = Command::new("sh");
    command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    Watchdog::new(child, stdin, stdout)
}

#[test]
fn the_watchdog_tells_the_engine_whether_it_fired_since_it_was_armed() {
    let mut watchdog = engine(
        "read x; echo K; read a; read d; printf 'F\\nF\\nK\\n'; read a; read d; echo K; read d; echo K",
    )
    .unwrap();
    watchdog.arm(Duration::from_millis(50)).unwrap();
    assert_eq!(watchdog.disarm().unwrap(), Fired(true));
    watchdog.arm(Duration::from_millis(50)).unwrap();
    assert_eq!(watchdog.disarm().unwrap(), Fired(false));
    watchdog.end();
}

/// Waits until no process can read what is written to `pipe`: one that another test is starting has
/// a copy of the pipe's other end for an instant.
fn await_no_reader(pipe: &ChildStdin) {
    let mut looked = [PollFd::new(pipe, PollFlags::empty())];
    let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_eq!(poll(&mut looked, Some(&limit)), Ok(1), "the pipe has a reader");
}

#[test]
fn a_watchdog_that_has_died_is_noticed_before_the_vm_is_paused() {
    let mut watchdog = engine("read x; echo K").unwrap();
    watchdog.child.wait().unwrap();
    await_no_reader(watchdog.stdin.as_ref().unwrap());
    assert!(matches!(watchdog.arm(Duration::from_secs(1)), Err(Error::Problem { .. })));
    assert!(engine("exit 0").is_err(), "one that never was ready");
    assert!(engine("read x; echo what; read y").is_err(), "one that talks nonsense");
}

#[test]
fn an_overdue_watchdog_gives_up_after_two_minutes() {
    let (mut dog, began) = (Dog::default(), Instant::now());
    dog.obey(&Order::Arm(Duration::ZERO), began);
    assert!(dog.is_due(began));
    assert!(dog.is_due(began + RESCUE_MAX) && dog.patience(began).is_some());
    assert!(dog.is_due(began + RESCUE_MAX + LAST_STOP));
    assert_eq!(dog.patience(began), None, "it would undo a later pause of the user");
    dog.obey(&Order::Arm(Duration::ZERO), began + RESCUE_MAX * 2);
    assert!(dog.is_due(began + RESCUE_MAX * 2) && dog.patience(began).is_some());
}
