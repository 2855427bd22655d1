//! Epochs on their way to the standby: pages to streams, each encoded by a thread of its own.
//!
//! ```text
//!   capture ─▶ WireSink ─▶ Wire: by page, stream 0: Encoder ─▶ channel 0
//!                                         stream 1: Encoder ─▶ channel 1
//!                 └──seal──▶ a Mark on each channel, an Epoch on the control channel
//! ```
//!
//! Invariants: the encoders' copy of the standby's pages is never ahead of the standby. So they
//! drop it after an epoch that was given up and when a session begins. A send that fails fails the
//! epoch, and its pages are owed to the next.

use super::frames::{EpochHead, FrameKind, marked, text};
use super::resync::RemotePageHashes;
use super::verify::Checks;
use keyframe_capture::{BoxError, CapturedCheckpoint, CheckpointSink};
use keyframe_disk_capture::DiskCut;
use keyframe_disk_capture::served::BlockSink;
use keyframe_link::Channel;
use keyframe_locks::IgnorePoison;
use keyframe_transfer::{EpochEncoder, SentPages, stream_of};
use keyframe_units::{Epoch, Page, PageIndex, ZERO_PAGE, duration_ns};
use std::sync::{Arc, Mutex, MutexGuard};

/// Pages in a batch: a frame of at most 4 MiB.
const BATCH_PAGES: usize = 512;
/// Blocks of disks that are collected before they are sent.
const BLOCKS: usize = 2048;

/// The connections to a standby.
pub struct Link {
    /// The connection for messages and the descriptions of epochs.
    pub control: Arc<Channel>,
    /// The connections for pages, one for each stream.
    pub data: Vec<Arc<Channel>>,
}

impl Link {
    /// Closes all connections.
    pub fn close(&self) {
        self.control.close();
        self.data.iter().for_each(|channel| channel.close());
    }
}

/// The encoders of the streams to the standby, which remember the standby's pages. The VM's thread
/// and its encoder share them.
pub struct Wire {
    encoders: Vec<EpochEncoder>,
    link: Option<Arc<Link>>,
    session: u64,
    /// The newest epoch of the session that the standby holds.
    base: Option<Epoch>,
    /// The pages that the standby held when the session began, until its first epoch is there.
    remote: Option<RemotePageHashes>,
    /// Epochs before it were given up; the encoder may not know yet.
    first_epoch: Epoch,
    /// An epoch that was given up was just refused: the epoch in progress goes on.
    refused: bool,
    /// Counts of the epoch in progress.
    sent: SentPages,
    /// The first page of each disk in the page space.
    disks: Vec<u64>,
    blocks: Vec<(PageIndex, Box<Page>)>,
}

/// A [`Wire`] that several threads share.
#[derive(Clone)]
pub struct SharedWire(Arc<Mutex<Wire>>);

/// The size and the times of an epoch that was sent.
#[derive(Clone, Copy, Debug, Default)]
pub struct SentEpoch {
    /// The counts of its pages and bytes.
    pub sent: SentPages,
    /// The length of its pause in nanoseconds.
    pub pause_ns: u64,
    /// The time since the pause of the epoch before, in nanoseconds.
    pub interval_ns: u64,
}

