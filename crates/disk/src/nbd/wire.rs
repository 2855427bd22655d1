//! The constants and headers of the NBD protocol. Integers are big-endian.
//!
//! Source: `doc/proto.md` of the NBD project.

use keyframe_bytes::{ByteReader, ReadError};

/// The first eight bytes of the server's greeting.
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// The second eight bytes of the server's greeting, and the first of each option of a client.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// The first eight bytes of each reply to an option.
pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// The first four bytes of a request.
pub const REQUEST: u32 = 0x2560_9513;
/// The first four bytes of a simple reply.
pub const SIMPLE_REPLY: u32 = 0x6744_6698;
/// The first four bytes of each chunk of a structured reply.
pub const STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// A flag of the handshake, of server and client: the fixed newstyle negotiation.
pub const FIXED_NEWSTYLE: u16 = 1;
/// A flag of the handshake, of server and client: no padding follows an export's flags.
pub const NO_ZEROES: u16 = 2;

// Options of a client (`NBD_OPT_...`).
pub const OPT_EXPORT_NAME: u32 = 1;
pub const OPT_ABORT: u32 = 2;
pub const OPT_LIST: u32 = 3;
pub const OPT_INFO: u32 = 6;
pub const OPT_GO: u32 = 7;
pub const OPT_STRUCTURED_REPLY: u32 = 8;
pub const OPT_LIST_META_CONTEXT: u32 = 9;
pub const OPT_SET_META_CONTEXT: u32 = 10;

// Types of replies to an option (`NBD_REP_...`).
pub const REP_ACK: u32 = 1;
pub const REP_SERVER: u32 = 2;
pub const REP_INFO: u32 = 3;
pub const REP_META_CONTEXT: u32 = 4;
pub const REP_ERR_UNSUP: u32 = 0x8000_0001;
pub const REP_ERR_INVALID: u32 = 0x8000_0003;
pub const REP_ERR_UNKNOWN: u32 = 0x8000_0006;
pub const REP_ERR_TOO_BIG: u32 = 0x8000_0009;

// Types of information about an export (`NBD_INFO_...`).
pub const INFO_EXPORT: u16 = 0;
pub const INFO_BLOCK_SIZE: u16 = 3;

/// The flags of each export: has flags, flush, FUA, trim, write zeroes, several connections, cache,
/// fast zero.
pub const EXPORT_FLAGS: u16 = 1 | 4 | 8 | 32 | 64 | 256 | 1024 | 2048;
/// A flag of an export, valid only with structured replies: a client may request a reply in one
/// chunk.
pub const EXPORT_DONT_FRAGMENT: u16 = 128;

// Commands of requests (`NBD_CMD_...`).
pub const CMD_READ: u16 = 0;
pub const CMD_WRITE: u16 = 1;
pub const CMD_DISC: u16 = 2;
pub const CMD_FLUSH: u16 = 3;
pub const CMD_TRIM: u16 = 4;
pub const CMD_CACHE: u16 = 5;
pub const CMD_WRITE_ZEROES: u16 = 6;
pub const CMD_BLOCK_STATUS: u16 = 7;

// Flags of requests (`NBD_CMD_FLAG_...`).
pub const FLAG_FUA: u16 = 1;
pub const FLAG_NO_HOLE: u16 = 2;
pub const FLAG_DONT_FRAGMENT: u16 = 4;
pub const FLAG_REQ_ONE: u16 = 8;
pub const FLAG_FAST_ZERO: u16 = 16;

// The only flag of a chunk, and the types of chunks (`NBD_REPLY_TYPE_...`).
pub const CHUNK_DONE: u16 = 1;
pub const CHUNK_NONE: u16 = 0;
pub const CHUNK_OFFSET_DATA: u16 = 1;
pub const CHUNK_BLOCK_STATUS: u16 = 5;
pub const CHUNK_ERROR: u16 = 0x8001;

/// The state of a range in `base:allocation`: not allocated, and reads as zero.
pub const STATE_HOLE_ZERO: u32 = 3;

// Error numbers of the protocol.
pub const EIO: u32 = 5;
pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const EOVERFLOW: u32 = 75;

/// The length of a request header in bytes.
pub const REQUEST_BYTES: usize = 28;
/// The largest number of bytes of one read or write.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// The longest option in bytes: two names of 4096 bytes and some numbers fit.
pub const OPTION_BYTES_MAX: u32 = 16 << 10;
/// The largest length of an export's name or a context's name, in bytes.
pub const NAME_BYTES_MAX: usize = 4096;

/// The header of a client's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdRequest {
    /// The flags, a combination of the `FLAG_` constants.
    pub flags: u16,
    /// The command, one of the `CMD_` constants.
    pub command: u16,
    /// The client's number of the request, which the reply repeats.
    pub cookie: u64,
    /// The offset of the first byte in the disk.
    pub offset: u64,
    /// The number of bytes.
    pub len: u32,
}

impl NbdRequest {
    /// Parses the bytes of a header. Returns `None` if the magic number is wrong.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let mut reader = ByteReader::new(bytes);
        (reader.u32_be().ok()? == REQUEST).then_some(())?;
        Some(Self {
            flags: reader.u16_be().ok()?,
            command: reader.u16_be().ok()?,
            cookie: reader.u64_be().ok()?,
            offset: reader.u64_be().ok()?,
            len: reader.u32_be().ok()?,
        })
    }
}

/// Reads a 32-bit length in bytes and then as many bytes, which it returns. Error: fewer bytes are
/// left.
pub fn read_string<'a>(reader: &mut ByteReader<'a>) -> Result<&'a [u8], ReadError> {
    let len = reader.u32_be()?;
    reader.take(len as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_request_or_none(bytes in prop::array::uniform28(any::<u8>())) {
            prop_assert!(NbdRequest::parse(&bytes).is_none_or(|_| bytes[..4] == REQUEST.to_be_bytes()));
            let mut reader = ByteReader::new(&bytes);
            while read_string(&mut reader).is_ok() {}
        }
    }
}
