//! The messages between a client and a checkpoint server; `docs/formats/serve.md` specifies them.
//!
//! ```text
//!   request   4 length of the rest │ 1 kind │ its fields
//!   answer    1 kind │ 1 encoding │ 2 code │ 8 length of the rest │ 8 length decoded │ the rest
//! ```
//!
//! Requests are answered in order, so a client may send several before the first answer comes. Both
//! sides bound what they accept: a request by its own length, an answer by its request. No I/O
//! happens here except in [`Answer::read`].

use keyframe_bytes::ByteReader;
use std::io::{self, Read};

/// The version of the protocol.
pub const VERSION: u16 = 1;
/// The first bytes of the greeting and of its answer.
pub const MAGIC: [u8; 8] = *b"KFSERVE\n";
/// The longest request, in bytes.
pub const REQUEST_BYTES_MAX: usize = 32 << 10;
/// The longest request of a client that has not shown its token yet, in bytes.
pub const HELLO_BYTES_MAX: usize = 1 << 10;
/// The longest token, in bytes.
pub const TOKEN_BYTES_MAX: usize = 512;
/// The longest range, in bytes.
pub const RANGE_BYTES_MAX: u32 = 1 << 20;
/// The most files that one request asks the state of.
pub const STATS_MAX: usize = 256;
/// Bytes of a file's beginning that its state includes: the header of a pack.
pub const HEAD_BYTES: usize = 64;
/// The longest listing, in bytes.
pub const LIST_BYTES_MAX: u64 = 256 << 20;
/// The longest reason of a refusal, in bytes.
pub const REFUSAL_BYTES_MAX: u64 = 4 << 10;
/// Bytes of the head of an answer.
pub const ANSWER_HEAD_BYTES: usize = 20;

/// The BLAKE3 hash of the bytes that a client has already.
pub type Hash = [u8; 32];

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The greeting: always the first request.
    Hello {
        /// Proves the client's right to read; empty if the server needs none.
        token: Vec<u8>,
    },
    /// The names of the files in a folder.
    List {
        /// The folder.
        folder: String,
    },
    /// A whole file.
    File {
        /// The name of the file.
        name: String,
        /// The server refuses a longer file.
        len_bytes_max: u64,
        /// The hash of the client's copy, if it has one.
        known: Option<Hash>,
    },
    /// The present state of files: whether they exist, their lengths and identities.
    Stat {
        /// The names of the files.
        names: Vec<String>,
    },
    /// A range of a file.
    Range {
        /// The name of the file.
        name: String,
        /// The identity of the file that is meant, in case another file has its name now; 0 for
        /// any.
        identity: u64,
        /// Where the range begins, in bytes.
        offset: u64,
        /// The length of the range, in bytes.
        len_bytes: u32,
        /// The hash of the client's copy, if it has one.
        known: Option<Hash>,
    },
    /// Which processes write and prune, and the boot id of the server's machine.
    State,
}

/// The present state of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileStat {
    /// See [`crate::FileStamp::identity`].
    pub identity: u64,
    /// See [`crate::FileStamp::modified`].
    pub modified: u64,
    /// The length, in bytes.
    pub len_bytes: u64,
    /// The first [`HEAD_BYTES`] bytes, or all if there are fewer.
    pub head: Vec<u8>,
}

/// The head of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerHead {
    /// What the answer is.
    pub kind: AnswerKind,
    /// How its bytes are encoded.
    pub encoding: AnswerEncoding,
    /// Why the request is refused, if it is.
    pub code: RefusalCode,
    /// Bytes that follow the head.
    pub wire_bytes: u64,
    /// Bytes after decoding.
    pub len_bytes: u64,
}

/// What an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerKind {
    /// The requested bytes.
    Data,
    /// The client's copy is up to date.
    Same,
    /// A refusal, with a reason in words.
    Refused,
}

/// How the bytes of an answer are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerEncoding {
    /// Not compressed.
    Plain,
    /// Compressed with Zstandard.
    Zstd,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalCode {
    /// It is not refused.
    None,
    /// The file does not exist.
    NotFound,
    /// The file ends before the range does.
    Ends,
    /// The token is wrong.
    Token,
    /// The server does not know such a request.
    Strange,
    /// The file is longer than the client accepts.
    TooLong,
    /// The server's own storage failed.
    Failed,
}

