//! The writes to an address that an analysis with the tool `watch` has found.

use crate::error::{Error, Result};
use serde::Serialize;
use std::path::PathBuf;

/// The memory that is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchedMemory {
    /// The first address.
    pub address: u64,
    /// The number of bytes.
    pub len_bytes: u64,
    /// True if the address is one of the guest's physical memory, false if it is virtual.
    pub is_physical: bool,
}

impl WatchedMemory {
    /// Returns the arguments with which the tool `watch` looks for writes to this memory.
    pub fn tool_arguments(self) -> Vec<String> {
        vec![
            format!("addr={:#x}", self.address),
            format!("len={}", self.len_bytes),
            format!("space={}", if self.is_physical { "physical" } else { "virtual" }),
        ]
    }
}

/// A write to a watched address, as the tool `watch` has found it.
#[derive(Clone, Debug, Serialize)]
pub struct FoundWrite {
    /// The number of instructions before the one that wrote.
    pub icount: u64,
    /// The address of the code that wrote, in hexadecimal.
    pub pc: String,
    /// The virtual address, in hexadecimal.
    pub vaddr: String,
    /// The physical address, in hexadecimal; empty if it is not known.
    pub paddr: String,
    /// The number of bytes.
    pub bytes: u64,
    /// The value, in hexadecimal.
    pub value: String,
    /// The name of the code that wrote; empty if it is not known.
    pub symbol: String,
}

/// Returns the writes in `files`, the results of the tool, in their order. Error: a file cannot be
/// read.
pub fn found_writes(files: &[PathBuf]) -> Result<Vec<FoundWrite>> {
    let mut writes = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(file).map_err(|e| Error::file("read", file, e))?;
        writes.extend(text.lines().skip(1).filter_map(parse));
    }
    Ok(writes)
}

/// A line of the tool's result: `icount,pc,vaddr,paddr,bytes,value,symbol`.
fn parse(line: &str) -> Option<FoundWrite> {
    let mut cells = line.splitn(7, ',');
    let icount = cells.next()?.parse().ok()?;
    let mut text = || cells.next().map(str::to_owned);
    let (pc, vaddr, paddr) = (text()?, text()?, text()?);
    let bytes = text()?.parse().ok()?;
    let (value, symbol) = (text()?, text()?);
    let symbol = symbol.trim_matches('"').replace("\"\"", "\"");
    Some(FoundWrite { icount, pc, vaddr, paddr, bytes, value, symbol })
}