impl SharedWire {
    /// Creates `streams` streams. They share `memory_bytes` bytes of memory for copies of the
    /// standby's pages. The page space has `ram_pages` pages of RAM, then the blocks of each disk.
    pub fn new(streams: usize, memory_bytes: usize, ram_pages: u64, disk_blocks: &[u64]) -> Self {
        let disks = first_pages(ram_pages, disk_blocks);
        let encoders =
            (0..streams).map(|_| EpochEncoder::new(memory_bytes / streams.max(1))).collect();
        Self(Arc::new(Mutex::new(Wire {
            encoders,
            link: None,
            session: 0,
            base: None,
            remote: None,
            first_epoch: Epoch(0),
            refused: false,
            sent: SentPages::default(),
            disks,
            blocks: Vec::new(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Wire> {
        self.0.lock().ignore_poison()
    }

    /// Sets the page space of another machine: `ram_pages` pages of RAM, then the blocks of each
    /// disk. The caller sends nothing before the next [`SharedWire::begin`].
    pub fn reshape(&self, ram_pages: u64, disk_blocks: &[u64]) {
        let mut wire = self.lock();
        wire.disks = first_pages(ram_pages, disk_blocks);
        wire.encoders.iter_mut().for_each(EpochEncoder::forget);
        (wire.base, wire.remote) = (None, None);
        (wire.sent, wire.refused) = (SentPages::default(), false);
        wire.blocks.clear();
    }

    /// Sets the connections over which epochs are sent. `None` if there are none; then sending
    /// fails.
    pub fn connect(&self, link: Option<Arc<Link>>) {
        self.lock().link = link;
    }

    /// Begins session number `session`, whose first epoch is `first_epoch`. `remote` has the hashes
    /// of the pages that the standby holds: `None` if they are not known.
    pub fn begin(&self, session: u64, first_epoch: Epoch, remote: Option<RemotePageHashes>) {
        let mut wire = self.lock();
        wire.first_epoch = first_epoch;
        wire.encoders.iter_mut().for_each(EpochEncoder::forget);
        (wire.session, wire.base, wire.sent) = (session, None, SentPages::default());
        wire.remote = remote;
        wire.blocks.clear();
    }

    /// Records that the standby holds all epochs up to `epoch`.
    pub fn acknowledged(&self, epoch: Epoch) {
        let mut wire = self.lock();
        wire.encoders.iter_mut().for_each(EpochEncoder::finish);
        wire.remote = None;
        wire.base = Some(epoch);
    }

    /// Continues with epoch `first_epoch` after an epoch was given up. From then on the standby
    /// counts as holding the acknowledged epochs and nothing else.
    pub fn resume(&self, first_epoch: Epoch) {
        let mut wire = self.lock();
        wire.first_epoch = first_epoch;
        wire.encoders.iter_mut().for_each(EpochEncoder::abandon);
        wire.remote = None;
        wire.sent = SentPages::default();
        wire.blocks.clear();
    }

    /// Sends the blocks of disk number `disk` from block `first` on, with the content `pages`, as
    /// part of the epoch in progress. Errors: no standby is connected; there is no such disk; the
    /// connection broke.
    pub fn put_blocks(&self, disk: usize, first: u64, pages: &[Page]) -> Result<(), BoxError> {
        let mut wire = self.lock();
        for (block, page) in (first..).zip(pages) {
            wire.put_block(disk, block, page)?;
        }
        wire.flush_blocks()
    }

    /// Sends zeros for the `blocks` blocks of disk number `disk` from block `first` on, but only
    /// for blocks of which the standby holds another content. Errors: those of
    /// [`Self::put_blocks`].
    pub fn put_hole(&self, disk: usize, first: u64, blocks: u64) -> Result<(), BoxError> {
        let mut wire = self.lock();
        let begin = *wire.disks.get(disk).ok_or("no such disk")?;
        let (mut from, end) = (begin + first, begin + first + blocks);
        while let Some(page) =
            wire.remote.as_ref().and_then(|remote| remote.next_not_zero(from, end))
        {
            wire.put_block(disk, page - begin, &ZERO_PAGE)?;
            from = page + 1;
        }
        wire.flush_blocks()
    }
}

/// The first page of each disk, in a page space that begins with `ram_pages` of RAM.
fn first_pages(ram_pages: u64, disk_blocks: &[u64]) -> Vec<u64> {
    let mut at = ram_pages;
    let next = |blocks: &u64| {
        at += blocks;
        at - blocks
    };
    disk_blocks.iter().map(next).collect()
}

impl Wire {
    fn link(&self) -> Result<Arc<Link>, BoxError> {
        self.link.clone().ok_or_else(|| "no standby is connected".into())
    }

    fn put(&mut self, pages: &[(PageIndex, &Page)]) -> Result<(), BoxError> {
        let link = self.link()?;
        let streams = self.encoders.len();
        let mut of_stream: Vec<Vec<(PageIndex, &Page)>> = vec![Vec::new(); streams];
        for page in pages {
            if self.remote.as_mut().is_some_and(|remote| remote.has(page.0, page.1)) {
                self.sent.pages += 1;
                self.sent.same += 1;
                continue;
            }
            if let Some(stream) = of_stream.get_mut(stream_of(page.0, streams)) {
                stream.push(*page);
            }
        }
        let head = marked(self.session, 0);
        let work = |encoder: &mut EpochEncoder, pages: &[(PageIndex, &Page)], channel: &Channel| {
            let (mut all, mut batch) = (SentPages::default(), Vec::new());
            for part in pages.chunks(BATCH_PAGES) {
                batch.clear();
                all = all.plus(encoder.encode(part, &mut batch));
                if !batch.is_empty() {
                    channel.send(FrameKind::Batch as u8, &[&head, &batch])?;
                }
            }
            Ok::<SentPages, keyframe_link::Error>(all)
        };
        let jobs = self
            .encoders
            .iter_mut()
            .zip(&of_stream)
            .zip(&link.data)
            .filter(|((_, p), _)| !p.is_empty());
        let results: Vec<_> = std::thread::scope(|scope| {
            let mut jobs: Vec<_> = jobs.collect();
            // This thread does one of them.
            let own = jobs.pop();
            let threads: Vec<_> = jobs
                .into_iter()
                .map(|((encoder, pages), channel)| {
                    scope.spawn(move || work(encoder, pages, channel))
                })
                .collect();
            let own = own.map(|((encoder, pages), channel)| work(encoder, pages, channel));
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).chain(own).collect()
        });
        for result in results {
            // A part of a batch may be sent: only a new connection can carry another.
            self.sent = self.sent.plus(result.inspect_err(|_| link.close())?);
        }
        Ok(())
    }

    fn flush_blocks(&mut self) -> Result<(), BoxError> {
        let blocks = std::mem::take(&mut self.blocks);
        let pages: Vec<(PageIndex, &Page)> =
            blocks.iter().map(|(page, content)| (*page, &**content)).collect();
        self.put(&pages)
    }

    fn finish(
        &mut self,
        label: &EpochLabel,
        captured: &CapturedCheckpoint,
    ) -> Result<SentEpoch, BoxError> {
        self.flush_blocks()?;
        let link = self.link()?;
        let head = marked(self.session, label.epoch.0);
        for channel in &link.data {
            channel.send(FrameKind::Mark as u8, &[&head]).inspect_err(|_| link.close())?;
        }
        let taken_at = captured.taken_at.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let said = EpochHead {
            after: self.base,
            reason: label.reason.into(),
            taken_at_ns: duration_ns(taken_at),
            pages: self.sent.pages,
            wire_bytes: self.sent.bytes,
            checks: label
                .checks
                .as_ref()
                .and_then(|checks| checks.get().cloned())
                .unwrap_or_default(),
        };
        let json = text(&said).map_err(|e| BoxError::from(e.to_string()))?;
        let len = (json.len() as u32).to_le_bytes();
        link.control.send(FrameKind::Epoch as u8, &[&head, &len, &json, &captured.device_state])?;
        let done = SentEpoch {
            sent: SentPages {
                bytes: self.sent.bytes + captured.device_state.len() as u64,
                ..self.sent
            },
            pause_ns: captured.timeline.pause_ns,
            interval_ns: captured.timeline.interval_ns,
        };
        self.sent = SentPages::default();
        Ok(done)
    }

    fn discard(&mut self) {
        self.encoders.iter_mut().for_each(EpochEncoder::abandon);
        self.remote = None;
        self.blocks.clear();
        self.sent = SentPages::default();
        let head = marked(self.session, 0);
        for channel in self.link.iter().flat_map(|link| &link.data) {
            // If the send fails, the connection has ended, and the standby drops the pages by
            // itself.
            let _ = channel.send(FrameKind::Discard as u8, &[&head]);
        }
    }
}

impl BlockSink for Wire {
    fn put_block(&mut self, disk: usize, block: u64, content: &Page) -> Result<(), BoxError> {
        let first = self.disks.get(disk).ok_or("no such disk")?;
        self.blocks.push((PageIndex(first + block), Box::new(*content)));
        if self.blocks.len() >= BLOCKS { self.flush_blocks() } else { Ok(()) }
    }

    fn put_zero_blocks(&mut self, disk: usize, block: u64, blocks: u64) -> Result<(), BoxError> {
        (block..block + blocks).try_for_each(|block| self.put_block(disk, block, &ZERO_PAGE))
    }
}

/// The description of an epoch whose pages are being sent.
pub struct EpochLabel {
    /// The number of the epoch.
    pub epoch: Epoch,
    /// The reason why it was taken.
    pub reason: &'static str,
    /// The blocks that its pause cut from the disks. `None` if the VM has no disks.
    pub cut: Option<DiskCut>,
    /// The hashes of its RAM, set in the pause. `None` without `--verify`.
    pub checks: Option<Checks>,
}

/// The sink of the checkpoint cycle that sends epochs to the standby.
pub struct WireSink(pub SharedWire);

impl CheckpointSink for WireSink {
    type Label = EpochLabel;
    type Sealed = SentEpoch;

    fn put(&mut self, pages: &[(PageIndex, &Page)]) -> Result<(), BoxError> {
        self.0.lock().put(pages)
    }

    fn seal(
        &mut self,
        captured: &CapturedCheckpoint,
        label: EpochLabel,
    ) -> Result<SentEpoch, BoxError> {
        let mut wire = self.0.lock();
        // The epoch in progress holds the pages of this one again. Without them this one is torn.
        if label.epoch < wire.first_epoch {
            wire.refused = true;
            return Err(format!("epoch {} was given up", label.epoch).into());
        }
        if let Some(cut) = &label.cut {
            cut.put_into(&mut *wire)?;
        }
        wire.finish(&label, captured)
    }

    fn abandon(&mut self) {
        let mut wire = self.0.lock();
        if !std::mem::take(&mut wire.refused) {
            wire.discard();
        }
    }
}
