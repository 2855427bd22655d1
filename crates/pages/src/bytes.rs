//! Reading outside bytes: a cursor that cannot run past its end, and variable-length integers.
//!
//! A varint is little-endian base 128, the high bit set on all bytes but the last, at most 10
//! bytes, in the shortest form (any other form is refused, so that a number has one encoding).
//! Zigzag maps small negative numbers to small unsigned ones: 0, -1, 1, -2, ... become 0, 1, 2, 3,
//! ...

/// Why bytes could not be decoded; the caller adds the object.
pub type Problem = String;

/// A slice that is consumed from its front.
pub struct Cursor<'a> {
    left: &'a [u8],
    len: usize,
}

impl<'a> Cursor<'a> {
    /// At the beginning of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { left: bytes, len: bytes.len() }
    }

    /// Bytes consumed so far.
    pub fn position(&self) -> usize {
        self.len - self.left.len()
    }

    /// True at the end.
    pub fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// All that is left.
    pub fn rest(self) -> &'a [u8] {
        self.left
    }

    /// The next `len` bytes.
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], Problem> {
        let (head, tail) = self.left.split_at_checked(len).ok_or_else(|| {
            format!("ends at byte {} where {len} more were expected", self.position())
        })?;
        self.left = tail;
        Ok(head)
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Problem> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    /// The next number of 4 bytes, little-endian.
    pub fn u32(&mut self) -> Result<u32, Problem> {
        self.array().map(u32::from_le_bytes)
    }

    /// The next number of 8 bytes, little-endian.
    pub fn u64(&mut self) -> Result<u64, Problem> {
        self.array().map(u64::from_le_bytes)
    }

    /// The next number of variable length.
    #[inline]
    pub fn varint(&mut self) -> Result<u64, Problem> {
        // Nearly all in maps are as short as that.
        let (len, value) = match *self.left {
            [a, ..] if a < 0x80 => (1, u64::from(a)),
            [a, b, ..] if b < 0x80 && b > 0 => (2, u64::from(a & 0x7f) | u64::from(b) << 7),
            _ => return self.long_varint(),
        };
        self.left = &self.left[len..];
        Ok(value)
    }

    fn long_varint(&mut self) -> Result<u64, Problem> {
        let at = self.position();
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let [byte] = self.array()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                if byte == 0 && shift > 0 {
                    break;
                }
                return Ok(value);
            }
        }
        Err(format!("malformed number at byte {at}"))
    }
}

/// Appends `value` in as few bytes as it takes.
pub fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// The difference `to - from` (modulo 2^64) as a zigzag number.
pub fn zigzag_delta(from: u64, to: u64) -> u64 {
    let delta = to.wrapping_sub(from).cast_signed();
    ((delta << 1) ^ (delta >> 63)).cast_unsigned()
}

/// The inverse of [`zigzag_delta`]: what `from` was followed by.
pub fn apply_zigzag(from: u64, delta: u64) -> u64 {
    from.wrapping_add((delta >> 1) ^ (delta & 1).wrapping_neg())
}

/// Lower-case hexadecimal.
pub fn to_hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The bytes that `N * 2` lower-case hexadecimal digits stand for.
pub fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |c: &u8| match c {
        b'0'..=b'9' => Some(c - b'0'),
        b'a'..=b'f' => Some(c - b'a' + 10),
        _ => None,
    };
    let mut out = [0; N];
    if text.len() != N * 2 {
        return None;
    }
    for (byte, pair) in out.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = digit(pair.first()?)? << 4 | digit(pair.last()?)?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_come_back(values in prop::collection::vec(prop_oneof![any::<u64>(), 0u64..300, Just(u64::MAX)], 0..40)) {
            let mut bytes = Vec::new();
            let mut previous = 0;
            for v in &values {
                put_varint(&mut bytes, *v);
                put_varint(&mut bytes, zigzag_delta(previous, *v));
                previous = *v;
            }
            let mut cursor = Cursor::new(&bytes);
            previous = 0;
            for v in &values {
                prop_assert_eq!(cursor.varint().unwrap(), *v);
                previous = apply_zigzag(previous, cursor.varint().unwrap());
                prop_assert_eq!(previous, *v);
            }
            prop_assert!(cursor.is_empty());
        }

        /// Whatever decodes was written in that very form: no second encoding of a number is
        /// accepted.
        #[test]
        fn any_bytes_decode_to_their_one_encoding_or_not_at_all(bytes in prop::collection::vec(any::<u8>(), 0..12)) {
            let mut cursor = Cursor::new(&bytes);
            if let Ok(value) = cursor.varint() {
                let mut again = Vec::new();
                put_varint(&mut again, value);
                prop_assert_eq!(&again[..], &bytes[..cursor.position()]);
            }
        }

        #[test]
        fn hex_comes_back(bytes in any::<[u8; 16]>(), other in "[0-9a-fA-Fxyz]{30,34}") {
            prop_assert_eq!(from_hex::<16>(&to_hex(&bytes)), Some(bytes));
            if let Some(parsed) = from_hex::<16>(&other) {
                prop_assert_eq!(to_hex(&parsed), other);
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
