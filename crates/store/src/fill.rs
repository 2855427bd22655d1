//! Filling memory with the image of a checkpoint, on several threads. Each page is made in its
//! final place.
//!
//! ```text
//!   zeros            | piece | piece | ...         made zero, while the references are sorted
//!   wanted, falling  | piece | piece | ...         plain ──▶ its place      composed ──▶ made after the piece
//!                        ▲       │                 delta ──▶ waits
//!                        └─ waiting deltas         base ──▶ the delta's place ─ patched ─▶ compared with its hash
//! ```
//!
//! A delta lies after its base, and the newest records are read first. So most deltas are known
//! before the piece with their base is read, and are made with it: each pack is read once. Deltas
//! that are found later are made at the end.
//!
//! Invariants: no page goes from one thread to another, and none is made elsewhere. The memory of
//! waiting deltas is bounded ([`LATE_BYTES_MAX`]): if there are more, they are made first.

use crate::assemble::{DERIVED_OF_DERIVED, NOT_ITS_HASH};
use crate::open_store::OpenStore;
use crate::parallel::{PAGES_MIN, PIECE_RECORDS, threads};
use crate::{Error, Result};
use keyframe_locks::IgnorePoison;
use keyframe_store_format::delta::Delta;
use keyframe_store_format::page_hash::{LANES, PageHash};
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::{Page, ZERO_PAGE};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

/// The ranges of zeros in one piece.
const PIECE_ZEROS: usize = 256;
/// The most memory of waiting deltas, in bytes: enough for 2 GiB of pages with a few changed words.
const LATE_BYTES_MAX: usize = 64 << 20;
/// Waiting deltas are grouped by regions of packs of this size, about a piece.
const REGION_BYTES: u64 = 4 << 20;

/// The reference of a page, and its place in memory.
type Wanted<'p> = (PageRef, &'p mut Page);

/// A delta that waits for its base.
struct Late<'a> {
    at: PageRef,
    hash: PageHash,
    delta: Delta,
    into: &'a mut Page,
}

impl Late<'_> {
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.delta.patch_bytes()
    }
}

/// The work that is left.
struct Left<'a, 'p> {
    /// Rising; taken from its end.
    wanted: &'a mut [Wanted<'p>],
    /// The waiting deltas by the region of their base.
    late: BTreeMap<u64, Vec<Late<'a>>>,
    late_bytes: usize,
    failed: Option<Error>,
}

/// The work that a thread takes at once. Both lists rise.
struct Piece<'a, 'p> {
    wanted: &'a mut [Wanted<'p>],
    late: Vec<Late<'a>>,
}

impl<'a, 'p> Left<'a, 'p> {
    fn next(&mut self, late_bytes_max: usize) -> Option<Piece<'a, 'p>> {
        let mut piece = Piece { wanted: &mut [], late: Vec::new() };
        if self.late_bytes <= late_bytes_max {
            let rest = self.wanted.len().saturating_sub(PIECE_RECORDS);
            (self.wanted, piece.wanted) = std::mem::take(&mut self.wanted).split_at_mut(rest);
        }
        if let Some((first, _)) = piece.wanted.first() {
            let late = self.late.split_off(&region(*first)).into_values().flatten();
            let (early, here) = late.partition(|late| late.delta.base < *first);
            piece.late = here;
            if !Vec::is_empty(&early) {
                self.late.insert(region(*first), early);
            }
        } else {
            while piece.late.len() < PIECE_RECORDS
                && let Some((_, late)) = self.late.pop_last()
            {
                piece.late.extend(late);
            }
        }
        self.late_bytes -= piece.late.iter().map(Late::bytes).sum::<usize>();
        (!piece.wanted.is_empty() || !piece.late.is_empty()).then_some(piece)
    }

    /// Adds the deltas that a piece has found.
    fn add(&mut self, late: Vec<Late<'a>>) {
        for late in late {
            self.late_bytes += late.bytes();
            self.late.entry(region(late.delta.base)).or_default().push(late);
        }
    }

    /// Keeps the first error, and ends all work.
    fn fail(&mut self, error: Error) {
        self.failed.get_or_insert(error);
        self.wanted = &mut [];
        (self.late, self.late_bytes) = (BTreeMap::new(), 0);
    }
}

fn region(to: PageRef) -> u64 {
    to.0 / REGION_BYTES
}

