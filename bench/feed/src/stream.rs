//! The stream: an image of a guest's RAM, and the pages that the guest writes in each second after it.
//!
//! ```text
//!   image      28 % zero, 3 % copies of other pages, the rest of the kinds in `page_maker`;
//!              in runs of up to 64 pages
//!   second     dirty pages (20,000 for 1 GiB):
//!                65 %  a few words changed; most of them in a hot set, the pages of data
//!                 5 %  new content
//!                12 %  a copy of another page
//!                10 %  written before, now as in the first image again
//!                 4 %  written, not changed
//!                 4 %  zero
//! ```
//!
//! The stream is made in memory from a fixed seed, so that each store on each machine gets the same
//! one. The pages of a second are in the order of their numbers, as a scan finds them.

use crate::job::ChangedWords;
use crate::page_maker::{Kind, PageMaker, change_word};
use crate::random::Random;
use keyframe_units::{Page, PageIndex, PageSet, ZERO_PAGE};
use rustc_hash::FxHashSet;
use xxhash_rust::xxh3::xxh3_128;

const SEED: u64 = 0x6b65_7966_7261_6d65;
/// The pages of 1 GiB.
const GIB_PAGES: u64 = 1 << 18;
/// The pages of 1 GiB that are dirty after a second.
const GIB_DIRTY_PAGES: u64 = 20_000;

/// The change of a dirty page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Words,
    New,
    Copied,
    Back,
    Same,
    Zero,
}

const CHANGES: [(Change, u32); 6] = [
    (Change::Words, 65),
    (Change::New, 5),
    (Change::Copied, 12),
    (Change::Back, 10),
    (Change::Same, 4),
    (Change::Zero, 4),
];
/// The share of the hot set among the pages with changed words, in percent.
const HOT_PERCENT: u64 = 85;

/// The dirty pages of one second.
#[derive(Debug, Default)]
pub struct DirtySecond {
    /// The numbers of the pages, in rising order.
    pub pages: Vec<PageIndex>,
    /// The contents of the pages.
    pub contents: Vec<Page>,
}

/// An image and the dirty pages of the seconds after it.
#[derive(Debug)]
pub struct Stream {
    /// The RAM at the first checkpoint.
    pub image: Vec<Page>,
    /// The pages written until each further checkpoint.
    pub seconds: Vec<DirtySecond>,
}

impl Stream {
    /// Makes an image of `image_pages` pages, and `seconds` seconds.
    pub fn new(image_pages: u64, seconds: usize, words: ChangedWords) -> Self {
        let mut maker = StreamMaker::new(image_pages);
        for _ in 0..seconds {
            maker.second(words);
        }
        maker.stream
    }

    /// Returns the bytes of all pages.
    pub fn len_bytes(&self) -> u64 {
        let pages = self.image.len() + self.seconds.iter().map(|s| s.contents.len()).sum::<usize>();
        (pages * size_of::<Page>()) as u64
    }

    /// Returns the bytes of its distinct pages without the page of zeros, which is what deduplication
    /// leaves.
    pub fn distinct_bytes(&self) -> u64 {
        let mut seen = FxHashSet::default();
        let all = self.image.iter().chain(self.seconds.iter().flat_map(|s| &s.contents));
        all.filter(|page| **page != ZERO_PAGE).for_each(|page| {
            seen.insert(xxh3_128(page));
        });
        (seen.len() * size_of::<Page>()) as u64
    }

    /// Makes the image what it was after the first `second`s; seconds that were applied are not
    /// again.
    pub fn apply(&mut self, second: usize) {
        if let Some(DirtySecond { pages, contents }) = self.seconds.get(second) {
            for (page, content) in pages.iter().zip(contents) {
                self.image[page.0 as usize] = *content;
            }
        }
    }

    /// For each page of the image that is not zero, the number of another such page: a shuffle of
    /// all of them.
    pub fn shuffled(&self) -> Vec<(PageIndex, usize)> {
        let pages: Vec<usize> =
            (0..self.image.len()).filter(|at| self.image[*at] != ZERO_PAGE).collect();
        let by = pages.len() / 3 + 1;
        let from = pages.iter().cycle().skip(by);
        pages.iter().map(|page| PageIndex(*page as u64)).zip(from.copied()).collect()
    }

