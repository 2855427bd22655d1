//! Frames: `$payload#checksum`, with `+` and `-` for what arrived and what did not, and a byte 3
//! that interrupts.

/// More than any stub or debugger sends at once.
pub const PACKET_BYTES_MAX: usize = 1 << 20;
const INTERRUPT: u8 = 3;

/// What comes over a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// A packet's payload, as it was framed.
    Packet(Vec<u8>),
    /// A packet whose checksum is wrong.
    Garbled,
    /// What was sent last has arrived.
    Ack,
    /// What was sent last is to be sent again.
    Nack,
    /// The user wants the target to stop.
    Interrupt,
}

/// Takes items out of bytes as they come.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
}

impl Decoder {
    /// Adds what has come.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next item that is whole. What is none is dropped.
    ///
    /// Error: a packet that does not end within [`PACKET_BYTES_MAX`].
    pub fn next_item(&mut self) -> Result<Option<Item>, String> {
        // All that is none at once: byte by byte it would take time that grows with its square.
        let begins = |byte: &u8| matches!(*byte, b'+' | b'-' | b'$' | INTERRUPT);
        let none = self.bytes.iter().position(begins).unwrap_or(self.bytes.len());
        self.bytes.drain(..none);
        let item = match self.bytes.first() {
            None => return Ok(None),
            Some(b'$') => return self.packet(),
            Some(b'+') => Item::Ack,
            Some(b'-') => Item::Nack,
            Some(_) => Item::Interrupt,
        };
        self.bytes.remove(0);
        Ok(Some(item))
    }

    fn packet(&mut self) -> Result<Option<Item>, String> {
        let end = self.bytes.iter().position(|byte| *byte == b'#');
        let Some(end) = end.filter(|end| end + 2 < self.bytes.len()) else {
            let len = end.unwrap_or(self.bytes.len());
            if len > PACKET_BYTES_MAX {
                return Err(format!("a packet of more than {PACKET_BYTES_MAX} bytes"));
            }
            return Ok(None);
        };
        let payload = self.bytes[1..end].to_vec();
        let told = std::str::from_utf8(&self.bytes[end + 1..end + 3]).ok();
        let told = told.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        self.bytes.drain(..end + 3);
        let is_whole = told == Some(checksum(&payload));
        Ok(Some(if is_whole { Item::Packet(payload) } else { Item::Garbled }))
    }
}

/// A payload in its frame.
pub fn frame(payload: &[u8]) -> Vec<u8> {
    let sum = format!("#{:02x}", checksum(payload));
    [b"$", payload, sum.as_bytes()].concat()
}

fn checksum(payload: &[u8]) -> u8 {
    payload.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(bytes: &[u8]) -> Vec<Item> {
        let mut decoder = Decoder::default();
        decoder.feed(bytes);
        std::iter::from_fn(|| decoder.next_item().unwrap()).collect()
    }

    #[test]
    fn items_come_out_in_order() {
        let packet = |text: &str| Item::Packet(text.into());
        assert_eq!(all(b"+$OK#9a\x03-"), [Item::Ack, packet("OK"), Item::Interrupt, Item::Nack]);
        assert_eq!(all(b"xx$OK#9b$#00"), [Item::Garbled, packet("")]);
        assert_eq!(all(b"$OK#9"), []);
        assert_eq!(all(b"$OK#zz"), [Item::Garbled]);
    }

    #[test]
    fn a_packet_without_end_is_an_error() {
        let mut decoder = Decoder::default();
        decoder.feed(b"$");
        decoder.feed(&vec![b'a'; PACKET_BYTES_MAX + 1]);
        assert!(decoder.next_item().is_err());
    }

    proptest! {
        /// Whatever is framed comes out again, however it is cut up on its way.
        #[test]
        fn frames_survive_any_cut(texts in prop::collection::vec("[ -\"%-~]{0,40}", 0..5), cut in 1usize..7) {
            let bytes: Vec<u8> = texts.iter().flat_map(|text| frame(text.as_bytes())).collect();
            let mut decoder = Decoder::default();
            let mut found = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.feed(piece);
                while let Some(item) = decoder.next_item().unwrap() {
                    found.push(item);
                }
            }
            let expected: Vec<_> = texts.into_iter().map(|text| Item::Packet(text.into_bytes())).collect();
            prop_assert_eq!(found, expected);
        }

        /// No bytes make it panic, and it always comes to an end.
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let found = all(&bytes);
            prop_assert!(found.len() <= bytes.len());
        }
    }
}
