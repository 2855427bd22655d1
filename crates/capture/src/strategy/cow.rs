//! Fine-grained copy-on-write: in the pause the checkpoint's dirty pages are protected and nothing is copied. The guest
//! runs again at once; a page that it writes is copied just before, the others in the background.
//! (Gerofi et al.: only the pages of the checkpoint's own dirty set are held; all others are in an earlier one.)
//!
//! ```text
//!   freeze: set ──▶ waiting ──first write──▶ copied by the hook, then written
//!                      └──────background───▶ copied, written later without us
//! ```
//!
//! It needs the tracker that handles faults itself. Where this process stalls, a guest that writes a waiting page stalls
//! with it; where it dies, the kernel lets the guest go on.

use super::{Hands, Strategy, ns};
use crate::cycle::CycleError;
use crate::parcel::{Parcel, Slots, StagingError};
use crate::ports::{FirstWrites, PageReader};
use keyframe_units::{PageIndex, PageRange, PageSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Pages copied by the background in one go: a write that meets it waits that long.
const BATCH_PAGES: u64 = 32;

/// Copies on the first write.
pub struct CopyOnWrite {
    writes: Arc<dyn FirstWrites>,
    pending: Arc<Mutex<Option<Pending>>>,
}

/// A checkpoint whose pages are being copied while the guest runs.
struct Pending {
    parcel: Parcel,
    waiting: PageSet,
    /// Where each page of the set goes, rising.
    slots: Vec<Slots>,
    reader: Arc<dyn PageReader>,
    failed: Option<StagingError>,
}

impl Pending {
    fn slot_of(&self, page: PageIndex) -> Option<Slots> {
        let at = self.slots.partition_point(|s| s.pages.first <= page).checked_sub(1)?;
        let slots = self.slots.get(at)?;
        (page < slots.pages.end()).then(|| slots.of(page))
    }

    /// Copies those pages of `range` that wait.
    fn copy(&mut self, range: PageRange) {
        for page in range.iter() {
            if !self.waiting.remove(page) {
                continue;
            }
            let Some(slot) = self.slot_of(page) else { continue };
            let reader = Arc::clone(&self.reader);
            if let Err(error) = self.parcel.fill(&[slot], &*reader) {
                self.failed.get_or_insert(error);
            }
        }
    }
}

impl CopyOnWrite {
    /// First writes are told by `writes`, which must be the tracker that the dirty log drains.
    pub fn new(writes: Arc<dyn FirstWrites>) -> Self {
        Self { writes, pending: Arc::default() }
    }

    fn pending(&self) -> MutexGuard<'_, Option<Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Strategy for CopyOnWrite {
    fn name(&self) -> &'static str {
        "cow"
    }

    fn before(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        let expected = hands.log.estimate_pages().unwrap_or(0);
        hands.prepare_memory(expected + expected / 4 + 4096)
    }

    fn freeze(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        // The drain protects what it reports; owed pages that it does not report were protected by an earlier one.
        let set = hands.last_scan(true)?;
        let copy = Instant::now();
        let mut parcel = std::mem::replace(&mut hands.parcel, Parcel::new(hands.pool));
        let slots = parcel.allot(&set)?;
        hands.held.union_with(&set);
        *self.pending() =
            Some(Pending { parcel, waiting: set, slots, reader: Arc::clone(hands.reader), failed: None });
        let pending = Arc::clone(&self.pending);
        self.writes.set_hook(Some(Arc::new(move |range| {
            let mut guard = pending.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(pending) = &mut *guard {
                pending.copy(range);
            }
        })));
        hands.timeline.copy_ns = ns(copy.elapsed());
        Ok(())
    }

    fn collect(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        let runs: Vec<PageRange> = match &*self.pending() {
            Some(pending) => pending.waiting.ranges().collect(),
            None => return Ok(()),
        };
        for mut run in runs {
            while run.len_pages > 0 {
                let batch = PageRange::new(run.first, run.len_pages.min(BATCH_PAGES));
                if let Some(pending) = &mut *self.pending() {
                    pending.copy(batch);
                }
                run = PageRange::new(batch.end(), run.len_pages - batch.len_pages);
            }
        }
        self.writes.set_hook(None);
        let Some(pending) = self.pending().take() else { return Ok(()) };
        hands.parcel = pending.parcel;
        match pending.failed {
            Some(error) => Err(CycleError::Staging(error)),
            None => Ok(()),
        }
    }

    fn release(&mut self) {
        self.writes.set_hook(None);
        *self.pending() = None;
    }
}
