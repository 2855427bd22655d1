//! The shared libraries that QEMU loads, as files' bytes.
//!
//! Each is a room of its own at the top (`plugins/`, `wakeups/`), compiled by this crate's build
//! script.

/// The plugin for interface 1 of QEMU's translator: QEMU 6.0 to 8.2.
pub static PLUGIN_1: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/plugin_1.so"));

/// For interface 4: QEMU 9.1 and later.
pub static PLUGIN_4: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/plugin_4.so"));

/// What is loaded before a QEMU that replays.
pub static WAKEUPS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/wakeups.so"));
