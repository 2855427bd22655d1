//! Entry point for the fuzzer in `fuzz/`, and its first inputs. Not part of the interface.

use crate::sample_tables::{VERSIONS, symbols, tables};
use std::convert::Infallible;

/// Searches `data` as the memory of a guest. It must neither panic nor allocate memory out of
/// proportion.
pub fn memory(data: &[u8]) {
    let found = crate::find(data.len() as u64, |at, out: &mut [u8]| {
        let from = data.get(at as usize..at as usize + out.len()).expect("within the memory");
        out.copy_from_slice(from);
        Ok::<_, Infallible>(())
    });
    if let Ok(symbols) = found {
        assert!(symbols.iter().all(|one| one.name.bytes().all(|byte| byte.is_ascii_graphic())));
    }
}

/// Returns memory with tables, in each form that a kernel has.
pub fn seeds() -> impl Iterator<Item = Vec<u8>> {
    VERSIONS.into_iter().map(|version| tables(&symbols(300, true), version))
}