    /// Makes pages of the same kinds as in the image. None is zero, none is repeated, and none is in the
    /// stream.
    pub fn unique(count: usize) -> Vec<Page> {
        let (pages, mut random) = (PageMaker::new(), Random::new(!SEED));
        let mut all = vec![ZERO_PAGE; count];
        for page in &mut all {
            pages.fill(PageMaker::any(&mut random), &mut random, page);
        }
        all
    }
}

/// The position of a page's content in the stream.
#[derive(Clone, Copy, Debug)]
struct ContentPosition {
    second: usize,
    index: usize,
}

/// Makes a stream.
struct StreamMaker {
    stream: Stream,
    random: Random,
    pages: PageMaker,
    /// The pages that are written most often.
    hot: Vec<PageIndex>,
    /// The latest content of each page; `None` if it is in the image.
    latest: Vec<Option<ContentPosition>>,
    dirty_pages: u64,
}

impl StreamMaker {
    fn new(image_pages: u64) -> Self {
        let stream = Stream { image: vec![ZERO_PAGE; image_pages as usize], seconds: Vec::new() };
        let latest = vec![None; image_pages as usize];
        let dirty_pages = image_pages * GIB_DIRTY_PAGES / GIB_PAGES;
        let (random, hot) = (Random::new(SEED), Vec::new());
        let mut this = Self { stream, random, pages: PageMaker::new(), hot, latest, dirty_pages };
        this.fill_image();
        this
    }

    /// Fills the image with runs of pages of one kind.
    fn fill_image(&mut self) {
        let count = self.stream.image.len();
        let mut next = 0;
        while next < count {
            let len = (self.random.between(1, 8) * self.random.between(1, 8)) as usize;
            let (run, what) = (next..(next + len).min(count), self.random.weighted(&[28, 3, 69]));
            let kind = PageMaker::any(&mut self.random);
            next = run.end;
            for at in run {
                match what {
                    0 => {}
                    1 => {
                        let from = self.random.below(at as u64 + 1) as usize;
                        self.stream.image[at] = self.stream.image[from];
                    }
                    _ => {
                        // With a generator of its own, so that a change of a kind of page does not
                        // change the choices.
                        let mut random = Random::new(SEED ^ (at as u64 + 1));
                        self.pages.fill(kind, &mut random, &mut self.stream.image[at]);
                        if kind == Kind::Data {
                            self.hot.push(PageIndex(at as u64));
                        }
                    }
                }
            }
        }
    }

    fn current(&self, page: PageIndex) -> &Page {
        match self.latest[page.0 as usize] {
            Some(at) => &self.stream.seconds[at.second].contents[at.index],
            None => &self.stream.image[page.0 as usize],
        }
    }

    fn any_page(&mut self) -> PageIndex {
        PageIndex(self.random.below(self.stream.image.len() as u64))
    }

    /// Returns a page that is not zero, if a few attempts find one.
    fn nonzero_page(&mut self) -> PageIndex {
        let mut page = self.any_page();
        for _ in 0..64 {
            if *self.current(page) != ZERO_PAGE {
                break;
            }
            page = self.any_page();
        }
        page
    }

    fn second(&mut self, words: ChangedWords) {
        let chosen = self.choose();
        let (pages, contents) =
            (Vec::with_capacity(chosen.len()), Vec::with_capacity(chosen.len()));
        let mut second = DirtySecond { pages, contents };
        for (page, change) in chosen {
            let content = self.changed(page, change, words);
            second.pages.push(page);
            second.contents.push(content);
        }
        let number = self.stream.seconds.len();
        for (index, page) in second.pages.iter().enumerate() {
            self.latest[page.0 as usize] = Some(ContentPosition { second: number, index });
        }
        self.stream.seconds.push(second);
    }

