//! Repair: saves what is intact, moves what is damaged to the quarantine, and lists both.
//!
//! ```text
//!   check ─ intact ─▶ nothing to do
//!     │ damaged
//!     ▼
//!   pack headers, trailers   written again if the records allow it
//!   checkpoint files, maps, tags that cannot be read ─▶ quarantine, with the checkpoints that need them
//!   bad records: does another record have the same content? ─ yes ─▶ it replaces the bad one
//!                    │ no
//!                    ▼
//!                checkpoints that show them ─▶ quarantine
//!   packs that are still damaged: records that checkpoints need copied to a new pack ─▶ maps rewritten ─▶ packs to quarantine
//!   check once more
//! ```
//!
//! Invariants: it holds the locks of writer and prune. A checkpoint that could be read before can
//! be read after, and at every instant: each file is written as a whole, and a pack goes when no
//! map of a remaining checkpoint refers to it. Nothing is deleted: it is in `quarantine/`. An error
//! that does not show damage, such as that of a network, ends the repair. Numbers are not used
//! again. The next repair completes an interrupted one. Repairing an intact store changes nothing.
//!
//! Left out: `store.json`, whose key is nowhere else; overlays of disks; working sets, which are
//! advice.

use crate::check::report::{CheckOptions, CheckProgress, CheckReport};
use crate::files::StoreFile;
use crate::open_store::OpenStore;
use crate::pack_file::{PackEnding, PackFile};
use crate::pack_shape::{PackShape, places};
use crate::pack_walk::WalkedRecords;
use crate::prune::{Copier, Live, rewrite_maps};
use crate::tuning::Tuning;
use crate::writer::Writer;
use crate::{Error, Result, Store};
use keyframe_store_backend::LockGuard;
use keyframe_store_backend::layout;
use keyframe_store_format::moves::Moves;
use keyframe_store_format::pack::{
    DICTIONARY_CHECK_BYTES, ENTRY_BYTES, FOOTER_BYTES, PackEntry, encode_pack_header,
    encode_trailer, parse_footer,
};
use keyframe_store_format::page_hash::PageHash;
use keyframe_store_format::page_ref::PACK_HEADER_BYTES;
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::{HASH_AT, RECORD_BYTES_MAX, Record, RecordKind};
use keyframe_units::{CheckpointId, Page, ZERO_PAGE};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A pack up to this size gets its header or trailer back in place. A larger one is copied.
const REBUILT_BYTES_MAX: u64 = 1 << 30;
const HASH_BYTES: usize = 16;

/// A file that a repair moved to the quarantine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantinedFile {
    /// Its former name.
    pub name: String,
    /// Its name in the quarantine; absent if the file did not exist.
    pub to: Option<String>,
    /// The reason.
    pub problem: String,
}

/// A checkpoint that a repair could not save.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostCheckpoint {
    /// Its number.
    pub id: CheckpointId,
    /// Its tags, which went with it.
    pub tags: Vec<String>,
    /// The damage of a file or record that it needs.
    pub problem: String,
}

/// The result of a repair of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairReport {
    /// The damage that was found.
    pub found: CheckReport,
    /// Packs with intact records whose header or trailer was written again.
    pub rebuilt: Vec<String>,
    /// The number of records that were copied out of damaged packs.
    pub saved_records: u64,
    /// The number of bad records among them whose content another record had.
    pub relinked_records: u64,
    /// Files that were moved to the quarantine.
    pub set_aside: Vec<QuarantinedFile>,
    /// Checkpoints that could not be saved.
    pub lost: Vec<LostCheckpoint>,
    /// The check after the repair; absent if nothing was damaged.
    pub after: Option<CheckReport>,
}

