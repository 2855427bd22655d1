//! Repair: what is whole stays or is saved, what is not is set aside, and both are listed.
//!
//! ```text
//!   check ─ whole ─▶ nothing to do
//!     │ damaged
//!     ▼
//!   pack headers, trailers  written anew where the records tell them
//!   checkpoint files, maps, tags that cannot be read ─▶ quarantine, with the checkpoints that need them
//!   bad records: of the same content elsewhere? ─ yes ─▶ that one stands for it
//!                    │ no
//!                    ▼
//!                checkpoints whose image shows them ─▶ quarantine
//!   packs that are still damaged: what others need of them copied to a new one ─▶ maps rewritten ─▶ packs to quarantine
//!   check once more
//! ```
//!
//! Invariants: only under the locks of writer and prune. A checkpoint that could be read before can
//! be read after, at every instant: files are put whole, and a pack goes when no map of a
//! checkpoint that is left names it. Nothing is deleted: it is in `quarantine/`. Numbers are not
//! used again. What is interrupted is done by the next repair; a repair of a whole store changes
//! nothing.
//!
//! Left out: `store.json`, whose key is nowhere else; overlays of disks; working sets, which are
//! advice.

use super::{CheckOptions, CheckProgress, CheckReport};
use crate::files::OpenFile;
use crate::identity::{PageHash, PageRef};
use crate::pack_file::{Ending, PackFile};
use crate::prune::{Copier, Live, Moves, Shape, packs, rewrite_maps};
use crate::record::{
    DICTIONARY_CHECK_BYTES, ENTRY_BYTES, Entry, FOOTER_BYTES, Kind, PACK_HEADER_BYTES,
    RECORD_BYTES_MAX, Record, encode_pack_header, encode_trailer, parse_footer,
};
use crate::store::Inner;
use crate::writer::{Tuning, Writer};
use crate::{Error, Result, Store};
use keyframe_locks::IgnorePoison;
use keyframe_store_backend::LockGuard;
use keyframe_store_backend::layout;
use keyframe_units::{CheckpointId, Page, ZERO_PAGE};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Packs up to this size get their header or trailer back in place; larger ones are copied.
const REBUILT_BYTES_MAX: u64 = 1 << 30;
/// The page hash in the header of a record.
const HASH_AT: u64 = 12;
const HASH_BYTES: usize = 16;

/// A file that was set aside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetAside {
    /// What it was called.
    pub name: String,
    /// Where it is now; absent where there was nothing left of it.
    pub to: Option<String>,
    /// Why.
    pub problem: String,
}

/// A checkpoint that is lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// Its number.
    pub id: CheckpointId,
    /// Its tags, which are gone with it.
    pub tags: Vec<String>,
    /// What it needs and is damaged.
    pub problem: String,
}

/// What a repair did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairReport {
    /// What was found damaged.
    pub found: CheckReport,
    /// Packs whose header or trailer was written anew, all records being whole.
    pub rebuilt: Vec<String>,
    /// Records that were copied out of damaged packs.
    pub saved_records: u64,
    /// Of these: bad ones whose content was elsewhere in the store.
    pub relinked_records: u64,
    /// Files that were set aside.
    pub set_aside: Vec<SetAside>,
    /// Checkpoints that could not be saved.
    pub lost: Vec<Lost>,
    /// Afterwards; absent where nothing was damaged.
    pub after: Option<CheckReport>,
}

impl Store {
    /// Saves what can be saved of a damaged store, and lists what cannot.
    ///
    /// Errors: [`Error::Locked`] where a run or a prune is at work; [`Error::OtherVersion`];
    /// [`Error::Damaged`] where the store's own description is not what it was: its key is nowhere
    /// else.
    pub fn repair(&self, progress: &mut dyn FnMut(CheckProgress)) -> Result<RepairReport> {
        let inner = self.inner();
        let options = CheckOptions { read_data: true };
        let pruning = inner.lock_prune()?;
        let found = self.check(&options, progress)?;
        if found.is_clean() {
            return Ok(RepairReport { found, ..RepairReport::default() });
        }
        inner.own_identity()?;
        let writer = self.lock_writer("keyframe check --repair")?;
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
        inner.forget_open_packs();
        repair.report.after = Some(self.check(&options, progress)?);
        Ok(repair.report)
    }
}

