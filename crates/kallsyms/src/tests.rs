//! Tables as each version of Linux writes them, and memory that only looks like tables.

use super::*;
use proptest::prelude::*;
use sample_tables::{VERSIONS, Version, symbols, tables};
use std::convert::Infallible;
use std::sync::LazyLock;

/// The symbols of `bytes`, which lie at offset `at` of a memory of some MiB.
fn found(bytes: &[u8], at: usize) -> Result<Vec<KernelSymbol>, Error<Infallible>> {
    let mut memory = vec![0; 10 << 20];
    memory[at..at + bytes.len()].copy_from_slice(bytes);
    find(memory.len() as u64, |at, out| {
        out.copy_from_slice(&memory[at as usize..at as usize + out.len()]);
        Ok(())
    })
}

#[test]
fn each_versions_tables_give_their_symbols() {
    for version in VERSIONS {
        let all = symbols(1000, !matches!(version, Version::V6_15 | Version::Absolute));
        let bytes = tables(&all, version);
        // In the middle, at both ends, and where two pieces of the search meet.
        let digits = memchr::memmem::find(&bytes, tokens::DIGITS).unwrap();
        let border = ((PIECE_BYTES as usize) - digits) & !7;
        for at in [1 << 20, 0, (10 << 20) - bytes.len().next_multiple_of(8), border, border - 8] {
            let symbols = found(&bytes, at).unwrap_or_else(|e| panic!("{version:?}, {at}: {e}"));
            assert!(symbols == all, "{version:?}, {at}");
        }
    }
}

#[test]
fn a_second_table_is_found_if_the_first_is_damaged() {
    let all = symbols(1000, true);
    let whole = tables(&all, Version::V6_1);
    let mut damaged = whole.clone();
    let names = 4 * 1000 + 16;
    damaged[names] = 0;
    assert_eq!(found(&[damaged.clone(), whole].concat(), 4096).unwrap(), all);
    let refused = found(&damaged, 4096).unwrap_err().to_string();
    assert!(refused.contains("no names precede the tokens"), "{refused}");
}

#[test]
fn memory_without_a_kernel_says_so() {
    for bytes in [&b""[..], tokens::DIGITS, &[0xff; 4096]] {
        assert!(matches!(found(bytes, 64), Err(Error::NoTables)));
    }
    let failed = find(4096, |_, _| Err("no such page"));
    assert!(matches!(failed, Err(Error::Read("no such page"))));
}

/// The tables of each version.
static TABLES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let all = symbols(400, true);
    VERSIONS.into_iter().map(|version| tables(&all, version)).collect()
});

proptest! {
    /// Whatever a guest writes into the tables, the search ends, and the names are printable.
    #[test]
    fn damaged_tables_are_harmless(
        version in 0..VERSIONS.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = TABLES[version].clone();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        fuzzing::memory(&bytes);
        fuzzing::memory(&bytes[cut.index(bytes.len())..]);
        fuzzing::memory(&bytes[..cut.index(bytes.len())]);
    }
}
