//! What the files of a store carry: the version of the format, and the store's id.

/// The version of the store format. All files of a store have the same one.
pub const FORMAT_VERSION: u32 = 1;

/// The id of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreId(pub [u8; 16]);
