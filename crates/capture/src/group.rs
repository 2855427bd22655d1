//! The ports of a group of VMs: their page spaces are joined end to end, so one cycle takes one
//! checkpoint of all members at one instant.
//!
//! ```text
//!   member    a                  b              c
//!   page      0 ...... 65535 | 65536 .... | ............      the group's page space
//!             0 ...... 65535 | 0 ........ | 0 ..........      each member's page space
//! ```
//!
//! Invariant: a page of the group's space belongs to exactly one member; a range over several
//! members is cut at their borders. Not here: pausing the members together, which
//! [`crate::Machine`] does.

use crate::ports::{
    BoxError, DirtyTracker, FirstWriteHook, FirstWriteMonitor, PageReader, PausedFind, RamFreezer,
};
use keyframe_units::{PageIndex, PageRange, PageSet};
use std::sync::Arc;

const STATES_MAGIC: &[u8; 8] = b"KFGROUP1";

/// One of the [ports](crate::ports) of a member of a group, such as its reader or its tracker,
/// before the pages of the members are laid end to end.
pub struct MemberPort<T> {
    /// The number of the member's pages.
    pub len_pages: u64,
    /// The port.
    pub port: T,
}

/// A port of each member, with the member's pages in the group's space.
struct Members<T>(Vec<(PageRange, T)>);

impl<T> Members<T> {
    /// Lays the members end to end.
    fn new(members: impl IntoIterator<Item = MemberPort<T>>) -> Self {
        let mut first = 0;
        let place = |MemberPort { len_pages, port }| {
            let place = PageRange::new(PageIndex(first), len_pages);
            first += len_pages;
            (place, port)
        };
        Self(members.into_iter().map(place).collect())
    }

    /// Calls `find` for each member with an empty set of its own space, and adds the pages that it
    /// inserts to `found`, a set of the group's space.
    fn gather<E>(
        &mut self,
        found: &mut PageSet,
        mut find: impl FnMut(&mut T, &mut PageSet) -> Result<(), E>,
    ) -> Result<(), E> {
        for (place, member) in &mut self.0 {
            let mut own = PageSet::new(place.len_pages);
            find(member, &mut own)?;
            for range in own.ranges() {
                found.insert_range(to_group(*place, range));
            }
        }
        Ok(())
    }
}

fn to_group(place: PageRange, range: PageRange) -> PageRange {
    PageRange::new(PageIndex(place.first.0 + range.first.0), range.len_pages)
}

/// The pages of `range` (of the group's space) that lie in `place`, in that member's own space.
fn to_member(place: PageRange, range: PageRange) -> Option<PageRange> {
    let first = range.first.max(place.first);
    let end = range.end().min(place.end());
    (first < end).then(|| PageRange::new(PageIndex(first.0 - place.first.0), end.0 - first.0))
}

/// Reads the pages of all members of a group, as those of one VM.
pub struct GroupReader(Members<Arc<dyn PageReader>>);

impl GroupReader {
    /// Creates a reader from the readers of the members' RAM, in the order of their pages.
    pub fn new(members: Vec<MemberPort<Arc<dyn PageReader>>>) -> Self {
        Self(Members::new(members))
    }
}

impl PageReader for GroupReader {
    fn read(&self, ranges: &[PageRange], mut dst: &mut [u8]) -> Result<(), BoxError> {
        // Consecutive ranges of one member are one read.
        let mut run: Vec<PageRange> = Vec::with_capacity(ranges.len());
        let mut of = 0;
        let mut flush = |of: usize, run: &mut Vec<PageRange>| -> Result<(), BoxError> {
            if let Some((_, reader)) = self.0.0.get(of).filter(|_| !run.is_empty()) {
                let len: u64 = run.iter().map(|r| r.len_bytes()).sum();
                let (now, rest) = std::mem::take(&mut dst)
                    .split_at_mut_checked(usize::try_from(len)?)
                    .ok_or("the buffer is shorter than the pages to read")?;
                dst = rest;
                reader.read(run, now)?;
                run.clear();
            }
            Ok(())
        };
        for range in ranges {
            let mut left = range.len_pages;
            for (member, (place, _)) in self.0.0.iter().enumerate() {
                let Some(part) = to_member(*place, *range) else { continue };
                if member != of {
                    flush(of, &mut run)?;
                    of = member;
                }
                run.push(part);
                left -= part.len_pages;
            }
            if left > 0 {
                return Err(
                    format!("page {} lies outside the group's RAM", range.end().0 - 1).into()
                );
            }
        }
        flush(of, &mut run)
    }
}

