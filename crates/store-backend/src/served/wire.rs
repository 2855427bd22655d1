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

mod answer;
mod name;
mod payload;
mod request;
mod write;

pub use answer::{Answer, AnswerEncoding, AnswerHead, AnswerKind, RefusalCode};
pub use payload::{
    FileStat, decode_names, decode_space, decode_stats, decode_welcome, encode_names, encode_space,
    encode_stats, encode_welcome,
};
pub use request::Request;
pub use write::{WriteAct, WriterId};

/// The version of the protocol of checkpoint servers.
pub const VERSION: u16 = 1;
/// The first bytes of the greeting and of its answer.
pub const MAGIC: [u8; 8] = *b"KFSERVE\n";
/// The largest length of a request, in bytes.
pub const REQUEST_BYTES_MAX: usize = 32 << 10;
/// The most bytes of a file that one act of a writer carries.
pub const WRITE_BYTES_MAX: usize = 1 << 20;
/// The largest length of a request to a server that accepts checkpoints, in bytes.
pub const WRITE_REQUEST_BYTES_MAX: usize = WRITE_BYTES_MAX + (1 << 10);
/// The most names in one act of a writer.
pub const NAMES_PER_ACT_MAX: usize = 1000;
/// The longest text with which a writer describes itself, in bytes.
pub const HOLDER_BYTES_MAX: usize = 2048;
/// The longest request of a client that has not shown its token yet, in bytes.
pub const HELLO_BYTES_MAX: usize = 1 << 10;
/// The largest length of a token, in bytes.
pub const TOKEN_BYTES_MAX: usize = 512;
/// The largest number of bytes of a file that one request can ask for.
pub const RANGE_BYTES_MAX: u32 = 1 << 20;
/// The largest number of files in one request for states.
pub const STATS_MAX: usize = 256;
/// The number of bytes of a file's beginning that the answer about its state includes: the header
/// of a pack.
pub const HEAD_BYTES: usize = 64;
/// The largest length of a list of file names, in bytes.
pub const LIST_BYTES_MAX: u64 = 256 << 20;
/// The largest length of the text of a refusal, in bytes.
pub const REFUSAL_BYTES_MAX: u64 = 4 << 10;
/// The number of bytes of the head of an answer.
pub const ANSWER_HEAD_BYTES: usize = 20;

/// The BLAKE3 hash of the bytes that a client has already.
pub type KnownHash = [u8; 32];

#[cfg(test)]
mod tests;
