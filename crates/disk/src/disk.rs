//! A disk as a guest sees it: an overlay and the layers below. Both can be exchanged while the disk
//! is served.
//!
//! ```text
//!   export ──▶ Disk ──▶ Stack: overlay, layer, base        exchange(): requests that come find the other one
//!                       Stack: another overlay and layer   requests under way end in the one that they began in
//! ```

use crate::layers::{Below, Range, Readable};
use crate::overlay::{Lasting, Overlay, Size};
use crate::{BLOCK, Base, DiskBlock, Layer, Result};
use keyframe_locks::IgnorePoison;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

/// What a disk holds.
pub(crate) struct Stack {
    pub overlay: Overlay,
    below: Below,
    lasting: Lasting,
}

/// What came of a read that is not to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Now {
    /// The content is in the buffer.
    Read,
    /// It would take waiting for a device. The buffer holds anything.
    Waits,
    /// Nobody knows. The buffer holds anything.
    Unknown,
}

impl Stack {
    /// On `base`, with its overlay in `dir`, which is made unless it is there.
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

/// A disk.
pub struct Disk {
    stack: RwLock<Arc<Stack>>,
    pause: Mutex<Pause>,
    /// Flushes acknowledged in a pause, before their sync.
    owed: AtomicU64,
    /// How many of them are durable.
    paid: AtomicU64,
}

/// Until when a flush is acknowledged before its sync.
///
/// ```text
///   running ──pause(limit)──▶ paused ──settled()──▶ running
///                               └──limit passed──▶ running
/// ```
#[derive(Default)]
struct Pause {
    until: Option<Instant>,
}

/// What a flush came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flushed {
    /// It is durable.
    Durable,
    /// The VM stands still: the sync is still to be done, by whoever gets this.
    Owed,
}

impl Disk {
    /// A disk on `base`, with its overlay in `dir`, which is made unless it is there.
    pub fn create(
        dir: &Path,
        base: Base,
        layer: Option<Box<dyn Layer>>,
        lasting: Lasting,
    ) -> Result<Self> {
        Stack::create(dir, base, layer, lasting).map(Self::of)
    }

    /// A disk of an overlay that is open.
    pub fn new(overlay: Overlay, base: Base, layer: Option<Box<dyn Layer>>) -> Self {
        Self::of(Stack { overlay, below: Below::new(base, layer), lasting: Lasting::Durable })
    }

    fn of(stack: Stack) -> Self {
        let stack = RwLock::new(Arc::new(stack));
        Self { stack, pause: Mutex::default(), owed: AtomicU64::new(0), paid: AtomicU64::new(0) }
    }

    /// What it holds now.
    pub(crate) fn stack(&self) -> Arc<Stack> {
        Arc::clone(&self.stack.read().ignore_poison())
    }

    /// Holds what `other` does from now on, which becomes what it held. Both are disks of one
    /// length.
    pub(crate) fn exchange(&self, other: &mut Arc<Stack>) {
        std::mem::swap(&mut *self.stack.write().ignore_poison(), other);
    }

    /// Bytes of the disk.
    pub fn disk_bytes(&self) -> u64 {
        self.stack().overlay.disk_bytes()
    }

