//! The file of a tag: one line with the checkpoint's number and a checksum.
//!
//! The line holds the number in decimal, a space, and the first 16 hexadecimal digits of
//! `BLAKE3("keyframe tag STORE-ID NAME NUMBER")`. So the decoder notices a flipped bit, and also a
//! file that was copied or renamed.

use crate::identity::StoreId;
use keyframe_bytes::hex::to_hex;
use keyframe_units::CheckpointId;

/// The longest file of a tag that is read, in bytes.
pub const TAG_BYTES_MAX: u64 = 256;

/// Encodes the file of `tag`, which points to checkpoint `id`.
pub fn encode(store: StoreId, tag: &str, id: CheckpointId) -> String {
    let hash = blake3::hash(format!("keyframe tag {} {tag} {id}", to_hex(&store.0)).as_bytes());
    format!("{id} {}\n", &hash.to_hex()[..16])
}

/// Parses the file of `tag` and returns the checkpoint that it points to; `None` if the bytes are
/// not those of such a file.
pub fn decode(store: StoreId, tag: &str, bytes: &[u8]) -> Option<CheckpointId> {
    let text = std::str::from_utf8(bytes).ok()?;
    let id = CheckpointId(text.split(' ').next()?.parse().ok()?);
    (encode(store, tag, id) == text).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STORE: StoreId = StoreId([1; 16]);

    #[test]
    fn every_flipped_bit_and_every_renamed_file_is_noticed() {
        let bytes = encode(STORE, "a", CheckpointId(12)).into_bytes();
        assert_eq!(decode(STORE, "a", &bytes), Some(CheckpointId(12)));
        assert_eq!(decode(STORE, "b", &bytes), None);
        assert_eq!(decode(StoreId([2; 16]), "a", &bytes), None);
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(STORE, "a", &flipped), None, "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            prop_assert_eq!(decode(STORE, "a", &bytes), None);
        }
    }
}