impl OpenStore {
    /// Reads the pages at `wanted`, which it sorts, into their destinations, and makes all of
    /// `zeros` zero. Uses several threads if there is much to read. Error: a record cannot be read
    /// or is damaged; the content of the destinations is then undefined.
    pub fn read_into(&self, wanted: &mut [Wanted<'_>], zeros: Vec<&mut [Page]>) -> Result<()> {
        let threads = if wanted.len() < PAGES_MIN { 1 } else { threads() };
        self.fill(wanted, zeros, threads, LATE_BYTES_MAX)
    }

    fn fill(
        &self,
        wanted: &mut [Wanted<'_>],
        mut zeros: Vec<&mut [Page]>,
        threads: usize,
        late_bytes_max: usize,
    ) -> Result<()> {
        let zeros = Mutex::new(zeros.chunks_mut(PIECE_ZEROS));
        let next_zeros = || lock(&zeros).next();
        let left = Mutex::new(Left { wanted, late: BTreeMap::new(), late_bytes: 0, failed: None });
        let next_piece = || lock(&left).next(late_bytes_max);
        let work = || {
            while let Some(piece) = next_zeros() {
                for pages in piece {
                    pages.fill(ZERO_PAGE);
                }
            }
            let mut buffer = Vec::new();
            while let Some(piece) = next_piece() {
                let mut found = Vec::new();
                match self.read_piece(piece, &mut buffer, &mut found) {
                    Ok(()) => lock(&left).add(found),
                    Err(error) => lock(&left).fail(error),
                }
            }
        };
        std::thread::scope(|scope| {
            // The other threads begin with the zeros, then wait for this lock.
            let mut all = lock(&left);
            for _ in 1..threads {
                scope.spawn(work);
            }
            all.wanted.sort_unstable_by_key(|(to, _)| *to);
            drop(all);
            work();
        });
        let left = left.into_inner().ignore_poison();
        left.failed.map_or(Ok(()), Err)
    }

    /// Makes the pages of a piece, and adds its deltas to `found`.
    fn read_piece<'a>(
        &self,
        piece: Piece<'a, '_>,
        buffer: &mut Vec<u8>,
        found: &mut Vec<Late<'a>>,
    ) -> Result<()> {
        let Piece { wanted, mut late } = piece;
        late.sort_unstable_by_key(|late| late.delta.base);
        // True marks the base of the next waiting delta, false a wanted record. Of equal references
        // the wanted one comes first.
        let mut records: Vec<(PageRef, bool)> = wanted.iter().map(|(to, _)| (*to, false)).collect();
        records.extend(late.iter().map(|late| (late.delta.base, true)));
        records.sort();
        let mut places = wanted.iter_mut();
        let (mut made, mut compared) = (0, 0);
        let mut before: Option<(PageRef, PageHash, &Page)> = None;
        let mut composed: Vec<Wanted<'a>> = Vec::new();
        for group in records.chunk_by(|a, b| a.0.pack() == b.0.pack()) {
            let pack = self.pack(group.first().map_or(0, |(to, _)| to.pack()))?;
            pack.read_bytes(group, buffer, |number, bytes| {
                let Some((to, is_base)) = group.get(number).copied() else { return Ok(()) };
                let failed = |problem| pack.damaged_at(to, problem);
                let known = before.filter(|(same, ..)| *same == to);
                if !is_base {
                    let Some((_, into)) = places.next() else { return Ok(()) };
                    let into: &'a mut Page = into;
                    if let Some((.., page)) = known {
                        *into = *page;
                        return Ok(());
                    }
                    let record = pack.parse(bytes, to)?;
                    if let Some(delta) = record.delta().map_err(failed)? {
                        found.push(Late { at: to, hash: record.hash, delta, into });
                    } else if record.kind.is_derived() {
                        composed.push((to, into));
                    } else {
                        record.decompress(into).map_err(failed)?;
                        before = Some((to, record.hash, into));
                    }
                    return Ok(());
                }
                let Some(late_page) = late.get_mut(made) else { return Ok(()) };
                if let Some((_, hash, base)) = known {
                    *late_page.into = *base;
                    self.apply_delta(late_page, hash)?;
                } else {
                    let record = pack.parse(bytes, to)?;
                    if record.kind.is_derived() {
                        return Err(self.damaged_at(to, DERIVED_OF_DERIVED));
                    }
                    record.decompress(late_page.into).map_err(failed)?;
                    self.apply_delta(late_page, record.hash)?;
                }
                made += 1;
                if made - compared == LANES {
                    self.verify_made(&late[compared..made])?;
                    compared = made;
                }
                Ok(())
            })?;
        }
        self.verify_made(&late[compared..made])?;
        self.read_composed(composed)
    }

    /// Turns the content of its base, whose record has `hash`, into the page of a delta.
    fn apply_delta(&self, late: &mut Late<'_>, hash: PageHash) -> Result<()> {
        let Late { at, delta, into, .. } = late;
        delta.apply(hash, into).map_err(|problem| self.damaged_at(*at, problem))
    }

    /// Reads composed blocks, which rise, into their places.
    fn read_composed(&self, mut composed: Vec<Wanted<'_>>) -> Result<()> {
        let wanted: Vec<(PageRef, usize)> = composed.iter().map(|(to, _)| *to).zip(0..).collect();
        self.read_pages(&wanted, &mut |number, page| {
            if let Some((_, into)) = composed.get_mut(number) {
                **into = *page;
            }
            Ok(())
        })
    }

    /// Compares pages made from deltas, at most [`LANES`], with their hashes.
    fn verify_made(&self, made: &[Late<'_>]) -> Result<()> {
        let mut pages = [&ZERO_PAGE; LANES];
        pages.iter_mut().zip(made).for_each(|(page, late)| *page = late.into);
        let hashes = PageHash::of_many(&self.config.key, &pages[..made.len().min(LANES)]);
        match made.iter().zip(hashes).find(|(late, hash)| late.hash != *hash) {
            Some((late, _)) => Err(self.damaged_at(late.at, NOT_ITS_HASH)),
            None => Ok(()),
        }
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().ignore_poison()
}

#[cfg(test)]
mod tests {
    use crate::Error;
    use crate::parallel::tests::{PAGES, epoch_of, page_of, subject};
    use crate::tests::on;
    use keyframe_store_backend::testing::FaultyBackend;
    use keyframe_store_format::page_ref::PageRef;
    use keyframe_units::{PAGE_BYTES, Page, PageIndex, ZERO_PAGE};

    fn expected(first: u64, pages: u64) -> Vec<Page> {
        let held = |page: u64| if page < PAGES { page_of(page, epoch_of(page)) } else { ZERO_PAGE };
        (first..first + pages).map(held).collect()
    }

    #[test]
    fn memory_is_filled_with_the_image_and_its_zeros_whatever_was_in_it() {
        let (_medium, loaded) = subject();
        // All, by several threads; some, by one; beyond the end; none.
        for (first, pages) in [(0, PAGES), (13, 700), (PAGES - 20, 40), (PAGES + 5, 3), (7, 0)] {
            let mut out = vec![[0xa5; PAGE_BYTES]; pages as usize];
            loaded.read_into(PageIndex(first), &mut out).unwrap();
            assert!(out == expected(first, pages), "{pages} pages from {first} on");
        }
    }

    #[test]
    fn however_many_threads_there_are_and_however_few_deltas_may_wait_the_image_is_the_same() {
        let (_medium, loaded) = subject();
        let expected = expected(0, PAGES);
        for (threads, late_bytes_max) in
            [(1, 0), (1, 30_000), (1, usize::MAX), (3, 0), (3, usize::MAX)]
        {
            let mut out = vec![[0xa5; PAGE_BYTES]; PAGES as usize];
            let (mut wanted, mut zeros) = (Vec::new(), Vec::new());
            for (page, into) in out.iter_mut().enumerate() {
                match PageRef(loaded.page_ref(PageIndex(page as u64))) {
                    PageRef::ZERO => zeros.push(std::slice::from_mut(into)),
                    to => wanted.push((to, into)),
                }
            }
            loaded.inner.fill(&mut wanted, zeros, threads, late_bytes_max).unwrap();
            assert!(out == expected, "{threads} threads, {late_bytes_max} bytes of deltas");
        }
    }

    /// Every record may be the damaged one: of a page, of a delta, of its base.
    #[test]
    fn a_damaged_record_is_an_error_by_its_pack() {
        let (medium, loaded) = subject();
        let flip = |medium: &FaultyBackend, name: &str, at: usize| {
            let mut bytes = medium.files()[name].clone();
            bytes[at] ^= 1;
            medium.overwrite(name, Some(bytes));
        };
        let packs: Vec<String> =
            medium.files().into_keys().filter(|name| name.starts_with("packs/")).collect();
        assert!(packs.len() > 2, "{packs:?}");
        for name in &packs {
            flip(&medium, name, 5000);
            let hurt = on(&medium).unwrap().load(loaded.id).unwrap();
            let read = hurt.read_into(PageIndex(0), &mut vec![ZERO_PAGE; PAGES as usize]);
            assert!(
                matches!(&read, Err(Error::Damaged { object, .. }) if object.contains(name)),
                "{name}: {read:?}"
            );
            flip(&medium, name, 5000);
        }
        let whole = on(&medium).unwrap().load(loaded.id).unwrap();
        let mut out = vec![ZERO_PAGE; PAGES as usize];
        whole.read_into(PageIndex(0), &mut out).unwrap();
        assert!(out == expected(0, PAGES));
    }
}
