//! The names, and the markers after them.

use super::tokens::TokenTable;
use super::{aligned, u32_at, u64_at};

/// The number of symbols of a kernel. Distributions have some hundred thousand.
const SYMBOLS_MIN: u32 = 256;
const SYMBOLS_MAX: u32 = 4 << 20;
/// The largest length of a kind and a name together: Linux allows 511 characters for a name.
const NAME_BYTES_MAX: usize = 512;
/// The length of all names together, at most.
const ALL_BYTES_MAX: usize = 256 << 20;
/// The number of names for each marker.
const NAMES_PER_MARKER: u32 = 256;
/// The number of tokens of names that are looked at in search of the table: a bound for memory that
/// is made to look like many tables.
pub const LOOKED_AT_MAX: usize = 256 << 20;

/// The table of a kernel's symbol names, found in memory.
#[derive(Clone, Debug)]
pub struct NameTable {
    /// The position of `num_syms`.
    pub count_at: usize,
    /// The number of symbols.
    pub count: usize,
}

impl NameTable {
    /// Finds the table of names that ends before `tokens`. Reads at most `left` tokens of names,
    /// and subtracts those that it has read. Returns `None` if there is no table, or if it has read
    /// that many.
    pub fn before(memory: &[u8], tokens: &TokenTable, left: &mut usize) -> Option<Self> {
        let mut count_at = tokens.start;
        loop {
            count_at = count_at.checked_sub(8)?;
            let Some(count) = u64_at(memory, count_at).and_then(|n| u32::try_from(n).ok()) else {
                continue;
            };
            if !(SYMBOLS_MIN..=SYMBOLS_MAX).contains(&count) {
                continue;
            }
            let table = Self { count_at, count: count as usize };
            if table.fits(memory, tokens, left) {
                return Some(table);
            }
            if *left == 0 {
                return None;
            }
        }
    }

    /// The position of the first name.
    fn start(&self) -> usize {
        self.count_at + 8
    }

    /// Whether names begin here, the markers after them fit, and only seqs may lie between these
    /// and the tokens.
    fn fits(&self, memory: &[u8], tokens: &TokenTable, left: &mut usize) -> bool {
        let Some(memory) = memory.get(..tokens.start) else { return false };
        let mut at = self.start();
        let mut markers = Vec::new();
        let mut all_bytes = 0;
        for number in 0..self.count as u32 {
            if number.is_multiple_of(NAMES_PER_MARKER) {
                markers.push((at - self.start()) as u64);
            }
            let Some((name, next)) = name_at(memory, at) else { return false };
            *left = left.saturating_sub(1 + name.len());
            if *left == 0 {
                return false;
            }
            let len: usize = name.iter().map(|token| tokens.text(*token).len()).sum();
            let kind = name.first().and_then(|token| tokens.text(*token).bytes().next());
            let is_kind = |kind: u8| kind.is_ascii_alphabetic() || matches!(kind, b'?' | b'-');
            all_bytes += len;
            if !kind.is_some_and(is_kind)
                || !(2..=NAME_BYTES_MAX).contains(&len)
                || all_bytes > ALL_BYTES_MAX
            {
                return false;
            }
            at = next;
        }
        let at = aligned(at);
        let ends = [4, 8].map(|width| {
            let has = |(number, marker): (usize, &u64)| {
                let at = at + width * number;
                let found =
                    if width == 4 { u32_at(memory, at).map(u64::from) } else { u64_at(memory, at) };
                found == Some(*marker)
            };
            let all = markers.iter().enumerate().all(has);
            all.then(|| aligned(at + width * markers.len()))
        });
        let seqs = aligned(3 * self.count);
        ends.into_iter().flatten().any(|end| [end, end + seqs].contains(&tokens.start))
    }

    /// Returns the kind and the name of each symbol. `memory` is that in which the table was found.
    pub fn symbols<'a>(
        &self,
        memory: &'a [u8],
        tokens: &'a TokenTable,
    ) -> impl Iterator<Item = (char, String)> + use<'a> {
        let mut at = self.start();
        (0..self.count).map_while(move |_| {
            let (name, next) = name_at(memory, at)?;
            at = next;
            let text: String = name.iter().map(|token| tokens.text(*token)).collect();
            let mut rest = text.chars();
            let kind = rest.next()?;
            Some((kind, rest.as_str().to_owned()))
        })
    }
}

/// The tokens of the name at `at`, and the position of the next one.
fn name_at(memory: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let first = usize::from(*memory.get(at)?);
    let (len, at) = if first & 0x80 == 0 {
        (first, at + 1)
    } else {
        (first & 0x7f | usize::from(*memory.get(at + 1)?) << 7, at + 2)
    };
    let end = at.checked_add(len).filter(|_| len > 0)?;
    Some((memory.get(at..end)?, end))
}
