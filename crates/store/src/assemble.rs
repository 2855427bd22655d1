//! Reading pages, derived ones (composed blocks, deltas) among them: those are put together behind the others, many at a time.
//!
//! ```text
//!   wanted, rising ──▶ records, pack by pack ──▶ plain ──────────────────────────────────────────────▶ sink
//!                                            └─▶ derived ─▶ Waiting  ──full, or the end──▶ their records, rising ─▶ sink
//! ```
//!
//! Invariants: what a derived record stands on must be plain, else it is damaged: one step, whatever a damaged store says.
//! Its content is compared with its hash, for it comes from several places. [`Waiting`] is bounded.

use crate::derived::Derivation;
use crate::identity::{PageHash, PageRef};
use crate::pack_file::Content;
use crate::record::{Record, verify};
use crate::store::Inner;
use crate::{Error, Result, names};
use keyframe_units::{Page, ZERO_PAGE};

/// Blocks put together at a time: a MiB of them.
const BLOCKS_MAX: usize = 256;
/// And how often they may be wanted.
const WANTED_MAX: usize = 4096;

/// Derived pages of which what lies elsewhere is still missing.
struct Waiting<T> {
    blocks: Vec<Block>,
    /// Of which block, and what the caller attached to it.
    wanted: Vec<(usize, T)>,
}

struct Block {
    at: PageRef,
    hash: PageHash,
    derivation: Derivation,
    page: Box<Page>,
}

impl<T: Copy> Waiting<T> {
    fn new() -> Self {
        Self { blocks: Vec::new(), wanted: Vec::new() }
    }

    fn is_full(&self) -> bool {
        self.blocks.len() >= BLOCKS_MAX || self.wanted.len() >= WANTED_MAX
    }

    /// Adds a record. The same one again comes right behind, as references rise.
    fn add(&mut self, at: PageRef, what: T, record: &Record<'_>) -> Result<(), String> {
        if self.blocks.last().is_none_or(|last| last.at != at) {
            let mut page = Box::new(ZERO_PAGE);
            let derivation = record.derivation(&mut page)?;
            self.blocks.push(Block { at, hash: record.hash, derivation, page });
        }
        self.wanted.push((self.blocks.len() - 1, what));
        Ok(())
    }
}

impl Inner {
    /// Reads the pages at `wanted` (rising references, none of them zero) and gives each to `sink` with what the caller
    /// attached to it; derived ones a little later than their place.
    pub fn read_pages<T: Copy, E: From<Error>>(
        &self,
        wanted: &[(PageRef, T)],
        sink: &mut dyn FnMut(T, &Page) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut waiting = Waiting::new();
        self.read_records(wanted, &mut |at, what, content| match content {
            Content::Plain(page, _) => sink(what, page),
            Content::Derived(record) => {
                waiting.add(at, what, record).map_err(|problem| self.damaged_at(at, problem))?;
                if waiting.is_full() { self.assemble(&mut waiting, sink) } else { Ok(()) }
            }
        })?;
        self.assemble(&mut waiting, sink)
    }

    /// Reads the page of a record that must be plain.
    pub fn read_plain(&self, at: PageRef, into: &mut Page) -> Result<()> {
        self.read_records(&[(at, ())], &mut |at, (), content| match content {
            Content::Plain(page, _) => {
                *into = *page;
                Ok(())
            }
            Content::Derived(_) => Err(self.damaged_at(at, DERIVED_OF_DERIVED)),
        })
    }

    /// Restores the page of a record, of whatever kind, and checks it against its hash.
    pub fn restore(&self, record: &Record<'_>, at: PageRef, page: &mut Page) -> Result<(), String> {
        match record.derivation_or_page(page)? {
            None => record.verify(&self.config.key, page),
            Some(derivation) => {
                let block = Block { at, hash: record.hash, derivation, page: Box::new(*page) };
                let mut waiting = Waiting { blocks: vec![block], wanted: vec![(0, ())] };
                self.assemble(&mut waiting, &mut |(), content| {
                    *page = *content;
                    Ok::<_, Error>(())
                })
                .map_err(|error| error.to_string())
            }
        }
    }

    fn read_records<T: Copy, E: From<Error>>(
        &self,
        wanted: &[(PageRef, T)],
        sink: &mut dyn FnMut(PageRef, T, Content<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut buffer = Vec::new();
        for group in wanted.chunk_by(|a, b| a.0.pack() == b.0.pack()) {
            let number = group.first().map_or(0, |(to, _)| to.pack());
            let pack = self.pack(number)?;
            pack.read_records(group, &mut buffer, sink)?;
        }
        Ok(())
    }

    /// Fetches what is missing of the blocks, and hands them on.
    fn assemble<T: Copy, E: From<Error>>(
        &self,
        waiting: &mut Waiting<T>,
        sink: &mut dyn FnMut(T, &Page) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut blocks = std::mem::take(&mut waiting.blocks);
        let records = |(number, block): (usize, &Block)| {
            block.derivation.records().into_iter().map(move |record| (record, number))
        };
        let mut missing: Vec<(PageRef, usize)> = blocks.iter().enumerate().flat_map(records).collect();
        missing.sort_unstable();
        self.read_records(&missing, &mut |at, number, content| {
            let Content::Plain(page, hash) = content else {
                return Err(E::from(self.damaged_at(at, DERIVED_OF_DERIVED)));
            };
            if let Some(block) = blocks.get_mut(number) {
                let Block { derivation, page: into, at: of, .. } = block;
                derivation.fill(at, hash, page, into).map_err(|problem| self.damaged_at(*of, problem))?;
            }
            Ok(())
        })?;
        for block in &blocks {
            verify(block.hash, &self.config.key, &block.page)
                .map_err(|problem| self.damaged_at(block.at, problem))?;
        }
        for (number, what) in waiting.wanted.drain(..) {
            if let Some(block) = blocks.get(number) {
                sink(what, &block.page)?;
            }
        }
        Ok(())
    }

    fn damaged_at(&self, at: PageRef, problem: impl Into<String>) -> Error {
        let object = self.backend.describe(&names::pack(at.pack()));
        Error::damaged(format!("{object} at offset {}", at.offset()), problem)
    }
}

const DERIVED_OF_DERIVED: &str = "it stands on other records, and a record stands on it";
