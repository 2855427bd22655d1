//! What a client and a checkpoint server say to each other, byte by byte: see
//! `docs/formats/serve.md`.
//!
//! ```text
//!   request   4 length of what follows │ 1 kind │ its fields
//!   answer    1 kind │ 1 encoding │ 2 code │ 8 bytes that follow │ 8 bytes when decoded │ ... those bytes
//! ```
//!
//! Requests are answered in their order, so that many can be under way on one connection. Both
//! sides know what may come: a request has a length of its own, and an answer at most what its
//! request asked for. Pure but for [`Answer::read`].

use crate::bytes::Cursor;
use std::io::{self, Read};

/// The version of the protocol that is spoken here.
pub const VERSION: u16 = 1;
/// With what the first request and its answer begin.
pub const MAGIC: [u8; 8] = *b"KFSERVE\n";
/// No request is longer.
pub const REQUEST_BYTES_MAX: usize = 32 << 10;
/// Nor the first one, from one who has not shown a token yet.
pub const HELLO_BYTES_MAX: usize = 1 << 10;
/// A token is not longer.
pub const TOKEN_BYTES_MAX: usize = 512;
/// A range is not longer.
pub const RANGE_BYTES_MAX: u32 = 1 << 20;
/// How many files one request looks at.
pub const LOOKS_MAX: usize = 256;
/// What is shown of a file's beginning when it is looked at: a pack's header.
pub const HEAD_BYTES: usize = 64;
/// No listing is longer, nor what is said otherwise.
pub const LIST_BYTES_MAX: u64 = 256 << 20;
/// Nor why a request is refused.
pub const REFUSAL_BYTES_MAX: u64 = 4 << 10;
/// Of the head of an answer.
pub const ANSWER_HEAD_BYTES: usize = 20;

/// BLAKE3 of what a client has already.
pub type Hash = [u8; 32];

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The first one: who asks.
    Hello {
        /// Shows that it may; empty where none is needed.
        token: Vec<u8>,
    },
    /// The names in a folder.
    List {
        /// Which.
        folder: String,
    },
    /// A whole file.
    File {
        /// Which.
        name: String,
        /// A longer one is refused.
        len_bytes_max: u64,
        /// Of what is there already.
        known: Option<Hash>,
    },
    /// What files are now: whether they are there, how long, which ones.
    Look {
        /// Which.
        names: Vec<String>,
    },
    /// A range of a file.
    Range {
        /// Which.
        name: String,
        /// Of the file that is meant, where another may have its name by now; 0 for whichever.
        identity: u64,
        /// Where it begins.
        offset: u64,
        /// How much.
        len_bytes: u32,
        /// Of what is there already.
        known: Option<Hash>,
    },
    /// Who writes, who prunes, which life of the machine this is.
    State,
}

/// What a look at a file found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// See [`super::Stamp`].
    pub identity: u64,
    /// See [`super::Stamp`].
    pub modified: u64,
    /// Its length.
    pub len_bytes: u64,
    /// Its first bytes, [`HEAD_BYTES`] of them if it has so many.
    pub head: Vec<u8>,
}

/// How an answer begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// What follows.
    pub kind: Kind,
    /// How it is encoded.
    pub encoding: Encoding,
    /// Why it is refused.
    pub code: Code,
    /// Bytes that follow.
    pub wire_bytes: u64,
    /// Bytes that they become.
    pub len_bytes: u64,
}

/// What an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// What was asked for.
    Data,
    /// What the client has is what it asks for.
    Same,
    /// A reason, in words.
    Refused,
}

/// How the bytes of an answer are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// As they are.
    Plain,
    /// Zstandard.
    Zstd,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// It is not.
    None,
    /// There is no such file.
    NotFound,
    /// The file ends before.
    Ends,
    /// The token is not the server's.
    Token,
    /// Nothing that this server answers.
    Strange,
    /// The file is longer than the client takes.
    TooLong,
    /// The server's own storage failed.
    Failed,
}

impl Code {
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
        // One of a later server is a refusal all the same.
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
    /// Adds its bytes, length first.
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
            Self::Look { names } => {
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

    /// A request of these bytes, which its length does not belong to.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut cursor = Cursor::new(bytes);
        let request = Self::parse(&mut cursor)
            .map_err(|problem| format!("a request that makes no sense: {problem}"))?;
        if cursor.is_empty() {
            Ok(request)
        } else {
            Err("a request with bytes behind its end".into())
        }
    }

