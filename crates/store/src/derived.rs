//! Records that stand on others: how their content is made from those.
//!
//! Invariant: what they stand on is plain, so that there is one step whatever a damaged store says.

use crate::composed::{Composition, Part};
use crate::delta::Delta;
use crate::identity::{PageHash, PageRef};
use keyframe_pages::bytes::Problem;
use keyframe_units::Page;

/// How a page is made from other records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Derivation {
    /// From parts of pages, and of its own.
    Parts(Composition),
    /// From one page with changes.
    Delta(Delta),
}

impl Derivation {
    /// The records that it stands on: rising, each once.
    pub fn records(&self) -> Vec<PageRef> {
        match self {
            Self::Parts(composition) => composition.records(),
            Self::Delta(delta) => vec![delta.base],
        }
    }

    /// Takes what it needs of `record`, which holds `content` and says `hash`, into `page`.
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

    /// Shows each reference, to be changed into one to the same content elsewhere.
    pub fn repoint(&mut self, place: &mut dyn FnMut(&mut PageRef)) {
        match self {
            Self::Parts(composition) => {
                for part in &mut composition.0 {
                    if let Part::Of(record, _) = part {
                        place(record);
                    }
                }
            }
            Self::Delta(delta) => place(&mut delta.base),
        }
    }
}
