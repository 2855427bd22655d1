//! Where a tool's names of code come from: a file, or the guest itself.

use crate::context::MergeContext;
use crate::error::Result;
use crate::symbols::SymbolTable;
use std::path::Path;

/// The value of `symbols` that stands for the guest's own tables.
pub(crate) const GUEST: &str = "guest";

/// The argument `symbols` of a tool.
#[derive(Debug)]
pub(crate) enum CodeSymbols {
    /// The symbols of a file; empty if no file is given.
    Given(SymbolTable),
    /// The symbols that the caller finds in the guest's RAM.
    Guest,
}

impl CodeSymbols {
    /// Makes the symbols that the value `text` of the argument `symbols` asks for: those of the
    /// guest for [`GUEST`], none for `None`, and otherwise those of the file `text`. `slide` is
    /// added to each address of a file.
    ///
    /// Errors: those of [`SymbolTable::read`].
    pub fn of_argument(text: Option<&str>, slide: u64) -> Result<Self> {
        match text {
            None => Ok(Self::Given(SymbolTable::default())),
            Some(GUEST) => Ok(Self::Guest),
            Some(path) => SymbolTable::read(Path::new(path), slide).map(Self::Given),
        }
    }

    /// Returns true if the caller must find the guest's symbols before the merge.
    pub fn are_the_guests(&self) -> bool {
        matches!(self, Self::Guest)
    }

    /// Returns the table to use in `merge`.
    pub fn table<'a>(&'a self, merge: &'a MergeContext) -> &'a SymbolTable {
        match self {
            Self::Given(table) => table,
            Self::Guest => &merge.guest_symbols,
        }
    }
}
