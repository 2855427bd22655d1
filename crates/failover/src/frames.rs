//! The frames between a primary and a standby that do not come from the protocol's core
//! (`keyframe_replication`): the purpose of a connection, the machine, and epochs.
//!
//! ```text
//!   connection   frames: ▶ from the primary, ◀ from the standby
//!   control      Greeting ▶ │ Machine ▶ ◀ Ready │ Core ◀▶, Epoch ▶, ◀ PageHashes (resync.rs)
//!   beat         Greeting ▶ │ Core ◀▶                          the second path
//!   data 0..n    Greeting ▶ │ Batch ▶ Batch ▶ ... Mark ▶ │ Batch ▶ ... Discard ▶ │ ...
//!
//!   frame        payload: lengths in bytes, integers little-endian
//!   Batch        session 8 | zero 8 | a batch of pages (keyframe_transfer)
//!   Mark         session 8 | epoch 8
//!   Discard      session 8 | zero 8
//!   Epoch        session 8 | epoch 8 | length of the JSON 4 | EpochHead as JSON | device state
//! ```
//!
//! Batches belong to the epoch whose Mark follows; a Discard drops them. An epoch is whole when its
//! Epoch and the Mark of each data stream have come.

use crate::error::{Error, Result};
use keyframe_machine::MachineSpec;
use keyframe_units::{Epoch, RamLayout};
use serde::{Deserialize, Serialize};

/// The version of the protocol, which must be the same on both hosts.
pub const VERSION: u32 = 1;
/// The largest length in bytes of the JSON of a frame.
pub const JSON_BYTES_MAX: usize = 4 << 20;

/// The kind of a frame, as the first lines of this module show them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// The first frame of a connection: a [`Greeting`].
    Greeting = 1,
    /// The machine to protect: a [`MachineFrame`].
    Machine = 2,
    /// The answer to a machine: a [`ReadyFrame`].
    Ready = 3,
    /// A message between the two state machines of the replication protocol.
    Core = 4,
    /// A batch of encoded pages of an epoch.
    Batch = 5,
    /// The end of an epoch on one data connection.
    Mark = 6,
    /// The order to drop the pages of the epoch in progress.
    Discard = 7,
    /// The description of an epoch ([`EpochHead`]) and its device state.
    Epoch = 8,
    /// Hashes of pages that the standby holds.
    PageHashes = 9,
}

impl FrameKind {
    /// Returns the kind with the number `number`. Returns `None` if there is none.
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
    /// Messages, and the descriptions of epochs.
    Control,
    /// Heartbeats on the second path.
    Beat,
    /// The pages of the stream with this number.
    Data { stream: usize },
}

/// The first frame of each connection, from the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// The version of the sender's protocol, [`VERSION`].
    pub version: u32,
    /// The purpose of the connection.
    pub purpose: Purpose,
    /// The number of the connection. A primary counts its connections from its start.
    pub connection: u64,
}

/// A disk that is replicated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicatedDisk {
    /// The name of the disk's NBD export.
    pub name: String,
    /// The size of the disk in bytes.
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

/// The machine of a primary, from which a standby starts the same one, with the settings that both
/// hosts must share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineFrame {
    /// The VM's name.
    pub name: String,
    /// The id of the protected VM at the witness (its group), as hexadecimal digits.
    pub group: String,
    /// The arbiter with which the primary was started.
    pub arbiter: Arbiter,
    /// The detection time in nanoseconds.
    pub detection_ns: u64,
    /// The number of paths: 1, or 2 with a second one for heartbeats.
    pub paths: u8,
    /// The number of data connections.
    pub streams: usize,
    /// The description of the VM.
    pub spec: MachineSpec,
    /// The RAM blocks of the VM.
    pub ram: RamLayout,
    /// The disks, in the order of their pages in the page space.
    pub disks: Vec<ReplicatedDisk>,
}

/// A standby's answer to a [`MachineFrame`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadyFrame {
    /// A QEMU with this machine waits for epochs.
    Ready,
    /// The standby cannot hold this VM, for this reason and with this fix, if one is known.
    Refused { problem: String, fix: Option<String> },
}

/// The description of an epoch. Its pages and its device state are sent beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpochHead {
    /// The number of the epoch that it builds upon. `None` if it holds all of the VM.
    pub after: Option<Epoch>,
    /// The reason why the epoch was taken, for the status.
    pub reason: String,
    /// The time at which the VM was paused, on the primary's wall clock, in nanoseconds since 1970.
    pub taken_at_ns: u64,
    /// The number of pages of the epoch.
    pub pages: u64,
    /// The number of bytes of the epoch's batches of pages.
    pub wire_bytes: u64,
    /// Hashes of RAM that were made in the pause, one for each 4096 pages. Empty without
    /// `--verify`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checks: Vec<String>,
}

/// Parses the JSON of a frame. Errors: [`Error::MessageTooLong`] for more than [`JSON_BYTES_MAX`]
/// bytes; [`Error::MalformedMessage`] if it is not the JSON of a `T`.
pub fn parse<T: serde::de::DeserializeOwned>(payload: &[u8]) -> Result<T> {
    if payload.len() > JSON_BYTES_MAX {
        return Err(Error::MessageTooLong(payload.len()));
    }
    serde_json::from_slice(payload).map_err(Error::MalformedMessage)
}

/// Returns `value` as JSON. Error: [`Error::EncodeMessage`] if it has no JSON form.
pub fn text(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(Error::EncodeMessage)
}

/// Returns the 16 bytes that precede the payload of a frame: the session and the epoch, 8 bytes
/// each, little-endian.
pub fn marked(session: u64, epoch: u64) -> [u8; 16] {
    let mut head = [0; 16];
    head[..8].copy_from_slice(&session.to_le_bytes());
    head[8..].copy_from_slice(&epoch.to_le_bytes());
    head
}

/// Splits the payload of a frame into session, epoch and the rest. Returns `None` if it is shorter
/// than 16 bytes.
pub fn unmarked(payload: &[u8]) -> Option<(u64, u64, &[u8])> {
    let (session, rest) = payload.split_first_chunk::<8>()?;
    let (epoch, rest) = rest.split_first_chunk::<8>()?;
    Some((u64::from_le_bytes(*session), u64::from_le_bytes(*epoch), rest))
}

/// Splits what follows session and epoch in an [`FrameKind::Epoch`] frame into the description and
/// the device state. Returns `None` if it is malformed.
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
