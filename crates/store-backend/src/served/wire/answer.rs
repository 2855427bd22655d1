//! Answers: their head, why a request is refused, and how a client reads them.

use super::{ANSWER_HEAD_BYTES, REFUSAL_BYTES_MAX};
use keyframe_bytes::ByteReader;
use std::io::{self, Read};

/// The head of an answer of a checkpoint server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerHead {
    /// The kind of the answer.
    pub kind: AnswerKind,
    /// The encoding of its bytes.
    pub encoding: AnswerEncoding,
    /// The reason why the request is refused; [`RefusalCode::None`] if it is not.
    pub code: RefusalCode,
    /// The number of bytes that follow the head.
    pub wire_bytes: u64,
    /// The number of bytes after decoding.
    pub len_bytes: u64,
}

/// The kind of an answer of a checkpoint server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerKind {
    /// The requested bytes.
    Data,
    /// The client's copy is up to date.
    Same,
    /// A refusal, with a reason in words.
    Refused,
}

/// The encoding of the bytes of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerEncoding {
    /// Not compressed.
    Plain,
    /// Compressed with Zstandard.
    Zstd,
}

/// The reason why a checkpoint server refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalCode {
    /// The request is not refused.
    None,
    /// The file does not exist.
    NotFound,
    /// The file ends before the range does.
    Ends,
    /// The token is wrong.
    Token,
    /// The request is malformed, of an unknown kind, or names no file of a store.
    Strange,
    /// The file is longer than the client accepts.
    TooLong,
    /// The server's own storage failed.
    Failed,
    /// The server's medium is full.
    Full,
    /// The name is taken already.
    Exists,
    /// The writer has no place in the store: its lease has ended, or the server has been restarted.
    Ended,
    /// The server accepts no checkpoints, or not what this one asks for.
    Denied,
    /// Another writer starts; the client asks again.
    Busy,
    /// A process has the store for itself. The text describes it.
    Locked,
}

impl RefusalCode {
    const ALL: [Self; 13] = [
        Self::None,
        Self::NotFound,
        Self::Ends,
        Self::Token,
        Self::Strange,
        Self::TooLong,
        Self::Failed,
        Self::Full,
        Self::Exists,
        Self::Ended,
        Self::Denied,
        Self::Busy,
        Self::Locked,
    ];

    fn number(self) -> u16 {
        Self::ALL.iter().zip(0..).find(|(code, _)| **code == self).map_or(0, |(_, number)| number)
    }

    fn of(number: u16) -> Self {
        // An unknown code is a refusal all the same.
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::Failed)
    }
}

impl AnswerHead {
    /// Returns the encoded head.
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

    /// Decodes a head. Error, as a text: the problem.
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

/// An answer of a checkpoint server, decoded.
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
    ///
    /// Errors: the connection fails; [`io::ErrorKind::InvalidData`] for a malformed or too long
    /// answer.
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
