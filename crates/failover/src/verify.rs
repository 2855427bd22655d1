//! `protect --verify`: all of RAM is hashed in each pause, and again at the standby once the epoch
//! is applied; where these differ the epoch is not taken. It makes each pause as long as hashing
//! RAM takes: for tests, and for whoever wants to see it.

use keyframe_capture::ports::CaptureObserver;
use keyframe_capture::{BoxError, PageReader};
use keyframe_transfer::Image;
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange, RamLayout, ZERO_PAGE};
use std::sync::{Arc, OnceLock};

/// Pages under one hash: where two images differ, the place is told as exactly.
const BATCH_PAGES: u64 = 4096;

/// Hashes of RAM as it was in a pause, batch by batch.
pub type Checks = Arc<OnceLock<Vec<String>>>;

/// Hashes in the pause.
#[derive(Default)]
pub struct Verifier {
    /// Where the next pause's are to be told.
    pub checks: Option<Checks>,
}

fn batches(pages: u64) -> impl Iterator<Item = PageRange> {
    (0..pages.div_ceil(BATCH_PAGES)).map(move |n| {
        PageRange::new(PageIndex(n * BATCH_PAGES), BATCH_PAGES.min(pages - n * BATCH_PAGES))
    })
}

impl CaptureObserver for Verifier {
    fn paused(&mut self, reader: &dyn PageReader, ram: &RamLayout) -> Result<(), BoxError> {
        let Some(checks) = self.checks.take() else { return Ok(()) };
        let mut buffer = Vec::new();
        let mut hashes = Vec::new();
        for range in batches(ram.len_pages()) {
            buffer.resize(range.len_bytes() as usize, 0);
            reader.read(&[range], &mut buffer)?;
            hashes.push(blake3::hash(&buffer).to_hex().to_string());
        }
        let _ = checks.set(hashes);
        Ok(())
    }
}

/// The same of what a standby holds, whose RAM has so many pages. Error: where it differs.
pub fn compare(image: &dyn Image, ram_pages: u64, checks: &[String]) -> Result<(), String> {
    if checks.len() as u64 != ram_pages.div_ceil(BATCH_PAGES) {
        return Err(format!("{} hashes for {ram_pages} pages of RAM", checks.len()));
    }
    let mut page = ZERO_PAGE;
    for (range, check) in batches(ram_pages).zip(checks) {
        let mut hasher = blake3::Hasher::new();
        for index in range.iter() {
            image.read(index, &mut page).map_err(|e| format!("read page {}: {e}", index.0))?;
            hasher.update(&page);
        }
        if hasher.finalize().to_hex().as_str() != check {
            return Err(format!(
                "its RAM differs from the primary's within pages {} to {} ({} bytes)",
                range.first.0,
                range.end().0 - 1,
                range.len_pages * PAGE_BYTES as u64
            ));
        }
    }
    Ok(())
}
