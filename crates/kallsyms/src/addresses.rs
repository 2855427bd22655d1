//! The addresses of the symbols, in the four forms that Linux has had.

use super::names::NameTable;
use super::tokens::TokenTable;
use super::{aligned, u32_at, u64_at};

/// The lowest address of the kernel's half, with the largest page tables.
const KERNEL_HALF: u64 = 0xff00_0000_0000_0000;

/// Finds the addresses of the symbols, one for each of `names`, in `memory`. Returns `None` if
/// there is no table there whose addresses rise and lie mostly in the kernel's half of the address
/// space.
pub fn find(memory: &[u8], tokens: &TokenTable, names: &NameTable) -> Option<Vec<u64>> {
    let (count, after) = (names.count, aligned(tokens.end()));
    let offsets_bytes = aligned(4 * count);
    // The base is between the offsets and num_syms.
    let before = names.count_at.checked_sub(8 + offsets_bytes);
    let numbers_before = names.count_at.checked_sub(8 * count);
    let all = || {
        let relative = [Some(after), before].into_iter().flatten();
        let relative = relative.filter_map(|at| by_offsets(memory, at, count));
        let absolute = [Some(after), numbers_before].into_iter().flatten();
        relative.chain(absolute.filter_map(|at| absolute_addresses(memory, at, count)))
    };
    all().find(|addresses| look_like_kernel_addresses(addresses))
}

/// Offsets of 32 bits from a base, which follows them.
fn by_offsets(memory: &[u8], at: usize, count: usize) -> Option<Vec<u64>> {
    let base = u64_at(memory, at + aligned(4 * count)).filter(|base| *base >= KERNEL_HALF)?;
    let offsets = (0..count).map(|number| u32_at(memory, at + 4 * number));
    let offsets: Vec<u32> = offsets.collect::<Option<_>>()?;
    // With CONFIG_KALLSYMS_ABSOLUTE_PERCPU, until Linux 6.14, the offsets of the kernel's image are
    // below 0, and others are values of CPU-local symbols.
    let has_values = offsets.iter().any(|offset| offset.cast_signed() < 0);
    let address = |offset: u32| match (has_values, offset.cast_signed()) {
        (true, 0..) => u64::from(offset),
        // base - 1 - offset; the complement of a negative number is not negative.
        (true, negative) => base.wrapping_add(u64::from((!negative).cast_unsigned())),
        (false, _) => base.wrapping_add(u64::from(offset)),
    };
    Some(offsets.into_iter().map(address).collect())
}

/// Addresses of 64 bits.
fn absolute_addresses(memory: &[u8], at: usize, count: usize) -> Option<Vec<u64>> {
    (0..count).map(|number| u64_at(memory, at + 8 * number)).collect()
}

/// Whether the addresses rise, and most are in the kernel's half.
fn look_like_kernel_addresses(addresses: &[u64]) -> bool {
    let kernels = addresses.iter().filter(|address| **address >= KERNEL_HALF).count();
    addresses.is_sorted() && kernels > addresses.len() / 2 && addresses.first() < addresses.last()
}
