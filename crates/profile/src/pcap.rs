//! Counts the packets in a growing capture file (QEMU's `filter-dump`, format pcap).
//!
//! ```text
//!   header  magic u32 · version 2 x u16 · zone, accuracy, snap length, link type 4 x u32
//!           24 bytes
//!   record  seconds u32 · microseconds u32 · stored length u32 · length on the wire u32
//!           16 bytes, then the stored bytes of the packet
//! ```
//!
//! Numbers have the byte order of the writer, which is QEMU on the same machine. A record that is
//! incomplete is counted once it is complete. A record with a stored length of 0 is space that QEMU
//! has not written yet.

use crate::{Error, Result};

const MAGIC: u32 = 0xa1b2_c3d4;
const HEADER_BYTES: u64 = 24;
const RECORD_BYTES: u64 = 16;
/// The largest stored length of a packet, in bytes.
const PACKET_BYTES_MAX: u32 = 1 << 18;

/// Counts the packets of a capture file while it grows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PacketCounter {
    /// The position up to which all records are counted, in bytes.
    offset: u64,
    packets: u64,
}

impl PacketCounter {
    /// Returns the position of the first record that is not counted, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the number of packets counted.
    pub fn packets(&self) -> u64 {
        self.packets
    }

    /// Counts the complete records in `bytes`, which begin at [`Self::offset`].
    ///
    /// Errors: [`Error::Pcap`] for bytes that are no capture file; records after that position are
    /// not counted.
    pub fn count(&mut self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        loop {
            let whole_bytes = if self.offset == 0 { header(rest) } else { record(rest) };
            let whole_bytes =
                whole_bytes.map_err(|problem| Error::Pcap { offset: self.offset, problem })?;
            let Some(next) = whole_bytes.and_then(|len| rest.get(len as usize..)) else {
                return Ok(());
            };
            self.packets += u64::from(self.offset > 0);
            self.offset += (rest.len() - next.len()) as u64;
            rest = next;
        }
    }
}

/// Returns the length of the file's header in bytes; `None` if it is incomplete.
fn header(bytes: &[u8]) -> Result<Option<u64>, &'static str> {
    match word(bytes, 0) {
        Some(MAGIC) => Ok((bytes.len() as u64 >= HEADER_BYTES).then_some(HEADER_BYTES)),
        Some(_) => Err("it does not begin as a capture file does"),
        None => Ok(None),
    }
}

/// Returns the length of a record in bytes; `None` if it is incomplete.
fn record(bytes: &[u8]) -> Result<Option<u64>, &'static str> {
    match word(bytes, 8) {
        Some(kept) if kept > PACKET_BYTES_MAX => Err("a record is longer than any packet"),
        Some(0) | None => Ok(None),
        Some(kept) => {
            let len = RECORD_BYTES + u64::from(kept);
            Ok((bytes.len() as u64 >= len).then_some(len))
        }
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dump(packets: &[usize]) -> Vec<u8> {
        let mut file = MAGIC.to_ne_bytes().to_vec();
        file.resize(HEADER_BYTES as usize, 0);
        for len in packets {
            file.extend([7; 8]);
            file.extend((*len as u32).to_ne_bytes());
            file.extend(1500u32.to_ne_bytes());
            file.extend(vec![0xff; *len]);
        }
        file
    }

    #[test]
    fn other_files_are_refused() {
        assert!(matches!(
            PacketCounter::default().count(&[0; 24]),
            Err(Error::Pcap { offset: 0, .. })
        ));
        let mut file = dump(&[1]);
        file.extend([0xff; 20]);
        let mut counter = PacketCounter::default();
        assert!(matches!(counter.count(&file), Err(Error::Pcap { offset: 41, .. })));
        assert_eq!(counter.packets(), 1);
    }

    proptest! {
        /// Each packet is counted once, in whatever steps the file grows.
        #[test]
        fn packets_are_counted_once(
            packets in prop::collection::vec(1usize..40, 0..20),
            step in 1usize..50,
            unwritten in 0usize..60,
        ) {
            let mut file = dump(&packets);
            let written = file.len() as u64;
            file.resize(file.len() + unwritten, 0);
            let mut counter = PacketCounter::default();
            for end in (0..file.len()).step_by(step).chain([file.len(), file.len()]) {
                counter.count(&file[counter.offset() as usize..end.max(counter.offset() as usize)]).unwrap();
            }
            prop_assert_eq!(counter.packets(), packets.len() as u64);
            prop_assert_eq!(counter.offset(), written);
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..100), whole in any::<bool>()) {
            let mut counter = PacketCounter::default();
            let head = if whole { dump(&[1]) } else { Vec::new() };
            let _ = counter.count(&[head, bytes].concat());
        }
    }
}