impl RefusalCode {
    const ALL: [Self; 7] = [
        Self::None,
        Self::NotFound,
        Self::Ends,
        Self::Token,
        Self::Strange,
        Self::TooLong,
        Self::Failed,
    ];

    fn number(self) -> u16 {
        Self::ALL.iter().zip(0..).find(|(code, _)| **code == self).map_or(0, |(_, number)| number)
    }

    fn of(number: u16) -> Self {
        // An unknown code is a refusal all the same.
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::Failed)
    }
}

const HELLO: u8 = 1;
const LIST: u8 = 2;
const FILE: u8 = 3;
const LOOK: u8 = 4;
const RANGE: u8 = 5;
const STATE: u8 = 6;

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
                out.push(LOOK);
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
        }
        let len = (out.len() - start - 4) as u32;
        if let Some(place) = out.get_mut(start..start + 4) {
            place.copy_from_slice(&len.to_le_bytes());
        }
    }

    /// Decodes a request, without its length field.
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
            [LIST] => Self::List { folder: name(reader)? },
            [FILE] => {
                let name = name(reader)?;
                Self::File { name, len_bytes_max: reader.u64_le()?, known: known(reader)? }
            }
            [LOOK] => {
                let count = usize::from(reader.u16_le()?);
                if count > STATS_MAX {
                    return Err(format!("a request for {count} files"));
                }
                Self::Stat { names: (0..count).map(|_| name(reader)).collect::<Result<_, _>>()? }
            }
            [RANGE] => {
                let name = name(reader)?;
                let (identity, offset) = (reader.u64_le()?, reader.u64_le()?);
                let len_bytes = reader.u32_le()?;
                if len_bytes > RANGE_BYTES_MAX {
                    return Err(format!("a range of {len_bytes} bytes"));
                }
                Self::Range { name, identity, offset, len_bytes, known: known(reader)? }
            }
            [STATE] => Self::State,
            [kind] => return Err(format!("kind {kind}")),
        })
    }

    /// The longest answer to this request that a client accepts, in bytes after decoding.
    pub fn answer_bytes_max(&self) -> u64 {
        match self {
            Self::Hello { .. } | Self::List { .. } | Self::State => LIST_BYTES_MAX,
            Self::File { len_bytes_max, .. } => *len_bytes_max,
            Self::Stat { names } => names.len() as u64 * (32 + HEAD_BYTES as u64),
            Self::Range { len_bytes, .. } => u64::from(*len_bytes),
        }
    }
}

fn put_name(out: &mut Vec<u8>, name: &str) {
    let name = name.as_bytes().get(..name.len().min(255)).unwrap_or_default();
    out.push(name.len() as u8);
    out.extend(name);
}

fn put_known(out: &mut Vec<u8>, known: Option<&Hash>) {
    out.push(u8::from(known.is_some()));
    out.extend(known.into_iter().flatten());
}

fn name(reader: &mut ByteReader<'_>) -> Result<String, String> {
    let [len] = reader.array::<1>()?;
    let bytes = reader.take(usize::from(len))?.to_vec();
    String::from_utf8(bytes).map_err(|_| "a name that is not text".into())
}

fn known(reader: &mut ByteReader<'_>) -> Result<Option<Hash>, String> {
    match reader.array::<1>()? {
        [0] => Ok(None),
        [1] => Ok(Some(reader.array()?)),
        [other] => Err(format!("hash flag {other}")),
    }
}

/// Encodes the answer to a greeting: the id of the served store.
pub fn encode_welcome(store: [u8; 16]) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes(), &store].concat()
}

/// Decodes the answer to a greeting.
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

/// Encodes states of files, in the order of the request.
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

/// Decodes the states of `count` files.
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

/// Encodes file names, each after its length.
pub fn encode_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
    let mut out = Vec::new();
    for name in names {
        put_name(&mut out, name);
    }
    out
}

