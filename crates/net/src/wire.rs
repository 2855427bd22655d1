//! The messages between a switch and its controller, over a unix stream.
//!
//! ```text
//!   message   | length of the JSON 4 | length of the bytes 4 | JSON | bytes |
//!             lengths are little-endian
//!
//!   controller ──▶ {"hold":{"limit_ms":10000}}          switch ──▶ "done"
//!                  {"quiesce":{"timeout_ms":50}}                   "done"
//!                  "collect"                                       "in_flight" and its bytes
//!                  "release"                                       "done"
//!                  {"restore":{"stand_ins":[...]}} and bytes       "done"
//!                  "ports"                                         {"ports":{...}}
//!                  {"listen":{"path":"/run/lan.sock"}}             "done"
//!                  any of them                                     {"failed":...}
//! ```
//!
//! The controller sends one request at a time. Each has one answer.

use crate::in_flight::{IN_FLIGHT_BYTES_MAX, StandInPort};
use crate::switch::SwitchPorts;
use crate::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The longest JSON, in bytes: more than that of all ports of a switch.
const JSON_BYTES_MAX: usize = 1 << 20;
const LENGTHS_BYTES: usize = 8;

/// A request of a controller to the process of a switch.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SwitchRequest {
    /// Stop delivery for at most this time, in milliseconds.
    Hold { limit_ms: u64 },
    /// Wait at most this time, in milliseconds, until all packets are taken.
    Quiesce { timeout_ms: u64 },
    /// Send the packets in flight.
    Collect,
    /// Deliver packets again.
    Release,
    /// Send the list of connections.
    Ports,
    /// Queue the recorded packets that follow the request, for the ports that stand for the
    /// recorded ones.
    Restore { stand_ins: Vec<StandInPort> },
    /// Add a LAN that listens at the unix socket with this path.
    Listen { path: String },
}

/// The answer of a switch's process to its controller.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SwitchResponse {
    /// The request was carried out.
    Done,
    /// The packets in flight, which follow the response.
    InFlight,
    /// The connections.
    Ports(SwitchPorts),
    /// The request failed.
    Failed(Error),
}

/// Returns the bytes of `message`, followed by `bytes`. Error: they are too long.
pub fn encode(message: &impl Serialize, bytes: &[u8]) -> Result<Vec<u8>> {
    let json = serde_json::to_vec(message)
        .map_err(|e| Error::control(format!("encode a message: {e}")))?;
    if json.len() > JSON_BYTES_MAX || bytes.len() > IN_FLIGHT_BYTES_MAX {
        return Err(Error::control(format!("a message of {} bytes", json.len() + bytes.len())));
    }
    let lengths = [json.len() as u32, bytes.len() as u32].map(u32::to_le_bytes).concat();
    Ok([&lengths[..], &json, bytes].concat())
}

/// Splits a stream of bytes, which arrives in pieces, into messages.
#[derive(Default)]
pub struct Messages(Vec<u8>);

impl Messages {
    /// Appends bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Returns true if more bytes wait than the longest message has.
    pub fn is_too_much(&self) -> bool {
        self.0.len() > LENGTHS_BYTES + JSON_BYTES_MAX + IN_FLIGHT_BYTES_MAX
    }

    /// Removes and returns the next message, if it is complete. Error: the stream is invalid, and
    /// its rest cannot be parsed.
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<Option<(T, Vec<u8>)>> {
        let Some((lengths, rest)) = self.0.split_at_checked(LENGTHS_BYTES) else { return Ok(None) };
        let (json, bytes) = lengths.split_at(LENGTHS_BYTES / 2);
        let [json_len, bytes_len] =
            [json, bytes].map(|l| l.iter().rev().fold(0, |n, b| n << 8 | usize::from(*b)));
        if json_len > JSON_BYTES_MAX || bytes_len > IN_FLIGHT_BYTES_MAX {
            return Err(Error::control("the other end sent a message that is too long"));
        }
        let Some((json, rest)) = rest.split_at_checked(json_len) else { return Ok(None) };
        let Some((bytes, rest)) = rest.split_at_checked(bytes_len) else { return Ok(None) };
        let message = serde_json::from_slice(json)
            .map_err(|e| Error::control(format!("the other end sent an invalid message: {e}")))?;
        let (bytes, rest) = (bytes.to_vec(), rest.to_vec());
        self.0 = rest;
        Ok(Some((message, bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::in_flight::PortId;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn messages_come_back_however_they_are_cut(
            sent in prop::collection::vec((any::<u32>(), prop::collection::vec(any::<u8>(), 0..50)), 0..6),
            cut in 1usize..30,
        ) {
            let stream: Vec<u8> = sent
                .iter()
                .flat_map(|(n, b)| encode(&SwitchRequest::Hold { limit_ms: (*n).into() }, b).unwrap())
                .collect();
            let (mut messages, mut found) = (Messages::default(), Vec::new());
            for piece in stream.chunks(cut) {
                messages.push(piece);
                while let Some((SwitchRequest::Hold { limit_ms }, bytes)) = messages.next().unwrap() {
                    found.push((limit_ms as u32, bytes));
                }
            }
            prop_assert_eq!(found, sent);
            prop_assert!(messages.0.is_empty());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut messages = Messages::default();
            messages.push(&bytes);
            let _ = messages.next::<SwitchRequest>();
        }
    }

    #[test]
    fn a_stand_in_is_a_pair_on_the_wire() {
        let port = |pid| PortId { lan: "/l".into(), pid, number: 0 };
        let stand_in = StandInPort { recorded: port(1), present: port(2) };
        let json = serde_json::to_string(&stand_in).unwrap();
        assert_eq!(json, serde_json::to_string(&(port(1), port(2))).unwrap());
        assert_eq!(serde_json::from_str::<StandInPort>(&json).unwrap(), stand_in);
    }

    #[test]
    fn an_error_arrives_unchanged() {
        let port = PortId { lan: "/l".into(), pid: 7, number: 1 };
        let io = Error::io("read")(std::io::Error::other("no such thing"));
        for error in [Error::NotQuiet { port, waited_ms: 5, problem: "p".into() }, Error::Busy, io]
        {
            let (text, source) = (
                error.to_string(),
                format!("{:?}", std::error::Error::source(&error).map(ToString::to_string)),
            );
            let mut messages = Messages::default();
            messages.push(&encode(&SwitchResponse::Failed(error), &[]).unwrap());
            let Some((SwitchResponse::Failed(back), _)) = messages.next().unwrap() else {
                panic!("no error")
            };
            assert_eq!(back.to_string(), text);
            assert_eq!(
                format!("{:?}", std::error::Error::source(&back).map(ToString::to_string)),
                source
            );
        }
    }
}
