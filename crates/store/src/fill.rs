//! Filling memory with an image, by several threads: each page is made in the place where it
//! belongs.
//!
//! ```text
//!   zeros            | piece | piece | ...         made zero, while the references are sorted
//!   wanted, falling  | piece | piece | ...         plain ──▶ its place      composed ──▶ put together behind its piece
//!                        ▲       │                 delta ──▶ late
//!                        └─ late, by base          base ──▶ the delta's place ─ changes ─▶ compared with its hash
//! ```
//!
//! A delta lies behind its base. As the newest records are read first, a piece knows of nearly all
//! deltas whose bases lie in it and makes them beside its own pages: packs are read once. What came
//! too late for its piece is made in the end.
//!
//! Invariants: no page goes from one thread to another, and none is made elsewhere. The deltas that
//! wait are bounded ([`LATE_BYTES_MAX`]): where there are more, those are made first.

use crate::assemble::{DERIVED_OF_DERIVED, NOT_ITS_HASH};
use crate::delta::Delta;
use crate::identity::{LANES, PageHash, PageRef};
use crate::parallel::{PAGES_MIN, PIECE_RECORDS, threads};
use crate::store::Inner;
use crate::{Error, Result};
use keyframe_locks::IgnorePoison;
use keyframe_units::{Page, ZERO_PAGE};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

/// Stretches of zeros that a thread takes at once.
const PIECE_ZEROS: usize = 256;
/// What deltas may take that wait for their bases: those of 2 GiB of pages in which a few words
/// changed.
const LATE_BYTES_MAX: usize = 64 << 20;
/// Deltas wait by regions of packs that are as large as this: about a piece.
const REGION_BYTES: u64 = 4 << 20;

/// A page's reference, and where the page belongs.
type Wanted<'p> = (PageRef, &'p mut Page);

/// A delta whose base is to be read.
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

/// What is to be done.
struct Left<'a, 'p> {
    /// Rising; taken from its end.
    wanted: &'a mut [Wanted<'p>],
    /// By the region of their bases.
    late: BTreeMap<u64, Vec<Late<'a>>>,
    late_bytes: usize,
    failed: Option<Error>,
}

/// What a thread does at once; both rising.
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

    /// Takes in what a piece has found.
    fn add(&mut self, late: Vec<Late<'a>>) {
        for late in late {
            self.late_bytes += late.bytes();
            self.late.entry(region(late.delta.base)).or_default().push(late);
        }
    }

    /// Nobody begins another piece.
    fn fail(&mut self, error: Error) {
        self.failed.get_or_insert(error);
        self.wanted = &mut [];
        (self.late, self.late_bytes) = (BTreeMap::new(), 0);
    }
}

fn region(to: PageRef) -> u64 {
    to.0 / REGION_BYTES
}

impl Inner {
    /// Reads the pages at `wanted` (which it sorts) into their places, and makes all of `zeros`
    /// zero, by several threads where there is much to read. After an error the places hold
    /// anything.
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
            // Others begin with the zeros meanwhile, and wait here for the first piece.
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

    /// Makes the pages of a piece; but of those that are deltas says what they are made of.
    fn read_piece<'a>(
        &self,
        piece: Piece<'a, '_>,
        buffer: &mut Vec<u8>,
        found: &mut Vec<Late<'a>>,
    ) -> Result<()> {
        let Piece { wanted, mut late } = piece;
        late.sort_unstable_by_key(|late| late.delta.base);
        // Each with whether it is the base of the next one that waited, or itself wanted; wanted
        // ones come first.
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
                    let record = pack.parse(bytes, to).map_err(failed)?;
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
                let Some(Late { at, delta, into, .. }) = late.get_mut(made) else { return Ok(()) };
                let base = if let Some((_, hash, page)) = known {
                    **into = *page;
                    hash
                } else {
                    let record = pack.parse(bytes, to).map_err(failed)?;
                    if record.kind.is_derived() {
                        return Err(self.damaged_at(to, DERIVED_OF_DERIVED));
                    }
                    record.decompress(into).map_err(failed)?;
                    record.hash
                };
                delta.change(base, into).map_err(|problem| self.damaged_at(*at, problem))?;
                made += 1;
                if made - compared == LANES {
                    self.compare(&late[compared..made])?;
                    compared = made;
                }
                Ok(())
            })?;
        }
        self.compare(&late[compared..made])?;
        let wanted: Vec<(PageRef, usize)> = composed.iter().map(|(to, _)| *to).zip(0..).collect();
        self.read_pages(&wanted, &mut |number, page| {
            if let Some((_, into)) = composed.get_mut(number) {
                **into = *page;
            }
            Ok(())
        })
    }

    /// Compares pages that were made, at most as many as are hashed at a time, with their hashes.
    fn compare(&self, made: &[Late<'_>]) -> Result<()> {
        let mut pages = [&ZERO_PAGE; LANES];
        pages.iter_mut().zip(made).for_each(|(page, late)| *page = late.into);
        let hashes = PageHash::of_some(&self.config.key, &pages[..made.len().min(LANES)]);
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
    use crate::identity::PageRef;
    use crate::parallel::tests::{PAGES, epoch_of, page_of, subject};
    use crate::tests::on;
    use keyframe_store_backend::testing::FaultyBackend;
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
