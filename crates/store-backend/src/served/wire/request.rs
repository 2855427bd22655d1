//! The requests of a client and their encoding.

use super::name::{put_name, read_name};
use super::write::read_flag;
use super::{
    HEAD_BYTES, HOLDER_BYTES_MAX, KnownHash, LIST_BYTES_MAX, MAGIC, RANGE_BYTES_MAX, STATS_MAX,
    TOKEN_BYTES_MAX, VERSION, WriteAct, WriterId,
};
use keyframe_bytes::ByteReader;

/// A request of a client to a checkpoint server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The greeting: always the first request.
    Hello {
        /// The token that proves the client's right to read; empty if the server needs none.
        token: Vec<u8>,
    },
    /// Asks for the names of the files in a folder.
    List {
        /// The folder.
        folder: String,
    },
    /// Asks for a whole file.
    File {
        /// The name of the file.
        name: String,
        /// The longest file that the client accepts, in bytes. The server refuses a longer one.
        len_bytes_max: u64,
        /// The hash of the client's copy; `None` if it has no copy.
        known: Option<KnownHash>,
    },
    /// Asks for the present state of files: whether they exist, their lengths and identities.
    Stat {
        /// The names of the files.
        names: Vec<String>,
    },
    /// Asks for a range of a file.
    Range {
        /// The name of the file.
        name: String,
        /// The identity of the file that is meant, in case another file has its name now; 0 for
        /// any.
        identity: u64,
        /// The offset at which the range begins, in bytes.
        offset: u64,
        /// The length of the range, in bytes.
        len_bytes: u32,
        /// The hash of the client's copy; `None` if it has no copy.
        known: Option<KnownHash>,
    },
    /// Asks which processes write and prune, and for the boot id of the server's machine.
    State,
    /// Asks for a place among the writers of the store. The client repeats it until the server has
    /// granted or refused one.
    Join {
        /// A random number that the client has chosen for this writer.
        writer: WriterId,
        /// The text with which the writer describes itself.
        holder: String,
    },
    /// Does something as a writer.
    Write {
        /// The writer.
        writer: WriterId,
        /// The number of the act: higher than that of each act before.
        sequence: u64,
        /// The act.
        act: WriteAct,
    },
    /// Renews the lease of a writer's place.
    Renew {
        /// The writer.
        writer: WriterId,
        /// True if it has started: others may start.
        has_started: bool,
    },
    /// Asks what each writer says about itself.
    Writers,
    /// Asks for the size and the free space of the medium.
    Space,
}

const HELLO: u8 = 1;
const LIST: u8 = 2;
const FILE: u8 = 3;
const STAT: u8 = 4;
const RANGE: u8 = 5;
const STATE: u8 = 6;
const JOIN: u8 = 7;
const WRITE: u8 = 8;
const RENEW: u8 = 9;
const WRITERS: u8 = 10;
const SPACE: u8 = 11;
/// The longest answer to a writer: it has no bytes of files.
const TO_WRITER_BYTES_MAX: u64 = 64 << 10;