impl Store {
    /// Saves the intact parts of a damaged store, and returns a report that lists the lost ones.
    /// Calls `progress` now and then.
    ///
    /// Errors: [`Error::Locked`] if a run or a prune is at work; [`Error::OtherVersion`] if
    /// `store.json` has another version of the format; [`Error::Damaged`] if `store.json` is
    /// damaged, because its key is nowhere else; the store cannot be read or written.
    pub fn repair(&self, progress: &mut dyn FnMut(CheckProgress)) -> Result<RepairReport> {
        let inner = self.inner();
        let options = CheckOptions { read_data: true };
        let pruning = inner.lock_prune()?;
        let found = self.check(&options, progress)?;
        if found.is_clean() {
            return Ok(RepairReport { found, ..RepairReport::default() });
        }
        inner.check_identity()?;
        let writer = self.lock_alone("keyframe check --repair")?;
        inner.remove_moves()?;
        let report = RepairReport { found, ..RepairReport::default() };
        let newest = newest_number(inner)?;
        let mut repair = Repair { store: self, inner, report, _locks: (writer, pruning) };
        fix_packs(inner, &mut repair.report.rebuilt)?;
        repair.files()?;
        repair.records(options, progress)?;
        repair.tags()?;
        if newest_number(inner)? < newest {
            inner.empty_map(newest)?;
        }
        inner.close_packs();
        repair.report.after = Some(self.check(&options, progress)?);
        Ok(repair.report)
    }
}

struct Repair<'a> {
    store: &'a Store,
    inner: &'a Arc<OpenStore>,
    report: RepairReport,
    _locks: (Writer, Box<dyn LockGuard>),
}

