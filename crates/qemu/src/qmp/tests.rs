//! Against a monitor made here, which answers as a script says.

use super::*;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;

const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#;

/// A monitor that greets, takes the capabilities, and then answers each command with the lines that
/// `answer` gives for its name and id, until it gives `None`.
fn monitor(
    answer: impl Fn(&str, u64) -> Option<Vec<String>> + Send + 'static,
) -> (tempfile::TempDir, std::path::PathBuf, JoinHandle<()>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        serve(stream, &answer);
    });
    (dir, path, thread)
}

fn serve(stream: UnixStream, answer: &impl Fn(&str, u64) -> Option<Vec<String>>) {
    let mut out = stream.try_clone().unwrap();
    writeln!(out, "{GREETING}").unwrap();
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { return };
        let message: Value = serde_json::from_str(&line).unwrap();
        let (name, id) = (message["execute"].as_str().unwrap(), message["id"].as_u64().unwrap());
        let lines = if name == "qmp_capabilities" { Some(vec![ok(id)]) } else { answer(name, id) };
        let Some(lines) = lines else { return };
        for line in lines {
            if writeln!(out, "{line}").is_err() {
                return;
            }
        }
    }
}

fn ok(id: u64) -> String {
    json!({ "return": {}, "id": id }).to_string()
}

fn event(name: &str, us: u64) -> String {
    let timestamp = json!({ "seconds": us / 1_000_000, "microseconds": us % 1_000_000 });
    json!({ "event": name, "timestamp": timestamp }).to_string()
}

fn connect(path: &Path) -> Qmp {
    let mut qmp = Qmp::connect(path, Duration::from_secs(5)).unwrap();
    qmp.set_timeout(Duration::from_secs(5));
    qmp
}

#[test]
fn a_stop_that_stopped_nothing_is_told_from_one_that_did() {
    for running in [true, false] {
        let (_dir, path, _) = monitor(move |_, id| {
            let mut lines = vec![ok(id)];
            if running {
                lines.insert(0, event("STOP", now_us()));
            }
            Some(lines)
        });
        let mut qmp = connect(&path);
        assert_eq!(qmp.stop().unwrap().was_running, running);
        // A STOP of an earlier pause is not this one's.
        assert_eq!(qmp.drain_events().unwrap().contains(&QmpEvent::Stop), running);
    }
}

#[test]
fn a_resume_by_another_client_is_seen_wherever_its_event_comes() {
    // When another client's RESUME happens and arrives; `None`: there is none.
    for (other, expected) in [(None, false), (Some("before cont"), true), (Some("with cont"), true)]
    {
        let (_dir, path, _) = monitor(move |name, id| {
            let early = event("RESUME", now_us() - 1_000_000);
            Some(match (name, other) {
                ("stop", Some("before cont")) => {
                    vec![event("STOP", now_us()), ok(id), event("RESUME", now_us())]
                }
                ("stop", _) => vec![event("STOP", now_us()), ok(id)],
                ("cont", Some("with cont")) => vec![early, ok(id)],
                ("cont", None) => vec![event("RESUME", now_us() + 1), ok(id)],
                _ => vec![ok(id)],
            })
        });
        let mut qmp = connect(&path);
        assert!(qmp.stop().unwrap().was_running);
        // The event behind the answer to `stop` must have arrived.
        qmp.execute("query-nothing", None).unwrap();
        assert_eq!(qmp.cont_after_stop().unwrap(), expected, "{other:?}");
    }
}

#[test]
fn a_resume_of_an_earlier_pause_does_not_tear_this_one() {
    let (_dir, path, _) = monitor(|name, id| {
        let first =
            if name == "stop" { event("STOP", now_us()) } else { event("RESUME", now_us() + 1) };
        Some(vec![first, ok(id)])
    });
    let mut qmp = connect(&path);
    for _ in 0..3 {
        assert!(qmp.stop().unwrap().was_running);
        assert!(!qmp.cont_after_stop().unwrap());
    }
}

