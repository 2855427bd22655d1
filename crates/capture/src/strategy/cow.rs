//! Fine-grained copy-on-write: in the pause the checkpoint's dirty pages are protected and nothing
//! is copied. The guest runs again at once; a page that it writes is copied just before, the others
//! in the background. (Gerofi et al.: only the pages of the checkpoint's own dirty set are held;
//! all others are in an earlier one.)
//!
//! ```text
//!   freeze: set ──▶ waiting ──first write──▶ copied by the hook, then written
//!                      └──────background───▶ copied, written later without us
//! ```
//!
//! It needs the tracker that handles faults itself. Where this process stalls, a guest that writes
//! a waiting page stalls with it; where it dies, the kernel lets the guest go on.

use super::{Hands, Strategy, ns};
use crate::cycle::CycleError;
use crate::parcel::{Parcel, Slots, StagingError};
use crate::ports::{FirstWriteHook, FirstWrites, PageReader};
use keyframe_units::{PageIndex, PageRange, PageSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Pages copied by the background in one go: a write that meets it waits that long.
const BATCH_PAGES: u64 = 32;

/// Copies on the first write.
pub struct CopyOnWrite {
    writes: Arc<dyn FirstWrites>,
    pending: Arc<Mutex<Pending>>,
}

/// What the hook and the background share.
#[derive(Default)]
enum Pending {
    /// No checkpoint is being copied.
    #[default]
    None,
    /// The hook is set and the dirty pages are not known yet: pages that were touched meanwhile. (A
    /// fault from before the stop can be answered as late as that.)
    Finding(Vec<PageRange>),
    /// A checkpoint whose pages are being copied while the guest runs.
    Copying(Box<Copying>),
}

struct Copying {
    parcel: Parcel,
    waiting: PageSet,
    /// Pages whose first write came before the background.
    by_hook: PageSet,
    /// Where each page of the set goes, rising.
    slots: Vec<Slots>,
    reader: Arc<dyn PageReader>,
    failed: Option<StagingError>,
}

impl Copying {
    fn slot_of(&self, page: PageIndex) -> Option<Slots> {
        let at = self.slots.partition_point(|s| s.pages.first <= page).checked_sub(1)?;
        let slots = self.slots.get(at)?;
        (page < slots.pages.end()).then(|| slots.of(page))
    }

    /// Copies those pages of `range` that wait.
    fn copy(&mut self, range: PageRange, by_hook: bool) {
        for page in range.iter() {
            if !self.waiting.remove(page) {
                continue;
            }
            if by_hook {
                self.by_hook.insert(page);
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

    fn hook(&self) -> FirstWriteHook {
        let pending = Arc::clone(&self.pending);
        Arc::new(move |range| match &mut *lock(&pending) {
            Pending::None => {}
            Pending::Finding(touched) => touched.push(range),
            Pending::Copying(copying) => copying.copy(range, true),
        })
    }
}

fn lock(pending: &Mutex<Pending>) -> MutexGuard<'_, Pending> {
    pending.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Strategy for CopyOnWrite {
    fn name(&self) -> &'static str {
        "cow"
    }

    fn before(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        // How many pages are dirty cannot be told without draining them.
        hands.relieve(None)?;
        hands.prepare_memory(hands.pool.capacity_pages() / 2)
    }

    fn freeze(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        *lock(&self.pending) = Pending::Finding(Vec::new());
        self.writes.set_hook(Some(self.hook()));
        // The drain protects what it reports; owed pages that it does not report were protected by
        // an earlier one.
        let set = hands.last_scan()?;
        let copy = Instant::now();
        let mut parcel = std::mem::replace(&mut hands.parcel, Parcel::new(hands.pool));
        let slots = parcel.allot(&set)?;
        hands.held.union_with(&set);
        let by_hook = PageSet::new(set.space_pages());
        let reader = Arc::clone(hands.reader);
        let mut copying =
            Box::new(Copying { parcel, waiting: set, by_hook, slots, reader, failed: None });
        let mut pending = lock(&self.pending);
        if let Pending::Finding(touched) = &*pending {
            // Their writers have gone on: copied now, while nothing of the VM runs.
            for range in touched {
                copying.copy(*range, true);
            }
        }
        *pending = Pending::Copying(copying);
        hands.timeline.copy_ns = ns(copy.elapsed());
        Ok(())
    }

    fn collect(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        let runs: Vec<PageRange> = match &*lock(&self.pending) {
            Pending::Copying(copying) => copying.waiting.ranges().collect(),
            _ => return Ok(()),
        };
        for mut run in runs {
            while run.len_pages > 0 {
                let batch = PageRange::new(run.first, run.len_pages.min(BATCH_PAGES));
                if let Pending::Copying(copying) = &mut *lock(&self.pending) {
                    copying.copy(batch, false);
                }
                run = PageRange::new(batch.end(), run.len_pages - batch.len_pages);
            }
        }
        // Asked before the hook goes: a page that is written from then on is written behind its
        // copy.
        let unannounced = self.writes.unannounced().map_err(CycleError::Scan)?;
        self.writes.set_hook(None);
        let Pending::Copying(copying) = std::mem::take(&mut *lock(&self.pending)) else {
            return Ok(());
        };
        let spoilt =
            unannounced.iter().filter(|p| hands.held.contains(*p) && !copying.by_hook.contains(*p));
        let spoilt = spoilt.count() as u64;
        let Copying { parcel, failed, .. } = *copying;
        hands.parcel = parcel;
        match failed {
            Some(error) => Err(CycleError::Staging(error)),
            None if spoilt > 0 => Err(CycleError::Unannounced { pages: spoilt }),
            None => Ok(()),
        }
    }

    fn release(&mut self) {
        self.writes.set_hook(None);
        *lock(&self.pending) = Pending::None;
    }
}
