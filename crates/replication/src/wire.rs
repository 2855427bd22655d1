//! The encoding that messages share: little-endian numbers, optional numbers, unknown values.

use keyframe_bytes::{ByteReader, ReadError};
use thiserror::Error;

/// The reason why bytes are not a valid message.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The message is too short or too long.
    #[error("malformed message: {0}")]
    Read(#[from] ReadError),
    /// The sender has another version of the protocol.
    #[error("the message has version {version} of the protocol; this build knows version {known}")]
    Version {
        /// The sender's version.
        version: u8,
        /// The known version.
        known: u8,
    },
    /// A field has an unknown value.
    #[error("{field} has the unknown value {value} at byte {at}")]
    UnknownValue {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u8,
        /// The offset of the value in the message, in bytes.
        at: usize,
    },
    /// A field exceeds its limit.
    #[error("{field} has the length {len}; at most {max} is allowed")]
    TooLong {
        /// The field.
        field: &'static str,
        /// The length of the field: of a text in bytes, of a list in entries.
        len: usize,
        /// The largest length, in the same unit.
        max: usize,
    },
    /// A text is not UTF-8.
    #[error("{field} is not UTF-8 text")]
    NotUtf8 {
        /// The field.
        field: &'static str,
    },
}

/// Reads the version, a byte, which must be `known`. Errors: [`DecodeError::Read`] if the bytes
/// have ended; [`DecodeError::Version`] if they name another version.
pub fn read_version(reader: &mut ByteReader<'_>, known: u8) -> Result<(), DecodeError> {
    match reader.u8()? {
        version if version == known => Ok(()),
        version => Err(DecodeError::Version { version, known }),
    }
}

/// Reads a byte, and a number if the byte is 1. Returns `None` if the byte is 0. `field` names the
/// number in errors. Errors: [`DecodeError::Read`] if the bytes have ended;
/// [`DecodeError::UnknownValue`] if the first one is neither 0 nor 1.
pub fn read_optional(
    reader: &mut ByteReader<'_>,
    field: &'static str,
) -> Result<Option<u64>, DecodeError> {
    match reader.u8()? {
        0 => Ok(None),
        1 => Ok(Some(reader.u64_le()?)),
        value => Err(unknown_value(reader, field, value)),
    }
}

/// Returns the error for `value`, the byte that was read last.
pub fn unknown_value(reader: &ByteReader<'_>, field: &'static str, value: u8) -> DecodeError {
    DecodeError::UnknownValue { field, value, at: reader.position().saturating_sub(1) }
}

/// Appends each of `numbers` in 8 bytes, little-endian.
pub fn put(out: &mut Vec<u8>, numbers: &[u64]) {
    for number in numbers {
        out.extend_from_slice(&number.to_le_bytes());
    }
}

/// Appends `number` in the form that [`read_optional`] reads: a byte 0 for `None`, or else a byte 1
/// and the number in 8 bytes.
pub fn put_optional(out: &mut Vec<u8>, number: Option<u64>) {
    out.push(u8::from(number.is_some()));
    put(out, number.as_slice());
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_the_golden_ones() {
        let errors = [
            DecodeError::Read(ReadError::Truncated { at: 7, wanted: 8 }),
            DecodeError::Read(ReadError::Trailing { at: 12, len: 3 }),
            DecodeError::Version { version: 9, known: 1 },
            DecodeError::UnknownValue { field: "kind", value: 77, at: 1 },
            DecodeError::TooLong { field: "reason", len: 600, max: 512 },
            DecodeError::NotUtf8 { field: "reason" },
        ];
        let texts: Vec<String> = errors.iter().map(|e| error_text(e, None)).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
