//! Which packs a prune removes. Pure: it does no I/O.
//!
//! ```text
//!   nothing of it needed ──▶ removed
//!   part of it needed ─────▶ the emptiest first, until at most --max-unused of what stays is unused: moved, removed
//!   being written, damaged ▶ left alone
//! ```

use crate::pack_shape::PackUsage;
use std::collections::BTreeSet;

/// Returns the numbers of the packs to remove, first the one that frees most space for its copying.
/// Of the packs that stay, at most the part `max_unused` (0 to 1) is then unused.
pub fn choose(packs: &[PackUsage], max_unused: f64) -> Vec<u32> {
    let newest = packs.iter().map(|pack| pack.number).max();
    let may_go = |pack: &&PackUsage| {
        !(pack.is_untouchable() || pack.holds_none && Some(pack.number) == newest)
    };
    let (dead, mut partly): (Vec<&PackUsage>, Vec<&PackUsage>) =
        packs.iter().filter(may_go).partition(|pack| pack.live_records == 0);
    let mut victims: Vec<u32> = dead.iter().map(|pack| pack.number).collect();
    let live_bytes: u64 = packs.iter().map(|pack| pack.live_bytes).sum();
    let mut unused_bytes: u64 = partly.iter().map(|pack| pack.unused_bytes()).sum();
    let part = |pack: &PackUsage| pack.unused_bytes() as f64 / (pack.len_bytes.max(1)) as f64;
    partly.sort_by(|a, b| part(b).total_cmp(&part(a)).then(a.number.cmp(&b.number)));
    for pack in partly {
        let is_enough = unused_bytes as f64 <= max_unused * (live_bytes + unused_bytes) as f64;
        if is_enough || pack.unused_bytes() == 0 {
            break;
        }
        unused_bytes -= pack.unused_bytes();
        victims.push(pack.number);
    }
    victims
}

/// Returns the numbers of packs to remove in addition to `victims` because they were not
/// recompressed yet: about `bytes_max` bytes of packs, the oldest first.
pub fn to_recompress(packs: &[PackUsage], victims: &[u32], bytes_max: u64) -> Vec<u32> {
    let mut left = bytes_max;
    let may_go = |pack: &&PackUsage| {
        !(pack.is_untouchable()
            || pack.is_dense
            || pack.live_records == 0
            || victims.contains(&pack.number))
    };
    let takes = |pack: &&PackUsage| {
        let takes = left > 0;
        left = left.saturating_sub(pack.len_bytes);
        takes
    };
    packs.iter().filter(may_go).take_while(takes).map(|pack| pack.number).collect()
}