struct Repair<'a> {
    store: &'a Store,
    inner: &'a Arc<Inner>,
    report: RepairReport,
    _locks: (Writer, Box<dyn LockGuard>),
}

impl Repair<'_> {
    fn set_aside(&mut self, name: &str, problem: &str) -> Result<()> {
        let to = self.inner.set_aside(name)?;
        let (name, problem) = (name.to_owned(), problem.to_owned());
        self.report.set_aside.push(SetAside { name, to, problem });
        Ok(())
    }

    /// Sets checkpoints aside that need something that is lost, their tags first.
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
            self.report.lost.push(Lost { id, tags, problem });
        }
        Ok(())
    }

    /// Checkpoint files and maps, and the checkpoints that need such.
    fn files(&mut self) -> Result<()> {
        let mut lost = BTreeMap::new();
        let mut chains = Vec::new();
        for id in self.inner.checkpoint_ids()? {
            match self.inner.read_checkpoint(id) {
                Ok(file) => chains.push((id, file.meta)),
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

    /// Tags that cannot be read, or point to nothing.
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

    /// Packs with bad records.
    fn records(
        &mut self,
        options: CheckOptions,
        progress: &mut dyn FnMut(CheckProgress),
    ) -> Result<()> {
        self.inner.forget_open_packs();
        let damaged = self.damaged_packs(options, progress)?;
        if damaged.is_empty() {
            return Ok(());
        }
        let mut copier = Copier::new(self.inner.clone(), Tuning::default());
        copier.raise()?;
        let moves = Moves { victims: damaged.keys().copied().collect(), ..Moves::default() };
        let (mut saved, mut bad) = (BTreeMap::new(), Vec::new());
        let mut keep = |place, (hash, kind, page): (PageHash, Kind, Box<Page>)| {
            self.report.saved_records += 1;
            // A derived one becomes a plain one: what it stands on may go.
            let kind = if kind.is_of_ram() { Kind::Page } else { Kind::Block };
            saved.insert(place, copier.keep(&page, hash, kind)?);
            Ok::<_, Error>(())
        };
        for place in touched(self.inner, &mut Live::find(self.inner)?, &moves.victims)? {
            match read_record(self.inner, place) {
                Ok(content) => keep(place, content)?,
                Err(Error::Damaged { .. } | Error::Io { .. }) => bad.push(place),
                Err(error) => return Err(error),
            }
        }
        let mut lost = BTreeSet::new();
        let twins = Twins::of(self.inner, &bad)?;
        for place in bad {
            match twins.read(self.inner, place) {
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
        // Those, too, that a repair which died has put anew, before what their former selves named
        // goes.
        self.inner.backend.remove_all(layout::MAPS, &[])?;
        let newest = packs::numbers(self.inner)?.last().copied();
        if newest.is_some_and(|newest| moves.victims.contains(&newest)) {
            copier.reserve()?;
        }
        self.inner.forget_open_packs();
        for (number, problem) in damaged {
            self.set_aside(&layout::pack(number), &problem)?;
        }
        Ok(())
    }

    /// The packs of which something is not well, by what a check says of them.
    fn damaged_packs(
        &self,
        options: CheckOptions,
        progress: &mut dyn FnMut(CheckProgress),
    ) -> Result<BTreeMap<u32, String>> {
        let now = self.store.check(&options, progress)?;
        let mut numbers: BTreeSet<u32> = packs::numbers(self.inner)?.into_iter().collect();
        // A pack that is missing is damaged, too.
        for id in self.inner.map_ids()? {
            numbers.extend(self.inner.read_map(id)?.refs().iter().map(|to| to.pack()));
        }
        let mut damaged = BTreeMap::new();
        for number in numbers {
            let object = self.inner.backend.describe(&layout::pack(number));
            // As the checks name them: the file, or a place in it.
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

    /// Checkpoints whose image shows one of those records.
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

/// What is wrong with a file; errors that are none of it go on.
fn damage(error: Error) -> Result<String> {
    match error {
        Error::OtherVersion { .. } => Err(error),
        other => Ok(other.to_string()),
    }
}

/// The records that some checkpoint shows and that lie in the packs that go, or are composed of
/// such.
fn touched(inner: &Inner, live: &mut Live, victims: &BTreeSet<u32>) -> Result<BTreeSet<PageRef>> {
    let mut touched = BTreeSet::new();
    for number in victims {
        touched.extend(packs::places(*number, live.offsets(*number)));
    }
    for number in packs::numbers(inner)?.into_iter().filter(|number| !victims.contains(number)) {
        let Some(shape) = Shape::of(inner, number)? else { continue };
        let composed = live.close(inner, &shape)?;
        let refers = |to: &[PageRef]| to.iter().any(|to| victims.contains(&to.pack()));
        touched.extend(composed.into_iter().filter(|(_, to)| refers(to)).map(|(of, _)| of));
    }
    Ok(touched)
}

/// Reads one record whole, and compares its content with its hash.
fn read_record(inner: &Inner, place: PageRef) -> Result<(PageHash, Kind, Box<Page>)> {
    let pack = inner.pack(place.pack())?;
    let damaged =
        |problem| Error::damaged(format!("{} at offset {}", pack.object, place.offset()), problem);
    let left = pack.file.len_bytes()?.saturating_sub(place.offset());
    let mut bytes = vec![0; left.min(RECORD_BYTES_MAX as u64) as usize];
    pack.file.read_at(place.offset(), &mut bytes)?;
    let record = pack.parse(&bytes, place).map_err(damaged)?;
    let mut page = Box::new(ZERO_PAGE);
    inner.restore(&record, place, &mut page).map_err(damaged)?;
    Ok((record.hash, record.kind, page))
}

/// Other records of the content that bad ones had, as the index of their pack says, or their own
/// header.
struct Twins {
    possible: BTreeMap<PageRef, Vec<PageHash>>,
    places: BTreeMap<PageHash, Vec<PageRef>>,
}

impl Twins {
    fn of(inner: &Inner, bad: &[PageRef]) -> Result<Self> {
        let mut twins = Self { possible: BTreeMap::new(), places: BTreeMap::new() };
        for of_pack in bad.chunk_by(|a, b| a.pack() == b.pack()) {
            let Some(number) = of_pack.first().map(|place| place.pack()) else { continue };
            let shape = if inner.len_of(&layout::pack(number)) > 0 {
                Shape::of(inner, number)?
            } else {
                None
            };
            let entries = shape.map_or_else(Vec::new, |shape| shape.entries);
            for place in of_pack {
                let indexed = entries.binary_search_by_key(&place.offset(), Entry::offset).ok();
                let indexed = indexed.and_then(|at| entries.get(at)).map(|entry| entry.hash);
                let own = inner.pack(number).ok().and_then(|pack| {
                    let mut bytes = [0; HASH_BYTES];
                    pack.file.read_at(place.offset() + HASH_AT, &mut bytes).ok()?;
                    Some(PageHash::from_bytes(bytes))
                });
                twins.possible.insert(*place, indexed.into_iter().chain(own).collect());
            }
        }
        for hash in twins.possible.values().flatten() {
            twins.places.insert(*hash, Vec::new());
        }
        if twins.places.is_empty() {
            return Ok(twins);
        }
        for number in packs::numbers(inner)? {
            for entry in Shape::of(inner, number)?.iter().flat_map(|shape| &shape.entries) {
                if let Some(places) = twins.places.get_mut(&entry.hash) {
                    places.push(PageRef::new(number, entry.offset()));
                }
            }
        }
        Ok(twins)
    }

    /// The content of a bad record, from one that is whole.
    fn read(&self, inner: &Inner, bad: PageRef) -> Option<(PageHash, Kind, Box<Page>)> {
        let hashes = self.possible.get(&bad)?.iter();
        let others = hashes
            .flat_map(|hash| self.places.get(hash).into_iter().flatten().map(move |at| (hash, at)));
        let read = |(hash, at): (&PageHash, &PageRef)| {
            let content = read_record(inner, *at).ok()?;
            (content.0 == *hash).then_some(content)
        };
        others.filter(|(_, at)| **at != bad).find_map(read)
    }
}

/// Writes headers and trailers of packs anew where the records tell them.
fn fix_packs(inner: &Inner, rebuilt: &mut Vec<String>) -> Result<()> {
    for number in packs::numbers(inner)? {
        let name = layout::pack(number);
        if inner.len_of(&name) > REBUILT_BYTES_MAX {
            continue;
        }
        // What the medium does not give cannot be put back.
        let bytes = || inner.backend.read(&name, REBUILT_BYTES_MAX).ok();
        let fixed = match PackFile::open(inner, number) {
            Err(Error::Damaged { .. }) => {
                bytes().and_then(|bytes| with_header(inner, number, bytes))
            }
            other => {
                let pack = other?;
                let end = records_end(inner, &pack, pack.file.len_bytes()?);
                end.and_then(|end| Some(with_trailer(inner, &pack, end, bytes()?)))
            }
        };
        if let Some(fixed) = fixed {
            inner.backend.put(&name, &fixed)?;
            rebuilt.push(name);
        }
    }
    Ok(())
}

fn with_trailer(inner: &Inner, pack: &PackFile, end: u64, mut bytes: Vec<u8>) -> Vec<u8> {
    let mut entries = Vec::new();
    pack.walk(inner, pack.first, end, &mut |held| entries.extend(held));
    let trailer = encode_trailer(&pack.header, &entries, end);
    bytes.truncate(end as usize);
    bytes.extend_from_slice(&trailer.index);
    bytes.extend_from_slice(&trailer.footer);
    bytes
}

/// Where the records end of a pack that lacks nothing but a right trailer.
fn records_end(inner: &Inner, pack: &PackFile, len_bytes: u64) -> Option<u64> {
    if matches!(pack.ending(len_bytes), Ending::Closed { .. } | Ending::Unfinished) {
        return None;
    }
    let (mut records, mut bad) = (0, false);
    let mut visit = |held: Result<_, _>| {
        records += 1;
        bad |= held.is_err();
    };
    let end = pack.walk(inner, pack.first, len_bytes, &mut visit)?.0;
    let index_end = end + records * ENTRY_BYTES as u64;
    let trailer_end = index_end.next_multiple_of(FOOTER_BYTES as u64) + FOOTER_BYTES as u64;
    (!bad && trailer_end == len_bytes).then_some(end)
}

/// A pack with the header that it must have had; `None` where no record follows, nor a trailer
/// tells of one.
fn with_header(inner: &Inner, number: u32, bytes: Vec<u8>) -> Option<Vec<u8>> {
    with_dense_header(inner, number, bytes.clone())
        .or_else(|| with_plain_header(inner, number, bytes))
}

fn with_plain_header(inner: &Inner, number: u32, mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    let place = PageRef::new(number, PACK_HEADER_BYTES as u64);
    Record::parse(bytes.get(PACK_HEADER_BYTES..)?, place).ok()?;
    let header = encode_pack_header(inner.config.id, number, None);
    bytes.get_mut(..PACK_HEADER_BYTES)?.copy_from_slice(&header);
    Some(bytes)
}

/// The dictionary reaches to the first record, which the trailer tells. A pack that was
/// recompressed has one, or nobody needs it.
fn with_dense_header(inner: &Inner, number: u32, mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    let footer =
        parse_footer(bytes.get(bytes.len().checked_sub(FOOTER_BYTES)?..)?, bytes.len() as u64)?
            .ok()?;
    let entry = bytes.get(usize::try_from(footer.records_end).ok()?..)?.get(HASH_BYTES..)?;
    let mut first = [0; 8];
    // The seventh and last byte of the offset; behind it is the kind.
    first[..7].copy_from_slice(entry.get(..7)?);
    let head_bytes = (PACK_HEADER_BYTES + DICTIONARY_CHECK_BYTES) as u64;
    let dictionary_bytes = u64::from_le_bytes(first).checked_sub(head_bytes)?;
    let header = encode_pack_header(inner.config.id, number, Some(dictionary_bytes));
    bytes.get_mut(..PACK_HEADER_BYTES)?.copy_from_slice(&header);
    is_closed(number, &bytes, header).then_some(bytes)
}

fn is_closed(number: u32, bytes: &[u8], header: [u8; PACK_HEADER_BYTES]) -> bool {
    let file = OpenFile::of_bytes(bytes.to_vec());
    let pack = PackFile::of(number, String::new(), file, header, PACK_HEADER_BYTES as u64);
    matches!(pack.ending(bytes.len() as u64), Ending::Closed { .. })
}

/// The highest number of a checkpoint or a map.
fn newest_number(inner: &Inner) -> Result<u64> {
    let maps = inner.map_ids()?.last().copied();
    let ids = inner.checkpoint_ids()?.last().map(|id| id.0);
    Ok(maps.max(ids).unwrap_or(0))
}

impl Inner {
    /// Packs that were replaced are opened anew.
    fn forget_open_packs(&self) {
        self.packs.lock().ignore_poison().clear();
    }
}
