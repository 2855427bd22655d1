//! Derived records: records whose content is made from other records.
//!
//! Invariant: a derived record refers to plain records only. So reading it takes one step, even in
//! a damaged store.

use crate::composed::{Composition, PagePart};
use crate::delta::Delta;
use crate::page_hash::PageHash;
use crate::page_ref::PageRef;
use keyframe_pages::bytes::Problem;
use keyframe_units::Page;

/// The method by which the page of a derived record is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Derivation {
    /// From parts of the pages of other records, and parts of its own.
    Parts(Composition),
    /// From the page of one other record and a patch.
    Delta(Delta),
}

impl Derivation {
    /// Returns the records to which the derived record refers, sorted, each once.
    pub fn records(&self) -> Vec<PageRef> {
        match self {
            Self::Parts(composition) => composition.records(),
            Self::Delta(delta) => vec![delta.base],
        }
    }

    /// Adds to `page` the content that comes from the record `record`, which has the content
    /// `content` and the hash `hash`. Error: the payload contradicts `content` or `hash`.
    pub fn fill(
        &self,
        record: PageRef,
        hash: PageHash,
        content: &Page,
        page: &mut Page,
    ) -> Result<(), Problem> {
        match self {
            Self::Parts(composition) => composition.fill(record, content, page),
            Self::Delta(delta) => delta.fill(hash, content, page)?,
        }
        Ok(())
    }

    /// Calls `place` for each reference, which it may replace with another one to the same content.
    pub fn repoint(&mut self, place: &mut dyn FnMut(&mut PageRef)) {
        match self {
            Self::Parts(composition) => {
                for part in &mut composition.0 {
                    if let PagePart::Of(record, _) = part {
                        place(record);
                    }
                }
            }
            Self::Delta(delta) => place(&mut delta.base),
        }
    }
}
