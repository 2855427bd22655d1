//! Fine-grained copy-on-write (Gerofi et al.): in the pause the checkpoint's dirty pages are
//! protected, and nothing is copied. After the pause a background loop copies them; a page that
//! the guest writes before is copied just before that write. Only pages of the checkpoint's dirty
//! set are held, since an earlier checkpoint has all others.
//!
//! ```text
//!   freeze: dirty set ──▶ waiting ──first write──▶ copied by the hook, then written
//!                            └──────background───▶ copied; later writes need no copy
//! ```
//!
//! The strategy needs the tracker that handles write faults in this process. If this process
//! stalls, a guest that writes a waiting page stalls too; if it dies, the kernel lets the guest go
//! on.

use super::CopyStrategy;
use crate::context::CaptureContext;
use crate::error::CaptureError;
use crate::ports::{FirstWriteHook, FirstWriteMonitor, PageReader};
use crate::staged_pages::{SlotRange, StagedPages, StagingError};
use keyframe_locks::IgnorePoison;
use keyframe_units::{PageIndex, PageRange, PageSet, elapsed_ns};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// Pages that the background copies under one lock: a write to a waiting page may wait that long.
const BATCH_PAGES: u64 = 32;

/// Freezes the pages in the pause. Copies each page after the pause: before its first write, or
/// else in the background.
pub struct CopyOnWriteStrategy {
    writes: Arc<dyn FirstWriteMonitor>,
    state: Arc<Mutex<CopyState>>,
}

/// The state that the hook and the background share.
#[derive(Default)]
enum CopyState {
    /// No checkpoint is being copied.
    #[default]
    Idle,
    /// The hook is set, and the dirty pages are not known yet. Holds the pages that were touched
    /// meanwhile: a fault from before the pause may be handled this late.
    Finding(Vec<PageRange>),
    /// The pages of a checkpoint are being copied while the guest runs.
    Copying(Box<WaitingCopy>),
}

/// The pages of a checkpoint that are being copied while the guest runs.
struct WaitingCopy {
    staged: StagedPages,
    waiting: PageSet,
    /// The pages whose first write came before the background's copy.
    by_hook: PageSet,
    /// The slots of the dirty set, in rising page order.
    slots: Vec<SlotRange>,
    reader: Arc<dyn PageReader>,
    failed: Option<StagingError>,
}

impl WaitingCopy {
    fn slot_of(&self, page: PageIndex) -> Option<SlotRange> {
        let at = self.slots.partition_point(|s| s.pages.first <= page).checked_sub(1)?;
        let slots = self.slots.get(at)?;
        (page < slots.pages.end()).then(|| slots.of(page))
    }

    /// Copies the pages of `range` that still wait.
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
            if let Err(error) = self.staged.fill(&[slot], &*reader) {
                self.failed.get_or_insert(error);
            }
        }
    }
}

impl CopyOnWriteStrategy {
    /// Creates the strategy with `writes`, which must be the tracker that the dirty log drains.
    pub fn new(writes: Arc<dyn FirstWriteMonitor>) -> Self {
        Self { writes, state: Arc::default() }
    }

    fn hook(&self) -> FirstWriteHook {
        let state = Arc::clone(&self.state);
        Arc::new(move |range| match &mut *lock(&state) {
            CopyState::Idle => {}
            CopyState::Finding(touched) => touched.push(range),
            CopyState::Copying(copying) => copying.copy(range, true),
        })
    }

    /// Copies all waiting pages, in batches, so that the hook gets the lock in between.
    fn copy_waiting(&self) {
        let runs: Vec<PageRange> = match &*lock(&self.state) {
            CopyState::Copying(copying) => copying.waiting.ranges().collect(),
            _ => return,
        };
        for mut run in runs {
            while run.len_pages > 0 {
                let batch = PageRange::new(run.first, run.len_pages.min(BATCH_PAGES));
                if let CopyState::Copying(copying) = &mut *lock(&self.state) {
                    copying.copy(batch, false);
                }
                run = PageRange::new(batch.end(), run.len_pages - batch.len_pages);
            }
        }
    }
}

fn lock(state: &Mutex<CopyState>) -> MutexGuard<'_, CopyState> {
    state.lock().ignore_poison()
}

impl CopyStrategy for CopyOnWriteStrategy {
    fn name(&self) -> &'static str {
        "cow"
    }

    fn before(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        // The tracker cannot count its dirty pages without draining them.
        context.relieve_memory(None)?;
        context.prepare_memory(context.pool.capacity_pages() / 2).map(drop)
    }

    fn freeze(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        *lock(&self.state) = CopyState::Finding(Vec::new());
        self.writes.set_hook(Some(self.hook()));
        // The drain protects the pages that it reports; an earlier drain has protected the other
        // owed pages.
        let set = context.last_scan()?;
        let started = Instant::now();
        let mut staged = std::mem::replace(&mut context.staged, StagedPages::new(context.pool));
        let slots = staged.allot(&set)?;
        context.held.union_with(&set);
        let by_hook = PageSet::new(set.space_pages());
        let reader = Arc::clone(context.reader);
        let mut copying =
            Box::new(WaitingCopy { staged, waiting: set, by_hook, slots, reader, failed: None });
        let mut state = lock(&self.state);
        if let CopyState::Finding(touched) = &*state {
            // Their writers have gone on: copy them now, while the VM is paused.
            for range in touched {
                copying.copy(*range, true);
            }
        }
        *state = CopyState::Copying(copying);
        context.timeline.copy_ns = elapsed_ns(started);
        Ok(())
    }

    fn collect(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        self.copy_waiting();
        // Ask before the hook is removed: later writes come after the page's copy.
        let unannounced = self.writes.unannounced().map_err(CaptureError::Scan)?;
        self.writes.set_hook(None);
        let CopyState::Copying(copying) = std::mem::take(&mut *lock(&self.state)) else {
            return Ok(());
        };
        let spoilt = unannounced
            .iter()
            .filter(|p| context.held.contains(*p) && !copying.by_hook.contains(*p));
        let spoilt = spoilt.count() as u64;
        let WaitingCopy { staged, failed, .. } = *copying;
        context.staged = staged;
        match failed {
            Some(error) => Err(CaptureError::Staging(error)),
            None if spoilt > 0 => Err(CaptureError::Unannounced { pages: spoilt }),
            None => Ok(()),
        }
    }

    fn release(&mut self) {
        self.writes.set_hook(None);
        *lock(&self.state) = CopyState::Idle;
    }
}