impl Request {
    /// Appends the encoded request, with its length first.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; 4]);
        match self {
            Self::Hello { token } => {
                out.push(HELLO);
                out.extend(MAGIC);
                out.extend(VERSION.to_le_bytes());
                out.extend((token.len() as u16).to_le_bytes());
                out.extend(token);
            }
            Self::List { folder } => {
                out.push(LIST);
                put_name(out, folder);
            }
            Self::File { name, len_bytes_max, known } => {
                out.push(FILE);
                put_name(out, name);
                out.extend(len_bytes_max.to_le_bytes());
                put_known(out, known.as_ref());
            }
            Self::Stat { names } => {
                out.push(STAT);
                out.extend((names.len() as u16).to_le_bytes());
                for name in names {
                    put_name(out, name);
                }
            }
            Self::Range { name, identity, offset, len_bytes, known } => {
                out.push(RANGE);
                put_name(out, name);
                out.extend(identity.to_le_bytes());
                out.extend(offset.to_le_bytes());
                out.extend(len_bytes.to_le_bytes());
                put_known(out, known.as_ref());
            }
            Self::State => out.push(STATE),
            Self::Join { writer, holder } => {
                out.push(JOIN);
                out.extend(writer);
                out.extend((holder.len() as u16).to_le_bytes());
                out.extend(holder.as_bytes());
            }
            Self::Write { writer, sequence, act } => {
                out.push(WRITE);
                out.extend(writer);
                out.extend(sequence.to_le_bytes());
                act.encode(out);
            }
            Self::Renew { writer, has_started } => {
                out.push(RENEW);
                out.extend(writer);
                out.push(u8::from(*has_started));
            }
            Self::Writers => out.push(WRITERS),
            Self::Space => out.push(SPACE),
        }
        let len = (out.len() - start - 4) as u32;
        if let Some(place) = out.get_mut(start..start + 4) {
            place.copy_from_slice(&len.to_le_bytes());
        }
    }

    /// Decodes a request, without its length field. Error, as a text: the problem.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut reader = ByteReader::new(bytes);
        let request =
            Self::parse(&mut reader).map_err(|problem| format!("invalid request: {problem}"))?;
        if reader.is_empty() {
            Ok(request)
        } else {
            Err("a request with bytes after its end".into())
        }
    }

    fn parse(reader: &mut ByteReader<'_>) -> Result<Self, String> {
        Ok(match reader.array::<1>()? {
            [HELLO] => {
                if reader.array::<8>()? != MAGIC {
                    return Err("not a greeting of this protocol".into());
                }
                let version = reader.u16_le()?;
                if version != VERSION {
                    return Err(format!(
                        "protocol version {version}; this side speaks version {VERSION}"
                    ));
                }
                let len = usize::from(reader.u16_le()?);
                if len > TOKEN_BYTES_MAX {
                    return Err(format!("a token of {len} bytes"));
                }
                Self::Hello { token: reader.take(len)?.to_vec() }
            }
            [LIST] => Self::List { folder: read_name(reader)? },
            [FILE] => {
                let name = read_name(reader)?;
                Self::File { name, len_bytes_max: reader.u64_le()?, known: known(reader)? }
            }
            [STAT] => {
                let count = usize::from(reader.u16_le()?);
                if count > STATS_MAX {
                    return Err(format!("a request for {count} files"));
                }
                Self::Stat {
                    names: (0..count).map(|_| read_name(reader)).collect::<Result<_, _>>()?,
                }
            }
            [RANGE] => {
                let name = read_name(reader)?;
                let (identity, offset) = (reader.u64_le()?, reader.u64_le()?);
                let len_bytes = reader.u32_le()?;
                if len_bytes > RANGE_BYTES_MAX {
                    return Err(format!("a range of {len_bytes} bytes"));
                }
                Self::Range { name, identity, offset, len_bytes, known: known(reader)? }
            }
            [STATE] => Self::State,
            [JOIN] => {
                let writer = reader.array()?;
                let len = usize::from(reader.u16_le()?);
                if len > HOLDER_BYTES_MAX {
                    return Err(format!("a description of {len} bytes"));
                }
                let holder = String::from_utf8(reader.take(len)?.to_vec());
                let holder = holder.map_err(|_| "a description that is not text")?;
                Self::Join { writer, holder }
            }
            [WRITE] => {
                let (writer, sequence) = (reader.array()?, reader.u64_le()?);
                Self::Write { writer, sequence, act: WriteAct::parse(reader)? }
            }
            [RENEW] => Self::Renew { writer: reader.array()?, has_started: read_flag(reader)? },
            [WRITERS] => Self::Writers,
            [SPACE] => Self::Space,
            [kind] => return Err(format!("kind {kind}")),
        })
    }

    /// Returns the longest answer to this request that a client accepts, in bytes after decoding.
    pub fn answer_bytes_max(&self) -> u64 {
        match self {
            Self::Hello { .. } | Self::List { .. } | Self::State | Self::Writers => LIST_BYTES_MAX,
            Self::Join { .. } | Self::Write { .. } | Self::Renew { .. } | Self::Space => {
                TO_WRITER_BYTES_MAX
            }
            Self::File { len_bytes_max, .. } => *len_bytes_max,
            Self::Stat { names } => names.len() as u64 * (32 + HEAD_BYTES as u64),
            Self::Range { len_bytes, .. } => u64::from(*len_bytes),
        }
    }
}

/// Appends the hash of the client's copy, or that it has none.
fn put_known(out: &mut Vec<u8>, known: Option<&KnownHash>) {
    out.push(u8::from(known.is_some()));
    out.extend(known.into_iter().flatten());
}

/// Reads what [`put_known`] appends.
fn known(reader: &mut ByteReader<'_>) -> Result<Option<KnownHash>, String> {
    match reader.array::<1>()? {
        [0] => Ok(None),
        [1] => Ok(Some(reader.array()?)),
        [other] => Err(format!("hash flag {other}")),
    }
}
