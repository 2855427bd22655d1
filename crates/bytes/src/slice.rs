//! Reads a slice from its front.

use thiserror::Error;

/// The reason why a [`ByteReader`] could not read a field. Offsets count bytes from the start of
/// the slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ReadError {
    /// The slice ends inside the field.
    #[error("ends at byte {at} where {wanted} more were expected")]
    Truncated {
        /// Offset of the field's first byte.
        at: usize,
        /// The length of the whole field in bytes.
        wanted: usize,
    },
    /// Bytes follow the last field.
    #[error("{len} more bytes follow its end at byte {at}")]
    Trailing {
        /// Offset of the first of these bytes.
        at: usize,
        /// The number of these bytes.
        len: usize,
    },
    /// A varint is longer than 10 bytes, exceeds 64 bits, or is not in its shortest form.
    #[error("malformed number at byte {at}")]
    Varint {
        /// Offset of the varint's first byte.
        at: usize,
    },
}

impl From<ReadError> for String {
    fn from(error: ReadError) -> Self {
        error.to_string()
    }
}

/// Reads fields from the front of a slice. A read that fails consumes nothing.
#[derive(Clone, Debug)]
pub struct ByteReader<'a> {
    remaining: &'a [u8],
    len: usize,
}

impl<'a> ByteReader<'a> {
    /// Starts at the first byte of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { remaining: bytes, len: bytes.len() }
    }

    /// Returns the number of bytes consumed so far.
    pub fn position(&self) -> usize {
        self.len - self.remaining.len()
    }

    /// Returns true if no bytes remain.
    pub fn is_empty(&self) -> bool {
        self.remaining.is_empty()
    }

    /// Returns the bytes that remain, without consuming them.
    pub fn remaining(&self) -> &'a [u8] {
        self.remaining
    }

    /// Checks that no bytes remain. Error: [`ReadError::Trailing`] if some do.
    pub fn expect_end(&self) -> Result<(), ReadError> {
        match self.remaining.len() {
            0 => Ok(()),
            len => Err(ReadError::Trailing { at: self.position(), len }),
        }
    }

    /// Reads the next `len` bytes. Error: [`ReadError::Truncated`] if fewer remain.
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], ReadError> {
        let (head, tail) = self
            .remaining
            .split_at_checked(len)
            .ok_or(ReadError::Truncated { at: self.position(), wanted: len })?;
        self.remaining = tail;
        Ok(head)
    }

    /// Reads the next `N` bytes. Error: [`ReadError::Truncated`] if fewer remain.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], ReadError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    /// Reads one byte. Error: [`ReadError::Truncated`] if none remains.
    pub fn u8(&mut self) -> Result<u8, ReadError> {
        self.array().map(u8::from_le_bytes)
    }

    /// Reads a little-endian number of 2 bytes. Error: [`ReadError::Truncated`] if fewer remain.
    pub fn u16_le(&mut self) -> Result<u16, ReadError> {
        self.array().map(u16::from_le_bytes)
    }

    /// Reads a little-endian number of 4 bytes. Error: [`ReadError::Truncated`] if fewer remain.
    pub fn u32_le(&mut self) -> Result<u32, ReadError> {
        self.array().map(u32::from_le_bytes)
    }

    /// Reads a little-endian number of 8 bytes. Error: [`ReadError::Truncated`] if fewer remain.
    pub fn u64_le(&mut self) -> Result<u64, ReadError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a little-endian number of 16 bytes. Error: [`ReadError::Truncated`] if fewer remain.
    pub fn u128_le(&mut self) -> Result<u128, ReadError> {
        self.array().map(u128::from_le_bytes)
    }

    /// Reads a big-endian number of 2 bytes. Error: [`ReadError::Truncated`] if fewer remain.
    pub fn u16_be(&mut self) -> Result<u16, ReadError> {
        self.array().map(u16::from_be_bytes)
    }

    /// Reads a big-endian number of 4 bytes. Error: [`ReadError::Truncated`] if fewer remain.
    pub fn u32_be(&mut self) -> Result<u32, ReadError> {
        self.array().map(u32::from_be_bytes)
    }

    /// Reads a big-endian number of 8 bytes. Error: [`ReadError::Truncated`] if fewer remain.
    pub fn u64_be(&mut self) -> Result<u64, ReadError> {
        self.array().map(u64::from_be_bytes)
    }

    /// Reads a varint (see [`crate::varint`]) in its shortest form. Errors:
    /// [`ReadError::Truncated`] if the bytes end in it, [`ReadError::Varint`] if it is longer than
    /// its shortest form or exceeds 64 bits.
    #[inline]
    pub fn varint(&mut self) -> Result<u64, ReadError> {
        // Page maps hold almost only varints of one or two bytes.
        let (len, value) = match *self.remaining {
            [a, ..] if a < 0x80 => (1, u64::from(a)),
            [a, b, ..] if b < 0x80 && b > 0 => (2, u64::from(a & 0x7f) | u64::from(b) << 7),
            _ => return self.long_varint(),
        };
        self.remaining = &self.remaining[len..];
        Ok(value)
    }

    fn long_varint(&mut self) -> Result<u64, ReadError> {
        let mut after = self.clone();
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = after.u8()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                if byte == 0 && shift > 0 {
                    break;
                }
                *self = after;
                return Ok(value);
            }
        }
        Err(ReadError::Varint { at: self.position() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn fields_come_back_and_a_short_slice_is_noticed(
            a in any::<u8>(), b in any::<u16>(), c in any::<u32>(), d in any::<u64>(),
            e in any::<u128>(), cut in 0usize..45,
        ) {
            let bytes = [
                &[a][..], &b.to_le_bytes(), &c.to_le_bytes(), &d.to_le_bytes(), &e.to_le_bytes(),
                &b.to_be_bytes(), &c.to_be_bytes(), &d.to_be_bytes(),
            ].concat();
            prop_assert_eq!(bytes.len(), 45);
            let read = |bytes: &[u8]| -> Result<_, ReadError> {
                let mut reader = ByteReader::new(bytes);
                let little = (
                    reader.u8()?, reader.u16_le()?, reader.u32_le()?, reader.u64_le()?,
                    reader.u128_le()?,
                );
                let big = (reader.u16_be()?, reader.u32_be()?, reader.u64_be()?);
                reader.expect_end()?;
                Ok((little, big))
            };
            prop_assert_eq!(read(&bytes), Ok(((a, b, c, d, e), (b, c, d))));
            let short = read(&bytes[..cut]);
            let truncated = matches!(short, Err(ReadError::Truncated { at, .. }) if at <= cut);
            prop_assert!(truncated, "{:?}", short);
            let long = read(&[&bytes[..], &[0; 3]].concat());
            prop_assert_eq!(long, Err(ReadError::Trailing { at: 45, len: 3 }));
        }

        #[test]
        fn a_failed_read_consumes_nothing(bytes in prop::collection::vec(any::<u8>(), 0..12)) {
            let mut reader = ByteReader::new(&bytes);
            while reader.varint().is_ok() {}
            let left = reader.remaining().len();
            prop_assert!(reader.take(left + 1).is_err());
            prop_assert_eq!(reader.remaining().len(), left);
        }
    }
}
