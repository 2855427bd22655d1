//! Finds the addresses of RAM blocks in QEMU's heap, for QEMUs whose monitor does not tell them
//! (7.2).
//!
//! QEMU keeps a record of each block, allocated once and never moved. What is known of a block (its
//! offset in the space of all RAM, the bytes it reserves, its name) identifies the record, and the
//! record holds the address:
//!
//! ```text
//!   byte  -16        -8           0        8             16           24        32     36
//!        | host     | colo_cache | offset | used_length | max_length | resized | flags| "pc.ram\0" ... 256 bytes
//!        └ wanted                └ known ┘              └ known ────┘                 └ known ┘
//! ```
//!
//! The name is looked for anywhere in the [`NAME_WITHIN`] bytes behind, so that fields added in
//! between do no harm.
//!
//! Invariant: an address is accepted only where it is the only one and the whole block is mapped
//! there. A guest that writes look-alikes into its own RAM is not believed: the main heap goes
//! first, and a VM is searched before its first instruction.
//!
//! Left out: records that a debugger could find by symbols; distributions strip them.

use crate::process::{Mapping, Maps, QemuProcess};
use crate::ramblock::Row;
use crate::{Error, Result};
use keyframe_units::{HostRange, HostVirt};

/// The number of bytes after `offset` within which the name is searched.
const NAME_WITHIN: usize = 300;
/// Larger mappings other than the main heap are guest RAM.
const MAPPING_BYTES_MAX: u64 = 64 << 20;
/// The longest main heap that is searched. It holds the kernel and the initial RAM disk that the
/// command line names.
const HEAP_BYTES_MAX: u64 = 4 << 30;
/// The size of the pieces in which memory is read, and how far two of them overlap: by a record.
const PIECE_BYTES: u64 = 16 << 20;
const OVERLAP_BYTES: u64 = 512;
/// The path of the main heap.
const MAIN_HEAP: &str = "[heap]";
/// The distance from `host` to `offset`, in bytes.
const HOST_BEFORE: usize = 16;

/// The address of each of `rows`, in their order.
pub(crate) fn find(process: &QemuProcess, maps: &Maps, rows: &[&Row]) -> Result<Vec<HostVirt>> {
    let mut found: Vec<Vec<HostVirt>> = vec![Vec::new(); rows.len()];
    let is_main_heap = |m: &&Mapping| m.path == MAIN_HEAP;
    let (heap, others): (Vec<_>, Vec<_>) =
        maps.iter().filter(|m| is_searched(m)).partition(is_main_heap);
    for places in [heap, others] {
        for mapping in places {
            // One that cannot be read has gone since; the block is then found elsewhere or reported
            // missing.
            for piece in pieces(mapping.range) {
                if let Ok(bytes) = process.read(piece) {
                    search(&bytes, rows, maps, &mut found);
                }
            }
        }
        if found.iter().all(|hosts| !hosts.is_empty()) {
            break;
        }
    }
    let mut hosts = Vec::with_capacity(rows.len());
    for (row, candidates) in rows.iter().zip(&found) {
        let fail = |problem: String| Error::RamAddress {
            block: row.name.clone(),
            pid: process.pid(),
            problem,
        };
        match candidates.as_slice() {
            [host] => hosts.push(*host),
            [] => {
                return Err(fail(
                    "this QEMU keeps no record of it in the form of 7.2 or 10.0".into(),
                ));
            }
            [first, second, ..] => {
                return Err(fail(format!("it could be at {first} or at {second}")));
            }
        }
    }
    Ok(hosts)
}

/// Private anonymous memory of a heap's size.
fn is_searched(mapping: &Mapping) -> bool {
    mapping.private_data
        && (mapping.path.is_empty()
            || mapping.path.starts_with('[')
            || mapping.path.starts_with("//anon"))
        && mapping.range.len_bytes
            < if mapping.path == MAIN_HEAP { HEAP_BYTES_MAX } else { MAPPING_BYTES_MAX }
}

/// The pieces of `range` to read one after the other. A record lies in one of them as a whole.
fn pieces(range: HostRange) -> impl Iterator<Item = HostRange> {
    let starts = (0..range.len_bytes).step_by(PIECE_BYTES as usize);
    starts.map(move |start| HostRange {
        start: HostVirt(range.start.0 + start),
        len_bytes: (PIECE_BYTES + OVERLAP_BYTES).min(range.len_bytes - start),
    })
}

