//! QEMU's migration stream: the state of all devices, alone or with RAM
//! (docs/formats/device-stream.md, docs/formats/images.md).
//!
//! QEMU's `xen-save-devices-state` writes each device and no RAM. In an incoming QEMU, ROMs and
//! video RAM are empty, so this crate writes a `ram` section before the devices. Main RAM is not in
//! the stream of a restore: the new QEMU gets it as a memory backend that holds its pages already.
//!
//! ```text
//!   QEVM 00000003 │ START "ram" v4: sizes │ END: pages of small blocks │
//!   └ from QEMU ┘ └──────────── written here ────────────────────────┘
//!   FULL device │ FULL device │ ... │ EOF
//!   └───────────── from QEMU ───────────┘
//! ```
//!
//! | module | does |
//! |---|---|
//! | `format` | marks of the stream; checks a device state from outside |
//! | `writer`, `export`, `delta_stream` | write a stream: for a restore, a whole VM, some pages |
//! | `migration_reader` | reads a whole stream that QEMU wrote |
//! | `snapshot_image` | writes the image in which a running QEMU takes a stream |
//! | `sections`, `section_bodies` | find a device's section, and the fields of the known ones |
//! | `comparison` | compares two device states, section by section |
//! | `processors`, `display` | registers of the processors and of the display |
//! | `low_memory` | what an x86 guest sees below 1 MiB |
//! | `sse_flags` | adds flags that QEMU leaves out of a processor's state |
//! | `flash`, `run_state` | the flash chips of a state; whether its VM stands still |
//! | `user_network` | the user networks of a state, for a line that has others |
//! | `accelerator_conversion`, `icount_conversion` | convert a device state: KVM, TCG, `-icount` |
//!
//! Invariant: bytes from QEMU or from a store are checked before they are used, and are passed on
//! unchanged unless a conversion was asked for.
//!
//! Not handled: the contents of most devices. Sections carry no length, so only QEMU can read them.
//!
//! This crate starts no process and opens no file or socket.

mod accelerator_conversion;
mod comparison;
mod delta_stream;
mod display;
mod due_timer;
mod error;
mod export;
mod flash;
mod format;
#[doc(hidden)]
pub mod fuzzing;
mod icount_conversion;
mod low_memory;
mod migration_reader;
mod processors;
mod run_state;
mod section_bodies;
mod sections;
pub mod snapshot_image;
mod sse_flags;
mod user_network;
mod writer;

pub use accelerator_conversion::{convert, written_by};
pub use comparison::{DifferingSection, differing_sections};
pub use delta_stream::{DeltaPages, write_delta};
pub use display::{Display, display};
pub use due_timer::with_due_timer;
pub use error::{Result, StreamError};
pub use export::export;
pub use flash::{FlashActivity, flash_activity, without_flash};
pub use format::check;
pub use icount_conversion::count_instructions;
pub use low_memory::{LowMemoryPart, low_memory};
pub use migration_reader::{MigrationBlock, MigrationPageSink, MigrationReader};
pub use processors::cpu_registers;
pub use run_state::{run_state, with_run_state};
pub use sse_flags::{SavedCpu, add_sse_flags};
pub use user_network::renumber_user_networks;
pub use writer::{MigrationHead, PageSink, StreamBlock, splice_ram, write_migration};

#[cfg(test)]
mod tests;
