//! A disk as a guest sees it: an overlay and the layers below. Both can be exchanged while the disk
//! is served.
//!
//! ```text
//!   export ──▶ Disk ──▶ Stack: overlay, layer, base       exchange(): new requests use the other
//!                       Stack: another overlay and layer  stack; each request under way ends in
//!                                                         the stack in which it began
//! ```

use crate::layers::{Below, DiskRange, Readable, append_range};
use crate::overlay::{Lasting, Overlay, Size};
use crate::{BLOCK, Base, DiskBlock, Layer, Result};
use keyframe_locks::IgnorePoison;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

/// An overlay and the layers below it.
pub(crate) struct Stack {
    /// The guest's writes.
    pub overlay: Overlay,
    below: Below,
    lasting: Lasting,
}

/// The result of a read that does not wait for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadNow {
    /// The content is in the buffer.
    Done,
    /// Reading would wait for a device. The content of the buffer is undefined.
    WouldWait,
    /// The layer cannot tell whether reading would wait. The content of the buffer is undefined.
    Unknown,
}

impl Stack {
    /// Creates a stack: `layer` over `base`, and over both the overlay in the directory `dir`,
    /// which is created if it does not exist. Errors: those of [`Overlay::create`].
    pub fn create(
        dir: &Path,
        base: Base,
        layer: Option<Box<dyn Layer>>,
        lasting: Lasting,
    ) -> Result<Self> {
        let overlay = Overlay::create(dir, base.disk_bytes(), lasting)?;
        Ok(Self { overlay, below: Below::new(base, layer), lasting })
    }
}

/// A disk whose content several threads can read, write and exchange at once.
pub struct Disk {
    stack: RwLock<Arc<Stack>>,
    pause: Mutex<Pause>,
    /// The number of flushes that were acknowledged in pauses before their sync.
    owed: AtomicU64,
    /// How many of these are durable.
    paid: AtomicU64,
}

/// The time until which a flush is acknowledged before its sync.
///
/// ```text
///   running ──pause(limit)──▶ paused ──settled()──▶ running
///                               └──limit passed──▶ running
/// ```
#[derive(Default)]
struct Pause {
    until: Option<Instant>,
}

/// The result of a client's flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushOutcome {
    /// The written data is durable.
    Durable,
    /// The VM is paused: the flush may be acknowledged now, and the caller must sync afterwards.
    Owed,
}

impl Disk {
    /// Creates a disk: `layer` over `base`, and over both the overlay in the directory `dir`, which
    /// is created if it does not exist. If `lasting` is [`Lasting::Temporary`], no flush waits for
    /// the medium. Errors: those of [`Overlay::create`].
    pub fn create(
        dir: &Path,
        base: Base,
        layer: Option<Box<dyn Layer>>,
        lasting: Lasting,
    ) -> Result<Self> {
        Stack::create(dir, base, layer, lasting).map(Self::of)
    }

    /// Creates a disk whose writes go to `overlay`. The overlay lies above `layer`, and the layer
    /// above `base`. The disk takes the overlay for a durable one ([`Lasting::Durable`]).
    pub fn new(overlay: Overlay, base: Base, layer: Option<Box<dyn Layer>>) -> Self {
        Self::of(Stack { overlay, below: Below::new(base, layer), lasting: Lasting::Durable })
    }

    fn of(stack: Stack) -> Self {
        let stack = RwLock::new(Arc::new(stack));
        Self { stack, pause: Mutex::default(), owed: AtomicU64::new(0), paid: AtomicU64::new(0) }
    }

    /// The current stack.
    pub(crate) fn stack(&self) -> Arc<Stack> {
        Arc::clone(&self.stack.read().ignore_poison())
    }

    /// Exchanges this disk's stack with `other`. Both must have the same size.
    pub(crate) fn exchange(&self, other: &mut Arc<Stack>) {
        std::mem::swap(&mut *self.stack.write().ignore_poison(), other);
    }

    /// Returns the size of the disk in bytes.
    pub fn disk_bytes(&self) -> u64 {
        self.stack().overlay.disk_bytes()
    }