impl Repair<'_> {
    fn set_aside(&mut self, name: &str, problem: &str) -> Result<()> {
        let to = self.inner.set_aside(name)?;
        let (name, problem) = (name.to_owned(), problem.to_owned());
        self.report.set_aside.push(QuarantinedFile { name, to, problem });
        Ok(())
    }

    /// Moves lost checkpoints to the quarantine, their tags first.
    fn lose(&mut self, lost: BTreeMap<CheckpointId, String>) -> Result<()> {
        for (id, problem) in lost {
            let mut tags = Vec::new();
            for tag in self.inner.tag_names()? {
                if self.inner.read_tag(&tag).is_ok_and(|to| to == Some(id)) {
                    self.set_aside(&layout::tag(&tag), &format!("checkpoint {id} is lost"))?;
                    tags.push(tag);
                }
            }
            self.set_aside(&layout::checkpoint(id), &problem)?;
            self.report.lost.push(LostCheckpoint { id, tags, problem });
        }
        Ok(())
    }

    /// Moves damaged checkpoint files and maps, and checkpoints that need such maps.
    fn files(&mut self) -> Result<()> {
        let mut lost = BTreeMap::new();
        let mut chains = Vec::new();
        for id in self.inner.checkpoint_ids()? {
            match self.inner.read_checkpoint(id) {
                Ok(file) => chains.push((id, file.meta)),
                // Forgotten since the listing.
                Err(Error::UnknownCheckpoint { .. }) => {}
                Err(error) => drop(lost.insert(id, damage(error)?)),
            }
        }
        for (id, meta) in &chains {
            if let Err(error) = self.inner.read_maps(meta) {
                lost.insert(*id, damage(error)?);
            }
        }
        self.lose(lost)?;
        for id in self.inner.map_ids()? {
            if let Err(error) = self.inner.read_map(id) {
                self.set_aside(&layout::map(id), &damage(error)?)?;
            }
        }
        Ok(())
    }

    /// Moves tags that cannot be read, or point to no checkpoint.
    fn tags(&mut self) -> Result<()> {
        let ids = self.inner.checkpoint_ids()?;
        for tag in self.inner.tag_names()? {
            let problem = match self.inner.read_tag(&tag) {
                Ok(Some(id)) if ids.binary_search(&id).is_err() => {
                    format!("it points to checkpoint {id}, which is not in the store")
                }
                Ok(_) => continue,
                Err(error) => damage(error)?,
            };
            self.set_aside(&layout::tag(&tag), &problem)?;
        }
        Ok(())
    }

    /// Saves the records of damaged packs, then moves these packs.
    fn records(
        &mut self,
        options: CheckOptions,
        progress: &mut dyn FnMut(CheckProgress),
    ) -> Result<()> {
        self.inner.close_packs();
        let damaged = self.damaged_packs(options, progress)?;
        if damaged.is_empty() {
            return Ok(());
        }
        let mut copier = Copier::new(self.inner.clone(), Tuning::default());
        copier.raise()?;
        let moves = Moves { victims: damaged.keys().copied().collect(), ..Moves::default() };
        let (mut saved, mut bad) = (BTreeMap::new(), Vec::new());
        let mut keep = |place, (hash, kind, page): (PageHash, RecordKind, Box<Page>)| {
            self.report.saved_records += 1;
            // A derived record becomes a plain one, because its references may go.
            let kind = if kind.is_of_ram() { RecordKind::Page } else { RecordKind::Block };
            saved.insert(place, copier.keep(&page, hash, kind)?);
            Ok::<_, Error>(())
        };
        for place in touched(self.inner, &mut Live::find(self.inner)?, &moves.victims)? {
            match unless_damaged(read_record(self.inner, place))? {
                Some(content) => keep(place, content)?,
                None => bad.push(place),
            }
        }
        let mut lost = BTreeSet::new();
        let twins = Twins::of(self.inner, &bad)?;
        for place in bad {
            match twins.read(self.inner, place)? {
                Some(content) => {
                    keep(place, content)?;
                    self.report.relinked_records += 1;
                }
                None => drop(lost.insert(place)),
            }
        }
        copier.close()?;
        let hurt = self.hurt(&lost)?;
        self.lose(hurt)?;
        let moves = Moves { to: saved.into_iter().collect(), ..moves };
        rewrite_maps(self.inner, &Live::find(self.inner)?, &moves, &|_| true)?;
        // Syncs all maps, also those that an interrupted repair has replaced. The packs that their
        // former versions refer to go after that.
        self.inner.backend.remove_all(layout::MAPS, &[])?;
        let newest = self.inner.pack_numbers()?.last().copied();
        if newest.is_some_and(|newest| moves.victims.contains(&newest)) {
            copier.reserve()?;
        }
        self.inner.close_packs();
        for (number, problem) in damaged {
            self.set_aside(&layout::pack(number), &problem)?;
        }
        Ok(())
    }

    /// The damaged packs, each with a problem that the check reported.
    fn damaged_packs(
        &self,
        options: CheckOptions,
        progress: &mut dyn FnMut(CheckProgress),
    ) -> Result<BTreeMap<u32, String>> {
        let now = self.store.check(&options, progress)?;
        let mut numbers: BTreeSet<u32> = self.inner.pack_numbers()?.into_iter().collect();
        // A missing pack counts as damaged.
        for id in self.inner.map_ids()? {
            numbers.extend(self.inner.read_map(id)?.refs().iter().map(|to| to.pack()));
        }
        let mut damaged = BTreeMap::new();
        for number in numbers {
            let object = self.inner.backend.describe(&layout::pack(number));
            // A check names the file, or a place in it.
            let is_of = |of: &str| {
                of.strip_prefix(&object)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', ':']))
            };
            if let Some(damage) = now.damages.iter().find(|damage| is_of(&damage.object)) {
                damaged.insert(number, damage.problem.clone());
            }
        }
        Ok(damaged)
    }

    /// The checkpoints that show one of the lost records.
    fn hurt(&self, lost: &BTreeSet<PageRef>) -> Result<BTreeMap<CheckpointId, String>> {
        let mut hurt = BTreeMap::new();
        if lost.is_empty() {
            return Ok(hurt);
        }
        for id in self.inner.checkpoint_ids()? {
            let meta = self.inner.read_checkpoint(id)?.meta;
            let (ram, disks) = self.inner.read_maps(&meta)?;
            let shown =
                ram.iter().map(|(_, to)| to).chain(disks.records()).find(|to| lost.contains(to));
            if let Some(to) = shown {
                let pack = self.inner.backend.describe(&layout::pack(to.pack()));
                hurt.insert(
                    id,
                    format!("the record in {pack} at offset {} is damaged", to.offset()),
                );
            }
        }
        Ok(hurt)
    }
}

/// The problem of a damaged file. Returns errors that do not show damage.
fn damage(error: Error) -> Result<String> {
    if error.is_damage() { Ok(error.to_string()) } else { Err(error) }
}

/// What was read; `None` if it is damaged. Returns errors that do not show damage.
fn unless_damaged<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Err(error) if error.is_damage() => Ok(None),
        other => other.map(Some),
    }
}

/// The live records in the packs that go, and the live records that refer to one in these packs.
fn touched(
    inner: &OpenStore,
    live: &mut Live,
    victims: &BTreeSet<u32>,
) -> Result<BTreeSet<PageRef>> {
    let mut touched = BTreeSet::new();
    for number in victims {
        touched.extend(places(*number, live.offsets(*number)));
    }
    for number in inner.pack_numbers()?.into_iter().filter(|number| !victims.contains(number)) {
        if live.offsets(number).is_empty() {
            continue;
        }
        let Some(shape) = PackShape::of(inner, number)? else { continue };
        let composed = live.close(inner, &shape)?;
        let refers = |to: &[PageRef]| to.iter().any(|to| victims.contains(&to.pack()));
        touched.extend(composed.into_iter().filter(|(_, to)| refers(to)).map(|(of, _)| of));
    }
    Ok(touched)
}

