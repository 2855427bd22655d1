//! The shared libraries that QEMU loads, as bytes.
//!
//! Their packages are at the top of the repository (`plugins/`, `eventfd-coalesce/`). This crate's
//! build script compiles them.

/// The analysis plugin for QEMU 6.0 to 8.2 (plugin interface 1).
pub static PLUGIN_1: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/plugin_1.so"));

/// The analysis plugin for QEMU 9.1 to 10.2 (plugin interface 4).
pub static PLUGIN_4: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/plugin_4.so"));

/// The analysis plugin for QEMU 11 (plugin interface 7).
pub static PLUGIN_7: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/plugin_7.so"));

/// The library that is preloaded into a replaying QEMU: it skips writes to eventfds that are
/// already signalled.
pub static EVENTFD_COALESCE: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/eventfd_coalesce.so"));