    /// Fills `buf` from byte `offset` of the disk on. Errors: [`Error::Io`](crate::Error::Io) if
    /// the overlay or an image cannot be read; those of the layer.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let stack = self.stack();
        for (start, len) in stack.overlay.read(offset, buf)? {
            stack.below.read(offset + start as u64, &mut buf[start..start + len])?;
        }
        Ok(())
    }

    /// Reads as [`Self::read`] does, but without waiting for a device. If the result is not
    /// `ReadNow::Done`, the content of `buf` is undefined. Errors: those of [`Self::read`].
    pub fn read_now(&self, offset: u64, buf: &mut [u8]) -> Result<ReadNow> {
        let stack = self.stack();
        let Some(missing) = stack.overlay.read_now(offset, buf)? else {
            return Ok(ReadNow::WouldWait);
        };
        for (start, len) in missing {
            if stack.below.layer.is_some() {
                return Ok(ReadNow::Unknown);
            }
            match stack.below.base.read_now(offset + start as u64, &mut buf[start..start + len])? {
                ReadNow::Done => {}
                other => return Ok(other),
            }
        }
        Ok(ReadNow::Done)
    }

    /// Writes `data` from byte `offset` on. The caller checks that the range lies within the disk.
    /// Errors: those of [`Overlay::write`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let stack = self.stack();
        stack.overlay.write(offset, data, &|at, buf| stack.below.read(at, buf))
    }

    /// Makes `len` bytes from byte `offset` on zero. The caller checks that the range lies within
    /// the disk. Errors: those of [`Overlay::zero`].
    pub fn zero(&self, offset: u64, len: u64) -> Result<()> {
        let stack = self.stack();
        stack.overlay.zero(offset, len, &|at, buf| stack.below.read(at, buf))
    }

    /// Discards `len` bytes from byte `offset` on: the whole blocks of 4096 bytes in this range
    /// become zero. The caller checks that the range lies within the disk. Errors: those of
    /// [`Overlay::discard`].
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.stack().overlay.discard(offset, len)
    }

    /// Divides the `len` bytes from byte `offset` on into consecutive ranges: bytes that are known
    /// to be zero, or others. Returns at most `max` ranges (at least one), so they may cover less
    /// than `len` bytes. Returns none past the end of the disk. Errors:
    /// [`Error::Io`](crate::Error::Io) if an image cannot be queried; those of the layer.
    pub fn status(&self, offset: u64, len: u64, max: usize) -> Result<Vec<DiskRange>> {
        let stack = self.stack();
        let end = offset.saturating_add(len).min(stack.overlay.disk_bytes());
        let mut ranges = Vec::new();
        let mut at = offset;
        while at < end {
            let block = at / BLOCK;
            // Queried in steps, so that one request does not hold the map for a whole disk.
            let blocks = (end.div_ceil(BLOCK) - block).min(STATUS_STEP_BLOCKS);
            let mut pieces = Vec::new();
            stack.overlay.status(DiskBlock(block), blocks, &mut |first, n, zero| {
                pieces.push((first, n, zero));
            });
            for (first, n, zero) in pieces {
                let stop = end.min((first.0 + n) * BLOCK);
                while at < stop {
                    let (len_bytes, is_zero) = match zero {
                        Some(zero) => (stop - at, zero),
                        None => stack.below.status(at, stop - at)?,
                    };
                    if !append_range(&mut ranges, DiskRange { offset: at, len_bytes, is_zero }, max)
                    {
                        return Ok(ranges);
                    }
                    at += len_bytes;
                }
            }
        }
        Ok(ranges)
    }

    /// Begins a pause: for at most `limit`, a flush is acknowledged before its sync. This is safe
    /// while the VM is paused, because the guest cannot act on the acknowledgement. `limit` must
    /// end before the watchdog may resume the VM.
    pub fn pause(&self, limit: Duration) {
        self.pause.lock().ignore_poison().until = Instant::now().checked_add(limit);
    }

    /// Ends a pause: if a flush was acknowledged before its sync, makes all written data durable.
    /// The caller calls this before the VM runs. Errors: those of [`Self::sync`]. The VM must then
    /// not run; the caller may try again.
    pub fn settled(&self) -> Result<()> {
        self.pause.lock().ignore_poison().until = None;
        if self.paid.load(Ordering::Acquire) < self.owed.load(Ordering::Acquire) {
            self.sync()
        } else {
            Ok(())
        }
    }

    /// Handles a client's flush at once if the overlay is [`Lasting::Temporary`], because then the
    /// flush waits for no device, and returns `true`. Returns `false` and does nothing if the
    /// overlay is durable. Errors: those of [`Self::sync`].
    pub fn flush_now(&self) -> Result<bool> {
        let is_temporary = self.stack().lasting == Lasting::Temporary;
        if is_temporary {
            self.sync()?;
        }
        Ok(is_temporary)
    }

    /// Handles a client's flush. Outside a pause ([`Self::pause`]), makes all written data durable.
    /// In a pause, returns `FlushOutcome::Owed` at once: the caller acknowledges the flush and
    /// calls [`Self::sync`] afterwards. Errors: those of [`Self::sync`].
    pub fn flush(&self) -> Result<FlushOutcome> {
        {
            let pause = self.pause.lock().ignore_poison();
            if pause.until.is_some_and(|until| Instant::now() < until) {
                // Counted under the lock, so that `settled` sees it.
                self.owed.fetch_add(1, Ordering::AcqRel);
                return Ok(FlushOutcome::Owed);
            }
        }
        self.sync().map(|()| FlushOutcome::Durable)
    }

    /// Makes all written data durable. Errors: those of [`Overlay::sync`].
    pub fn sync(&self) -> Result<()> {
        let owed = self.owed.load(Ordering::Acquire);
        self.stack().overlay.sync()?;
        self.paid.fetch_max(owed, Ordering::AcqRel);
        Ok(())
    }

    /// Returns the sizes and counters of the overlay.
    pub fn size(&self) -> Size {
        self.stack().overlay.size()
    }
}

impl Readable for Disk {
    fn disk_bytes(&self) -> u64 {
        Self::disk_bytes(self)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        Self::read(self, offset, buf)
    }

    fn ranges(&self, offset: u64, len: u64, max: usize) -> Result<Vec<DiskRange>> {
        self.status(offset, len, max)
    }
}

const STATUS_STEP_BLOCKS: u64 = 1 << 16;