/// Reads one record and compares its content with its hash.
fn read_record(inner: &OpenStore, place: PageRef) -> Result<(PageHash, RecordKind, Box<Page>)> {
    let pack = inner.pack(place.pack())?;
    let left = pack.file.len_bytes()?.saturating_sub(place.offset());
    let mut bytes = vec![0; left.min(RECORD_BYTES_MAX as u64) as usize];
    pack.file.read_at(place.offset(), &mut bytes)?;
    let record = pack.parse(&bytes, place)?;
    let mut page = Box::new(ZERO_PAGE);
    inner.restore(&record, place, &mut page)?;
    Ok((record.hash, record.kind, page))
}

/// Other records with the content of bad ones. The index of the pack or the header of the bad
/// record gives the hash of the content.
struct Twins {
    possible: BTreeMap<PageRef, Vec<PageHash>>,
    places: BTreeMap<PageHash, Vec<PageRef>>,
}

impl Twins {
    fn of(inner: &OpenStore, bad: &[PageRef]) -> Result<Self> {
        let mut twins = Self { possible: BTreeMap::new(), places: BTreeMap::new() };
        for of_pack in bad.chunk_by(|a, b| a.pack() == b.pack()) {
            let Some(number) = of_pack.first().map(|place| place.pack()) else { continue };
            let entries = shape_of(inner, number)?.map_or_else(Vec::new, |shape| shape.entries);
            for place in of_pack {
                let indexed = entries.binary_search_by_key(&place.offset(), PackEntry::offset).ok();
                let indexed = indexed.and_then(|at| entries.get(at)).map(|entry| entry.hash);
                let own = unless_damaged(own_hash(inner, *place))?;
                twins.possible.insert(*place, indexed.into_iter().chain(own).collect());
            }
        }
        for hash in twins.possible.values().flatten() {
            twins.places.insert(*hash, Vec::new());
        }
        if twins.places.is_empty() {
            return Ok(twins);
        }
        for number in inner.pack_numbers()? {
            for entry in shape_of(inner, number)?.iter().flat_map(|shape| &shape.entries) {
                if let Some(places) = twins.places.get_mut(&entry.hash) {
                    places.push(PageRef::new(number, entry.offset()));
                }
            }
        }
        Ok(twins)
    }

    /// The content of a bad record, from an intact one; `None` if there is none.
    fn read(
        &self,
        inner: &OpenStore,
        bad: PageRef,
    ) -> Result<Option<(PageHash, RecordKind, Box<Page>)>> {
        for hash in self.possible.get(&bad).into_iter().flatten() {
            for place in self.places.get(hash).into_iter().flatten().filter(|at| **at != bad) {
                let content = unless_damaged(read_record(inner, *place))?;
                if let Some(content) = content.filter(|content| content.0 == *hash) {
                    return Ok(Some(content));
                }
            }
        }
        Ok(None)
    }
}

/// The records of a pack that can be read; `None` if its header is damaged.
fn shape_of(inner: &OpenStore, number: u32) -> Result<Option<PackShape>> {
    Ok(unless_damaged(PackShape::of(inner, number))?.flatten())
}

/// The hash in the header of a record.
fn own_hash(inner: &OpenStore, place: PageRef) -> Result<PageHash> {
    let mut bytes = [0; HASH_BYTES];
    inner.pack(place.pack())?.file.read_at(place.offset() + HASH_AT, &mut bytes)?;
    Ok(PageHash::from_bytes(bytes))
}

/// Writes headers and trailers of packs again if the records allow it.
fn fix_packs(inner: &OpenStore, rebuilt: &mut Vec<String>) -> Result<()> {
    for number in inner.pack_numbers()? {
        let name = layout::pack(number);
        if inner.len_of(&name) > REBUILT_BYTES_MAX {
            continue;
        }
        let fixed = match unless_damaged(inner.open_pack(number))? {
            Some(pack) => with_trailer(inner, &name, &pack)?,
            None => whole(inner, &name)?.and_then(|bytes| with_header(inner, number, bytes)),
        };
        if let Some(fixed) = fixed {
            inner.backend.put(&name, &fixed)?;
            rebuilt.push(name);
        }
    }
    Ok(())
}