    /// Chooses distinct pages, in rising order, and the change of each.
    fn choose(&mut self) -> Vec<(PageIndex, Change)> {
        let mut seen = PageSet::new(self.stream.image.len() as u64);
        let mut chosen = Vec::new();
        // The number of attempts suffices for a large image. A small image may get fewer pages.
        for _ in 0..self.dirty_pages * 16 {
            if seen.len() == self.dirty_pages {
                break;
            }
            let change = CHANGES[self.random.weighted(&CHANGES.map(|(_, share)| share))].0;
            let page = match change {
                Change::Words | Change::Same
                    if !self.hot.is_empty() && self.random.below(100) < HOT_PERCENT =>
                {
                    *self.random.pick(&self.hot)
                }
                Change::Back => self.written_before(),
                Change::New | Change::Copied => self.any_page(),
                _ => self.nonzero_page(),
            };
            if seen.insert(page) {
                chosen.push((page, change));
            }
        }
        chosen.sort_unstable_by_key(|(page, _)| *page);
        chosen
    }

    /// Returns a page of an earlier second; any page if there is none.
    fn written_before(&mut self) -> PageIndex {
        if self.stream.seconds.is_empty() {
            return self.nonzero_page();
        }
        let second = self.random.pick(&self.stream.seconds);
        *self.random.pick(&second.pages)
    }

    fn changed(&mut self, page: PageIndex, change: Change, words: ChangedWords) -> Page {
        match change {
            Change::Words => {
                let mut content = *self.current(page);
                let range = words.range();
                for _ in 0..self.random.between(*range.start(), *range.end()) {
                    change_word(&mut self.random, &mut content);
                }
                content
            }
            Change::New => {
                let (mut content, kind) = (ZERO_PAGE, PageMaker::any(&mut self.random));
                self.pages.fill(kind, &mut self.random, &mut content);
                content
            }
            Change::Copied => {
                let from = self.nonzero_page();
                *self.current(from)
            }
            Change::Back => self.stream.image[page.0 as usize],
            Change::Same => *self.current(page),
            Change::Zero => ZERO_PAGE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The figures of two runs can be compared only if the streams are equal.
    #[test]
    fn the_stream_is_reproducible_and_has_the_described_shares() {
        let make = || Stream::new(8192, 3, ChangedWords::Few);
        let (stream, again) = (make(), make());
        assert!(stream.image == again.image);
        assert!(stream.seconds.iter().zip(&again.seconds).all(|(a, b)| a.contents == b.contents));
        let zero = stream.image.iter().filter(|page| **page == ZERO_PAGE).count();
        assert!((1600..3000).contains(&zero), "{zero} of 8192 pages are zero");
        for second in &stream.seconds {
            assert_eq!(second.pages.len(), 625);
            assert!(second.pages.is_sorted_by(|a, b| a < b));
        }
        let distinct = stream.distinct_bytes() as f64 / stream.len_bytes() as f64;
        assert!((0.5..0.8).contains(&distinct), "{distinct} of the stream is distinct");
    }

    #[test]
    fn seconds_lead_from_one_image_to_the_next() {
        let mut stream = Stream::new(4096, 2, ChangedWords::Many);
        let first = stream.image.clone();
        stream.apply(0);
        let differ = stream.image.iter().zip(&first).filter(|(a, b)| a != b).count();
        assert!((200..=312).contains(&differ), "{differ} of 312 dirty pages differ");
    }

    #[test]
    fn shuffled_pages_hold_what_others_held_and_unique_ones_nothing_known() {
        let stream = Stream::new(4096, 0, ChangedWords::Few);
        let shuffled = stream.shuffled();
        let moved =
            shuffled.iter().filter(|(to, from)| stream.image[to.0 as usize] != stream.image[*from]);
        assert!(moved.count() * 10 > shuffled.len() * 9);
        let known: FxHashSet<&Page> = stream.image.iter().collect();
        let unique = Stream::unique(500);
        assert_eq!(unique.iter().collect::<FxHashSet<_>>().len(), 500);
        assert!(unique.iter().all(|page| !known.contains(page)));
    }
}
