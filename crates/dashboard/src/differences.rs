//! Where and how much a checkpoint differs from its parent. This reads page maps and pages, so the
//! last few answers are kept.

use super::listed::ListedStore;
use super::locked;
use keyframe_store::{CheckpointId, LoadedCheckpoint};
use keyframe_units::PageIndex;
use keyframe_web::{ApiError, HeatMap, HeatRegion};
use serde_json::Value;
use std::collections::VecDeque;
use std::sync::Mutex;

/// Answers that are kept.
const KEPT_MAX: usize = 32;

/// Computes differences between checkpoints, and keeps the last few answers.
#[derive(Default)]
pub struct Differences {
    heats: Mutex<VecDeque<(Key, HeatMap)>>,
    diffs: Mutex<VecDeque<(Key, Value)>>,
}

/// The id of the store, the checkpoint, its parent, and the number of pieces.
type Key = (String, u64, Option<u64>, u64);

impl Differences {
    /// Counts the pages in which checkpoint `id` differs from its parent, in each of `pieces` equal
    /// parts of RAM, and returns the counts. For a checkpoint without a parent, counts all pages
    /// that are not zero. Errors: there is no such checkpoint; the store cannot be read.
    pub fn heat(&self, listed: &ListedStore, id: u64, pieces: u64) -> Result<HeatMap, ApiError> {
        let parent = parent_of(listed, id)?;
        let key = (listed.id().to_owned(), id, parent, pieces);
        if let Some(kept) = find(&self.heats, &key) {
            return Ok(kept);
        }
        let load = |id| listed.store().load(CheckpointId(id)).map_err(|e| listed.error(&e));
        let loaded = load(id)?;
        let before = parent.map(load).transpose()?;
        // Another layout, after RAM was plugged in: page numbers mean something else.
        let before = before.filter(|before| before.meta.ram.same_space(&loaded.meta.ram));
        let heat = heat(&loaded, before.as_ref(), pieces);
        keep(&self.heats, key, heat.clone());
        Ok(heat)
    }

    /// Returns the differences between checkpoint `id` and its parent, as JSON. Errors: there is no
    /// such checkpoint; its parent is not in the store; the store cannot be read.
    pub fn diff(&self, listed: &ListedStore, id: u64) -> Result<Value, ApiError> {
        let parent = parent_of(listed, id)?.ok_or_else(|| {
            ApiError::Unknown(format!(
                "checkpoint {id} has no parent in the store: it is the first, or that one was forgotten"
            ))
        })?;
        let key = (listed.id().to_owned(), id, Some(parent), 0);
        if let Some(kept) = find(&self.diffs, &key) {
            return Ok(kept);
        }
        let diff = listed
            .store()
            .diff(CheckpointId(parent), CheckpointId(id), &mut |_, _| ())
            .map_err(|e| listed.error(&e))?;
        let diff = serde_json::to_value(&diff)
            .map_err(|e| ApiError::Failed(format!("write JSON: {e}")))?;
        keep(&self.diffs, key, diff.clone());
        Ok(diff)
    }
}

fn parent_of(listed: &ListedStore, id: u64) -> Result<Option<u64>, ApiError> {
    let listing = listed.listing()?;
    let one =
        listing.get(id).ok_or_else(|| ApiError::Unknown(format!("there is no checkpoint {id}")))?;
    Ok(one.parent.filter(|parent| listing.get(*parent).is_some()))
}

fn find<T: Clone>(kept: &Mutex<VecDeque<(Key, T)>>, key: &Key) -> Option<T> {
    locked(kept).iter().find(|(known, _)| known == key).map(|(_, one)| one.clone())
}

fn keep<T>(kept: &Mutex<VecDeque<(Key, T)>>, key: Key, one: T) {
    let mut kept = locked(kept);
    kept.push_back((key, one));
    if kept.len() > KEPT_MAX {
        kept.pop_front();
    }
}

/// Pages of one store with the same token hold the same bytes: no page is read.
fn heat(loaded: &LoadedCheckpoint, before: Option<&LoadedCheckpoint>, pieces: u64) -> HeatMap {
    let layout = &loaded.meta.ram;
    let piece_pages = layout.len_pages().div_ceil(pieces.max(1)).max(1);
    let regions = layout.blocks().iter().enumerate().map(|(at, block)| {
        let range = layout.pages_of(at);
        let len = range.len_pages.div_ceil(piece_pages) as usize;
        let mut region = HeatRegion {
            name: block.name.clone(),
            pages: range.len_pages,
            changed: vec![0; len],
            nonzero: vec![0; len],
            ..HeatRegion::default()
        };
        for offset in 0..range.len_pages {
            let page = PageIndex(range.first.0 + offset);
            let token = loaded.page_ref(page);
            let was = before.map_or(0, |before| before.page_ref(page));
            let piece = (offset / piece_pages) as usize;
            region.changed[piece] += u64::from(token != was);
            region.nonzero[piece] += u64::from(token != 0);
        }
        region.changed_pages = region.changed.iter().sum();
        region.nonzero_pages = region.nonzero.iter().sum();
        region
    });
    HeatMap {
        id: loaded.id.0,
        parent: before.map(|before| before.id.0),
        piece_pages,
        regions: regions.collect(),
    }
}
