//! Finds the symbols of a Linux kernel in its memory: the tables from which the kernel itself makes
//! `/proc/kallsyms` (CONFIG_KALLSYMS). A stripped kernel has them too.
//!
//! `scripts/kallsyms.c` of Linux writes the tables. All are aligned to 8 bytes, little-endian, and
//! adjacent in physical memory, as the kernel's image is. Their order changed in Linux 6.4:
//!
//! ```text
//!   until 6.3   addresses │ num_syms │ names │ markers │ (seqs) │ token_table │ token_index
//!   from 6.4    num_syms │ names │ markers │ token_table │ token_index │ addresses │ (seqs)
//!
//!   token_table   256 strings, each with a zero byte at its end: what a byte of a name stands for
//!   token_index   256 × u16: where each of these strings begins
//!   names         for each symbol: a length of one or two bytes, and that many bytes, each a token; the
//!                 first character is the symbol's kind, as in /proc/kallsyms
//!   markers       where every 256th name begins: u32, or u64 before Linux 4.20
//!   addresses     num_syms × i32 and a u64, the base (CONFIG_KALLSYMS_BASE_RELATIVE); or num_syms × u64
//!   seqs          num_syms × 3 bytes, for look-ups by name, from Linux 6.2 on
//! ```
//!
//! The search begins with the digits: each character that names use is a token of its own, so the
//! table of tokens contains the strings 0 to 9 in this order. Whatever is found is verified: the
//! index must fit the strings, the markers must fit the names, and the addresses must rise. A
//! kernel with a randomized base (KASLR) relocates `addresses` as it starts, so the result has the
//! addresses of the running kernel.
//!
//! Invariants: memory is untrusted, no contents make this crate panic, and each allocation is
//! bounded beforehand; a name consists of printable ASCII characters.
//!
//! Not here: the symbols of modules and of compiled BPF programs, which are in other structures;
//! kernels of 32 bits; big-endian kernels.

mod addresses;
mod names;
mod tokens;

#[doc(hidden)]
pub mod fuzzing;
mod sample_tables;
#[cfg(test)]
mod tests;

use names::NameTable;
use tokens::TokenTable;

/// The size of the pieces in which memory is searched.
const PIECE_BYTES: u64 = 4 << 20;
/// The most bytes that are read before and after the table of tokens: enough for some million
/// symbols.
const BEFORE_BYTES: u64 = 32 << 20;
const AFTER_BYTES: u64 = 24 << 20;
/// The number of places that look like the digits of a table of tokens, after which the search is
/// given up: a guest can fill its memory with them.
const DIGITS_MAX: usize = 4096;
/// The number of tables of tokens that are looked at before the search is given up.
const TOKEN_TABLES_MAX: usize = 64;

/// A symbol of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelSymbol {
    /// Its virtual address in the running kernel, or for symbols of CPU-local data their offset.
    pub address: u64,
    /// Its kind, as `/proc/kallsyms` and `nm` show it: `t` and `T` are code.
    pub kind: char,
    /// Its name.
    pub name: String,
}

/// The reason why no symbols were found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error<E> {
    /// Memory could not be read.
    #[error(transparent)]
    Read(E),
    /// There is no table of tokens.
    #[error("found no Linux kernel with symbols (CONFIG_KALLSYMS) in the guest's memory")]
    NoTables,
    /// There is a table of tokens, but the tables around it do not fit.
    #[error(
        "the kernel's symbol tables at offset {at:#x} of the guest's memory cannot be read: {problem}"
    )]
    Unreadable {
        /// The offset of the table of tokens, in bytes.
        at: u64,
        /// What does not fit.
        problem: &'static str,
    },
}

/// Finds the symbols of a kernel in memory of `len_bytes` bytes, in the order of `/proc/kallsyms`.
/// `read` fills a slice with the memory from an offset on; it is called with ranges within
/// `len_bytes`, which are at most 56 MiB long. Offsets are in bytes, in any space in which the
/// kernel's image is contiguous, such as physical addresses. If memory holds several kernels, such
/// as a loaded crash kernel, the one at the lowest offset whose tables fit is returned.
///
/// Errors: [`Error::Read`], with the error of `read`; [`Error::NoTables`] if no tokens were found;
/// [`Error::Unreadable`] if tokens were found, but no complete tables.
pub fn find<E>(
    len_bytes: u64,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
) -> Result<Vec<KernelSymbol>, Error<E>> {
    let mut get = |start: u64, end: u64| {
        let (start, end) = (start.min(len_bytes), end.min(len_bytes));
        let mut bytes = vec![0; end.saturating_sub(start) as usize];
        read(start, &mut bytes).map(|()| bytes).map_err(Error::Read)
    };
    let mut refused = None;
    let (mut digits_seen, mut looked_at, mut left) = (0, 0, names::LOOKED_AT_MAX);
    for start in (0..len_bytes).step_by(PIECE_BYTES as usize) {
        let piece = get(start, start + PIECE_BYTES + tokens::DIGITS.len() as u64 - 1)?;
        for digits in memchr::memmem::find_iter(&piece, tokens::DIGITS) {
            digits_seen += 1;
            if digits_seen > DIGITS_MAX {
                return Err(refused.unwrap_or(Error::NoTables));
            }
            let digits = start + digits as u64;
            // Page boundaries, so that the alignment of the tables is kept.
            let from = digits.saturating_sub(tokens::TABLE_BYTES_MAX) & !0xfff;
            let nearby = get(from, digits + tokens::TABLE_BYTES_MAX + tokens::INDEX_BYTES)?;
            let Some(tokens) = TokenTable::around(&nearby, (digits - from) as usize) else {
                continue;
            };
            let at = from + tokens.start as u64;
            let from = at.saturating_sub(BEFORE_BYTES) & !0xfff;
            let around = get(from, at + AFTER_BYTES)?;
            match read_tables(&around, &tokens.moved_to((at - from) as usize), &mut left) {
                Ok(symbols) => return Ok(symbols),
                Err(problem) => refused = refused.or(Some(Error::Unreadable { at, problem })),
            }
            looked_at += 1;
            if looked_at == TOKEN_TABLES_MAX {
                return Err(refused.unwrap_or(Error::NoTables));
            }
        }
    }
    Err(refused.unwrap_or(Error::NoTables))
}

/// Reads all tables around `tokens`, which lies in `memory`. `left` is the number of tokens that
/// may still be looked at.
fn read_tables(
    memory: &[u8],
    tokens: &TokenTable,
    left: &mut usize,
) -> Result<Vec<KernelSymbol>, &'static str> {
    let names = NameTable::before(memory, tokens, left).ok_or("no names precede the tokens")?;
    let addresses = addresses::find(memory, tokens, &names)
        .ok_or("no addresses precede the names or follow the tokens")?;
    let symbols = names.symbols(memory, tokens).zip(addresses);
    Ok(symbols.map(|((kind, name), address)| KernelSymbol { address, kind, name }).collect())
}

/// Returns the number at `at`, little-endian.
fn u32_at(memory: &[u8], at: usize) -> Option<u32> {
    let word = memory.get(at..at.checked_add(4)?)?;
    word.try_into().ok().map(u32::from_le_bytes)
}

/// Returns the number at `at`, little-endian.
fn u64_at(memory: &[u8], at: usize) -> Option<u64> {
    let word = memory.get(at..at.checked_add(8)?)?;
    word.try_into().ok().map(u64::from_le_bytes)
}

/// Returns the first multiple of the tables' alignment from `at` on.
fn aligned(at: usize) -> usize {
    at.next_multiple_of(8)
}
