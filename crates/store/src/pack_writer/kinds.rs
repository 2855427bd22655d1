//! The kinds of records, read from the packs. A list of all kinds would not fit into memory, and
//! few are needed.

use crate::pack_file::{PackEnding, PackFile, PageContent};
use crate::pack_writer::open_pack::OpenPack;
use crate::pack_writer::writer::PackWriter;
use crate::{Error, Result};
use keyframe_store_format::pack::PackEntry;
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::{KIND_AT, RecordKind};

impl PackWriter {
    /// Removes all records that are not derived from `records`, which are in rising order. Also
    /// removes damaged ones, of which a later read reports the damage. Error: the backend fails.
    pub fn keep_derived_of(&self, records: &mut Vec<PageRef>) -> Result<()> {
        let mut derived = Vec::new();
        for of_pack in records.chunk_by(|a, b| a.pack() == b.pack()) {
            let Some(first) = of_pack.first() else { continue };
            let own = self.open.as_ref().filter(|pack| pack.number == first.pack());
            if let Some(own) = own {
                derived.extend(derived_in(&own.entries, of_pack));
                continue;
            }
            let pack = match self.inner.pack(first.pack()) {
                Err(Error::Damaged { .. }) => continue,
                other => other?,
            };
            match pack.ending(pack.file.len_bytes()?)? {
                PackEnding::Closed { entries, .. } => derived.extend(derived_in(&entries, of_pack)),
                PackEnding::Unfinished | PackEnding::Damaged(_) => {
                    derived.extend(intact_derived_of(&pack, of_pack)?);
                }
            }
        }
        *records = derived;
        Ok(())
    }

    /// True if RAM brought a record into the store. `open` is the open pack.
    pub(super) fn is_of_ram(&self, record: PageRef, open: &OpenPack) -> bool {
        let kind = match record.pack() {
            own if own == open.number => kind_in(&open.entries, record),
            _ => self.inner.pack(record.pack()).ok().and_then(|pack| {
                let mut letter = [0];
                pack.file.read_at(record.offset() + KIND_AT, &mut letter).ok()?;
                RecordKind::of_letter(letter[0])
            }),
        };
        kind.is_none_or(RecordKind::is_of_ram)
    }
}

/// The derived ones among `records`, which are in rising order and all of one pack without an
/// index. Leaves out damaged ones.
fn intact_derived_of(pack: &PackFile, records: &[PageRef]) -> Result<Vec<PageRef>> {
    match derived_of(pack, records) {
        // The damage must not hide the records after it.
        Err(Error::Damaged { .. }) => {}
        other => return other,
    }
    let mut derived = Vec::new();
    for record in records.chunks(1) {
        match derived_of(pack, record) {
            Err(Error::Damaged { .. }) => {}
            other => derived.extend(other?),
        }
    }
    Ok(derived)
}

fn derived_of(pack: &PackFile, records: &[PageRef]) -> Result<Vec<PageRef>> {
    let wanted: Vec<_> = records.iter().map(|at| (*at, ())).collect();
    let mut derived = Vec::new();
    pack.read_records(&wanted, &mut Vec::new(), &mut |at, (), content| {
        derived.extend(matches!(content, PageContent::Derived(_)).then_some(at));
        Ok::<_, Error>(())
    })?;
    Ok(derived)
}

fn kind_in(entries: &[PackEntry], record: PageRef) -> Option<RecordKind> {
    let at = entries.binary_search_by_key(&record.offset(), PackEntry::offset).ok()?;
    entries.get(at).map(PackEntry::kind)
}

fn derived_in<'a>(
    entries: &'a [PackEntry],
    records: &'a [PageRef],
) -> impl Iterator<Item = PageRef> + 'a {
    records
        .iter()
        .copied()
        .filter(|record| kind_in(entries, *record).is_some_and(RecordKind::is_derived))
}