#[test]
fn no_answer_is_a_timeout_and_the_late_one_is_not_taken_for_another() {
    let (_dir, path, _) = monitor(|name, id| match name {
        "query-lost" => Some(vec![]),
        // Both answers at once, the late one first.
        _ => Some(vec![
            json!({ "return": "late", "id": id - 1 }).to_string(),
            json!({ "return": "mine", "id": id }).to_string(),
        ]),
    });
    let mut qmp = connect(&path);
    qmp.set_timeout(Duration::from_millis(30));
    let error = qmp.execute("query-lost", None).unwrap_err();
    assert!(
        matches!(&error, Error::Timeout { operation, waited_ms: 30, .. } if operation == "query-lost"),
        "{error}"
    );
    qmp.set_timeout(Duration::from_secs(5));
    assert_eq!(qmp.execute("query-found", None).unwrap(), json!("mine"));
}

#[test]
fn a_refusal_carries_qemus_words() {
    let (_dir, path, _) = monitor(|_, id| {
        Some(vec![
            json!({ "error": { "class": "GenericError", "desc": "no such thing" }, "id": id })
                .to_string(),
        ])
    });
    let error = connect(&path).execute("query-x", None).unwrap_err();
    assert_eq!(error.to_string(), "QEMU refused query-x: no such thing");
}

#[test]
fn the_end_of_qemu_is_told_and_the_events_before_it_are_kept() {
    let (_dir, path, thread) =
        monitor(|name, id| (name != "query-last").then(|| vec![ok(id), event("SHUTDOWN", 1)]));
    let mut qmp = connect(&path);
    qmp.execute("query-x", None).unwrap();
    assert!(matches!(qmp.execute("query-last", None), Err(Error::Gone { .. })));
    thread.join().unwrap();
    assert_eq!(
        qmp.drain_events().unwrap(),
        [QmpEvent::Shutdown { guest: false, reason: String::new() }]
    );
    assert!(matches!(qmp.drain_events(), Err(Error::Gone { .. })));
}

#[test]
fn answers_that_are_none_are_errors() {
    for answer in
        ["no json", "{}", "[]", r#"{"id": 2}"#, r#"{"return": 1, "error": {}, "id": 2}"#, "\u{0}"]
    {
        let (_dir, path, _) = monitor(move |_, _| Some(vec![answer.into()]));
        let error = connect(&path).execute("query-x", None).unwrap_err();
        assert!(
            matches!(&error, Error::Protocol { operation, .. } if operation == "query-x"),
            "{answer}: {error}"
        );
    }
}

#[test]
fn a_line_without_end_is_given_up() {
    let (_dir, path, _) = monitor(|_, _| Some(vec!["x".repeat(17 << 20)]));
    let error = connect(&path).execute("query-x", None).unwrap_err();
    assert!(error.to_string().contains("bytes"), "{error}");
}

#[test]
fn what_greets_otherwise_is_no_monitor() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        listener.accept().unwrap().0.write_all(b"{\"hello\": 1}\n").unwrap();
    });
    let error = Qmp::connect(&path, Duration::from_secs(5)).err().unwrap();
    assert!(error.to_string().contains("no QMP monitor"), "{error}");
    thread.join().unwrap();
}

#[test]
fn a_socket_that_never_appears_is_an_error_that_names_it() {
    let error =
        Qmp::connect(Path::new("/no/such/dir/qmp.sock"), Duration::from_millis(10)).err().unwrap();
    assert!(error.to_string().contains("/no/such/dir/qmp.sock"), "{error}");
}

#[test]
fn events_that_nobody_fetches_do_not_pile_up() {
    let (_dir, path, _) = monitor(|_, id| {
        let mut lines: Vec<String> = (0..EVENTS_MAX + 10).map(|_| event("RTC_CHANGE", 1)).collect();
        lines.extend([event("RESET", 1), ok(id)]);
        Some(lines)
    });
    let mut qmp = connect(&path);
    qmp.execute("query-x", None).unwrap();
    let events = qmp.drain_events().unwrap();
    assert_eq!(events.len(), EVENTS_MAX);
    assert_eq!(events.last(), Some(&QmpEvent::Reset));
}
