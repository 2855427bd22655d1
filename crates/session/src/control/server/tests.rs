//! Requests at the control socket keep their order.

use super::*;
use std::io::{BufRead, BufReader};
use std::sync::mpsc::channel;

fn take(tag: usize) -> String {
    let tag = Some(format!("t{tag}"));
    let request = EngineRequest::Take { tag, strategy: None };
    serde_json::to_string(&request).unwrap() + "\n"
}

/// Eight clients, each of which has sent its request.
fn clients(socket: &Path) -> Vec<UnixStream> {
    let client = |number| {
        let mut client = UnixStream::connect(socket).unwrap();
        client.write_all(take(number).as_bytes()).unwrap();
        client
    };
    (0..8).map(client).collect()
}

#[test]
fn requests_are_delivered_in_the_order_in_which_they_were_written() {
    let folder = tempfile::tempdir().unwrap();
    let (sender, delivered) = channel();
    let status = SharedStatus::default();
    let deliver = move |pending: Pending| sender.send(pending).is_ok();
    let socket = listen(folder.path(), &status, deliver).unwrap();
    for round in 0..50 {
        // A client that sends nothing delays no other client.
        let silent = UnixStream::connect(&socket.path).unwrap();
        let clients = clients(&socket.path);
        for (number, client) in clients.into_iter().enumerate() {
            let pending = delivered.recv_timeout(Duration::from_secs(60)).unwrap();
            let EngineRequest::Take { tag, .. } = pending.request else { panic!("no take") };
            assert_eq!(tag.as_deref(), Some(&*format!("t{number}")), "round {round}");
            pending.answer.send(EngineResponse::Stopping).unwrap();
            let mut answer = String::new();
            BufReader::new(client).read_line(&mut answer).unwrap();
            assert!(answer.ends_with('\n'), "{answer}");
        }
        drop(silent);
    }
}

#[test]
fn a_socket_that_is_closed_has_its_answers_written() {
    for round in 0..50 {
        let folder = tempfile::tempdir().unwrap();
        let (sender, delivered) = channel();
        let deliver = move |pending: Pending| sender.send(pending).is_ok();
        let socket = listen(folder.path(), &SharedStatus::default(), deliver).unwrap();
        let clients = clients(&socket.path);
        for _ in &clients {
            let pending = delivered.recv_timeout(Duration::from_secs(60)).unwrap();
            pending.answer.send(EngineResponse::Stopping).unwrap();
        }
        drop(socket);
        for client in clients {
            client.set_nonblocking(true).unwrap();
            let mut answer = String::new();
            BufReader::new(client).read_line(&mut answer).unwrap_or_else(|e| {
                panic!("round {round}: an answer was not written: {e}");
            });
            assert!(answer.ends_with('\n'), "round {round}: {answer}");
        }
    }
}

/// A run whose VM goes to another process again and again makes a socket each time.
#[test]
fn the_thread_of_a_dropped_socket_ends() {
    let folder = tempfile::tempdir().unwrap();
    let deliver = |pending: Pending| pending.answer.send(EngineResponse::Stopping).is_ok();
    let socket = listen(folder.path(), &SharedStatus::default(), deliver).unwrap();
    let answering = socket.answering.clone();
    let silent = UnixStream::connect(&socket.path).unwrap();
    drop(socket);
    let until = Instant::now() + Duration::from_secs(60);
    while answering.strong_count() > 0 {
        assert!(Instant::now() < until, "the thread goes on");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(silent);
}
