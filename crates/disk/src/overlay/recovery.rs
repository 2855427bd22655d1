//! The state of an overlay that an earlier process has written.

use super::State;
use super::chain::{BlockPlace, EpochChain};
use super::journal::JournalRecord;
use super::recent::{Left, RecentLog};
use super::slots::SlotAllocator;
use crate::extents::ExtentMap;
use crate::{Error, Result};

/// The state of an overlay whose journal holds `map`, and whose last process left `left` that the
/// journal does not hold. `is_served`: a guest goes on with it, so it must hold every acknowledged
/// write; otherwise what the journal holds is enough.
///
/// Errors: [`Error::Broken`] if a sync had failed; [`Error::Damaged`].
pub(super) fn recover(
    name: &str,
    mut map: ExtentMap<BlockPlace>,
    left: Left,
    recent: RecentLog,
    disk_bytes: u64,
    is_served: bool,
) -> Result<State> {
    if left.is_broken && is_served {
        return Err(Error::Broken { object: name.into() });
    }
    // After a failed sync, only what the journal holds is certain.
    let records = if left.is_broken { Vec::new() } else { left.records };
    // Until the next sync, the slots that the journal names are not reused.
    let mut waiting = disjoint_slots(name, &map)?;
    for record in &records {
        if !record.is_possible(disk_bytes) {
            return Err(Error::damaged(format!("{name}/recent"), "a record is impossible"));
        }
        let JournalRecord { block, blocks, place } = *record;
        map.insert(block, blocks, place, &mut |_, _, _| {});
    }
    let mut used = disjoint_slots(name, &map)?;
    used.iter().for_each(|(slot, n, ())| waiting.remove(slot, n, &mut |_, _, ()| {}));
    let superseded: Vec<(u64, u64)> = waiting.iter().map(|(slot, n, ())| (slot, n)).collect();
    for (slot, n) in &superseded {
        used.insert(*slot, *n, (), &mut |_, _, ()| {});
    }
    let used: Vec<(u32, u32)> = used.iter().map(|(slot, n, ())| (slot as u32, n as u32)).collect();
    let tail = used.iter().map(|(slot, n)| slot + n).max().unwrap_or(0);
    let mut slots = SlotAllocator::recovered(tail, used.into_iter());
    for (slot, n) in superseded {
        slots.supersede(slot as u32, n as u32);
    }
    Ok(State { chain: EpochChain::recovered(map), slots, records, recent })
}

/// The slots that `map` names. Error: a slot belongs to two blocks.
fn disjoint_slots(name: &str, map: &ExtentMap<BlockPlace>) -> Result<ExtentMap<()>> {
    let mut seen = ExtentMap::default();
    let mut twice = None;
    for (_, n, place) in map.iter() {
        if let BlockPlace::Slot(slot) = place {
            seen.insert(slot.into(), n, (), &mut |slot, _, ()| twice = Some(slot));
        }
    }
    match twice {
        Some(slot) => Err(Error::damaged(
            format!("{name}/journal"),
            format!("slot {slot} belongs to two blocks"),
        )),
        None => Ok(seen),
    }
}
