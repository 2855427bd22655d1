//! The stream: an image of a guest's RAM, and the pages that it writes in each second after.
//!
//! ```text
//!   image      28 % zero, 3 % copies of other pages, the rest of the kinds in `pages`, in runs of up to 64 pages
//!   second     dirty pages (20,000 of 1 GiB):
//!                65 %  a few words changed; most of them in a hot set, the pages of data
//!                 5 %  new content
//!                12 %  a copy of another page
//!                10 %  written before, and again as in the first image
//!                 4 %  written, not changed
//!                 4 %  zero
//! ```
//!
//! Made in memory from a fixed seed: the same stream for each store, on each machine. A second's
//! pages are in the order of their numbers, as a scan finds them.

use crate::job::Words;
use crate::pages::{Kind, Pages, change_word};
use crate::random::Random;
use keyframe_units::{Page, PageIndex, PageSet, ZERO_PAGE};
use rustc_hash::FxHashSet;
use xxhash_rust::xxh3::xxh3_128;

const SEED: u64 = 0x6b65_7966_7261_6d65;
/// Pages of 1 GiB, and those of it that are dirty after a second.
const GIB_PAGES: u64 = 1 << 18;
const GIB_DIRTY_PAGES: u64 = 20_000;

/// What became of a dirty page.
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
/// Of the pages of which words change, those of the hot set, in percent.
const HOT_PERCENT: u64 = 85;

/// The dirty pages of one second.
#[derive(Debug, Default)]
pub struct Second {
    /// Their numbers, rising.
    pub pages: Vec<PageIndex>,
    /// What each holds now.
    pub contents: Vec<Page>,
}

/// The stream.
#[derive(Debug)]
pub struct Stream {
    /// RAM at the first checkpoint.
    pub image: Vec<Page>,
    /// What was written until each further one.
    pub seconds: Vec<Second>,
}

impl Stream {
    /// An image of `image_pages` pages and as many seconds.
    pub fn new(image_pages: u64, seconds: usize, words: Words) -> Self {
        let mut maker = Maker::new(image_pages);
        for _ in 0..seconds {
            maker.second(words);
        }
        maker.stream
    }

    /// All bytes that are fed.
    pub fn len_bytes(&self) -> u64 {
        let pages = self.image.len() + self.seconds.iter().map(|s| s.contents.len()).sum::<usize>();
        (pages * size_of::<Page>()) as u64
    }

    /// The bytes of its distinct pages, but for the page of zeros: what deduplication alone leaves.
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
        if let Some(Second { pages, contents }) = self.seconds.get(second) {
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

    /// Pages of the same kinds as in the image, none zero, none twice, and none in the stream.
    pub fn unique(count: usize) -> Vec<Page> {
        let (pages, mut random) = (Pages::new(), Random::new(!SEED));
        let mut all = vec![ZERO_PAGE; count];
        for page in &mut all {
            pages.fill(Pages::any(&mut random), &mut random, page);
        }
        all
    }
}

struct Maker {
    stream: Stream,
    random: Random,
    pages: Pages,
    /// The pages that are written most.
    hot: Vec<PageIndex>,
    /// Where the content of each page is: in the image, or a second and a place in it.
    latest: Vec<Option<(usize, usize)>>,
    dirty_pages: u64,
}

impl Maker {
    fn new(image_pages: u64) -> Self {
        let stream = Stream { image: vec![ZERO_PAGE; image_pages as usize], seconds: Vec::new() };
        let latest = vec![None; image_pages as usize];
        let dirty_pages = image_pages * GIB_DIRTY_PAGES / GIB_PAGES;
        let (random, hot) = (Random::new(SEED), Vec::new());
        let mut this = Self { stream, random, pages: Pages::new(), hot, latest, dirty_pages };
        this.image();
        this
    }

    /// Runs of pages of one kind.
    fn image(&mut self) {
        let count = self.stream.image.len();
        let mut next = 0;
        while next < count {
            let len = (self.random.between(1, 8) * self.random.between(1, 8)) as usize;
            let (run, what) = (next..(next + len).min(count), self.random.weighted(&[28, 3, 69]));
            let kind = Pages::any(&mut self.random);
            next = run.end;
            for at in run {
                match what {
                    0 => {}
                    1 => {
                        let from = self.random.below(at as u64 + 1) as usize;
                        self.stream.image[at] = self.stream.image[from];
                    }
                    _ => {
                        // Apart from the choices, so that these stay where kinds of pages change.
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
            Some((second, at)) => &self.stream.seconds[second].contents[at],
            None => &self.stream.image[page.0 as usize],
        }
    }

    fn any_page(&mut self) -> PageIndex {
        PageIndex(self.random.below(self.stream.image.len() as u64))
    }

    /// One that is not zero, as far as a few tries find one.
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

    fn second(&mut self, words: Words) {
        let chosen = self.choose();
        let (pages, contents) =
            (Vec::with_capacity(chosen.len()), Vec::with_capacity(chosen.len()));
        let mut second = Second { pages, contents };
        for (page, change) in chosen {
            let content = self.changed(page, change, words);
            second.pages.push(page);
            second.contents.push(content);
        }
        let number = self.stream.seconds.len();
        for (at, page) in second.pages.iter().enumerate() {
            self.latest[page.0 as usize] = Some((number, at));
        }
        self.stream.seconds.push(second);
    }

    /// Distinct pages, rising, and what becomes of each.
    fn choose(&mut self) -> Vec<(PageIndex, Change)> {
        let mut seen = PageSet::new(self.stream.image.len() as u64);
        let mut chosen = Vec::new();
        // More tries than a set that is mostly free needs; an image of a few pages may stay below
        // its number.
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

    /// A page of an earlier second; any, where there is none.
    fn written_before(&mut self) -> PageIndex {
        if self.stream.seconds.is_empty() {
            return self.nonzero_page();
        }
        let second = self.random.pick(&self.stream.seconds);
        *self.random.pick(&second.pages)
    }

    fn changed(&mut self, page: PageIndex, change: Change, words: Words) -> Page {
        match change {
            Change::Words => {
                let mut content = *self.current(page);
                let (from, to) = words.range();
                for _ in 0..self.random.between(from, to) {
                    change_word(&mut self.random, &mut content);
                }
                content
            }
            Change::New => {
                let (mut content, kind) = (ZERO_PAGE, Pages::any(&mut self.random));
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

    /// Figures of two runs can be compared only if the streams are one.
    #[test]
    fn the_stream_is_the_same_each_time_and_of_the_kind_described() {
        let make = || Stream::new(8192, 3, Words::Few);
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
        let mut stream = Stream::new(4096, 2, Words::Many);
        let first = stream.image.clone();
        stream.apply(0);
        let differ = stream.image.iter().zip(&first).filter(|(a, b)| a != b).count();
        assert!((200..=312).contains(&differ), "{differ} of 312 dirty pages differ");
    }

    #[test]
    fn shuffled_pages_hold_what_others_held_and_unique_ones_nothing_known() {
        let stream = Stream::new(4096, 0, Words::Few);
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
