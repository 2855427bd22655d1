//! Reading pages. Derived ones (composed blocks, deltas) are made after the plain ones, many at a
//! time.
//!
//! ```text
//!   wanted, rising ──▶ records, pack by pack ──▶ plain ──────────────────────────────────────────────▶ sink
//!                                            └─▶ derived ─▶ Waiting  ──full, or the end──▶ their records, rising ─▶ sink
//!                                                             a delta is made when its base is read: it needs no page of its own
//! ```
//!
//! Invariants: a derived record refers to plain records only, else it is damaged. So there is one
//! step, even in a damaged store. The content of a derived record is compared with its hash,
//! because it comes from several places. [`Waiting`] is bounded.

use crate::open_store::OpenStore;
use crate::pack_file::PageContent;
use crate::{Error, Result};
use keyframe_store_format::derived::Derivation;
use keyframe_store_format::page_hash::{LANES, PageHash};
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::Record;
use keyframe_units::{Page, ZERO_PAGE};
use std::cell::Cell;
use std::ops::Range;

/// The most composed blocks that wait: 1 MiB.
const COMPOSED_MAX: usize = 256;
/// The most deltas that wait, of at most 2 KiB each. Of many deltas, more bases lie next to each
/// other.
const DELTAS_MAX: usize = 2048;
/// The most requests for all that wait.
const WANTED_MAX: usize = 4096;

