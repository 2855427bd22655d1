//! The symbols of the guest's kernel, found in the RAM of a checkpoint.

use super::Analysis;
use crate::error::{AnalysisError, Error, Result};
use keyframe_analysis::SymbolTable;
use keyframe_kallsyms::KernelSymbol;
use keyframe_store::{LoadedCheckpoint, Store};
use keyframe_units::{CheckpointId, PAGE_BYTES, Page, PageIndex, ZERO_PAGE};
use std::sync::Arc;

impl Analysis<'_> {
    /// Returns the symbols that the tool needs; an empty table if it needs none. Found once, and
    /// kept.
    ///
    /// The kernel that ran last in the analysed intervals counts. If none was loaded yet, the one
    /// at the end of the recording does.
    ///
    /// # Errors
    ///
    /// [`AnalysisError::GuestSymbols`] if neither checkpoint holds a kernel with symbols; the store
    /// cannot be read.
    pub(super) fn guest_symbols(&self) -> Result<Arc<SymbolTable>> {
        if !self.tool.needs_guest_symbols() {
            return Ok(Arc::default());
        }
        if let Some(found) = self.guest_symbols.get() {
            return Ok(found.clone());
        }
        let candidates = {
            let progress = self.progress();
            let ends = [progress.header.intervals.last(), progress.known.intervals.last()];
            ends.map(|last| last.map(|one| one.end.unwrap_or(one.begin.checkpoint)))
        };
        let mut candidates = candidates.into_iter().flatten();
        let first = candidates.next().ok_or(AnalysisError::NoIntervals)?;
        let store = self.subject.store();
        let found = symbols_in(store, first).or_else(|error| match candidates.next() {
            Some(other) if other != first && matches!(error, Error::Analysis(_)) => {
                symbols_in(store, other)
            }
            _ => Err(error),
        })?;
        Ok(self.guest_symbols.get_or_init(|| Arc::new(found)).clone())
    }
}

/// Finds the symbols of the kernel in a checkpoint.
fn symbols_in(store: &Store, checkpoint: CheckpointId) -> Result<SymbolTable> {
    let failed = |e| Error::store(store.path(), e);
    let loaded = store.load(checkpoint).map_err(failed)?;
    let len_bytes = loaded.meta.ram.len_bytes();
    let found = keyframe_kallsyms::find(len_bytes, |offset, out: &mut [u8]| {
        read_bytes(&loaded, offset, out)
    });
    match found {
        Ok(symbols) => Ok(SymbolTable::from_kernel(
            symbols.into_iter().map(|KernelSymbol { address, kind, name }| (address, kind, name)),
        )),
        Err(keyframe_kallsyms::Error::Read(source)) => Err(failed(source)),
        Err(error) => {
            let problem = error.to_string();
            Err(AnalysisError::GuestSymbols { checkpoint, problem }.into())
        }
    }
}

/// Reads RAM from byte `offset` on.
fn read_bytes(
    loaded: &LoadedCheckpoint,
    offset: u64,
    out: &mut [u8],
) -> Result<(), keyframe_store::Error> {
    const PAGE: u64 = PAGE_BYTES as u64;
    let first = offset / PAGE;
    let within = (offset % PAGE) as usize;
    let mut pages: Vec<Page> = vec![ZERO_PAGE; (within + out.len()).div_ceil(PAGE_BYTES)];
    loaded.read_into(PageIndex(first), &mut pages)?;
    if let Some(bytes) = pages.as_flattened().get(within..within + out.len()) {
        out.copy_from_slice(bytes);
    }
    Ok(())
}
