//! Names of code: the functions of an ELF file (vmlinux), or lines `ADDRESS TYPE NAME` (System.map,
//! /proc/kallsyms).
//!
//! ```text
//!   address ──▶ the last symbol at or below it ──▶ name, offset
//!               (none if that symbol is known to end before)
//! ```
//!
//! Invariant: an address has one name, whatever the order in the file: of several at one address
//! the alphabetically first. Global symbols are not preferred.

use crate::error::{Error, Result, file};
use object::{Object, ObjectSymbol, SymbolKind};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The largest symbol file that is read into memory, in bytes.
const FILE_BYTES_MAX: u64 = 2 << 30;

/// A function, as read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SymbolEntry {
    address: u64,
    name: String,
    /// 0 if the symbol extends to the next one.
    len_bytes: u64,
    /// Its line in a text file, or its number in the ELF symbol table.
    number: u64,
}

/// Functions by address; empty if there is no symbol file.
#[derive(Clone, Debug, Default)]
pub struct SymbolTable(Vec<SymbolEntry>);

/// A function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its first address.
    pub address: u64,
    /// Its length in bytes. If the file does not tell it, the function reaches to the next symbol;
    /// then the length of the last one is 0.
    pub len_bytes: u64,
    /// Its line in a text file from 1 on, or its number in the ELF symbol table.
    pub number: u64,
}

impl SymbolTable {
    /// Reads a symbol file of either kind. `slide` is added to each address, for a kernel with a
    /// randomized base.
    ///
    /// Errors: [`Error::File`]; [`Error::Damaged`] if the file names no function.
    pub fn read(path: &Path, slide: u64) -> Result<Self> {
        Self::parse(path, &read_file(path)?, slide)
    }

    /// Parses `bytes`, the contents of a symbol file, as [`SymbolTable::read`] does. `path` names
    /// the file in errors. Error: [`Error::Damaged`].
    pub fn parse(path: &Path, bytes: &[u8], slide: u64) -> Result<Self> {
        let found = if is_elf(bytes) { elf(bytes) } else { Ok(text(bytes)) };
        match found {
            Ok(found) if found.is_empty() => Err(damaged(path, "it names no function")),
            Ok(found) => Ok(Self::from_entries(found, slide)),
            Err(problem) => Err(damaged(path, &problem)),
        }
    }

    fn from_entries(mut all: Vec<SymbolEntry>, slide: u64) -> Self {
        for symbol in &mut all {
            symbol.address = symbol.address.wrapping_add(slide);
        }
        all.sort_unstable();
        all.dedup_by_key(|symbol| symbol.address);
        Self(all)
    }

    /// Returns all functions, by address.
    pub fn iter(&self) -> impl Iterator<Item = Symbol<'_>> {
        self.0.iter().filter_map(|symbol| self.find(symbol.address))
    }

    /// Returns whether there are no functions.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the function that contains `address`; `None` if there is none.
    pub fn find(&self, address: u64) -> Option<Symbol<'_>> {
        let next = self.0.partition_point(|symbol| symbol.address <= address);
        let symbol = self.0.get(next.checked_sub(1)?)?;
        let after = self.0.get(next).map_or(0, |following| following.address - symbol.address);
        let len_bytes = if symbol.len_bytes == 0 { after } else { symbol.len_bytes };
        // A program's address does not belong to the kernel's last function, nor does an address
        // after a function with a known end.
        (address - symbol.address < len_bytes || (len_bytes == 0 && address == symbol.address))
            .then_some(Symbol {
                name: &symbol.name,
                address: symbol.address,
                len_bytes,
                number: symbol.number,
            })
    }

    /// Returns the name of an address: `name+0x12`, `name`, or an empty string if no symbol covers
    /// it.
    pub fn label(&self, address: u64) -> String {
        match self.find(address) {
            Some(found) if found.address == address => found.name.to_owned(),
            Some(found) => format!("{}+{:#x}", found.name, address - found.address),
            None => String::new(),
        }
    }
}

/// Reads a symbol file into memory.
pub(crate) fn read_file(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let input = File::open(path).map_err(file("opening the symbol file", path))?;
    input.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(file("reading", path))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(damaged(path, &format!("more than {FILE_BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

/// Whether `bytes` begin as an ELF file does.
pub(crate) fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

fn damaged(path: &Path, problem: &str) -> Error {
    Error::Damaged {
        path: path.to_owned(),
        place: "symbol file".into(),
        problem: format!("{problem}; name a vmlinux, a System.map or a copy of /proc/kallsyms"),
    }
}

fn elf(bytes: &[u8]) -> Result<Vec<SymbolEntry>, String> {
    let parsed = object::File::parse(bytes).map_err(|error| error.to_string())?;
    let functions = parsed
        .symbols()
        .filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.is_definition());
    let named = functions.filter_map(|symbol| {
        let name = symbol.name().ok().filter(|name| !name.is_empty())?.to_owned();
        let number = symbol.index().0 as u64;
        Some(SymbolEntry { address: symbol.address(), name, len_bytes: symbol.size(), number })
    });
    Ok(named.collect())
}

fn text(bytes: &[u8]) -> Vec<SymbolEntry> {
    let lines = bytes.split(|byte| *byte == b'\n').zip(1..);
    let symbols = lines.filter_map(|(line, number)| {
        let mut words = std::str::from_utf8(line).ok()?.split_whitespace();
        let address = u64::from_str_radix(words.next()?, 16).ok()?;
        let kind = words.next()?;
        let name = words.next()?.to_owned();
        matches!(kind, "t" | "T" | "w" | "W").then_some(SymbolEntry {
            address,
            name,
            len_bytes: 0,
            number,
        })
    });
    symbols.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_file_names_addresses() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("System.map");
        let map = "ffffffff81000000 T _text\nffffffff81000000 T _stext\nffffffff81000100 t helper\nffffffff81000080 D data\nbroken\n\
            ffffffff81000200 T last\n";
        std::fs::write(&path, map).unwrap();
        let symbols = SymbolTable::read(&path, 0).unwrap();
        assert_eq!(symbols.label(0xffff_ffff_8100_0000), "_stext");
        assert_eq!(symbols.label(0xffff_ffff_8100_0090), "_stext+0x90");
        assert_eq!(symbols.label(0xffff_ffff_8100_01ff), "helper+0xff");
        assert_eq!(symbols.label(0xffff_ffff_8100_0200), "last");
        assert_eq!(
            symbols.label(0xffff_ffff_8100_0300),
            "",
            "the end of the last function is not known"
        );
        assert_eq!(symbols.label(0x1000), "");
        let slid = SymbolTable::read(&path, 0x100_0000).unwrap();
        assert_eq!(slid.label(0xffff_ffff_8200_0100), "helper");
    }

    #[test]
    fn a_program_of_this_machine_names_its_functions() {
        let own = std::env::current_exe().unwrap();
        let symbols = SymbolTable::read(&own, 0).unwrap();
        let some = symbols
            .0
            .iter()
            .find(|symbol| symbol.name.contains("SymbolTable") && symbol.len_bytes > 1);
        let some = some.expect("this program has functions of this file");
        assert!(symbols.label(some.address + 1).ends_with("+0x1"));
    }

    #[test]
    fn other_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("odd");
        for bytes in
            [&b""[..], b"hello world\n", b"\x7fELF", b"\x7fELF\x02\x01\x01\0garbage", &[0xff; 4096]]
        {
            std::fs::write(&path, bytes).unwrap();
            assert!(SymbolTable::read(&path, 0).is_err(), "{bytes:?}");
        }
    }
}