/// Finds the written pages of all members of a group, as those of one VM.
pub struct GroupTracker(Members<Box<dyn DirtyTracker>>);

impl GroupTracker {
    /// Creates a tracker from the members' trackers, in the order of their pages.
    pub fn new(members: Vec<MemberPort<Box<dyn DirtyTracker>>>) -> Self {
        Self(Members::new(members))
    }
}

impl DirtyTracker for GroupTracker {
    fn drain(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        // If one fails, the pages of those before it are lost too: the caller takes every page as
        // written.
        self.0.gather(written, |tracker, own| tracker.drain(own))
    }

    fn drain_paused(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        self.0.gather(written, |tracker, own| tracker.drain_paused(own))
    }

    fn has_window(&self) -> bool {
        self.0.0.iter().any(|(_, tracker)| tracker.has_window())
    }

    fn open_window(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        self.0.gather(written, |tracker, own| tracker.open_window(own))
    }

    fn close_window(&mut self) {
        self.0.0.iter_mut().for_each(|(_, tracker)| tracker.close_window());
    }

    fn paused_find(&self) -> PausedFind {
        let all = self.0.0.iter().map(|(_, tracker)| tracker.paused_find());
        all.reduce(PausedFind::and).unwrap_or_default()
    }

    fn mark_unfrozen_copies(&mut self, pages: &PageSet) {
        let ranges: Vec<PageRange> = pages.ranges().collect();
        for (place, tracker) in &mut self.0.0 {
            let mut own = PageSet::new(place.len_pages);
            ranges
                .iter()
                .filter_map(|r| to_member(*place, *r))
                .for_each(|part| own.insert_range(part));
            tracker.mark_unfrozen_copies(&own);
        }
    }

    fn estimate_pages(&mut self) -> Option<u64> {
        self.0.0.iter_mut().map(|(_, tracker)| tracker.estimate_pages()).sum()
    }
}

/// Delays the first writes to pages of all members of a group.
pub struct GroupFirstWriteMonitor(Members<Arc<dyn FirstWriteMonitor>>);

impl GroupFirstWriteMonitor {
    /// Creates a monitor from the members' monitors, in the order of their pages.
    pub fn new(members: Vec<MemberPort<Arc<dyn FirstWriteMonitor>>>) -> Self {
        Self(Members::new(members))
    }
}

impl FirstWriteMonitor for GroupFirstWriteMonitor {
    fn set_hook(&self, hook: Option<FirstWriteHook>) {
        for (place, member) in &self.0.0 {
            let place = *place;
            member.set_hook(hook.clone().map(|hook| -> FirstWriteHook {
                Arc::new(move |range| hook(to_group(place, range)))
            }));
        }
    }

    fn unannounced(&self) -> Result<PageSet, BoxError> {
        let mut found = PageSet::new(self.0.0.last().map_or(0, |(place, _)| place.end().0));
        for (place, member) in &self.0.0 {
            for range in member.unannounced()?.ranges() {
                found.insert_range(to_group(*place, range));
            }
        }
        Ok(found)
    }
}

/// Freezes the RAM of all members, one after the other, while all of them are paused.
pub struct GroupFreezer(Vec<MemberPort<Box<dyn RamFreezer>>>);

impl GroupFreezer {
    /// Creates a freezer from the members' freezers, in the order of their pages.
    pub fn new(members: Vec<MemberPort<Box<dyn RamFreezer>>>) -> Self {
        Self(members)
    }
}

