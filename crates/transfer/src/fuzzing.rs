//! Entry points of the fuzzers in `fuzz/`. They are not part of the interface.

use crate::{Decoder, EpochBuffer, EpochImage};
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

/// A batch of pages: any bytes are pages within the space, or an error.
pub fn batch(bytes: &[u8]) {
    let mut epoch = EpochBuffer::default();
    let _ = Decoder::new(PAGES).decode(bytes, &mut epoch, &Numbered);
    assert!(
        epoch.len_pages() <= PAGES && epoch.pages().all(|(page, _)| page.0 < PAGES),
        "pages of nobody's"
    );
}
