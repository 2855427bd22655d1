//! What lies beneath the overlay: a checkpoint's blocks, where the VM was restored from one, and the image.

use crate::{BLOCK, BLOCK_BYTES, Base, Block, DiskBlock, Result};

/// What a layer says of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Its content was put into the buffer.
    Data,
    /// It is zero; the buffer is as it was.
    Zero,
    /// The layer does not know it: what lies beneath counts. The buffer is as it was.
    Absent,
}

/// Blocks of a disk above its base, for example those of a checkpoint. Read from several threads.
pub trait Layer: Send + Sync {
    /// Reads a block.
    fn read_block(&self, block: DiskBlock, into: &mut Block) -> Result<Content>;

    /// The first block, at or behind `from`, that is not absent.
    fn next_block(&self, from: DiskBlock) -> Result<Option<DiskBlock>>;
}

/// The base and the layer above it.
pub struct Below {
    pub layer: Option<Box<dyn Layer>>,
    pub base: Base,
}

impl Below {
    /// Fills `buf` from byte `offset` on.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let Some(layer) = &self.layer else { return self.base.read(offset, buf) };
        let end = offset + buf.len() as u64;
        let mut at = offset;
        while at < end {
            let known = layer.next_block(DiskBlock(at / BLOCK))?.map_or(end, |b| b.0.saturating_mul(BLOCK));
            if known > at {
                let stop = known.min(end);
                self.base.read(at, &mut buf[(at - offset) as usize..(stop - offset) as usize])?;
                at = stop;
                continue;
            }
            let stop = (known + BLOCK).min(end);
            let part = &mut buf[(at - offset) as usize..(stop - offset) as usize];
            let mut block = [0u8; BLOCK_BYTES];
            match layer.read_block(DiskBlock(at / BLOCK), &mut block)? {
                Content::Data => part.copy_from_slice(&block[(at - known) as usize..(stop - known) as usize]),
                Content::Zero => part.fill(0),
                Content::Absent => self.base.read(at, part)?,
            }
            at = stop;
        }
        Ok(())
    }

    /// How many bytes from `offset` on, at most `len` and at least 1, are of one kind, and whether they are known to be
    /// zero.
    pub fn status(&self, offset: u64, len: u64) -> Result<(u64, bool)> {
        let Some(layer) = &self.layer else { return self.base.status(offset, len) };
        match layer.next_block(DiskBlock(offset / BLOCK))?.map(|b| b.0.saturating_mul(BLOCK)) {
            // Whether it is zero would take reading it.
            Some(known) if known <= offset => Ok(((known + BLOCK - offset).min(len), false)),
            Some(known) => self.base.status(offset, len.min(known - offset)),
            None => self.base.status(offset, len),
        }
    }
}
