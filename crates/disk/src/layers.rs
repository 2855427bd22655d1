//! The layers below an overlay: the image, and a checkpoint's blocks if the VM was restored from
//! one. Without an overlay they form a checkpoint's disk, which is read-only.

use crate::{BLOCK, BLOCK_BYTES, Base, Block, DiskBlock, Result};

/// The result of reading a block from a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The layer wrote the block's content to the buffer.
    Data,
    /// The block is zero. The buffer is unchanged.
    Zero,
    /// The layer does not have the block, so the layer below decides. The buffer is unchanged.
    Absent,
}

/// Blocks of a disk that lie above its base, for example those of a checkpoint. Several threads
/// read it at once.
pub trait Layer: Send + Sync {
    /// Reads the content of `block` into `into`. The result tells whether `into` was filled. Error:
    /// the block cannot be read.
    fn read_block(&self, block: DiskBlock, into: &mut Block) -> Result<Content>;

    /// Returns the first block at or after `from` that is not [`Content::Absent`]. Returns `None`
    /// if there is none. Error: the layer cannot be read.
    fn next_block(&self, from: DiskBlock) -> Result<Option<DiskBlock>>;
}

/// A range of consecutive bytes of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRange {
    /// The offset of its first byte in the disk.
    pub offset: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// True if all its bytes are known to be zero. False if they may have content.
    pub is_zero: bool,
}

/// Appends a range, or extends the last one if that is of the same kind. False if there are `max`
/// ranges already.
pub(crate) fn append_range(ranges: &mut Vec<DiskRange>, range: DiskRange, max: usize) -> bool {
    let is_full = ranges.len() >= max.max(1);
    match ranges.last_mut() {
        Some(last) if last.is_zero == range.is_zero => last.len_bytes += range.len_bytes,
        _ if is_full => return false,
        _ => ranges.push(range),
    }
    true
}

/// A disk that can be copied to a new image.
pub trait Readable {
    /// Returns the size of the disk in bytes.
    fn disk_bytes(&self) -> u64;

    /// Fills `buf` from byte `offset` of the disk on. Error: the disk cannot be read.
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()>;

    /// Divides the `len` bytes from byte `offset` on into consecutive ranges: bytes that are known
    /// to be zero, or others. Returns at most `max` ranges (at least one), so they may cover less
    /// than `len` bytes. Returns none past the end of the disk. Error: a layer or an image cannot
    /// be queried.
    fn ranges(&self, offset: u64, len: u64, max: usize) -> Result<Vec<DiskRange>>;
}

/// The content below an overlay: the base, and the layer above it if there is one.
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

    fn ranges(&self, offset: u64, len: u64, max: usize) -> Result<Vec<DiskRange>> {
        let end = offset.saturating_add(len).min(self.base.disk_bytes());
        let mut ranges = Vec::new();
        let mut at = offset;
        while at < end {
            let (len_bytes, is_zero) = self.status(at, end - at)?;
            if !append_range(&mut ranges, DiskRange { offset: at, len_bytes, is_zero }, max) {
                break;
            }
            at += len_bytes;
        }
        Ok(ranges)
    }
}

impl Below {
    /// Creates a disk of `layer` over `base`.
    pub fn new(base: Base, layer: Option<Box<dyn Layer>>) -> Self {
        Self { layer, base }
    }

    /// Fills `buf` from byte `offset` of the disk on. Errors: those of [`Base::read`] and of the
    /// layer.
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

    /// Tells whether the bytes from byte `offset` of the disk on are known to be zero. Looks at no
    /// more than `len` bytes. Returns the number of bytes that the answer holds for (1 to `len`),
    /// and true if these bytes are known to be zero. False means that they may have content.
    /// Errors: those of [`Base::status`] and of the layer.
    pub fn status(&self, offset: u64, len: u64) -> Result<(u64, bool)> {
        let Some(layer) = &self.layer else { return self.base.status(offset, len) };
        match layer.next_block(DiskBlock(offset / BLOCK))?.map(|b| b.0.saturating_mul(BLOCK)) {
            // Only reading the block would tell whether it is zero.
            Some(known) if known <= offset => Ok(((known + BLOCK - offset).min(len), false)),
            Some(known) => self.base.status(offset, len.min(known - offset)),
            None => self.base.status(offset, len),
        }
    }
}
