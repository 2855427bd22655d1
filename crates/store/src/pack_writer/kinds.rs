//! The kinds of records, read from the packs. A list of all kinds would not fit into memory, and
//! few are needed.

use crate::Result;
use crate::pack_file::{PackEnding, PageContent};
use crate::pack_writer::open_pack::OpenPack;
use crate::pack_writer::writer::PackWriter;
use keyframe_store_format::pack::PackEntry;
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::{KIND_AT, RecordKind};

impl PackWriter {
    /// Removes all records that are not derived from `records`, which are in rising order. Also
    /// removes those of packs that cannot be read. Error: the store cannot be listed.
    pub fn keep_derived_of(&self, records: &mut Vec<PageRef>) -> Result<()> {
        let mut derived = Vec::new();
        for of_pack in records.chunk_by(|a, b| a.pack() == b.pack()) {
            let Some(first) = of_pack.first() else { continue };
            let own = self.open.as_ref().filter(|pack| pack.number == first.pack());
            if let Some(own) = own {
                derived.extend(derived_in(&own.entries, of_pack));
                continue;
            }
            let Ok(pack) = self.inner.pack(first.pack()) else { continue };
            match pack.ending(pack.file.len_bytes()?) {
                PackEnding::Closed { entries, .. } => derived.extend(derived_in(&entries, of_pack)),
                PackEnding::Unfinished | PackEnding::Damaged(_) => {
                    let wanted: Vec<_> = of_pack.iter().map(|at| (*at, ())).collect();
                    let read =
                        pack.read_records(&wanted, &mut Vec::new(), &mut |at, (), content| {
                            derived
                                .extend(matches!(content, PageContent::Derived(_)).then_some(at));
                            Ok::<_, crate::Error>(())
                        });
                    // A later read of the records reports the error.
                    drop(read);
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
