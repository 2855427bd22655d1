//! The references of derived records.

use crate::open_store::OpenStore;
use crate::pack_file::PageContent;
use crate::{Error, Result};
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::ZERO_PAGE;

impl OpenStore {
    /// Returns the derived records among those at `wanted`, which are in rising order, with their
    /// references. Errors: a record is damaged; the backend fails.
    pub fn references_of(&self, wanted: &[PageRef]) -> Result<Vec<(PageRef, Vec<PageRef>)>> {
        let mut found = Vec::with_capacity(wanted.len());
        let mut page = ZERO_PAGE;
        for of_pack in wanted.chunk_by(|a, b| a.pack() == b.pack()) {
            let number = of_pack.first().map_or(0, |of| of.pack());
            let places: Vec<(PageRef, ())> = of_pack.iter().map(|of| (*of, ())).collect();
            self.pack(number)?.read_records(&places, &mut Vec::new(), &mut |at, (), content| {
                if let PageContent::Derived(record) = content {
                    let derivation = record
                        .derivation(&mut page)
                        .map_err(|problem| self.damaged_at(at, problem))?;
                    found.push((at, derivation.records()));
                }
                Ok::<_, Error>(())
            })?;
        }
        Ok(found)
    }
}
