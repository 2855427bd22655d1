//! The frames between a primary and a standby that do not come from the protocol's core
//! (`keyframe_replication`): the purpose of a connection, the machine, and epochs.
//!
//! ```text
//!   control   Greeting ▶ │ Machine ▶ ◀ Ready │ Core ◀▶ ...                       Epoch ▶ (devices; its batches are on the data streams)
//!                                                        ◀ PageHashes ... (resync.rs)
//!   beat      Greeting ▶ │ Core ◀▶ ...                                           the second path: signs of life alone
//!   data 0..n Greeting ▶ │ Batch ▶ Batch ▶ ... Mark ▶ │ Batch ▶ ... Discard ▶ │
//!
//!   Batch     session 8 | 0 8 | batch (keyframe_transfer)      Mark   session 8 | epoch 8      Discard   session 8 | 0 8
//!   Epoch     session 8 | epoch 8 | length of the JSON 4 | EpochHead as JSON | device state                      all little-endian
//! ```
//!
//! Batches belong to the epoch whose Mark follows; a Discard drops them. An epoch is whole when its
//! Epoch and the Mark of each data stream have come.

use crate::error::{Error, Result};
use keyframe_machine::MachineSpec;
use keyframe_units::{Epoch, RamLayout};
use serde::{Deserialize, Serialize};

/// The version of the protocol; both hosts must have the same.
pub const VERSION: u32 = 1;
/// The longest description of a machine.
pub const JSON_BYTES_MAX: usize = 4 << 20;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    Greeting = 1,
    Machine = 2,
    Ready = 3,
    Core = 4,
    Batch = 5,
    Mark = 6,
    Discard = 7,
    Epoch = 8,
    PageHashes = 9,
}

impl FrameKind {
    /// Returns the kind with this number; `None` if there is none.
    pub fn of(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Greeting,
            2 => Self::Machine,
            3 => Self::Ready,
            4 => Self::Core,
            5 => Self::Batch,
            6 => Self::Mark,
            7 => Self::Discard,
            8 => Self::Epoch,
            9 => Self::PageHashes,
            _ => return None,
        })
    }
}

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    Control,
    Beat,
    Data { stream: usize },
}

/// The first frame of each connection, from the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    pub version: u32,
    pub purpose: Purpose,
    /// Counts the connections of one primary process.
    pub connection: u64,
}

/// A disk that is replicated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicatedDisk {
    /// Its export's name.
    pub name: String,
    pub disk_bytes: u64,
}

/// The arbiter that decides which host runs the VM. Both hosts must have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arbiter {
    /// The witness on a third host.
    Witness,
    /// The hook that switches the other host off.
    Fencing,
    /// The user.
    Manual,
}

impl Arbiter {
    /// The option that chooses it.
    pub(crate) fn option(self) -> &'static str {
        match self {
            Self::Witness => "with --witness",
            Self::Fencing => "with --fence-with",
            Self::Manual => "without --witness or --fence-with",
        }
    }
}

/// The machine, as a standby needs it to start the same one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineFrame {
    /// The VM's name.
    pub name: String,
    /// The group's id, as hexadecimal digits.
    pub group: String,
    pub arbiter: Arbiter,
    pub detection_ns: u64,
    /// Number of paths: 1, or 2 with a second one for heartbeats.
    pub paths: u8,
    pub streams: usize,
    /// The machine.
    pub spec: MachineSpec,
    pub ram: RamLayout,
    pub disks: Vec<ReplicatedDisk>,
}

/// The answer to a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadyFrame {
    Ready,
    Refused { problem: String, fix: Option<String> },
}

/// The description of an epoch, beside its pages and device state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpochHead {
    /// The epoch that it builds upon; `None` if it holds all of the VM.
    pub after: Option<Epoch>,
    /// The reason why it was taken.
    pub reason: String,
    /// The time at which the VM was paused, on the primary's wall clock, in nanoseconds since 1970.
    pub taken_at_ns: u64,
    pub pages: u64,
    pub wire_bytes: u64,
    /// Hashes of RAM in the pause, for `--verify`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checks: Vec<String>,
}

/// Parses the JSON of a frame. Errors: [`Error::MessageTooLong`], [`Error::MalformedMessage`].
pub fn parse<T: serde::de::DeserializeOwned>(payload: &[u8]) -> Result<T> {
    if payload.len() > JSON_BYTES_MAX {
        return Err(Error::MessageTooLong(payload.len()));
    }
    serde_json::from_slice(payload).map_err(Error::MalformedMessage)
}

/// Returns a frame's JSON. Error: the value cannot be encoded.
pub fn text(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(Error::EncodeMessage)
}

/// Encodes the session and the epoch that precede a payload: 8 bytes each, little-endian.
pub fn marked(session: u64, epoch: u64) -> [u8; 16] {
    let mut head = [0; 16];
    head[..8].copy_from_slice(&session.to_le_bytes());
    head[8..].copy_from_slice(&epoch.to_le_bytes());
    head
}

/// Splits a payload into session, epoch and the rest. Returns `None` if it is shorter than 16
/// bytes.
pub fn unmarked(payload: &[u8]) -> Option<(u64, u64, &[u8])> {
    let (session, rest) = payload.split_first_chunk::<8>()?;
    let (epoch, rest) = rest.split_first_chunk::<8>()?;
    Some((u64::from_le_bytes(*session), u64::from_le_bytes(*epoch), rest))
}

/// Splits the rest of an Epoch frame into head and device state. Returns `None` if it is malformed.
pub fn epoch_parts(rest: &[u8]) -> Option<(EpochHead, &[u8])> {
    let (len, rest) = rest.split_first_chunk::<4>()?;
    let (head, devices) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    (head.len() <= JSON_BYTES_MAX)
        .then(|| serde_json::from_slice(head).ok())?
        .map(|head| (head, devices))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_are_taken_apart_as_they_were_put_together_and_nonsense_is_none() {
        let head = EpochHead {
            after: Some(Epoch(3)),
            reason: "due".into(),
            taken_at_ns: 5,
            pages: 7,
            wire_bytes: 9,
            checks: Vec::new(),
        };
        let json = text(&head).unwrap();
        let whole =
            [&marked(3, 4)[..], &(json.len() as u32).to_le_bytes(), &json, b"devices"].concat();
        let (session, epoch, rest) = unmarked(&whole).unwrap();
        assert_eq!((session, epoch), (3, 4));
        assert_eq!(epoch_parts(rest), Some((head, &b"devices"[..])));
        for len in 0..rest.len() - 7 {
            assert_eq!(epoch_parts(&rest[..len]), None);
        }
        assert!(unmarked(&whole[..15]).is_none());
        assert!(
            (0..=255).filter(|n| FrameKind::of(*n).is_some_and(|kind| kind as u8 == *n)).count()
                == 9
        );
    }
}
