//! The messages between a switch and its controller, over a unix stream.
//!
//! ```text
//!   message   | length of the JSON 4 | length of the bytes 4 | JSON | bytes |      lengths little-endian
//!
//!   controller ──▶ {"hold":{"limit_ms":10000}}          switch ──▶ "done"
//!                  {"quiesce":{"timeout_ms":50}}                   "done"
//!                  "collect"                                       "in_flight" and its bytes
//!                  "release"                                       "done"
//!                  {"restore":{"stand_ins":[...]}} and bytes       "done"
//!                  "ports"                                         {"ports":{...}}
//!                  {"listen":{"path":"/run/lan.sock"}}             "done"
//!                                                                  {"failed":...} to any of them
//! ```
//!
//! One request at a time; each has one answer.

use crate::in_flight::{IN_FLIGHT_BYTES_MAX, PortId};
use crate::switch::Ports;
use crate::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The longest JSON: that of all ports of a switch, and room.
const JSON_BYTES_MAX: usize = 1 << 20;
const LENGTHS_BYTES: usize = 8;

/// What a controller asks for.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    Hold { limit_ms: u64 },
    Quiesce { timeout_ms: u64 },
    Collect,
    Release,
    Ports,
    Restore { stand_ins: Vec<(PortId, PortId)> },
    Listen { path: String },
}

/// What the switch answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    Done,
    InFlight,
    Ports(Ports),
    Failed(Error),
}

/// `message` with `bytes` behind it, as it is sent.
pub fn encode(message: &impl Serialize, bytes: &[u8]) -> Result<Vec<u8>> {
    let json = serde_json::to_vec(message)
        .map_err(|e| Error::control(format!("encode a message: {e}")))?;
    if json.len() > JSON_BYTES_MAX || bytes.len() > IN_FLIGHT_BYTES_MAX {
        return Err(Error::control(format!("a message of {} bytes", json.len() + bytes.len())));
    }
    let lengths = [json.len() as u32, bytes.len() as u32].map(u32::to_le_bytes).concat();
    Ok([&lengths[..], &json, bytes].concat())
}

/// Finds messages in what comes in pieces.
#[derive(Default)]
pub struct Messages(Vec<u8>);

impl Messages {
    /// Adds what came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// True where more waits than the longest message has.
    pub fn is_too_much(&self) -> bool {
        self.0.len() > LENGTHS_BYTES + JSON_BYTES_MAX + IN_FLIGHT_BYTES_MAX
    }

    /// The next message, if it is complete. Error: what came is none; nothing that comes behind it
    /// can be understood.
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<Option<(T, Vec<u8>)>> {
        let Some((lengths, rest)) = self.0.split_at_checked(LENGTHS_BYTES) else { return Ok(None) };
        let (json, bytes) = lengths.split_at(LENGTHS_BYTES / 2);
        let [json_len, bytes_len] =
            [json, bytes].map(|l| l.iter().rev().fold(0, |n, b| n << 8 | usize::from(*b)));
        if json_len > JSON_BYTES_MAX || bytes_len > IN_FLIGHT_BYTES_MAX {
            return Err(Error::control("it sent a message that is too long"));
        }
        let Some((json, rest)) = rest.split_at_checked(json_len) else { return Ok(None) };
        let Some((bytes, rest)) = rest.split_at_checked(bytes_len) else { return Ok(None) };
        let message = serde_json::from_slice(json)
            .map_err(|e| Error::control(format!("it sent what is no message: {e}")))?;
        let (bytes, rest) = (bytes.to_vec(), rest.to_vec());
        self.0 = rest;
        Ok(Some((message, bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn messages_come_back_however_they_are_cut(
            sent in prop::collection::vec((any::<u32>(), prop::collection::vec(any::<u8>(), 0..50)), 0..6),
            cut in 1usize..30,
        ) {
            let stream: Vec<u8> = sent
                .iter()
                .flat_map(|(n, b)| encode(&Request::Hold { limit_ms: (*n).into() }, b).unwrap())
                .collect();
            let (mut messages, mut found) = (Messages::default(), Vec::new());
            for piece in stream.chunks(cut) {
                messages.push(piece);
                while let Some((Request::Hold { limit_ms }, bytes)) = messages.next().unwrap() {
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
            let _ = messages.next::<Request>();
        }
    }

    #[test]
    fn an_error_arrives_as_it_was() {
        let port = PortId { lan: "/l".into(), pid: 7, number: 1 };
        let io = Error::io("read")(std::io::Error::other("no such thing"));
        for error in [Error::NotQuiet { port, waited_ms: 5, problem: "p".into() }, Error::Busy, io]
        {
            let (text, source) = (
                error.to_string(),
                format!("{:?}", std::error::Error::source(&error).map(ToString::to_string)),
            );
            let mut messages = Messages::default();
            messages.push(&encode(&Response::Failed(error), &[]).unwrap());
            let Some((Response::Failed(back), _)) = messages.next().unwrap() else {
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