    fn parse(cursor: &mut Cursor<'_>) -> Result<Self, String> {
        Ok(match cursor.array::<1>()? {
            [HELLO] => {
                if cursor.array::<8>()? != MAGIC {
                    return Err("it is not of this protocol".into());
                }
                let version = cursor.u16_le()?;
                if version != VERSION {
                    return Err(format!("version {version} of the protocol; this is {VERSION}"));
                }
                let len = usize::from(cursor.u16_le()?);
                if len > TOKEN_BYTES_MAX {
                    return Err(format!("a token of {len} bytes"));
                }
                Self::Hello { token: cursor.take(len)?.to_vec() }
            }
            [LIST] => Self::List { folder: name(cursor)? },
            [FILE] => {
                let name = name(cursor)?;
                Self::File { name, len_bytes_max: cursor.u64_le()?, known: known(cursor)? }
            }
            [LOOK] => {
                let count = usize::from(cursor.u16_le()?);
                if count > LOOKS_MAX {
                    return Err(format!("a look at {count} files"));
                }
                Self::Look { names: (0..count).map(|_| name(cursor)).collect::<Result<_, _>>()? }
            }
            [RANGE] => {
                let name = name(cursor)?;
                let (identity, offset) = (cursor.u64_le()?, cursor.u64_le()?);
                let len_bytes = cursor.u32_le()?;
                if len_bytes > RANGE_BYTES_MAX {
                    return Err(format!("a range of {len_bytes} bytes"));
                }
                Self::Range { name, identity, offset, len_bytes, known: known(cursor)? }
            }
            [STATE] => Self::State,
            [kind] => return Err(format!("kind {kind}")),
        })
    }

    /// How long an answer to it may be, decoded.
    pub fn answer_bytes_max(&self) -> u64 {
        match self {
            Self::Hello { .. } | Self::List { .. } | Self::State => LIST_BYTES_MAX,
            Self::File { len_bytes_max, .. } => *len_bytes_max,
            Self::Look { names } => names.len() as u64 * (32 + HEAD_BYTES as u64),
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

fn name(cursor: &mut Cursor<'_>) -> Result<String, String> {
    let [len] = cursor.array::<1>()?;
    let bytes = cursor.take(usize::from(len))?.to_vec();
    String::from_utf8(bytes).map_err(|_| "a name that is not text".into())
}

fn known(cursor: &mut Cursor<'_>) -> Result<Option<Hash>, String> {
    match cursor.array::<1>()? {
        [0] => Ok(None),
        [1] => Ok(Some(cursor.array()?)),
        [other] => Err(format!("neither a hash nor none: {other}")),
    }
}

/// What the server that was found says of itself: its store.
pub fn welcome(store: [u8; 16]) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes(), &store].concat()
}

/// The store of a server's welcome.
pub fn welcomed(bytes: &[u8]) -> Result<[u8; 16], String> {
    let mut cursor = Cursor::new(bytes);
    if cursor.array::<8>()? != MAGIC {
        return Err("it is no checkpoint server".into());
    }
    match cursor.u16_le()? {
        VERSION => Ok(cursor.array()?),
        other => Err(format!("it speaks version {other} of the protocol; this is {VERSION}")),
    }
}

/// The bytes for what was found of files, in the order of the request.
pub fn encode_looks(looks: &[Option<Look>]) -> Vec<u8> {
    let mut out = Vec::new();
    for look in looks {
        let Some(look) = look else {
            out.push(0);
            continue;
        };
        out.push(1);
        for number in [look.identity, look.modified, look.len_bytes] {
            out.extend(number.to_le_bytes());
        }
        let head = look.head.get(..look.head.len().min(HEAD_BYTES)).unwrap_or_default();
        out.push(head.len() as u8);
        out.extend(head);
    }
    out
}

/// What was found of `count` files.
pub fn decode_looks(bytes: &[u8], count: usize) -> Result<Vec<Option<Look>>, String> {
    let mut cursor = Cursor::new(bytes);
    let mut looks = Vec::new();
    for _ in 0..count {
        if cursor.array::<1>()? == [0] {
            looks.push(None);
            continue;
        }
        let (identity, modified, len_bytes) =
            (cursor.u64_le()?, cursor.u64_le()?, cursor.u64_le()?);
        let [len] = cursor.array::<1>()?;
        let head = cursor.take(usize::from(len))?.to_vec();
        looks.push(Some(Look { identity, modified, len_bytes, head }));
    }
    if cursor.is_empty() { Ok(looks) } else { Err("more looks than were asked for".into()) }
}

/// The bytes for names: each with its length before it.
pub fn encode_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
    let mut out = Vec::new();
    for name in names {
        put_name(&mut out, name);
    }
    out
}

