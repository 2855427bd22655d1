//! The layers below an overlay: a checkpoint's blocks, if the VM was restored from one, and the
//! image. Without an overlay they form a checkpoint's disk, to be read.

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

/// A range of a disk: its first byte, how many it has, and whether they are known to be zero.
pub type Range = (u64, u64, bool);

/// A disk that new images are made from.
pub trait Readable {
    /// Bytes of the disk.
    fn disk_bytes(&self) -> u64;

    /// Fills `buf` from byte `offset` on.
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()>;

    /// Ranges from `offset` on, one behind the other. At most `max` of them, so perhaps not all of
    /// `len`.
    fn ranges(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Range>>;
}

/// The base and the layer above it.
pub struct Below {
    pub(crate) layer: Option<Box<dyn Layer>>,
    pub(crate) base: Base,
}

impl Readable for Below {
    fn disk_bytes(&self) -> u64 {
        self.base.disk_bytes()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        Self::read(self, offset, buf)
    }

    fn ranges(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Range>> {
        let end = offset.saturating_add(len).min(self.base.disk_bytes());
        let mut ranges: Vec<Range> = Vec::new();
        let mut at = offset;
        while at < end {
            let (bytes, zero) = self.status(at, end - at)?;
            let full = ranges.len() >= max.max(1);
            match ranges.last_mut() {
                Some(last) if last.2 == zero => last.1 += bytes,
                _ if full => break,
                _ => ranges.push((at, bytes, zero)),
            }
            at += bytes;
        }
        Ok(ranges)
    }
}

impl Below {
    /// `layer` over `base`.
    pub fn new(base: Base, layer: Option<Box<dyn Layer>>) -> Self {
        Self { layer, base }
    }

    /// Fills `buf` from byte `offset` on.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let Some(layer) = &self.layer else { return self.base.read(offset, buf) };
        let end = offset + buf.len() as u64;
        let mut at = offset;
        while at < end {
            let known =
                layer.next_block(DiskBlock(at / BLOCK))?.map_or(end, |b| b.0.saturating_mul(BLOCK));
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
                Content::Data => {
                    part.copy_from_slice(&block[(at - known) as usize..(stop - known) as usize]);
                }
                Content::Zero => part.fill(0),
                Content::Absent => self.base.read(at, part)?,
            }
            at = stop;
        }
        Ok(())
    }

    /// How many bytes from `offset` on, at most `len` and at least 1, are of one kind, and whether
    /// they are known to be zero.
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