impl RamFreezer for GroupFreezer {
    fn freeze(&mut self) -> Result<Box<dyn PageReader>, BoxError> {
        let freeze = |member: &mut MemberPort<Box<dyn RamFreezer>>| {
            let port = Arc::from(member.port.freeze()?);
            Ok(MemberPort { len_pages: member.len_pages, port })
        };
        let frozen = self.0.iter_mut().map(freeze).collect::<Result<_, BoxError>>()?;
        Ok(Box::new(GroupReader::new(frozen)))
    }
}

/// Joins the device states of a group's members, and last that of its network, into one, and
/// returns its bytes: `KFGROUP1`, the number of states (u32), the length of each in bytes (u64),
/// then the states. Integers are little-endian.
pub fn join_device_states(states: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::with_capacity(64 + states.iter().map(Vec::len).sum::<usize>());
    out.extend_from_slice(STATES_MAGIC);
    out.extend_from_slice(&(states.len() as u32).to_le_bytes());
    for state in states {
        out.extend_from_slice(&(state.len() as u64).to_le_bytes());
    }
    out.extend(states.iter().flatten());
    out
}

/// Splits the result of [`join_device_states`] into its states. Returns `None` if `joined` has
/// another form.
pub fn split_device_states(joined: &[u8]) -> Option<Vec<&[u8]>> {
    let rest = joined.strip_prefix(STATES_MAGIC)?;
    let (count, mut rest) = rest.split_first_chunk::<4>()?;
    let count =
        usize::try_from(u32::from_le_bytes(*count)).ok().filter(|n| *n <= rest.len() / 8)?;
    let mut lens = Vec::with_capacity(count);
    for _ in 0..count {
        let (len, tail) = rest.split_first_chunk::<8>()?;
        lens.push(usize::try_from(u64::from_le_bytes(*len)).ok()?);
        rest = tail;
    }
    let mut states = Vec::with_capacity(count);
    for len in lens {
        let (state, tail) = rest.split_at_checked(len)?;
        states.push(state);
        rest = tail;
    }
    rest.is_empty().then_some(states)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::Mutex;

    /// Page `p` of member `m` holds `m * 64 + p` in its first byte.
    struct Marked(u8);
    impl PageReader for Marked {
        fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError> {
            let pages = ranges.iter().flat_map(|r| r.iter());
            for (page, slot) in pages.zip(dst.chunks_mut(keyframe_units::PAGE_BYTES)) {
                slot[0] = self.0 * 64 + page.0 as u8;
            }
            Ok(())
        }
    }

    #[derive(Default)]
    struct Told(Arc<Mutex<Vec<u64>>>, Vec<u64>);
    impl DirtyTracker for Told {
        fn drain(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
            for page in self.1.drain(..) {
                written.insert(PageIndex(page));
            }
            Ok(())
        }
        fn mark_unfrozen_copies(&mut self, pages: &PageSet) {
            self.0.lock().unwrap().extend(pages.iter().map(|p| p.0));
        }
    }

    const LENS: [u64; 3] = [10, 1, 20];

    /// The naive oracle: which member holds page `page`, and where in it.
    fn locate(page: u64) -> (u8, u64) {
        match page {
            0..10 => (0, page),
            10 => (1, 0),
            _ => (2, page - 11),
        }
    }

    fn reader() -> GroupReader {
        let member = |m: usize| MemberPort {
            len_pages: LENS[m],
            port: Arc::new(Marked(m as u8)) as Arc<dyn PageReader>,
        };
        GroupReader::new((0..3).map(member).collect())
    }

    proptest! {
        #[test]
        fn every_page_is_read_from_its_member(ranges in prop::collection::vec((0u64..31, 1u64..12), 1..8)) {
            let ranges: Vec<_> =
                ranges.into_iter().map(|(first, len)| PageRange::new(PageIndex(first), len.min(31 - first))).collect();
            let pages: Vec<u64> = ranges.iter().flat_map(|r| r.iter()).map(|p| p.0).collect();
            let mut dst = vec![0; pages.len() * keyframe_units::PAGE_BYTES];
            reader().read(&ranges, &mut dst).unwrap();
            for (page, found) in pages.iter().zip(dst.chunks(keyframe_units::PAGE_BYTES)) {
                let (member, own) = locate(*page);
                prop_assert_eq!(found[0], member * 64 + own as u8, "page {}", page);
            }
        }

        #[test]
        fn members_are_told_of_their_own_pages_and_tell_theirs(pages in prop::collection::btree_set(0u64..31, 0..31)) {
            let told: Vec<Arc<Mutex<Vec<u64>>>> = (0..3).map(|_| Arc::default()).collect();
            let own = |m: usize| pages.iter().map(|p| locate(*p)).filter(|(n, _)| *n as usize == m).map(|(_, p)| p).collect::<Vec<_>>();
            let tracker = |m: usize| Box::new(Told(Arc::clone(&told[m]), own(m))) as Box<dyn DirtyTracker>;
            let member = |m: usize| MemberPort { len_pages: LENS[m], port: tracker(m) };
            let mut tracker = GroupTracker::new((0..3).map(member).collect());
            let mut written = PageSet::new(31);
            tracker.drain(&mut written).unwrap();
            prop_assert_eq!(written.iter().map(|p| p.0).collect::<Vec<_>>(), pages.iter().copied().collect::<Vec<_>>());
            tracker.mark_unfrozen_copies(&written);
            for (m, told) in told.iter().enumerate() {
                prop_assert_eq!(&*told.lock().unwrap(), &own(m));
            }
        }
    }

    proptest! {
        #[test]
        fn joined_states_come_apart_again(states in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..6), cut in 0usize..300) {
            let joined = join_device_states(&states);
            prop_assert_eq!(split_device_states(&joined), Some(states.iter().map(Vec::as_slice).collect()));
            prop_assert_eq!(split_device_states(&joined[..cut.min(joined.len() - 1)]), None);
        }

        #[test]
        fn arbitrary_bytes_are_no_states(count in any::<u32>(), tail in prop::collection::vec(any::<u8>(), 0..80)) {
            let mut bytes = STATES_MAGIC.to_vec();
            bytes.extend_from_slice(&count.to_le_bytes());
            bytes.extend_from_slice(&tail);
            let _ = split_device_states(&bytes);
        }
    }

    #[test]
    fn a_page_of_no_member_is_an_error() {
        let mut dst = vec![0; 2 * keyframe_units::PAGE_BYTES];
        assert!(reader().read(&[PageRange::new(PageIndex(30), 2)], &mut dst).is_err());
    }

    #[test]
    fn first_writes_carry_the_groups_numbers() {
        struct Writes(Mutex<Option<FirstWriteHook>>);
        impl FirstWriteMonitor for Writes {
            fn set_hook(&self, hook: Option<FirstWriteHook>) {
                *self.0.lock().unwrap() = hook;
            }
            fn unannounced(&self) -> Result<PageSet, BoxError> {
                let mut set = PageSet::new(1);
                set.insert(PageIndex(0));
                Ok(set)
            }
        }
        let members: Vec<_> = (0..2).map(|_| Arc::new(Writes(Mutex::default()))).collect();
        let group = GroupFirstWriteMonitor::new(
            members
                .iter()
                .map(|m| MemberPort {
                    len_pages: 1,
                    port: Arc::clone(m) as Arc<dyn FirstWriteMonitor>,
                })
                .collect(),
        );
        let seen = Arc::new(Mutex::new(Vec::new()));
        let hook: FirstWriteHook = {
            let seen = Arc::clone(&seen);
            Arc::new(move |range| seen.lock().unwrap().push(range.first.0))
        };
        group.set_hook(Some(hook));
        for member in members.iter().rev() {
            member.0.lock().unwrap().as_ref().unwrap()(PageRange::new(PageIndex(0), 1));
        }
        assert_eq!(*seen.lock().unwrap(), [1, 0]);
        assert_eq!(group.unannounced().unwrap().len(), 2);
        group.set_hook(None);
        assert!(members.iter().all(|m| m.0.lock().unwrap().is_none()));
    }
}