/// The names of a listing.
pub fn decode_names(bytes: &[u8]) -> Result<Vec<String>, String> {
    let mut cursor = Cursor::new(bytes);
    let mut names = Vec::new();
    while !cursor.is_empty() {
        names.push(name(&mut cursor)?);
    }
    Ok(names)
}

impl Head {
    /// Its bytes.
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

    /// What these bytes say.
    pub fn decode(bytes: &[u8; ANSWER_HEAD_BYTES]) -> Result<Self, String> {
        let mut cursor = Cursor::new(bytes);
        let kind = match cursor.array::<1>()? {
            [0] => Kind::Data,
            [1] => Kind::Same,
            [2] => Kind::Refused,
            [other] => return Err(format!("an answer of kind {other}")),
        };
        let encoding = match cursor.array::<1>()? {
            [0] => Encoding::Plain,
            [1] => Encoding::Zstd,
            [other] => return Err(format!("an answer in encoding {other}")),
        };
        let code = Code::of(cursor.u16_le()?);
        Ok(Self { kind, encoding, code, wire_bytes: cursor.u64_le()?, len_bytes: cursor.u64_le()? })
    }
}

/// What came for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// What was asked for.
    Data(Vec<u8>),
    /// What the client has is what it asks for.
    Same,
    /// A reason.
    Refused(Code, String),
}