    /// Fills `buf` from byte `offset` on.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let stack = self.stack();
        for (start, len) in stack.overlay.read(offset, buf)? {
            stack.below.read(offset + start as u64, &mut buf[start..start + len])?;
        }
        Ok(())
    }

    /// The same, unless it would take waiting for a device, or may.
    pub fn read_now(&self, offset: u64, buf: &mut [u8]) -> Result<Now> {
        let stack = self.stack();
        let Some(missing) = stack.overlay.read_now(offset, buf)? else { return Ok(Now::Waits) };
        for (start, len) in missing {
            if stack.below.layer.is_some() {
                return Ok(Now::Unknown);
            }
            match stack.below.base.read_now(offset + start as u64, &mut buf[start..start + len])? {
                Now::Read => {}
                other => return Ok(other),
            }
        }
        Ok(Now::Read)
    }

    /// Writes `data` from byte `offset` on.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let stack = self.stack();
        stack.overlay.write(offset, data, &|at, buf| stack.below.read(at, buf))
    }

    /// Makes `len` bytes from `offset` on zero.
    pub fn zero(&self, offset: u64, len: u64) -> Result<()> {
        let stack = self.stack();
        stack.overlay.zero(offset, len, &|at, buf| stack.below.read(at, buf))
    }

    /// `len` bytes from `offset` on are no longer needed: whole blocks in there become zero.
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.stack().overlay.discard(offset, len)
    }

    /// Shows ranges from `offset` on: start, bytes, whether they are known to be zero. At most
    /// `max` of them, so perhaps not all of `len`.
    pub fn status(&self, offset: u64, len: u64, max: usize) -> Result<Vec<(u64, u64, bool)>> {
        let stack = self.stack();
        let end = offset.saturating_add(len).min(stack.overlay.disk_bytes());
        let mut ranges: Vec<(u64, u64, bool)> = Vec::new();
        let mut at = offset;
        while at < end {
            let block = at / BLOCK;
            // Looked at in steps, lest one question holds the map for all of a disk.
            let blocks = (end.div_ceil(BLOCK) - block).min(STATUS_STEP_BLOCKS);
            let mut pieces = Vec::new();
            stack.overlay.status(DiskBlock(block), blocks, &mut |first, n, zero| {
                pieces.push((first, n, zero));
            });
            for (first, n, zero) in pieces {
                let stop = end.min((first.0 + n) * BLOCK);
                while at < stop {
                    let (bytes, zero) = match zero {
                        Some(zero) => (stop - at, zero),
                        None => stack.below.status(at, stop - at)?,
                    };
                    let full = ranges.len() >= max.max(1);
                    match ranges.last_mut() {
                        Some(last) if last.2 == zero => last.1 += bytes,
                        _ if full => return Ok(ranges),
                        _ => ranges.push((at, bytes, zero)),
                    }
                    at += bytes;
                }
            }
        }
        Ok(ranges)
    }

    /// Begins a pause: for at most `limit`, a flush is acknowledged before its sync. That is right
    /// for as long as the VM stands still, since nobody can act on the acknowledgement. `limit`
    /// must end before anybody else lets the VM run.
    pub fn pause(&self, limit: Duration) {
        self.pause.lock().ignore_poison().until = Instant::now().checked_add(limit);
    }

    /// Ends a pause: what was acknowledged in it is durable. To be awaited before the VM runs;
    /// where it fails, the VM must not run, and it can be tried again.
    pub fn settled(&self) -> Result<()> {
        self.pause.lock().ignore_poison().until = None;
        if self.paid.load(Ordering::Acquire) < self.owed.load(Ordering::Acquire) {
            self.sync()
        } else {
            Ok(())
        }
    }

    /// A client's flush, where it waits for nothing since what is written is to be thrown away;
    /// else `false`.
    pub fn flush_now(&self) -> Result<bool> {
        let is_temporary = self.stack().lasting == Lasting::Temporary;
        if is_temporary {
            self.sync()?;
        }
        Ok(is_temporary)
    }

    /// A client's flush.
    pub fn flush(&self) -> Result<Flushed> {
        {
            let pause = self.pause.lock().ignore_poison();
            if pause.until.is_some_and(|until| Instant::now() < until) {
                // Under the lock, so that `settled` sees it.
                self.owed.fetch_add(1, Ordering::AcqRel);
                return Ok(Flushed::Owed);
            }
        }
        self.sync().map(|()| Flushed::Durable)
    }

    /// Makes everything written durable.
    pub fn sync(&self) -> Result<()> {
        let owed = self.owed.load(Ordering::Acquire);
        self.stack().overlay.sync()?;
        self.paid.fetch_max(owed, Ordering::AcqRel);
        Ok(())
    }

    /// How large the overlay is.
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

    fn ranges(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Range>> {
        self.status(offset, len, max)
    }
}

const STATUS_STEP_BLOCKS: u64 = 1 << 16;
