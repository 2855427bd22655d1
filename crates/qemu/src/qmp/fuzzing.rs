//! What the fuzzers need of the monitor's readers.

use super::event::{QmpEvent, RunStatus, timestamp_us};
use super::transport::Transport;
use super::virsh;
use serde_json::Value;
use std::os::fd::OwnedFd;

/// Parses each line that arrives on a socket whose other end is closed.
pub fn received(socket: OwnedFd, line: &mut dyn FnMut(&Value)) {
    let mut transport = Transport::taken_over(socket, "fuzz".into());
    // A line that is no JSON does not end it: others follow.
    for _ in 0..10_000 {
        match transport.receive_now("fuzz") {
            Ok(Some(message)) => line(&message),
            Ok(None) | Err(crate::Error::Gone { .. }) => return,
            Err(_) => {}
        }
    }
}

/// Parses one message as an event.
pub fn event(message: &Value) {
    let _ = (QmpEvent::parse(message), timestamp_us(message));
    let _ = message.get("return").and_then(|r| r.get("status")?.as_str()).map(RunStatus::parse);
}

/// Parses the output of virsh.
pub fn libvirt(said: &str) {
    let _ = virsh::answer(said);
    said.lines().filter_map(virsh::event).for_each(|message| event(&message));
    let plain = virsh::plain(said);
    assert!(
        plain.bytes().all(|b| matches!(b, b' '..=b'~') && b != b'\''),
        "virsh would read this otherwise"
    );
}
