//! Little-endian numbers in a slice, read with bounds.

use keyframe_bytes::{ByteReader, ReadError};
use thiserror::Error;

/// Why bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// It ends in the middle.
    #[error("the message ends at byte {at}, in the middle of a field of {need} bytes")]
    Short {
        /// Where the field begins.
        at: usize,
        /// How long it is.
        need: usize,
    },
    /// Bytes behind the end.
    #[error("{0} bytes behind the message")]
    Trailing(usize),
    /// Another version of the protocol.
    #[error("version {0} of the protocol is not known")]
    Version(u8),
    /// A kind, or a value of a field, that is not known.
    #[error("{field} has the unknown value {value} at byte {at}")]
    Value {
        /// Which field.
        field: &'static str,
        /// What it holds.
        value: u8,
        /// Where.
        at: usize,
    },
    /// Longer than allowed.
    #[error("{field} is {len} long, more than {max}")]
    Long {
        /// Which field.
        field: &'static str,
        /// How long it is.
        len: usize,
        /// What is allowed.
        max: usize,
    },
    /// Not UTF-8.
    #[error("{0} is no text")]
    Text(&'static str),
}

impl From<ReadError> for DecodeError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Truncated { at, wanted } => Self::Short { at, need: wanted },
            ReadError::Trailing { len, .. } => Self::Trailing(len),
            // No message holds a varint.
            ReadError::Varint { at } => Self::Value { field: "a number", value: 0, at },
        }
    }
}

/// Reads fields one after the other.
pub struct Reader<'a>(ByteReader<'a>);

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(ByteReader::new(bytes))
    }

    pub fn take(&mut self, need: usize) -> Result<&'a [u8], DecodeError> {
        Ok(self.0.take(need)?)
    }

    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.0.u8()?)
    }

    pub fn u16(&mut self) -> Result<u16, DecodeError> {
        Ok(self.0.u16_le()?)
    }

    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(self.0.u32_le()?)
    }

    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(self.0.u64_le()?)
    }

    pub fn u128(&mut self) -> Result<u128, DecodeError> {
        Ok(self.0.u128_le()?)
    }

    /// A number behind a byte that says whether there is one.
    pub fn option(&mut self, field: &'static str) -> Result<Option<u64>, DecodeError> {
        match self.u8()? {
            0 => Ok(None),
            1 => self.u64().map(Some),
            value => Err(self.unknown(field, value)),
        }
    }

    /// The error for the byte that was read last.
    pub fn unknown(&self, field: &'static str, value: u8) -> DecodeError {
        DecodeError::Value { field, value, at: self.0.position().saturating_sub(1) }
    }

    pub fn end(self) -> Result<(), DecodeError> {
        Ok(self.0.expect_end()?)
    }
}

pub fn put(out: &mut Vec<u8>, numbers: &[u64]) {
    for number in numbers {
        out.extend_from_slice(&number.to_le_bytes());
    }
}

pub fn put_option(out: &mut Vec<u8>, number: Option<u64>) {
    out.push(u8::from(number.is_some()));
    put(out, number.as_slice());
}
