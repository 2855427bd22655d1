//! Writes a disk back to an image: to a new one, or its written blocks into its base.
//!
//! ```text
//!   new        base, layer, overlay ──▶ unnamed file ──synced──▶ linked at its name
//!
//!   in place   IMAGE.keyframe-commit is created and synced
//!                ──▶ layer, overlay ──▶ IMAGE, synced ──▶ overlay emptied ──▶ mark removed
//!                 └── killed: layer and overlay are unchanged, and are written again
//! ```
//!
//! Invariants: a new image is complete and durable, or it does not exist. A commit in place writes
//! whole blocks, which do not depend on the content of the base. So writing them twice has the same
//! effect as writing them once, and the overlay serves as its own journal. An image with a commit
//! under way is not served.
//!
//! Left out: the user's consent; other images that have the written image as their backing file.

mod in_place;
mod new;

pub use in_place::InPlace;
pub use in_place::interrupted;
pub(crate) use in_place::marked_source;
pub use new::{empty_qcow2, to_file, to_new, to_new_raw, to_stream};

use crate::{BLOCK, Block, Content, DiskBlock, Layer, Overlay, Result};

/// The amount of data that a commit writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// The number of bytes of blocks with content.
    pub data_bytes: u64,
    /// The number of bytes of blocks that are zero.
    pub zero_bytes: u64,
}

/// The caller's function that a commit calls with the number of bytes processed so far. If the
/// function returns an error, the commit stops and returns that error.
pub type ProgressCallback<'a> = &'a mut dyn FnMut(u64) -> Result<()>;

/// The largest read and write, in bytes.
const CHUNK_BYTES: u64 = 1 << 20;

impl Layer for Overlay {
    fn read_block(&self, block: DiskBlock, into: &mut Block) -> Result<Content> {
        let mut zero = None;
        self.status(block, 1, &mut |_, _, is| zero = is);
        match zero {
            None => Ok(Content::Absent),
            Some(true) => Ok(Content::Zero),
            Some(false) => self.read(block.0 * BLOCK, into).map(|_| Content::Data),
        }
    }

    fn next_block(&self, from: DiskBlock) -> Result<Option<DiskBlock>> {
        Ok(self.next(from).map(|(block, _)| block))
    }
}

/// Returns the amount of data that a commit of `layer` would write, in whole blocks of 4096 bytes.
/// Error: that of `layer` if it cannot be read.
pub fn measure(layer: &dyn Layer) -> Result<Amount> {
    let mut amount = Amount::default();
    let mut block = [0; crate::BLOCK_BYTES];
    let mut from = DiskBlock(0);
    while let Some(at) = layer.next_block(from)? {
        match layer.read_block(at, &mut block)? {
            Content::Data => amount.data_bytes += BLOCK,
            Content::Zero => amount.zero_bytes += BLOCK,
            Content::Absent => {}
        }
        from = DiskBlock(at.0 + 1);
    }
    Ok(amount)
}
