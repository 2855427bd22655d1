//! Packet framing: `$payload#checksum`, the acknowledgements `+` and `-`, and a byte 3 that asks to
//! stop the target.

/// The largest number of bytes of a packet that is accepted.
pub const PACKET_BYTES_MAX: usize = 1 << 20;
const INTERRUPT: u8 = 3;

/// An element of the byte stream of GDB's remote protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodedItem {
    /// The payload of a packet. Its escape sequences are not decoded.
    Packet(Vec<u8>),
    /// A packet whose checksum is wrong.
    Corrupt,
    /// The other end has received the last packet.
    Ack,
    /// The other end asks for the last packet again.
    Nack,
    /// A request to stop the target.
    Interrupt,
}

/// Splits a byte stream of GDB's remote protocol into packets, acknowledgements and requests to
/// stop.
#[derive(Debug, Default)]
pub struct PacketDecoder {
    bytes: Vec<u8>,
}

impl PacketDecoder {
    /// Appends received bytes, which [`Self::next_item`] splits into items.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next complete item; `None` until more bytes arrive. Drops bytes that belong to
    /// no item.
    ///
    /// Error: a packet that does not end within [`PACKET_BYTES_MAX`].
    pub fn next_item(&mut self) -> Result<Option<DecodedItem>, String> {
        // Dropping them one by one would take quadratic time.
        let begins = |byte: &u8| matches!(*byte, b'+' | b'-' | b'$' | INTERRUPT);
        let skipped = self.bytes.iter().position(begins).unwrap_or(self.bytes.len());
        self.bytes.drain(..skipped);
        let item = match self.bytes.first() {
            None => return Ok(None),
            Some(b'$') => return self.packet(),
            Some(b'+') => DecodedItem::Ack,
            Some(b'-') => DecodedItem::Nack,
            Some(_) => DecodedItem::Interrupt,
        };
        self.bytes.remove(0);
        Ok(Some(item))
    }

    fn packet(&mut self) -> Result<Option<DecodedItem>, String> {
        let end = self.bytes.iter().position(|byte| *byte == b'#');
        let Some(end) = end.filter(|end| end + 2 < self.bytes.len()) else {
            let len = end.unwrap_or(self.bytes.len());
            if len > PACKET_BYTES_MAX {
                return Err(format!("a packet of more than {PACKET_BYTES_MAX} bytes"));
            }
            return Ok(None);
        };
        let payload = self.bytes[1..end].to_vec();
        let expected = std::str::from_utf8(&self.bytes[end + 1..end + 3]).ok();
        let expected = expected.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        self.bytes.drain(..end + 3);
        let is_intact = expected == Some(checksum(&payload));
        Ok(Some(if is_intact { DecodedItem::Packet(payload) } else { DecodedItem::Corrupt }))
    }
}

/// Returns the packet with this payload: `$payload#checksum`. The caller has escaped the payload.
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

    fn all(bytes: &[u8]) -> Vec<DecodedItem> {
        let mut decoder = PacketDecoder::default();
        decoder.feed(bytes);
        std::iter::from_fn(|| decoder.next_item().unwrap()).collect()
    }

    #[test]
    fn items_come_out_in_order() {
        let packet = |text: &str| DecodedItem::Packet(text.into());
        assert_eq!(
            all(b"+$OK#9a\x03-"),
            [DecodedItem::Ack, packet("OK"), DecodedItem::Interrupt, DecodedItem::Nack]
        );
        assert_eq!(all(b"xx$OK#9b$#00"), [DecodedItem::Corrupt, packet("")]);
        assert_eq!(all(b"$OK#9"), []);
        assert_eq!(all(b"$OK#zz"), [DecodedItem::Corrupt]);
    }

    #[test]
    fn an_endless_packet_is_an_error() {
        let mut decoder = PacketDecoder::default();
        decoder.feed(b"$");
        decoder.feed(&vec![b'a'; PACKET_BYTES_MAX + 1]);
        assert!(decoder.next_item().is_err());
    }

    proptest! {
        /// A framed packet is decoded again, however the stream is cut.
        #[test]
        fn frames_survive_any_cut(texts in prop::collection::vec("[ -\"%-~]{0,40}", 0..5), cut in 1usize..7) {
            let bytes: Vec<u8> = texts.iter().flat_map(|text| frame(text.as_bytes())).collect();
            let mut decoder = PacketDecoder::default();
            let mut found = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.feed(piece);
                while let Some(item) = decoder.next_item().unwrap() {
                    found.push(item);
                }
            }
            let expected: Vec<_> = texts.into_iter().map(|text| DecodedItem::Packet(text.into_bytes())).collect();
            prop_assert_eq!(found, expected);
        }

        /// Arbitrary bytes do not make the decoder panic or loop.
        #[test]
        fn arbitrary_bytes_are_decoded(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let found = all(&bytes);
            prop_assert!(found.len() <= bytes.len());
        }
    }
}