thread_local! {
    /// The read buffer of a thread, while it does not read.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Derived pages whose references were not read yet.
struct Waiting<T> {
    blocks: Vec<Block>,
    composed: usize,
    /// The values of the caller, block by block.
    wanted: Vec<T>,
}

struct Block {
    at: PageRef,
    hash: PageHash,
    derivation: Derivation,
    /// The parts of a composed block that are there.
    page: Option<Box<Page>>,
    /// The range of its values in `Waiting::wanted`.
    wanted: Range<usize>,
}

impl<T: Copy> Waiting<T> {
    fn new() -> Self {
        Self { blocks: Vec::new(), composed: 0, wanted: Vec::new() }
    }

    fn is_full(&self) -> bool {
        self.composed >= COMPOSED_MAX
            || self.blocks.len() >= DELTAS_MAX
            || self.wanted.len() >= WANTED_MAX
    }

    /// Adds a record. References rise, so requests for the same record follow each other.
    fn add(&mut self, at: PageRef, what: T, record: &Record<'_>) -> Result<(), String> {
        if self.blocks.last().is_none_or(|last| last.at != at) {
            let mut page = None;
            let derivation = match record.delta()? {
                Some(delta) => Derivation::Delta(delta),
                None => record.derivation(page.insert(Box::new(ZERO_PAGE)).as_mut())?,
            };
            self.put(at, record.hash, derivation, page);
        }
        self.wanted.push(what);
        if let Some(last) = self.blocks.last_mut() {
            last.wanted.end = self.wanted.len();
        }
        Ok(())
    }

    fn put(
        &mut self,
        at: PageRef,
        hash: PageHash,
        derivation: Derivation,
        page: Option<Box<Page>>,
    ) {
        self.composed += usize::from(page.is_some());
        let wanted = self.wanted.len()..self.wanted.len();
        self.blocks.push(Block { at, hash, derivation, page, wanted });
    }
}

impl Waiting<()> {
    /// A single parsed record. `page` has the parts that are in it.
    fn of(at: PageRef, hash: PageHash, derivation: Derivation, page: &Page) -> Self {
        let mut waiting = Self::new();
        let page = matches!(derivation, Derivation::Parts(_)).then(|| Box::new(*page));
        waiting.put(at, hash, derivation, page);
        waiting.wanted.push(());
        waiting.blocks.iter_mut().for_each(|block| block.wanted.end = 1);
        waiting
    }
}

impl OpenStore {
    /// Reads the pages of the records at `wanted`, which are in rising order and not zero. Passes
    /// each page to `sink` with the caller's value; pages of derived records come a little out of
    /// order. Errors: a record is damaged or cannot be read; an error of `sink`.
    pub fn read_pages<T: Copy, E: From<Error>>(
        &self,
        wanted: &[(PageRef, T)],
        sink: &mut dyn FnMut(T, &Page) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut waiting = Waiting::new();
        self.read_records(wanted, &mut |at, what, content| match content {
            PageContent::Plain(page, _) => sink(what, page),
            PageContent::Derived(record) => {
                waiting.add(at, what, record).map_err(|problem| self.damaged_at(at, problem))?;
                if waiting.is_full() { self.assemble(&mut waiting, sink) } else { Ok(()) }
            }
        })?;
        self.assemble(&mut waiting, sink)
    }

    /// Reads the page of the record at `at`, which must not be derived, into `into`. Errors: it is
    /// derived or damaged; the pack cannot be read.
    pub fn read_plain(&self, at: PageRef, into: &mut Page) -> Result<()> {
        self.read_records(&[(at, ())], &mut |at, (), content| match content {
            PageContent::Plain(page, _) => {
                *into = *page;
                Ok(())
            }
            PageContent::Derived(_) => Err(self.damaged_at(at, DERIVED_OF_DERIVED)),
        })
    }

    /// Restores the page of `record`, which is at `at`, into `page`, and checks it against its
    /// hash. Errors: the record or one that it refers to is damaged; the backend fails.
    pub fn restore(&self, record: &Record<'_>, at: PageRef, page: &mut Page) -> Result<()> {
        let damaged = |problem| self.damaged_at(at, problem);
        match record.derivation_or_page(page).map_err(damaged)? {
            None => record.verify(&self.config.key, page).map_err(damaged),
            Some(derivation) => {
                let mut waiting = Waiting::of(at, record.hash, derivation, page);
                self.assemble(&mut waiting, &mut |(), content| {
                    *page = *content;
                    Ok::<_, Error>(())
                })
            }
        }
    }

    fn read_records<T: Copy, E: From<Error>>(
        &self,
        wanted: &[(PageRef, T)],
        sink: &mut dyn FnMut(PageRef, T, PageContent<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        // Memory for large reads is expensive to get, so a thread keeps its buffer.
        let mut buffer = BUFFER.take();
        for group in wanted.chunk_by(|a, b| a.0.pack() == b.0.pack()) {
            let number = group.first().map_or(0, |(to, _)| to.pack());
            let pack = self.pack(number)?;
            pack.read_records(group, &mut buffer, sink)?;
        }
        BUFFER.set(buffer);
        Ok(())
    }

    /// Reads the references of the waiting records and passes their pages to `sink`.
    fn assemble<T: Copy, E: From<Error>>(
        &self,
        waiting: &mut Waiting<T>,
        sink: &mut dyn FnMut(T, &Page) -> Result<(), E>,
    ) -> Result<(), E> {
        if waiting.blocks.is_empty() {
            return Ok(());
        }
        let mut blocks = std::mem::take(&mut waiting.blocks);
        let wanted = std::mem::take(&mut waiting.wanted);
        waiting.composed = 0;
        let mut give = |some: &[(&Block, &Page)]| {
            let mut pages = [&ZERO_PAGE; LANES];
            pages.iter_mut().zip(some).for_each(|(page, (_, made))| *page = made);
            let hashes = PageHash::of_many(&self.config.key, &pages[..some.len().min(LANES)]);
            some.iter().zip(hashes).try_for_each(|((block, page), hash)| {
                if hash != block.hash {
                    return Err(E::from(self.damaged_at(block.at, NOT_ITS_HASH)));
                }
                let wanted = wanted.get(block.wanted.clone()).unwrap_or_default();
                wanted.iter().try_for_each(|what| sink(*what, page))
            })
        };
        let records = |(number, block): (usize, &Block)| {
            block.derivation.records().into_iter().map(move |record| (record, number))
        };
        let mut missing: Vec<(PageRef, usize)> =
            blocks.iter().enumerate().flat_map(records).collect();
        missing.sort_unstable();
        let mut made = Made::new();
        self.read_records(&missing, &mut |at, number, content| {
            let PageContent::Plain(base, hash) = content else {
                return Err(E::from(self.damaged_at(at, DERIVED_OF_DERIVED)));
            };
            let Some(block) = blocks.get_mut(number) else { return Ok(()) };
            let is_whole = block.page.is_none();
            let Some(into) = block.page.as_deref_mut().or_else(|| made.next(number)) else {
                return Ok(());
            };
            block
                .derivation
                .fill(at, hash, base, into)
                .map_err(|problem| self.damaged_at(block.at, problem))?;
            if is_whole && made.numbers.len() == LANES {
                made.give(&blocks, &mut give)?;
            }
            Ok(())
        })?;
        made.give(&blocks, &mut give)?;
        let composed: Vec<(&Block, &Page)> =
            blocks.iter().filter_map(|block| Some((block, block.page.as_deref()?))).collect();
        composed.chunks(LANES).try_for_each(give)
    }
}

/// Pages made from deltas that wait to be hashed side by side. The memory is reused.
struct Made {
    /// The blocks of the first pages.
    numbers: Vec<usize>,
    pages: Vec<Page>,
}

impl Made {
    fn new() -> Self {
        Self { numbers: Vec::with_capacity(LANES), pages: vec![ZERO_PAGE; LANES] }
    }

    /// The memory for the page of a block.
    fn next(&mut self, number: usize) -> Option<&mut Page> {
        let place = self.pages.get_mut(self.numbers.len());
        self.numbers.push(number);
        place
    }

    /// Passes the pages on.
    fn give<E>(
        &mut self,
        blocks: &[Block],
        give: &mut impl FnMut(&[(&Block, &Page)]) -> Result<(), E>,
    ) -> Result<(), E> {
        let made = self.numbers.iter().zip(&self.pages);
        let some: Vec<(&Block, &Page)> =
            made.filter_map(|(number, page)| Some((blocks.get(*number)?, page))).collect();
        let given = give(&some);
        self.numbers.clear();
        given
    }
}

pub const NOT_ITS_HASH: &str = "the page does not match its hash";
pub const DERIVED_OF_DERIVED: &str = "it refers to other records, and another record refers to it";
