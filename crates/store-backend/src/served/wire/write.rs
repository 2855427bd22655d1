//! What a writer asks the server to do in its place, and the encoding of it.
//!
//! A writer numbers its acts. The server carries out each number once, so a client may send an act
//! again whose answer did not come.

use super::name::{put_name, read_name};
use super::{NAMES_PER_ACT_MAX, WRITE_BYTES_MAX};
use crate::STATE_BYTES_MAX;
use keyframe_bytes::ByteReader;

/// The secret number by which a server knows a writer. Any process that has it can write as that
/// writer.
pub type WriterId = [u8; 16];

/// An act of a writer behind a checkpoint server. The names are those of files of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteAct {
    /// The writer has started: others may start.
    Started,
    /// Shows a state to other processes ([`crate::WriterSlot::tell`]).
    Tell {
        /// The state.
        state: Vec<u8>,
    },
    /// Creates an empty file that grows.
    Create {
        /// Its name.
        name: String,
    },
    /// Appends to a file that this writer created.
    Append {
        /// Its name.
        name: String,
        /// Its length before, in bytes. The server refuses if it has another one.
        offset: u64,
        /// The bytes to append.
        bytes: Vec<u8>,
    },
    /// Makes a file durable that this writer created and has open.
    SyncOpen {
        /// Its name.
        name: String,
    },
    /// Truncates a file that this writer created.
    Truncate {
        /// Its name.
        name: String,
        /// Its length afterwards, in bytes.
        len_bytes: u64,
    },
    /// Closes a file that grows: nothing more is appended.
    Close {
        /// Its name.
        name: String,
    },
    /// Keeps bytes for the next [`Self::Put`].
    Stage {
        /// The number of bytes that were kept before. At 0, the server drops what it has kept.
        offset: u64,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Writes a file as a whole: the staged bytes, then `bytes`.
    Put {
        /// Its name.
        name: String,
        /// True if the file must not exist yet.
        is_new: bool,
        /// The number of staged bytes.
        staged: u64,
        /// The last bytes of the file.
        bytes: Vec<u8>,
    },
    /// Removes a file.
    Remove {
        /// Its name.
        name: String,
    },
    /// Removes files of one folder, and makes all earlier changes of the folder durable.
    RemoveAll {
        /// The folder.
        folder: String,
        /// The names of the files, without the folder.
        names: Vec<String>,
    },
    /// Makes an existing file durable.
    Sync {
        /// Its name.
        name: String,
    },
    /// The writer ends: its place is free.
    Leave,
}

const STARTED: u8 = 1;
const TELL: u8 = 2;
const CREATE: u8 = 3;
const APPEND: u8 = 4;
const SYNC_OPEN: u8 = 5;
const TRUNCATE: u8 = 6;
const CLOSE: u8 = 7;
const STAGE: u8 = 8;
const PUT: u8 = 9;
const REMOVE: u8 = 10;
const REMOVE_ALL: u8 = 11;
const SYNC: u8 = 12;
const LEAVE: u8 = 13;

impl WriteAct {
    /// Appends the encoded act.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Started => out.push(STARTED),
            Self::Tell { state } => {
                out.push(TELL);
                put_bytes(out, state);
            }
            Self::Create { name } => of_name(out, CREATE, name),
            Self::Append { name, offset, bytes } => {
                of_name(out, APPEND, name);
                out.extend(offset.to_le_bytes());
                put_bytes(out, bytes);
            }
            Self::SyncOpen { name } => of_name(out, SYNC_OPEN, name),
            Self::Truncate { name, len_bytes } => {
                of_name(out, TRUNCATE, name);
                out.extend(len_bytes.to_le_bytes());
            }
            Self::Close { name } => of_name(out, CLOSE, name),
            Self::Stage { offset, bytes } => {
                out.push(STAGE);
                out.extend(offset.to_le_bytes());
                put_bytes(out, bytes);
            }
            Self::Put { name, is_new, staged, bytes } => {
                of_name(out, PUT, name);
                out.push(u8::from(*is_new));
                out.extend(staged.to_le_bytes());
                put_bytes(out, bytes);
            }
            Self::Remove { name } => of_name(out, REMOVE, name),
            Self::RemoveAll { folder, names } => {
                of_name(out, REMOVE_ALL, folder);
                out.extend((names.len() as u16).to_le_bytes());
                for name in names {
                    put_name(out, name);
                }
            }
            Self::Sync { name } => of_name(out, SYNC, name),
            Self::Leave => out.push(LEAVE),
        }
    }

    /// Decodes an act. Error, as a text: the problem.
    pub(super) fn parse(reader: &mut ByteReader<'_>) -> Result<Self, String> {
        Ok(match reader.array::<1>()? {
            [STARTED] => Self::Started,
            [TELL] => Self::Tell { state: read_bytes(reader, STATE_BYTES_MAX)? },
            [CREATE] => Self::Create { name: read_name(reader)? },
            [APPEND] => Self::Append {
                name: read_name(reader)?,
                offset: reader.u64_le()?,
                bytes: read_bytes(reader, WRITE_BYTES_MAX)?,
            },
            [SYNC_OPEN] => Self::SyncOpen { name: read_name(reader)? },
            [TRUNCATE] => Self::Truncate { name: read_name(reader)?, len_bytes: reader.u64_le()? },
            [CLOSE] => Self::Close { name: read_name(reader)? },
            [STAGE] => Self::Stage {
                offset: reader.u64_le()?,
                bytes: read_bytes(reader, WRITE_BYTES_MAX)?,
            },
            [PUT] => Self::Put {
                name: read_name(reader)?,
                is_new: read_flag(reader)?,
                staged: reader.u64_le()?,
                bytes: read_bytes(reader, WRITE_BYTES_MAX)?,
            },
            [REMOVE] => Self::Remove { name: read_name(reader)? },
            [REMOVE_ALL] => {
                let folder = read_name(reader)?;
                let count = usize::from(reader.u16_le()?);
                if count > NAMES_PER_ACT_MAX {
                    return Err(format!("{count} names at once"));
                }
                let names = (0..count).map(|_| read_name(reader)).collect::<Result<_, _>>()?;
                Self::RemoveAll { folder, names }
            }
            [SYNC] => Self::Sync { name: read_name(reader)? },
            [LEAVE] => Self::Leave,
            [kind] => return Err(format!("act {kind}")),
        })
    }
}

fn of_name(out: &mut Vec<u8>, kind: u8, name: &str) {
    out.push(kind);
    put_name(out, name);
}

/// Appends bytes after their length.
fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(bytes);
}

fn read_bytes(reader: &mut ByteReader<'_>, len_max: usize) -> Result<Vec<u8>, String> {
    let len = reader.u32_le()? as usize;
    if len > len_max {
        return Err(format!("{len} bytes at once"));
    }
    Ok(reader.take(len)?.to_vec())
}

/// Reads a flag.
pub(super) fn read_flag(reader: &mut ByteReader<'_>) -> Result<bool, String> {
    match reader.array::<1>()? {
        [0] => Ok(false),
        [1] => Ok(true),
        [other] => Err(format!("flag {other}")),
    }
}
