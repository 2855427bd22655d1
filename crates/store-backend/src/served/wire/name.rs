//! The encoding of a file's name: its length in one byte, then its text.

use keyframe_bytes::ByteReader;

/// Appends a name. A name of more than 255 bytes is cut.
pub(super) fn put_name(out: &mut Vec<u8>, name: &str) {
    let name = name.as_bytes().get(..name.len().min(255)).unwrap_or_default();
    out.push(name.len() as u8);
    out.extend(name);
}

/// Reads a name. Fails if it is not UTF-8, or if it ends early.
pub(super) fn read_name(reader: &mut ByteReader<'_>) -> Result<String, String> {
    let [len] = reader.array::<1>()?;
    let bytes = reader.take(usize::from(len))?.to_vec();
    String::from_utf8(bytes).map_err(|_| "a name that is not text".into())
}
