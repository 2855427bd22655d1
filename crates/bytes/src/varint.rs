//! Integers of variable length, and differences as small integers.
//!
//! A varint is little-endian base 128: 7 bits a byte, the high bit set on all bytes but the last,
//! at most 10 bytes. [`crate::ByteReader::varint`] accepts the shortest form alone, so each number
//! has one encoding. Zigzag maps small signed numbers to small unsigned ones: 0, -1, 1, -2 become
//! 0, 1, 2, 3.

/// Appends `value` as a varint in its shortest form, 1 to 10 bytes.
pub fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Returns the difference `to - from` (modulo 2^64) as a zigzag number.
pub fn zigzag_delta(from: u64, to: u64) -> u64 {
    let delta = to.wrapping_sub(from).cast_signed();
    ((delta << 1) ^ (delta >> 63)).cast_unsigned()
}

/// Returns `from` plus the difference `delta`: the number `to` for which [`zigzag_delta`] of `from`
/// and `to` is `delta`.
pub fn apply_zigzag(from: u64, delta: u64) -> u64 {
    from.wrapping_add((delta >> 1) ^ (delta & 1).wrapping_neg())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ByteReader;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_come_back(
            values in prop::collection::vec(
                prop_oneof![any::<u64>(), 0u64..300, Just(u64::MAX)], 0..40),
        ) {
            let mut bytes = Vec::new();
            let mut previous = 0;
            for v in &values {
                put_varint(&mut bytes, *v);
                put_varint(&mut bytes, zigzag_delta(previous, *v));
                previous = *v;
            }
            let mut reader = ByteReader::new(&bytes);
            previous = 0;
            for v in &values {
                prop_assert_eq!(reader.varint().unwrap(), *v);
                previous = apply_zigzag(previous, reader.varint().unwrap());
                prop_assert_eq!(previous, *v);
            }
            prop_assert!(reader.is_empty());
        }

        #[test]
        fn a_number_has_one_encoding(bytes in prop::collection::vec(any::<u8>(), 0..12)) {
            let mut reader = ByteReader::new(&bytes);
            if let Ok(value) = reader.varint() {
                let mut again = Vec::new();
                put_varint(&mut again, value);
                prop_assert_eq!(&again[..], &bytes[..reader.position()]);
            }
        }
    }

    #[test]
    fn small_steps_take_one_byte() {
        for (from, to) in [(1000, 1000), (1000, 1063), (1000, 937)] {
            assert!(zigzag_delta(from, to) < 128, "{from} to {to}");
        }
    }
}
