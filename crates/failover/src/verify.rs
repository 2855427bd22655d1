//! `protect --verify`: hashes all of RAM in each pause, and again at the standby after the epoch is
//! applied. The standby refuses an epoch whose hashes differ. Each pause is as long as hashing RAM
//! takes: for tests and doubts.

use keyframe_capture::ports::CaptureObserver;
use keyframe_capture::{BoxError, PageReader};
use keyframe_transfer::EpochImage;
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange, RamLayout, ZERO_PAGE};
use std::sync::{Arc, OnceLock};

/// Pages under one hash, and so the precision of a reported difference.
const BATCH_PAGES: u64 = 4096;

/// The hashes of RAM as it was in a pause, as hexadecimal digits: one for each 4096 pages. Set in
/// the pause.
pub type Checks = Arc<OnceLock<Vec<String>>>;

/// Makes the hashes of RAM in a pause.
#[derive(Default)]
pub struct Verifier {
    /// The place for the hashes of the next pause. `None` if none are made.
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

/// Compares the first `ram_pages` pages of `image` with the hashes `checks`. Errors, as a text: the
/// pages of the first difference; the number of hashes is wrong; a page cannot be read.
pub fn compare(image: &dyn EpochImage, ram_pages: u64, checks: &[String]) -> Result<(), String> {
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
