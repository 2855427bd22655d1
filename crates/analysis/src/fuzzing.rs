//! Entry points for the fuzzers in `fuzz/`: each parses bytes of a guest's symbol file.
//!
//! Not part of the interface. Each accepts any bytes, and must neither panic nor allocate memory
//! out of proportion to them.

use crate::btf::TaskLayout;
use crate::source_lines::SourceLines;
use crate::symbols::SymbolTable;
use std::path::Path;

/// Parses the functions and lines of a program, or a System.map.
pub fn symbols(data: &[u8]) {
    let path = Path::new("symbols");
    if let Ok(symbols) = SymbolTable::parse(path, data, 0) {
        let _ = symbols.find(u64::MAX);
    }
    if let Ok(lines) = SourceLines::parse(path, data, 0) {
        let _ = (lines.all().count(), lines.find(0));
    }
}

/// Parses a kernel's type information.
pub fn types(data: &[u8]) {
    let _ = TaskLayout::parse(data);
}
