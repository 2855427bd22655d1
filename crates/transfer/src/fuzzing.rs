//! Entry points of the fuzzers in `fuzz/`. They are not part of the interface.

use crate::{EpochBuffer, EpochDecoder, EpochImage};
use keyframe_units::{Page, PageIndex, ZERO_PAGE};

const PAGES: u64 = 64;

/// Each page is full of its number.
struct Numbered;

impl EpochImage for Numbered {
    fn read(&self, page: PageIndex, into: &mut Page) -> std::io::Result<()> {
        *into = ZERO_PAGE;
        into.fill(page.0 as u8);
        Ok(())
    }
}

/// Decodes `bytes` as a batch of pages. Decoding must end with an error, or with at most as many
/// pages as the page space has, all of them inside it.
///
/// # Panics
///
/// If the decoder accepts a page outside the page space.
pub fn batch(bytes: &[u8]) {
    let mut epoch = EpochBuffer::default();
    let _ = EpochDecoder::new(PAGES).decode(bytes, &mut epoch, &Numbered);
    assert!(
        epoch.len_pages() <= PAGES && epoch.pages().all(|(page, _)| page.0 < PAGES),
        "pages of nobody's"
    );
}
