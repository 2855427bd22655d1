//! The packets in flight between the VMs of a group at its checkpoint, and their encoding.
//!
//! ```text
//!   in flight  | magic 8 | version 4 | ports 4 | port | port | ... | BLAKE3 of all before, 32 |
//!   port       | name length 2 | LAN's name | pid 4 | number 4 | frames 4 | frame | frame | ... |
//!   frame      | length 4 | bytes |
//! ```
//!
//! Integers are little-endian. docs/formats/in-flight.md specifies the format for other programs.
//!
//! Invariants: bytes that decode were encoded in exactly that form. A hostile file costs no more
//! memory than its own size.

use crate::frame::Frame;
use crate::{Error, Result};
use keyframe_bytes::{ByteReader, ReadError};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The version of the format in which frames in flight are recorded.
pub const IN_FLIGHT_VERSION: u32 = 1;
/// The largest length of a recording of frames in flight, in bytes.
pub const IN_FLIGHT_BYTES_MAX: usize = 320 << 20;
/// The largest number of ports of a switch.
pub const PORTS_MAX: usize = 256;

const MAGIC: &[u8; 8] = b"KFINFLT\n";
const HASH_BYTES: usize = 32;
/// The offset of the version.
const VERSION_AT: usize = 8;
/// The longest name of a LAN, in bytes: longer than the longest path of a unix socket.
const LAN_BYTES_MAX: usize = 256;

/// Names a VM's connection to a LAN, in checkpoints and for users.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PortId {
    /// The LAN: the path of its socket.
    pub lan: String,
    /// The id of the process at the other end.
    pub pid: u32,
    /// The number of the connection among those of this process to this LAN, in the order of their
    /// arrival, from 0.
    pub number: u32,
}

impl fmt::Display for PortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "port {} of process {} on {}", self.number, self.pid, self.lan)
    }
}

/// The port of a restored VM that stands for a port of a recorded one. In JSON it is the pair
/// `[recorded, present]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(PortId, PortId)", into = "(PortId, PortId)")]
pub struct StandInPort {
    /// The port as the recording names it.
    pub recorded: PortId,
    /// The port of this switch that stands for it.
    pub present: PortId,
}

impl From<(PortId, PortId)> for StandInPort {
    fn from((recorded, present): (PortId, PortId)) -> Self {
        Self { recorded, present }
    }
}

impl From<StandInPort> for (PortId, PortId) {
    fn from(port: StandInPort) -> Self {
        (port.recorded, port.present)
    }
}

/// The frames in flight to one port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortInFlight {
    /// The port.
    pub port: PortId,
    /// Its frames, in the order of delivery.
    pub frames: Vec<Frame>,
}

/// The frames that wait for each port of a switch. Ports without frames are included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InFlight {
    /// The ports in the order of [`PortId`], each once.
    pub ports: Vec<PortInFlight>,
}

impl InFlight {
    /// Returns the number of frames of all ports.
    pub fn frames(&self) -> usize {
        self.ports.iter().map(|port| port.frames.len()).sum()
    }

    /// Encodes the frames for a checkpoint. Error: they take more than [`IN_FLIGHT_BYTES_MAX`]
    /// bytes, there are too many ports, or the name of a LAN is too long.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(self.encoded_len());
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&IN_FLIGHT_VERSION.to_le_bytes());
        put_len(&mut out, self.ports.len());
        for PortInFlight { port, frames } in &self.ports {
            out.extend_from_slice(&(port.lan.len() as u16).to_le_bytes());
            out.extend_from_slice(port.lan.as_bytes());
            out.extend_from_slice(&port.pid.to_le_bytes());
            out.extend_from_slice(&port.number.to_le_bytes());
            put_len(&mut out, frames.len());
            for frame in frames {
                put_len(&mut out, frame.bytes().len());
                out.extend_from_slice(frame.bytes());
            }
        }
        out.extend_from_slice(blake3::hash(&out).as_bytes());
        let in_bounds = out.len() <= IN_FLIGHT_BYTES_MAX
            && self.ports.len() <= PORTS_MAX
            && self.ports.iter().all(|p| p.port.lan.len() <= LAN_BYTES_MAX);
        if in_bounds { Ok(out) } else { Err(bad(out.len(), "too large for the format")) }
    }

    fn encoded_len(&self) -> usize {
        let port = |p: &PortInFlight| {
            14 + p.port.lan.len() + p.frames.iter().map(|frame| frame.wire().len()).sum::<usize>()
        };
        16 + HASH_BYTES + self.ports.iter().map(port).sum::<usize>()
    }

    /// Decodes the bytes that [`Self::encode`] made. Errors: [`Error::LaterVersion`] for a later
    /// version of the format; [`Error::InFlight`] if the bytes are damaged.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = ByteReader::new(bytes);
        if bytes.len() > IN_FLIGHT_BYTES_MAX {
            return Err(bad(0, "longer than any recording"));
        }
        if reader.array::<8>()? != *MAGIC {
            return Err(bad(0, "not a recording of packets in flight"));
        }
        match reader.u32_le()? {
            IN_FLIGHT_VERSION => {}
            found if found > IN_FLIGHT_VERSION => {
                return Err(Error::LaterVersion { found, known: IN_FLIGHT_VERSION });
            }
            found => return Err(bad(VERSION_AT, format!("unknown version {found}"))),
        }
        let (covered, hash) =
            bytes.split_last_chunk::<HASH_BYTES>().ok_or_else(|| bad(0, "ends early"))?;
        if blake3::hash(covered).as_bytes() != hash {
            return Err(bad(covered.len(), "the checksum does not match"));
        }
        let mut reader = ByteReader::new(covered);
        reader.take(VERSION_AT + 4)?;
        read_ports(&mut reader)
    }
}

