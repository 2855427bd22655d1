//! Writes a pack in object storage again, as a repair does with another header or trailer.
//!
//! The parts keep their beginnings, and only those are put whose bytes differ. So a repair changes
//! one object, or few. If it dies between two of them, the pack holds parts of both contents, and
//! the next repair writes it again.

use super::{PART_BYTES_MAX, PackPart, begun, closed, part_bytes, part_name, stitch};
use crate::Result;
use crate::s3::Shared;
use crate::s3::client::{ListDepth, Precondition};
use std::ops::Range;

/// Writes the pack `name` with content `bytes`. No process may append to it meanwhile. Errors: a
/// lock may have been lost; the service refuses or cannot be reached. The pack may then hold parts
/// of both contents.
pub fn rewrite(shared: &Shared, name: &str, bytes: &[u8]) -> Result<()> {
    let objects = shared.client.list(&format!("{name}/"), ListDepth::Here, None)?;
    let parts = stitch(name, objects.clone());
    let ranges = cut(&parts, bytes.len() as u64);
    for object in objects.iter().rev() {
        let Ok(at) = object.name.parse::<u64>() else { continue };
        let object = format!("{name}/{}", object.name);
        // It lies behind the new end, inside another part, or after a gap.
        if part_name(name, at) == object && !ranges.iter().any(|range| range.start == at) {
            shared.delete(&object)?;
        }
    }
    if objects.iter().all(|object| object.name != "begun") {
        shared.put(&begun(name), b"", Precondition::Always)?;
    }
    for range in ranges {
        let new = bytes.get(range.start as usize..range.end as usize).unwrap_or_default();
        let old = parts.iter().find(|part| part.at == range.start);
        let is_same = |part| part_bytes(shared, part).is_ok_and(|old| old.as_slice() == new);
        if !old.is_some_and(is_same) {
            shared.put(&part_name(name, range.start), new, Precondition::Always)?;
        }
    }
    shared.put(&closed(name), b"", Precondition::Always)?;
    Ok(())
}

/// The parts of a pack that becomes `len_bytes` bytes long: they begin where `parts` begin, and
/// none is too long to be read.
fn cut(parts: &[PackPart], len_bytes: u64) -> Vec<Range<u64>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    let starts = parts.iter().map(|part| part.at).filter(|start| *start < len_bytes);
    for end in starts.chain([len_bytes]) {
        while at < end {
            let stop = end.min(at + PART_BYTES_MAX);
            ranges.push(at..stop);
            at = stop;
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::s3::client::ListedObject;

    #[test]
    fn a_pack_is_cut_where_its_parts_begin_and_into_parts_that_can_be_read() {
        let part = |(at, len_bytes)| PackPart {
            at,
            object: ListedObject { name: String::new(), len_bytes, tag: String::new() },
        };
        let parts = [(0, 5), (5, 9), (9, 1)].map(part);
        let of = |parts: &[PackPart], len_bytes| -> Vec<(u64, u64)> {
            cut(parts, len_bytes).iter().map(|range| (range.start, range.end)).collect()
        };
        assert_eq!(of(&parts, 10), [(0, 5), (5, 9), (9, 10)]);
        assert_eq!(of(&parts, 9), [(0, 5), (5, 9)]);
        assert_eq!(of(&parts, 3), [(0, 3)]);
        assert_eq!(of(&parts, 0), []);
        assert_eq!(of(&[], 7), [(0, 7)]);
        let (one, two) = (9 + PART_BYTES_MAX, 9 + 2 * PART_BYTES_MAX);
        assert_eq!(of(&parts, two + 1), [(0, 5), (5, 9), (9, one), (one, two), (two, two + 1)]);
    }
}
