//! Encodes a page as its differences from another page.
//!
//! ```text
//!   base      | ......AAAA..........BB............. |
//!   page      | ......CCCC..........DD............. |
//!   patch     gap 6, length 4, CCCC   gap 10, length 2, DD
//!
//!   patch     runs, each: varint, equal bytes since the run before │ varint, length of the run, at least 1 │ its bytes
//! ```
//!
//! Invariant: applying any bytes gives a page or a [`Problem`].

use crate::bytes::{Cursor, Problem, put_varint};
use keyframe_units::{PAGE_BYTES, Page};

/// The largest length of a patch, in bytes. A page with a longer patch is stored without a base.
pub const PATCH_BYTES_MAX: usize = PAGE_BYTES / 2;
/// The shortest gap of equal bytes that ends a run. A shorter gap costs less than another run.
const GAP_BYTES_MIN: usize = 3;
const LINE_BYTES: usize = 64;

/// Appends to `out` the patch that turns `base` into `page`: for each run of different bytes its
/// distance from the previous one, its length and its bytes. Returns false if the patch is longer
/// than `len_bytes_max`; `out` then holds a part of it.
pub fn diff(base: &Page, page: &Page, len_bytes_max: usize, out: &mut Vec<u8>) -> bool {
    let end_max = out.len() + len_bytes_max;
    let mut runs = Runs { page, out, written: 0 };
    let mut run: Option<(usize, usize)> = None;
    let (old, new) = (base.as_chunks::<LINE_BYTES>().0, page.as_chunks::<LINE_BYTES>().0);
    // Bit masks of the lines that differ, then of the words of such a line: a processor could not
    // predict a branch for each.
    let mut lines = mask(old.iter().zip(new).map(|(old, new)| !is_same(old, new)));
    while lines != 0 {
        let line = lines.trailing_zeros() as usize;
        lines &= lines - 1;
        let (Some(old), Some(new)) = (old.get(line), new.get(line)) else { break };
        let (old, new) = (old.as_chunks::<8>().0, new.as_chunks::<8>().0);
        let mut words = mask(old.iter().zip(new).map(|(old, new)| old != new));
        while words != 0 {
            let word = words.trailing_zeros() as usize;
            words &= words - 1;
            let (Some(old), Some(new)) = (old.get(word), new.get(word)) else { break };
            let changed = u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new);
            let at = line * LINE_BYTES + word * 8;
            let first = at + changed.trailing_zeros() as usize / 8;
            let end = at + 8 - changed.leading_zeros() as usize / 8;
            run = Some(match run {
                Some((from, to)) if first - to < GAP_BYTES_MIN => (from, end),
                Some((from, to)) => {
                    runs.put(from, to);
                    (first, end)
                }
                None => (first, end),
            });
        }
        if runs.out.len() > end_max {
            return false;
        }
    }
    if let Some((from, to)) = run {
        runs.put(from, to);
    }
    out.len() <= end_max
}

/// Bit by bit what is true, without a branch.
fn mask(of: impl Iterator<Item = bool>) -> u64 {
    of.zip(0..u64::BITS).fold(0, |all, (is, bit)| all | u64::from(is) << bit)
}

/// Compares without a branch for each word.
fn is_same(a: &[u8; LINE_BYTES], b: &[u8; LINE_BYTES]) -> bool {
    let words = a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0);
    words.fold(0, |all, (a, b)| all | (u64::from_le_bytes(*a) ^ u64::from_le_bytes(*b))) == 0
}

struct Runs<'a> {
    page: &'a Page,
    out: &'a mut Vec<u8>,
    written: usize,
}

impl Runs<'_> {
    fn put(&mut self, from: usize, to: usize) {
        put_varint(self.out, (from - self.written) as u64);
        put_varint(self.out, (to - from) as u64);
        self.out.extend_from_slice(self.page.get(from..to).unwrap_or_default());
        self.written = to;
    }
}

/// Writes the runs of `patch`, as [`diff`] makes it, over `page`, which must have the content of
/// the patch's base. Error: the patch is malformed, or leads out of the page; `page` then has
/// undefined content.
pub fn apply(patch: &[u8], page: &mut Page) -> Result<(), Problem> {
    let mut cursor = Cursor::new(patch);
    let mut at = 0usize;
    while !cursor.is_empty() {
        let (gap, len) = (cursor.varint()?, cursor.varint()?);
        let from = at as u64 + gap.min(PAGE_BYTES as u64);
        let to = from + len.min(PAGE_BYTES as u64 + 1);
        let Some(into) = page.get_mut(from as usize..to as usize).filter(|into| !into.is_empty())
        else {
            return Err("a delta that reaches beyond its page".into());
        };
        into.copy_from_slice(cursor.take(into.len())?);
        at = to as usize;
    }
    Ok(())
}