impl Answer {
    /// Reads one from `from`, at most `len_bytes_max` when decoded; and how many bytes that were.
    /// Memory is taken as bytes come.
    pub fn read(from: &mut dyn Read, len_bytes_max: u64) -> io::Result<(Self, u64)> {
        let mut head = [0; ANSWER_HEAD_BYTES];
        from.read_exact(&mut head)?;
        let strange = |problem: String| io::Error::new(io::ErrorKind::InvalidData, problem);
        let head = Head::decode(&head).map_err(strange)?;
        let most = match head.kind {
            Kind::Data => len_bytes_max,
            Kind::Same => 0,
            Kind::Refused => REFUSAL_BYTES_MAX,
        };
        // What is compressed is not longer than what it is made of: it would have been sent plain.
        if head.wire_bytes > most || head.len_bytes > most {
            let (wire, len) = (head.wire_bytes, head.len_bytes);
            return Err(strange(format!(
                "an answer of {wire} bytes, {len} decoded, where at most {most} were asked for"
            )));
        }
        let mut bytes = Vec::new();
        from.take(head.wire_bytes).read_to_end(&mut bytes)?;
        if (bytes.len() as u64) < head.wire_bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if head.encoding == Encoding::Zstd {
            let mut decoded = Vec::new();
            zstd::stream::Decoder::new(&*bytes)?
                .take(head.len_bytes.saturating_add(1))
                .read_to_end(&mut decoded)?;
            bytes = decoded;
        }
        if bytes.len() as u64 != head.len_bytes {
            return Err(strange(format!(
                "an answer of {} bytes that was to have {}",
                bytes.len(),
                head.len_bytes
            )));
        }
        let came = ANSWER_HEAD_BYTES as u64 + head.wire_bytes;
        Ok((
            match head.kind {
                Kind::Data => Self::Data(bytes),
                Kind::Same => Self::Same,
                Kind::Refused => {
                    let said = String::from_utf8_lossy(&bytes);
                    Self::Refused(head.code, said.chars().filter(|c| !c.is_control()).collect())
                }
            },
            came,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn requests() -> Vec<Request> {
        let name = || "packs/00000001.pack".to_owned();
        vec![
            Request::Hello { token: b"secret".to_vec() },
            Request::List { folder: "packs".into() },
            Request::File {
                name: "maps/0000000001.map".into(),
                len_bytes_max: 1 << 40,
                known: Some([7; 32]),
            },
            Request::Look { names: vec![name(), "packs/00000002.pack".into()] },
            Request::Range {
                name: name(),
                identity: 5,
                offset: 1 << 33,
                len_bytes: 128 << 10,
                known: None,
            },
            Request::State,
        ]
    }

    #[test]
    fn requests_come_back_and_nothing_shorter_or_longer_is_one() {
        for request in requests() {
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            let (len, body) = bytes.split_first_chunk::<4>().unwrap();
            assert_eq!(u32::from_le_bytes(*len) as usize, body.len());
            assert_eq!(Request::decode(body).as_ref(), Ok(&request));
            for cut in 0..body.len() {
                assert!(Request::decode(&body[..cut]).is_err(), "{request:?} cut to {cut}");
            }
            assert!(Request::decode(&[body, &[0]].concat()).is_err());
        }
    }

    #[test]
    fn bounds_are_kept() {
        let mut bytes = Vec::new();
        Request::Look { names: vec!["x".repeat(255); LOOKS_MAX] }.encode(&mut bytes);
        assert!(Request::decode(&bytes[4..]).is_ok());
        let range = Request::Range {
            name: "x".into(),
            identity: 0,
            offset: 0,
            len_bytes: RANGE_BYTES_MAX + 1,
            known: None,
        };
        bytes.clear();
        range.encode(&mut bytes);
        assert!(Request::decode(&bytes[4..]).is_err());
    }

    fn answer(head: Head, body: &[u8], most: u64) -> io::Result<(Answer, u64)> {
        Answer::read(&mut &*[&head.encode()[..], body].concat(), most)
    }

    fn data(encoding: Encoding, body: &[u8], len: u64) -> Head {
        let wire_bytes = body.len() as u64;
        Head { kind: Kind::Data, encoding, code: Code::None, wire_bytes, len_bytes: len }
    }

    #[test]
    fn answers_are_as_long_as_they_say_and_no_longer_than_was_asked_for() {
        let plain = data(Encoding::Plain, b"bytes", 5);
        assert_eq!(answer(plain, b"bytes", 5).unwrap(), (Answer::Data(b"bytes".to_vec()), 25));
        assert!(answer(plain, b"bytes", 4).is_err());
        assert!(answer(plain, b"byte", 5).is_err());
        assert!(answer(Head { len_bytes: 4, ..plain }, b"bytes", 5).is_err());
        let zeros = vec![0; 1 << 20];
        let packed = zstd::bulk::compress(&zeros, 1).unwrap();
        let head = data(Encoding::Zstd, &packed, 1 << 20);
        assert_eq!(answer(head, &packed, 1 << 20).unwrap().0, Answer::Data(zeros));
        // More than it says, which nobody has memory for.
        assert!(answer(Head { len_bytes: 9, ..head }, &packed, 1 << 20).is_err());
        assert!(answer(data(Encoding::Zstd, b"nonsense", 9), b"nonsense", 9).is_err());
        let refused =
            Head { kind: Kind::Refused, code: Code::Token, ..data(Encoding::Plain, b"no\n", 3) };
        assert_eq!(
            answer(refused, b"no\n", 0).unwrap().0,
            Answer::Refused(Code::Token, "no".into())
        );
        let same = Head { kind: Kind::Same, ..data(Encoding::Plain, b"", 0) };
        assert_eq!(answer(same, b"", 7).unwrap().0, Answer::Same);
        assert!(answer(Head { wire_bytes: u64::MAX, ..plain }, b"", u64::MAX).is_err());
    }

    #[test]
    fn looks_and_names_come_back() {
        let looks = [
            None,
            Some(Look { identity: 1, modified: 2, len_bytes: 3, head: vec![4; HEAD_BYTES] }),
        ];
        assert_eq!(decode_looks(&encode_looks(&looks), 2).unwrap(), looks);
        assert!(decode_looks(&encode_looks(&looks), 1).is_err());
        assert!(decode_looks(&encode_looks(&looks), 3).is_err());
        let names = ["a", "", "00000001.pack"];
        assert_eq!(decode_names(&encode_names(names)).unwrap(), names);
        assert!(decode_names(&[3, b'a']).is_err());
        assert_eq!(welcomed(&welcome([9; 16])), Ok([9; 16]));
        assert!(welcomed(b"HTTP/1.1 400 Bad Request\r\n\r\n").is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), count in 0..9_usize) {
            crate::fuzzing::served_request(&bytes);
            crate::fuzzing::served_answer(&bytes);
            let _ = decode_looks(&bytes, count);
        }
    }
}
