//! A batch of pages, byte by byte.
//!
//! ```text
//!   batch    entries, end to end, rising by page
//!   entry    varint: pages since the entry before (since 0 for the first) * 8 + kind, then by kind
//!   0 zero   nothing
//!   1 raw    4,096 bytes
//!   2 LZ4    varint length, one LZ4 block
//!   3 words  varint length, a page's words (keyframe_pages::words)
//!   4 patch  varint length, the difference from the standby's version of this page (keyframe_pages::patch)
//!   5 packed patch   varint length of the patch, varint length, the patch as one LZ4 block
//!   6 like   varint: the page that has the same content at the standby
//! ```

/// The encoding of a page in an entry of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PageEncoding {
    /// A page of zeros.
    Zero = 0,
    /// The page itself.
    Raw = 1,
    /// The page as one LZ4 block.
    Lz4 = 2,
    /// The page as its 64-bit words.
    Words = 3,
    /// A patch over the standby's version of the page.
    Patch = 4,
    /// A patch over the standby's version of the page, compressed by LZ4.
    PackedPatch = 5,
    /// A copy of another page of the standby.
    Like = 6,
}

impl PageEncoding {
    /// Returns the encoding with this number; `None` if there is none.
    pub fn of(number: u64) -> Option<Self> {
        Some(match number {
            0 => Self::Zero,
            1 => Self::Raw,
            2 => Self::Lz4,
            3 => Self::Words,
            4 => Self::Patch,
            5 => Self::PackedPatch,
            6 => Self::Like,
            _ => return None,
        })
    }
}