/// Adds the addresses that records in `bytes` give for `rows`.
fn search(bytes: &[u8], rows: &[&Row], maps: &Maps, found: &mut [Vec<HostVirt>]) {
    for at in (HOST_BEFORE..bytes.len()).step_by(8) {
        let Some(max_length) = word(bytes, at + 16) else { return };
        // Most of the heap is ruled out by this one comparison.
        for (row, hosts) in
            rows.iter().zip(found.iter_mut()).filter(|(row, _)| row.total_bytes == max_length)
        {
            let Some(host) = record(bytes, at, row) else { continue };
            let range = HostRange { start: host, len_bytes: row.total_bytes };
            if maps.covers(range) && !hosts.contains(&host) {
                hosts.push(host);
            }
        }
    }
}

/// The address in the record of `row` whose `offset` field lies at `at`, if it is one.
fn record(bytes: &[u8], at: usize, row: &Row) -> Option<HostVirt> {
    let (offset, used_length) = (word(bytes, at)?, word(bytes, at + 8)?);
    if offset != row.offset || used_length > row.total_bytes || row.name.is_empty() {
        return None;
    }
    let behind = bytes.get(at + 24..)?;
    let behind = behind.get(..NAME_WITHIN).unwrap_or(behind);
    let name = row.name.as_bytes();
    let named = behind.windows(name.len() + 1).enumerate().any(|(i, window)| {
        let begins = i == 0 || behind.get(i - 1) == Some(&0);
        begins && window.split_last() == Some((&0, name))
    });
    // The four bytes of flags before the name may end in anything, so there the name need not
    // follow a zero.
    let in_place =
        behind.get(12..12 + name.len() + 1).and_then(<[u8]>::split_last) == Some((&0, name));
    let host = HostVirt(word(bytes, at.checked_sub(HOST_BEFORE)?)?);
    (named || in_place).then_some(host).filter(|h| h.0 != 0 && h.0.is_multiple_of(4096))
}

/// The little-endian word at `at`.
fn word(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|b| u64::from_le_bytes(*b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn row(name: &str, offset: u64, total_bytes: u64) -> Row {
        Row { name: name.into(), offset, used_bytes: total_bytes, total_bytes, host: None }
    }

    /// A record as 7.2 lays it out.
    fn bytes(row: &Row, host: u64) -> Vec<u8> {
        let mut record = Vec::new();
        for word in [1, 2, host, 0, row.offset, row.used_bytes, row.total_bytes, 0] {
            record.extend_from_slice(&u64::to_le_bytes(word));
        }
        record.extend_from_slice(&7u32.to_le_bytes());
        record.extend_from_slice(row.name.as_bytes());
        record.resize(400, 0);
        record
    }

    #[test]
    fn a_record_gives_its_address_and_a_near_miss_does_not() {
        let wanted = row("pc.ram", 0x40_0000, 0x20_0000);
        let good = bytes(&wanted, 0x7000_0000);
        assert_eq!(record(&good, 32, &wanted), Some(HostVirt(0x7000_0000)));
        assert_eq!(record(&good, 40, &wanted), None);
        assert_eq!(
            record(&bytes(&row("pc.ram2", 0x40_0000, 0x20_0000), 0x7000_0000), 32, &wanted),
            None
        );
        assert_eq!(
            record(&bytes(&row("xpc.ram", 0x40_0000, 0x20_0000), 0x7000_0000), 32, &wanted),
            None
        );
        assert_eq!(
            record(&bytes(&row("pc.ram", 0x80_0000, 0x20_0000), 0x7000_0000), 32, &wanted),
            None
        );
        assert_eq!(record(&bytes(&wanted, 0x7000_0001), 32, &wanted), None, "not aligned");
    }

    #[test]
    fn pieces_cover_all_and_hold_each_record() {
        for len_bytes in [0, 1, PIECE_BYTES, PIECE_BYTES + 8, 3 * PIECE_BYTES + 4096] {
            let all: Vec<_> = pieces(HostRange { start: HostVirt(0x1000), len_bytes }).collect();
            let mut covered = 0;
            for piece in &all {
                let start = piece.start.0 - 0x1000;
                assert!(start == 0 || start + OVERLAP_BYTES <= covered || covered == len_bytes);
                covered = start + piece.len_bytes;
            }
            assert_eq!(covered, len_bytes);
        }
    }

    proptest! {
        #[test]
        fn no_heap_panics(bytes in prop::collection::vec(0u8..3, 0..200), at in 0usize..220) {
            let wanted = row("a", 0, 0);
            let _ = record(&bytes, at, &wanted);
            search(&bytes, &[&wanted], &Maps::default(), &mut [Vec::new()]);
        }
    }
}