/// Returns the victims of the next round: those of `left`, in the order of [`choose`], that move at
/// most `bytes_max` bytes and `records_max` records together. If no pack moves so little, the round
/// has the one that moves least. An interruption of a prune costs one round.
pub fn next_round(
    packs: &[PackUsage],
    left: &[u32],
    bytes_max: u64,
    records_max: usize,
) -> BTreeSet<u32> {
    let usage = |victim: &u32| packs.iter().find(|pack| pack.number == *victim);
    let live = |victim: &u32| usage(victim).map_or((0, 0), |u| (u.live_bytes, u.live_records));
    // Packs without needed records go first, and alone: on a full disk they make room.
    let dead: BTreeSet<u32> = left.iter().filter(|victim| live(victim).1 == 0).copied().collect();
    if !dead.is_empty() {
        return dead;
    }
    let (mut round, mut bytes, mut records) = (BTreeSet::new(), 0u64, 0);
    for victim in left {
        let (more_bytes, more_records) = live(victim);
        if bytes + more_bytes <= bytes_max && records + more_records <= records_max {
            (bytes, records) = (bytes + more_bytes, records + more_records);
            round.insert(*victim);
        } else if !round.is_empty() {
            break;
        }
    }
    if round.is_empty() {
        round.extend(left.iter().min_by_key(|victim| live(victim).0));
    }
    round
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack_shape::PackStanding;
    use proptest::prelude::*;

    fn usage(number: u32, len_bytes: u64, live_bytes: u64) -> PackUsage {
        let live_records = usize::from(live_bytes > 0);
        PackUsage {
            number,
            len_bytes,
            live_bytes,
            live_records,
            head_bytes: 64,
            is_dense: false,
            standing: PackStanding::Free,
            holds_none: false,
        }
    }

    #[test]
    fn the_emptiest_packs_are_removed_until_little_is_unused() {
        let packs = [
            usage(1, 10_000, 0),
            usage(2, 10_000, 9000),
            usage(3, 10_000, 1000),
            usage(4, 10_000, 5000),
        ];
        assert_eq!(choose(&packs, 0.3), [1, 3]);
        assert_eq!(choose(&packs, 0.1), [1, 3, 4]);
        assert_eq!(choose(&packs, 0.0), [1, 3, 4, 2]);
        assert_eq!(choose(&packs, 1.0), [1]);
        let stub = PackUsage { holds_none: true, ..usage(5, 128, 0) };
        assert_eq!(choose(std::slice::from_ref(&stub), 0.0), [0u32; 0]);
        assert_eq!(choose(&[stub, usage(6, 10_000, 9990)], 0.0), [5]);
    }

    proptest! {
        #[test]
        fn the_packs_that_stay_keep_the_limit_and_rounds_hold_every_victim_once(
            packs in prop::collection::vec((200u64..100_000, 0.0f64..1.0, any::<bool>()), 0..40), max in 0.0f64..1.0,
            bytes_max in 1u64..200_000,
        ) {
            let of = |(number, (len, part, untouchable)): (u32, (u64, f64, bool))| PackUsage {
                standing: if untouchable { PackStanding::Untouchable } else { PackStanding::Free },
                ..usage(number, len, ((len - 192) as f64 * part) as u64)
            };
            let packs: Vec<PackUsage> = (1..).zip(packs).map(of).collect();
            let victims = choose(&packs, max);
            let goes = |pack: &&PackUsage| victims.contains(&pack.number);
            prop_assert!(packs.iter().filter(goes).all(|pack| !pack.is_untouchable()));
            let dead = |pack: &&PackUsage| pack.live_records == 0 && !pack.is_untouchable();
            prop_assert!(packs.iter().filter(dead).all(|pack| goes(&pack)));
            let live: u64 = packs.iter().map(|pack| pack.live_bytes).sum();
            let stays = packs.iter().filter(|pack| !goes(pack) && !pack.is_untouchable());
            let unused: u64 = stays.map(PackUsage::unused_bytes).sum();
            prop_assert!(unused as f64 <= max * (live + unused) as f64 + 1e-6, "{} of {}", unused, live);
            let mut left = victims.clone();
            while !left.is_empty() {
                let round = next_round(&packs, &left, bytes_max, 1000);
                prop_assert!(!round.is_empty() && round.iter().all(|victim| left.contains(victim)));
                left.retain(|victim| !round.contains(victim));
                let bytes: u64 = packs.iter().filter(|p| round.contains(&p.number)).map(|p| p.live_bytes).sum();
                prop_assert!(bytes <= bytes_max || round.len() == 1);
            }
        }
    }

    #[test]
    fn a_round_holds_what_there_is_room_for() {
        let packs = [
            usage(1, 10_000, 0),
            usage(2, 10_000, 6000),
            usage(3, 10_000, 1000),
            usage(4, 10_000, 7000),
            usage(5, 10_000, 0),
        ];
        let round = |left: &[u32], bytes_max| {
            next_round(&packs, left, bytes_max, 1000).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(round(&[1, 5, 2, 3, 4], 0), [1, 5], "no copying");
        assert_eq!(round(&[2, 3, 4], 5000), [3], "what fits");
        assert_eq!(round(&[2, 3, 4], 500), [3], "what needs least");
        assert_eq!(round(&[2, 4], 6999), [2]);
        assert_eq!(round(&[2, 3, 4], 100_000), [2, 3, 4]);
    }
}
