//! Writes a disk back to an image: to a new one, or its written blocks into its base.
//!
//! ```text
//!   new        base, layer, overlay ──▶ file without a name ──synced──▶ in place under its name
//!
//!   in place   IMAGE.keyframe-commit made, synced ──▶ layer, overlay ──▶ IMAGE, synced ──▶ overlay emptied ──▶ removed
//!                 └── killed: what was to be written is still there, and is written again
//! ```
//!
//! Invariants: a new image is there whole and durable, or not at all. What is written in place are
//! whole blocks, which do not depend on what the base holds: so writing them twice is writing them
//! once, and an overlay is its own journal. An image with a commit under way is served to nobody.
//!
//! Left out: whether somebody agreed to it; images whose backing file is the one that is written.

mod in_place;
mod new;

pub use in_place::InPlace;
pub use in_place::interrupted;
pub use new::{empty_qcow2, to_file, to_new, to_new_raw, to_stream};

use crate::{BLOCK, Block, Content, DiskBlock, Layer, Overlay, Result};

/// How much of a disk was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Bytes with content.
    pub data_bytes: u64,
    /// Bytes that are zero.
    pub zero_bytes: u64,
}

/// Told how many bytes are done; an error ends it.
pub type Watch<'a> = &'a mut dyn FnMut(u64) -> Result<()>;

/// The most that is read and written at once.
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

/// What writing `layer` would write.
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
