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

/// Where a bzImage has the letters `HdrS` (Documentation/arch/x86/boot.rst of Linux).
const BZIMAGE_MAGIC_AT: usize = 0x202;

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
    /// Errors: [`Error::File`] if the file cannot be read; [`Error::Damaged`] if it is invalid or
    /// names no function.
    pub fn read(path: &Path, slide: u64) -> Result<Self> {
        Self::parse(path, &read_file(path)?, slide)
    }

    /// Parses `bytes`, the contents of a symbol file, as [`SymbolTable::read`] does. `path` names
    /// the file in errors, and `slide` is added to each address. Error: [`Error::Damaged`] if the
    /// file is invalid or names no function.
    pub fn parse(path: &Path, bytes: &[u8], slide: u64) -> Result<Self> {
        let found = if is_elf(bytes) { elf(bytes) } else { text(bytes) };
        let found = found.map_err(|problem| damaged(path, &problem))?;
        Ok(Self::from_entries(found, slide))
    }

    /// Makes the table of the code among `symbols`, each with an address, a kind as in
    /// `/proc/kallsyms`, and a name. The numbers of the symbols are their lines there.
    pub fn from_kernel(symbols: impl IntoIterator<Item = (u64, char, String)>) -> Self {
        let code = symbols.into_iter().zip(1..).filter(|((_, kind, _), _)| is_code(*kind));
        let entries = code.map(|((address, _, name), number)| SymbolEntry {
            address,
            name,
            len_bytes: 0,
            number,
        });
        Self::from_entries(entries.collect(), 0)
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
        problem: format!(
            "{problem}; use symbols=FILE with a vmlinux, a System.map or a copy of /proc/kallsyms, or \
             symbols=guest"
        ),
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
    let named: Vec<_> = named.collect();
    if named.is_empty() {
        return Err("the ELF file is stripped: it names no function".into());
    }
    Ok(named)
}

/// Whether symbols of this kind are functions: local, global or weak ones.
fn is_code(kind: char) -> bool {
    matches!(kind, 't' | 'T' | 'w' | 'W')
}

/// Parses lines `ADDRESS KIND NAME`. An undefined symbol has no address.
fn text(bytes: &[u8]) -> Result<Vec<SymbolEntry>, String> {
    if bytes.get(BZIMAGE_MAGIC_AT..).is_some_and(|rest| rest.starts_with(b"HdrS")) {
        return Err("a compressed kernel (bzImage) has no symbols that can be read".into());
    }
    let (mut found, mut others, mut lines) = (Vec::new(), 0_u64, 0_u64);
    for (line, number) in bytes.split(|byte| *byte == b'\n').zip(1..) {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        lines += 1;
        let Some((address, kind, name)) = text_symbol(line) else {
            others += 1;
            continue;
        };
        if is_code(kind) {
            found.push(SymbolEntry { address, name: name.to_owned(), len_bytes: 0, number });
        }
    }
    match () {
        () if lines == 0 => Err("it is empty".into()),
        () if others > lines / 2 => {
            Err("most of its lines are not ADDRESS TYPE NAME, so it is no symbol file".into())
        }
        () if found.is_empty() => Err("it names no function".into()),
        () if found.iter().all(|one| one.address == 0) => {
            Err("all of its addresses are 0: /proc/kallsyms shows addresses only to root".into())
        }
        () => Ok(found),
    }
}

/// The address, kind and name of a line.
fn text_symbol(line: &[u8]) -> Option<(u64, char, &str)> {
    let mut words = std::str::from_utf8(line).ok()?.split_whitespace();
    let address = u64::from_str_radix(words.next()?, 16).ok()?;
    let mut kind = words.next()?.chars();
    let is_one = |kind: &char| kind.is_ascii_alphabetic() || matches!(kind, '?' | '-');
    let kind = kind.next().filter(|one| is_one(one) && kind.as_str().is_empty())?;
    Some((address, kind, words.next()?))
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
    fn the_symbols_of_a_kernel_are_its_code() {
        let all = [
            (0x10, 'A', "cpu_local"),
            (0x1000, 'T', "first"),
            (0x1100, 'd', "data"),
            (0x1180, 't', "second"),
        ];
        let symbols =
            SymbolTable::from_kernel(all.map(|(at, kind, name)| (at, kind, name.to_owned())));
        assert_eq!(symbols.label(0x1104), "first+0x104");
        assert_eq!(symbols.find(0x1180).map(|one| one.number), Some(4), "its line in kallsyms");
        assert_eq!(symbols.label(0x10), "");
    }

    #[test]
    fn other_files_are_refused_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("odd");
        let mut bzimage = vec![0; 4096];
        bzimage[BZIMAGE_MAGIC_AT..][..4].copy_from_slice(b"HdrS");
        for (bytes, reason) in [
            (&b""[..], "empty"),
            (b"hello world\nadd t one\nno symbols\n", "no symbol file"),
            (b"ffffffff81000080 D data\n", "names no function"),
            (b"0000000000000000 T _text\n0000000000000000 t one\n", "only to root"),
            (b"\x7fELF", "symbol file"),
            (b"\x7fELF\x02\x01\x01\0garbage", "symbol file"),
            (&[0xff; 4096], "no symbol file"),
            (&bzimage, "bzImage"),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let refused = SymbolTable::read(&path, 0).unwrap_err().to_string();
            assert!(refused.contains(reason) && refused.contains("symbols=guest"), "{refused}");
        }
    }
}
