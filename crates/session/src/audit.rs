//! `run --audit`: a full copy of RAM taken in the same pause, and the comparison with what was
//! sealed.
//!
//! ```text
//!   DIR/12.ram       the copy that checkpoint 12 must equal: all RAM blocks end to end, in page order
//! ```
//!
//! The newest copies are kept, and every one that a checkpoint differed from; the others are
//! removed, because each is as large as RAM.

use keyframe_capture::{BoxError, PageReader};
use keyframe_store::Store;
use keyframe_units::{CheckpointId, PAGE_BYTES, Page, PageIndex, PageRange, RamLayout};
use std::collections::VecDeque;
use std::path::PathBuf;

const BATCH_PAGES: u64 = 4096;
/// Copies that are kept although their checkpoints equalled them.
const KEPT: usize = 8;

/// Copies RAM in the pause of a checkpoint, and compares the copy with the sealed checkpoint.
pub struct Audit {
    dir: PathBuf,
    equal: VecDeque<PathBuf>,
    copy: Vec<u8>,
    /// The number of the capture that the copy belongs to.
    seq: Option<u64>,
}

impl Audit {
    /// Creates an audit that puts copies into the directory `dir`, which it makes. Error: the
    /// directory cannot be made.
    pub fn new(dir: PathBuf) -> std::io::Result<Self> {
        std::fs::create_dir_all(&dir)?;
        Ok(Self { dir, equal: VecDeque::new(), copy: Vec::new(), seq: None })
    }

    /// Copies all of RAM to memory, in the pause; a copy to a disk could take seconds. Errors: the
    /// RAM cannot be read; no memory for the copy.
    pub fn copy(&mut self, reader: &dyn PageReader, ram: &RamLayout) -> Result<(), BoxError> {
        self.seq = None;
        self.copy.resize(usize::try_from(ram.len_bytes())?, 0);
        reader.read(&[PageRange::new(PageIndex(0), ram.len_pages())], &mut self.copy)
    }

    /// Records that the copy belongs to capture `seq`.
    pub fn captured(&mut self, seq: u64) {
        self.seq = Some(seq);
    }

    /// Reads checkpoint `id`, the sealed one of capture `seq`, back from the store and compares it
    /// with the copy. Returns the pages that differ. Errors: the checkpoint cannot be read; a
    /// differing copy cannot be written.
    pub fn compare(
        &mut self,
        store: &Store,
        seq: u64,
        id: CheckpointId,
    ) -> Result<Vec<PageIndex>, BoxError> {
        if self.seq != Some(seq) {
            return Err("the copy is that of another checkpoint".into());
        }
        let kept = self.dir.join(format!("{id}.ram"));
        std::fs::write(&kept, &self.copy)?;
        let loaded = store.load(id)?;
        let pages = loaded.meta.ram.len_pages();
        let mut differing = Vec::new();
        let mut image = Vec::new();
        let mut next = 0;
        while next < pages {
            let range = PageRange::new(PageIndex(next), BATCH_PAGES.min(pages - next));
            image.clear();
            image.resize(range.len_bytes() as usize, 0);
            loaded.read_pages(range, &mut |page: PageIndex, content: &Page| {
                let at = (page.0 - next) as usize * PAGE_BYTES;
                image[at..at + PAGE_BYTES].copy_from_slice(content);
                Ok::<_, keyframe_store::Error>(())
            })?;
            let start = next as usize * PAGE_BYTES;
            let copy = self
                .copy
                .get(start..start + image.len())
                .ok_or("the copy is shorter than the checkpoint")?;
            let pairs = image.chunks_exact(PAGE_BYTES).zip(copy.chunks_exact(PAGE_BYTES));
            differing.extend(
                (next..).zip(pairs).filter(|(_, (a, b))| a != b).map(|(p, _)| PageIndex(p)),
            );
            next += range.len_pages;
        }
        if differing.is_empty() {
            self.equal.push_back(kept);
        }
        while self.equal.len() > KEPT {
            if let Some(old) = self.equal.pop_front() {
                std::fs::remove_file(old)?;
            }
        }
        Ok(differing)
    }
}
