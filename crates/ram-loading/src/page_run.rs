//! Pages on their way from a checkpoint to memory: asked for in pieces, written in runs.

use keyframe_units::{Page, PageIndex, PageRange};
use std::io;

/// The longest run of neighbouring pages: it fits into a core's cache.
const WRITE_BYTES_MAX: usize = 256 << 10;

/// Returns `pages` in pieces of `piece_pages` pages. The last piece may be shorter.
pub fn pieces(pages: PageRange, piece_pages: u64) -> impl Iterator<Item = PageRange> {
    (0..pages.len_pages.div_ceil(piece_pages)).map(move |k| {
        let skipped = k * piece_pages;
        PageRange::new(
            PageIndex(pages.first.0 + skipped),
            piece_pages.min(pages.len_pages - skipped),
        )
    })
}

/// Checks that `page`, which a source returned, lies in the requested `range`. Error: it does not,
/// and would be written elsewhere.
pub fn check_within(page: PageIndex, range: PageRange) -> io::Result<()> {
    if range.first <= page && page < range.end() {
        return Ok(());
    }
    let text = format!("page {} was not among those asked for, {range:?}", page.0);
    Err(io::Error::new(io::ErrorKind::InvalidData, text))
}

/// Collects consecutive pages, so that they are written together.
pub struct PageRun<'a> {
    /// Writes bytes at an offset.
    write: &'a dyn Fn(u64, &[u8]) -> io::Result<()>,
    start: u64,
    bytes: Vec<u8>,
}

impl<'a> PageRun<'a> {
    /// Creates a buffer that collects consecutive pages and passes them to `write`, with the offset
    /// of the first byte.
    pub fn new(write: &'a dyn Fn(u64, &[u8]) -> io::Result<()>) -> Self {
        Self { write, start: 0, bytes: Vec::with_capacity(WRITE_BYTES_MAX) }
    }

    /// Adds the page at byte `offset`. Error: that of `write`.
    pub fn put(&mut self, offset: u64, page: &Page) -> io::Result<()> {
        if self.start + self.bytes.len() as u64 != offset || self.bytes.len() >= WRITE_BYTES_MAX {
            self.flush()?;
            self.start = offset;
        }
        self.bytes.extend_from_slice(page);
        Ok(())
    }

    /// Passes the collected pages to `write`. Error: that of `write`.
    pub fn flush(&mut self) -> io::Result<()> {
        if !self.bytes.is_empty() {
            (self.write)(self.start, &self.bytes)?;
            self.bytes.clear();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE_PAGES: u64 = 4096;

    #[test]
    fn pieces_cover_every_page_once() {
        for len in [0, 1, PIECE_PAGES, PIECE_PAGES + 1, 3 * PIECE_PAGES - 1] {
            let all: Vec<PageRange> =
                pieces(PageRange::new(PageIndex(7), len), PIECE_PAGES).collect();
            assert_eq!(all.iter().map(|p| p.len_pages).sum::<u64>(), len);
            assert!(
                all.windows(2).all(|w| w[0].end() == w[1].first)
                    && all.first().is_none_or(|p| p.first.0 == 7)
            );
        }
    }
}
