//! The bounded reader and the number encodings of `keyframe-bytes`, under the names that the
//! store's decoders use.

pub use keyframe_bytes::ByteReader as Cursor;
pub use keyframe_bytes::hex::{from_hex, to_hex};
pub use keyframe_bytes::varint::{apply_zigzag, put_varint, zigzag_delta};

/// The reason why bytes could not be decoded, without the object that they belong to, which the
/// caller adds.
pub type Problem = String;
