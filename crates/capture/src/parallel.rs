//! Copies pages with several threads (Schötterl-Glausch 2018, parallel copy), over another reader.

use crate::ports::{BoxError, PageReader};
use keyframe_locks::IgnorePoison;
use keyframe_scheduling::ThreadChoice;
use keyframe_units::elapsed_ns;
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange};
use rayon::prelude::*;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Fewer pages are copied by the calling thread: waking threads costs as much as copying them.
const PART_PAGES_MIN: u64 = 256;
/// A copy of fewer pages does not tell which number of threads is fastest.
const LEARN_PAGES_MIN: u64 = 1024;

/// A reader that splits each read among threads of its own.
pub struct ParallelPageReader {
    inner: Arc<dyn PageReader>,
    threads: rayon::ThreadPool,
    /// Chooses the number of threads; `None` if the caller fixed it.
    choice: Option<Mutex<ThreadChoice>>,
}

impl ParallelPageReader {
    /// Creates a reader that reads through `inner` with `threads` threads. Error: a thread cannot
    /// be started.
    pub fn new(inner: Arc<dyn PageReader>, threads: usize) -> Result<Self, BoxError> {
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|n| format!("copy-{n}"))
            .build()?;
        Ok(Self { inner, threads, choice: None })
    }

    /// Creates a reader that measures which number of threads up to `max` is fastest, and uses it.
    /// Error: a thread cannot be started.
    pub fn adaptive(inner: Arc<dyn PageReader>, max: usize) -> Result<Self, BoxError> {
        let choice = Some(Mutex::new(ThreadChoice::new(max)));
        Ok(Self { choice, ..Self::new(inner, max)? })
    }

    fn read_with(
        &self,
        threads: usize,
        ranges: &[PageRange],
        pages: u64,
        dst: &mut [u8],
    ) -> Result<(), BoxError> {
        let part_pages = pages.div_ceil(threads.max(1) as u64).max(PART_PAGES_MIN);
        if part_pages >= pages || dst.len() as u64 != pages * PAGE_BYTES as u64 {
            return self.inner.read(ranges, dst);
        }
        let parts = cut(ranges, part_pages);
        let cells: Vec<&mut [u8]> = dst.chunks_mut(part_pages as usize * PAGE_BYTES).collect();
        self.threads.install(|| {
            parts
                .into_par_iter()
                .zip(cells)
                .try_for_each(|(part, cell)| self.inner.read(&part, cell))
        })
    }
}

impl PageReader for ParallelPageReader {
    fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError> {
        let pages: u64 = ranges.iter().map(|r| r.len_pages).sum();
        let choice = self.choice.as_ref().filter(|_| pages >= LEARN_PAGES_MIN);
        let Some(choice) = choice else {
            let threads =
                if self.choice.is_some() { 1 } else { self.threads.current_num_threads() };
            return self.read_with(threads, ranges, pages, dst);
        };
        let threads = choice.lock().ignore_poison().choose();
        let began = Instant::now();
        self.read_with(threads, ranges, pages, dst)?;
        let took_ns = elapsed_ns(began);
        choice.lock().ignore_poison().learn(threads, pages, took_ns);
        Ok(())
    }
}

/// Cuts `ranges` into parts of `part_pages` pages; the last part may be shorter.
fn cut(ranges: &[PageRange], part_pages: u64) -> Vec<Vec<PageRange>> {
    let mut parts = vec![Vec::new()];
    let mut room = part_pages;
    for range in ranges {
        let mut left = *range;
        while left.len_pages > 0 {
            if room == 0 {
                parts.push(Vec::new());
                room = part_pages;
            }
            let taken = left.len_pages.min(room);
            if let Some(part) = parts.last_mut() {
                part.push(PageRange::new(left.first, taken));
            }
            room -= taken;
            left = PageRange::new(PageIndex(left.first.0 + taken), left.len_pages - taken);
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Numbered;
    impl PageReader for Numbered {
        fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError> {
            let pages = ranges.iter().flat_map(|r| r.iter());
            let mut cells = dst.chunks_exact_mut(PAGE_BYTES);
            for page in pages {
                if page.0 == 666 {
                    return Err("page 666".into());
                }
                cells.next().ok_or("short")?[..8].copy_from_slice(&page.0.to_le_bytes());
            }
            if cells.next().is_some() { Err("long".into()) } else { Ok(()) }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_page_lands_in_its_place(ranges in prop::collection::vec((0u64..100_000, 0u64..900), 0..12), threads in 1usize..5) {
            let ranges: Vec<_> = ranges.into_iter().map(|(at, len)| PageRange::new(PageIndex(1000 + at), len)).collect();
            let pages: Vec<u64> = ranges.iter().flat_map(|r| r.iter()).map(|p| p.0).collect();
            let mut dst = vec![0; pages.len() * PAGE_BYTES];
            let reader = if threads == 4 {
                ParallelPageReader::adaptive(Arc::new(Numbered), 4)
            } else {
                ParallelPageReader::new(Arc::new(Numbered), threads)
            };
            let reader = reader.unwrap();
            reader.read(&ranges, &mut vec![0; pages.len() * PAGE_BYTES]).unwrap();
            reader.read(&ranges, &mut dst).unwrap();
            for (page, cell) in pages.iter().zip(dst.chunks_exact(PAGE_BYTES)) {
                prop_assert_eq!(cell[..8].to_vec(), page.to_le_bytes().to_vec());
            }
        }
    }

    #[test]
    fn an_error_of_one_thread_is_the_error() {
        let reader = ParallelPageReader::new(Arc::new(Numbered), 3).unwrap();
        let mut dst = vec![0; 3000 * PAGE_BYTES];
        assert!(reader.read(&[PageRange::new(PageIndex(0), 3000)], &mut dst).is_err());
    }
}