/// The bytes of a pack; `None` if some cannot be read, so that it cannot be written again.
fn whole(inner: &OpenStore, name: &str) -> Result<Option<Vec<u8>>> {
    unless_damaged(inner.backend.read(name, REBUILT_BYTES_MAX))
}

/// The pack with the trailer that it must have had; `None` if its trailer is not its only damage.
fn with_trailer(inner: &OpenStore, name: &str, pack: &PackFile) -> Result<Option<Vec<u8>>> {
    let len_bytes = pack.file.len_bytes()?;
    if matches!(pack.ending(len_bytes)?, PackEnding::Closed { .. } | PackEnding::Unfinished) {
        return Ok(None);
    }
    let WalkedRecords { entries, wrong, stop } = pack.walk_records(inner, pack.first, len_bytes)?;
    let Some(end) = stop.filter(|_| wrong == 0) else { return Ok(None) };
    let index_end = end + (entries.len() * ENTRY_BYTES) as u64;
    let trailer_end = index_end.next_multiple_of(FOOTER_BYTES as u64) + FOOTER_BYTES as u64;
    if trailer_end != len_bytes {
        return Ok(None);
    }
    let Some(mut bytes) = whole(inner, name)? else { return Ok(None) };
    let trailer = encode_trailer(&pack.header, &entries, end);
    bytes.truncate(end as usize);
    bytes.extend_from_slice(&trailer.index);
    bytes.extend_from_slice(&trailer.footer);
    Ok(Some(bytes))
}

/// The pack with the header that it must have had; `None` if neither a record nor a trailer shows
/// which one.
fn with_header(inner: &OpenStore, number: u32, bytes: Vec<u8>) -> Option<Vec<u8>> {
    with_dense_header(inner, number, bytes.clone())
        .or_else(|| with_plain_header(inner, number, bytes))
}

fn with_plain_header(inner: &OpenStore, number: u32, mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    let place = PageRef::new(number, PACK_HEADER_BYTES as u64);
    Record::parse(bytes.get(PACK_HEADER_BYTES..)?, place).ok()?;
    let header = encode_pack_header(inner.config.id, number, None);
    bytes.get_mut(..PACK_HEADER_BYTES)?.copy_from_slice(&header);
    Some(bytes)
}

/// The dictionary ends at the first record, whose offset is in the trailer. A recompressed pack
/// that a checkpoint needs has a trailer.
fn with_dense_header(inner: &OpenStore, number: u32, mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    let footer =
        parse_footer(bytes.get(bytes.len().checked_sub(FOOTER_BYTES)?..)?, bytes.len() as u64)?
            .ok()?;
    let entry = bytes.get(usize::try_from(footer.records_end).ok()?..)?.get(HASH_BYTES..)?;
    let mut first = [0; 8];
    // The offset has seven bytes; the eighth is the kind.
    first[..7].copy_from_slice(entry.get(..7)?);
    let head_bytes = (PACK_HEADER_BYTES + DICTIONARY_CHECK_BYTES) as u64;
    let dictionary_bytes = u64::from_le_bytes(first).checked_sub(head_bytes)?;
    let header = encode_pack_header(inner.config.id, number, Some(dictionary_bytes));
    bytes.get_mut(..PACK_HEADER_BYTES)?.copy_from_slice(&header);
    is_closed(number, &bytes, header).then_some(bytes)
}

fn is_closed(number: u32, bytes: &[u8], header: [u8; PACK_HEADER_BYTES]) -> bool {
    let file = StoreFile::of_bytes(bytes.to_vec());
    let pack = PackFile::with_header(number, String::new(), file, header, PACK_HEADER_BYTES as u64);
    matches!(pack.ending(bytes.len() as u64), Ok(PackEnding::Closed { .. }))
}

/// The highest number of a checkpoint or a map.
fn newest_number(inner: &OpenStore) -> Result<u64> {
    let maps = inner.map_ids()?.last().copied();
    let ids = inner.checkpoint_ids()?.last().map(|id| id.0);
    Ok(maps.max(ids).unwrap_or(0))
}