/// Decodes file names.
pub fn decode_names(bytes: &[u8]) -> Result<Vec<String>, String> {
    let mut reader = ByteReader::new(bytes);
    let mut names = Vec::new();
    while !reader.is_empty() {
        names.push(name(&mut reader)?);
    }
    Ok(names)
}

impl AnswerHead {
    /// The encoded head.
    pub fn encode(&self) -> [u8; ANSWER_HEAD_BYTES] {
        let mut out = [0; ANSWER_HEAD_BYTES];
        let (kind, encoding) = (self.kind as u8, self.encoding as u8);
        let parts: [&[u8]; 5] = [
            &[kind],
            &[encoding],
            &self.code.number().to_le_bytes(),
            &self.wire_bytes.to_le_bytes(),
            &self.len_bytes.to_le_bytes(),
        ];
        for (to, from) in out.iter_mut().zip(parts.concat()) {
            *to = from;
        }
        out
    }

    /// Decodes a head.
    pub fn decode(bytes: &[u8; ANSWER_HEAD_BYTES]) -> Result<Self, String> {
        let mut reader = ByteReader::new(bytes);
        let kind = match reader.array::<1>()? {
            [0] => AnswerKind::Data,
            [1] => AnswerKind::Same,
            [2] => AnswerKind::Refused,
            [other] => return Err(format!("an answer of kind {other}")),
        };
        let encoding = match reader.array::<1>()? {
            [0] => AnswerEncoding::Plain,
            [1] => AnswerEncoding::Zstd,
            [other] => return Err(format!("an answer in encoding {other}")),
        };
        let code = RefusalCode::of(reader.u16_le()?);
        Ok(Self { kind, encoding, code, wire_bytes: reader.u64_le()?, len_bytes: reader.u64_le()? })
    }
}

/// An answer, decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The requested bytes.
    Data(Vec<u8>),
    /// The client's copy is up to date.
    Same,
    /// The request is refused for this reason.
    Refused(RefusalCode, String),
}

impl Answer {
    /// Reads an answer of at most `len_bytes_max` bytes after decoding; returns it with the number
    /// of bytes read. Memory grows with the bytes that arrive.
    pub fn read(from: &mut dyn Read, len_bytes_max: u64) -> io::Result<(Self, u64)> {
        let mut head = [0; ANSWER_HEAD_BYTES];
        from.read_exact(&mut head)?;
        let strange = |problem: String| io::Error::new(io::ErrorKind::InvalidData, problem);
        let head = AnswerHead::decode(&head).map_err(strange)?;
        let most = match head.kind {
            AnswerKind::Data => len_bytes_max,
            AnswerKind::Same => 0,
            AnswerKind::Refused => REFUSAL_BYTES_MAX,
        };
        // Compressed bytes are never longer than plain ones: the server would have sent those.
        if head.wire_bytes > most || head.len_bytes > most {
            let (wire, len) = (head.wire_bytes, head.len_bytes);
            return Err(strange(format!(
                "an answer of {wire} bytes ({len} decoded); at most {most} were expected"
            )));
        }
        let mut bytes = Vec::new();
        from.take(head.wire_bytes).read_to_end(&mut bytes)?;
        if (bytes.len() as u64) < head.wire_bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if head.encoding == AnswerEncoding::Zstd {
            let mut decoded = Vec::new();
            zstd::stream::Decoder::new(&*bytes)?
                .take(head.len_bytes.saturating_add(1))
                .read_to_end(&mut decoded)?;
            bytes = decoded;
        }
        if bytes.len() as u64 != head.len_bytes {
            return Err(strange(format!(
                "an answer of {} bytes instead of {}",
                bytes.len(),
                head.len_bytes
            )));
        }
        let came = ANSWER_HEAD_BYTES as u64 + head.wire_bytes;
        Ok((
            match head.kind {
                AnswerKind::Data => Self::Data(bytes),
                AnswerKind::Same => Self::Same,
                AnswerKind::Refused => {
                    let said = String::from_utf8_lossy(&bytes);
                    Self::Refused(head.code, said.chars().filter(|c| !c.is_control()).collect())
                }
            },
            came,
        ))
    }
}

#[cfg(test)]
mod tests;
