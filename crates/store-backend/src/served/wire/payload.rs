//! The bytes of answers with data: the welcome, names of files and states of files.

use super::name::{put_name, read_name};
use super::{HEAD_BYTES, LIST_BYTES_MAX, MAGIC, VERSION};
use crate::Space;
use keyframe_bytes::ByteReader;

/// The shortest file name of a store besides tags, that of a pack, with its length before it.
const NAME_BYTES_MIN: usize = 14;
/// The largest number of file names in a list. Each becomes a `String`, which takes more memory
/// than a short name took on the wire.
const NAMES_MAX: usize = LIST_BYTES_MAX as usize / NAME_BYTES_MIN;

/// The present state of a file behind a checkpoint server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileStat {
    /// The file's identity: see [`crate::FileStamp::identity`].
    pub identity: u64,
    /// A number that changes with the contents: see [`crate::FileStamp::modified`].
    pub modified: u64,
    /// The length, in bytes.
    pub len_bytes: u64,
    /// The first [`HEAD_BYTES`] bytes, or all if there are fewer.
    pub head: Vec<u8>,
}

/// Encodes the answer to a greeting: the id of the served store.
pub fn encode_welcome(store: [u8; 16]) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes(), &store].concat()
}

/// Decodes the answer to a greeting and returns the id of the served store. Errors, as a text: the
/// peer is no checkpoint server, or speaks another version of the protocol.
pub fn decode_welcome(bytes: &[u8]) -> Result<[u8; 16], String> {
    let mut reader = ByteReader::new(bytes);
    if reader.array::<8>()? != MAGIC {
        return Err("not a checkpoint server".into());
    }
    match reader.u16_le()? {
        VERSION => Ok(reader.array()?),
        other => Err(format!("protocol version {other}; this side speaks version {VERSION}")),
    }
}

/// Encodes states of files, in the order of the request; `None` for a file that does not exist.
pub fn encode_stats(stats: &[Option<FileStat>]) -> Vec<u8> {
    let mut out = Vec::new();
    for stat in stats {
        let Some(stat) = stat else {
            out.push(0);
            continue;
        };
        out.push(1);
        for number in [stat.identity, stat.modified, stat.len_bytes] {
            out.extend(number.to_le_bytes());
        }
        let head = stat.head.get(..stat.head.len().min(HEAD_BYTES)).unwrap_or_default();
        out.push(head.len() as u8);
        out.extend(head);
    }
    out
}

/// Decodes the states of `count` files, in the order of the request. A state is `None` for a file
/// that does not exist. Errors, as a text: the bytes end early or are too many.
pub fn decode_stats(bytes: &[u8], count: usize) -> Result<Vec<Option<FileStat>>, String> {
    let mut reader = ByteReader::new(bytes);
    let mut stats = Vec::new();
    for _ in 0..count {
        if reader.array::<1>()? == [0] {
            stats.push(None);
            continue;
        }
        let (identity, modified, len_bytes) =
            (reader.u64_le()?, reader.u64_le()?, reader.u64_le()?);
        let [len] = reader.array::<1>()?;
        let head = reader.take(usize::from(len))?.to_vec();
        stats.push(Some(FileStat { identity, modified, len_bytes, head }));
    }
    if reader.is_empty() { Ok(stats) } else { Err("more file states than requested".into()) }
}

/// Encodes the space of a medium; `None` if the medium does not tell.
pub fn encode_space(space: Option<Space>) -> Vec<u8> {
    let numbers = space.into_iter().flat_map(|space| [space.total_bytes, space.free_bytes]);
    numbers.flat_map(u64::to_le_bytes).collect()
}

/// Decodes the space of a medium. Error, as a text: the bytes are too few or too many.
pub fn decode_space(bytes: &[u8]) -> Result<Option<Space>, String> {
    let mut reader = ByteReader::new(bytes);
    if reader.is_empty() {
        return Ok(None);
    }
    let space = Space { total_bytes: reader.u64_le()?, free_bytes: reader.u64_le()? };
    if reader.is_empty() { Ok(Some(space)) } else { Err("bytes after the space".into()) }
}

/// Encodes file names, each after its length in one byte. Cuts a name of more than 255 bytes.
pub fn encode_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
    let mut out = Vec::new();
    for name in names {
        put_name(&mut out, name);
    }
    out
}

/// Decodes the file names that [`encode_names`] encoded. Errors, as a text: a name is empty, ends
/// early or is not UTF-8; there are more names than a store can have files.
pub fn decode_names(bytes: &[u8]) -> Result<Vec<String>, String> {
    decode_names_up_to(NAMES_MAX, bytes)
}

/// Decodes at most `names_max` names.
pub(super) fn decode_names_up_to(names_max: usize, bytes: &[u8]) -> Result<Vec<String>, String> {
    let mut reader = ByteReader::new(bytes);
    let mut names = Vec::new();
    while !reader.is_empty() {
        if names.len() == names_max {
            return Err(format!("more than {names_max} file names"));
        }
        let name = read_name(&mut reader)?;
        if name.is_empty() {
            return Err("an empty file name".into());
        }
        names.push(name);
    }
    Ok(names)
}
