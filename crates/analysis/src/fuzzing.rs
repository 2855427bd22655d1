//! Doors for the fuzzers in `fuzz/`: each gives bytes to a reader of a guest's symbols.
//!
//! Not part of the interface. Each takes any bytes, and must neither panic nor take memory out of
//! proportion to them.

use crate::btf::Tasks;
use crate::lines::Lines;
use crate::symbols::Symbols;
use std::path::Path;

/// Names and lines of a program, or a System.map.
pub fn symbols(data: &[u8]) {
    let path = Path::new("symbols");
    if let Ok(symbols) = Symbols::parse(path, data, 0) {
        let _ = symbols.find(u64::MAX);
    }
    if let Ok(lines) = Lines::parse(path, data, 0) {
        let _ = (lines.all().count(), lines.find(0));
    }
}

/// A kernel's types.
pub fn types(data: &[u8]) {
    let _ = Tasks::parse(data);
}