/// Lengths are far below 4 GiB: that of a frame, or one bounded by [`IN_FLIGHT_BYTES_MAX`].
fn put_len(out: &mut Vec<u8>, len: usize) {
    out.extend_from_slice(&(len as u32).to_le_bytes());
}

fn bad(offset: usize, problem: impl Into<String>) -> Error {
    Error::InFlight { offset, problem: problem.into() }
}

impl From<ReadError> for Error {
    fn from(error: ReadError) -> Self {
        let (ReadError::Truncated { at, .. }
        | ReadError::Trailing { at, .. }
        | ReadError::Varint { at }) = error;
        bad(at, String::from(error))
    }
}

fn read_ports(reader: &mut ByteReader<'_>) -> Result<InFlight> {
    let count = reader.u32_le()? as usize;
    if count > PORTS_MAX {
        let problem = format!("{count} ports, but a switch has at most {PORTS_MAX}");
        return Err(bad(reader.position(), problem));
    }
    let mut ports: Vec<PortInFlight> = Vec::with_capacity(count);
    for _ in 0..count {
        let port = read_port(reader)?;
        if ports.last().is_some_and(|before| before.port >= port.port) {
            return Err(bad(reader.position(), format!("{} is out of order", port.port)));
        }
        ports.push(port);
    }
    reader.expect_end()?;
    Ok(InFlight { ports })
}

fn read_port(reader: &mut ByteReader<'_>) -> Result<PortInFlight> {
    let name_len = usize::from(reader.u16_le()?);
    if name_len > LAN_BYTES_MAX {
        return Err(bad(reader.position(), format!("a LAN's name of {name_len} bytes")));
    }
    let name = std::str::from_utf8(reader.take(name_len)?)
        .map_err(|_| bad(reader.position(), "a name that is not UTF-8"))?;
    let port = PortId { lan: name.to_owned(), pid: reader.u32_le()?, number: reader.u32_le()? };
    let count = reader.u32_le()?;
    let mut frames = Vec::new();
    for _ in 0..count {
        let len = reader.u32_le()? as usize;
        let frame = Frame::new(reader.take(len)?)
            .ok_or_else(|| bad(reader.position(), format!("a frame of {len} bytes")))?;
        frames.push(frame);
    }
    Ok(PortInFlight { port, frames })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn recording() -> impl Strategy<Value = InFlight> {
        let frames = prop::collection::vec(prop::collection::vec(any::<u8>(), 1..100), 0..5);
        prop::collection::btree_map(("[a-z/]{0,12}", any::<u32>(), 0u32..3), frames, 0..5).prop_map(
            |ports| {
                let port = |((lan, pid, number), frames): ((String, u32, u32), Vec<Vec<u8>>)| {
                    PortInFlight {
                        port: PortId { lan, pid, number },
                        frames: frames.iter().map(|b| Frame::new(b).unwrap()).collect(),
                    }
                };
                InFlight { ports: ports.into_iter().map(port).collect() }
            },
        )
    }

    fn sealed(covered: &[u8]) -> Vec<u8> {
        [covered, blake3::hash(covered).as_bytes()].concat()
    }

    proptest! {
        #[test]
        fn comes_back_and_every_flipped_bit_is_noticed(recording in recording(), bit in any::<usize>()) {
            let bytes = recording.encode().unwrap();
            prop_assert_eq!(bytes.len(), recording.encoded_len());
            prop_assert_eq!(InFlight::decode(&bytes).unwrap(), recording);
            let mut flipped = bytes.clone();
            let bit = bit % (bytes.len() * 8);
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(InFlight::decode(&flipped).is_err());
            prop_assert!(InFlight::decode(&bytes[..bit / 8]).is_err());
        }

        /// The checksum is valid, so that the parser reads the rest.
        #[test]
        fn what_decodes_was_encoded_in_that_form(
            recording in recording(), at in any::<usize>(), by in prop::collection::vec(any::<u8>(), 0..8),
        ) {
            let mut covered = recording.encode().unwrap();
            covered.truncate(covered.len() - HASH_BYTES);
            let at = at % covered.len();
            covered.splice(at..(at + by.len()).min(covered.len()), by);
            let bytes = sealed(&covered);
            if let Ok(found) = InFlight::decode(&bytes) {
                prop_assert_eq!(found.encode().unwrap(), bytes);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = InFlight::decode(&bytes);
            let _ = InFlight::decode(&sealed(&[&MAGIC[..], &1u32.to_le_bytes(), &bytes].concat()));
        }
    }

    #[test]
    fn the_bytes_of_version_1_stay_readable() {
        let golden = include_bytes!("../tests/golden/in-flight-v1.bin");
        let port = |pid, frames: &[&[u8]]| PortInFlight {
            port: PortId { lan: "/run/lan.sock".into(), pid, number: 0 },
            frames: frames.iter().map(|b| Frame::new(b).unwrap()).collect(),
        };
        let expected = InFlight { ports: vec![port(100, &[b"first", b"second"]), port(200, &[])] };
        assert_eq!(InFlight::decode(golden).unwrap(), expected);
        assert_eq!(expected.encode().unwrap(), golden);
    }

    #[test]
    fn a_later_version_is_told_from_damage() {
        let mut bytes = InFlight::default().encode().unwrap();
        bytes[VERSION_AT] = 2;
        assert!(matches!(
            InFlight::decode(&bytes),
            Err(Error::LaterVersion { found: 2, known: 1 })
        ));
    }
}
