//! A source of RAM pages.

use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange, ZERO_PAGE};
use std::io;

/// Pages that [`read_ascending`] holds in memory at once: 4 MiB.
const BATCH_PAGES: u64 = 1024;

/// A source of the RAM pages of a checkpoint.
pub trait RamSource: Sync {
    /// Gives `sink` each page of `range` that is not all zeros, exactly once, in any order. An
    /// error of `sink` ends the reading and is returned.
    fn read(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()>;

    /// Reads single pages, in any order, as [`RamSource::read`] reads a range. Errors: those of the
    /// source and of `sink`.
    fn read_some(
        &self,
        pages: &[PageIndex],
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        pages.iter().try_for_each(|page| self.read(PageRange::new(*page, 1), sink))
    }

    /// Returns the pages that the VM is expected to touch first, in that order. A lazy restore
    /// loads them before the others.
    fn wanted_first(&self) -> Vec<PageIndex> {
        Vec::new()
    }
}

/// Reads the pages of `range` from `source`. Passes each page that is not all zeros to `sink`, in
/// ascending order, with its offset in bytes from the start of `range`.
///
/// Errors: those of `source` and `sink`; `source` gives a page outside the range.
pub fn read_ascending(
    source: &dyn RamSource,
    range: PageRange,
    sink: &mut dyn FnMut(u64, &Page) -> io::Result<()>,
) -> io::Result<()> {
    let mut done = 0;
    while done < range.len_pages {
        let first = PageIndex(range.first.0 + done);
        let batch = PageRange::new(first, BATCH_PAGES.min(range.len_pages - done));
        let mut pages = vec![ZERO_PAGE; usize::try_from(batch.len_pages).unwrap_or(0)];
        source.read(batch, &mut |page, content| {
            let index = page.0.checked_sub(first.0).and_then(|index| usize::try_from(index).ok());
            match index.and_then(|index| pages.get_mut(index)) {
                Some(slot) => *slot = *content,
                None => return Err(outside(page, batch)),
            }
            Ok(())
        })?;
        for (index, page) in pages.iter().enumerate().filter(|(_, page)| **page != ZERO_PAGE) {
            sink((done + index as u64) * PAGE_BYTES as u64, page)?;
        }
        done += batch.len_pages;
    }
    Ok(())
}

fn outside(page: PageIndex, range: PageRange) -> io::Error {
    let problem = format!(
        "the source gave page {}, which is not among the {} pages from {} that were asked for",
        page.0, range.len_pages, range.first.0
    );
    io::Error::new(io::ErrorKind::InvalidData, problem)
}
