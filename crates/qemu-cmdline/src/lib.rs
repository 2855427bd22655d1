//! QEMU's command line: parses it, and rewrites it for each use.
//!
//! ```text
//!   the user's words ─▶ options::parse ─▶ [Argument]
//!                                            │
//!            ┌───────────────┬───────────────┼──────────────────┬───────────────────┐
//!            ▼               ▼               ▼                  ▼                   ▼
//!     disks and media    recorded or     a gate for        restored once        one of several
//!     that are served    replayed        its packets       more                 clones
//!     drives, media      recording       net_gate          restored_line,       clone_conflicts
//!                                                          memory_backends,
//!                                                          accelerator
//! ```
//!
//! [`CommandLine`] is the line that a user gave, with the changes that a launch makes. A line is
//! refused, with reason and fix, if the machine that it describes could not be checkpointed
//! exactly.
//!
//! Invariant: a rewritten line makes the same machine for the guest as the user's line.
//!
//! This crate starts no process and opens no socket; it looks at the file system only for files
//! that a restored line names.

mod accelerator;
mod clone_conflicts;
mod command_line;
mod drives;
mod error;
mod lineage;
mod media;
mod memory_backends;
mod net_gate;
mod network;
pub mod options;
pub mod recording;
mod restored_line;
mod waiting_sockets;
mod wrapper;

pub use accelerator::{
    check_accelerator_line, machine_defaults, named_accelerator, without_accelerator,
};
pub use clone_conflicts::{CloneLine, CloneOptions, clone_line};
pub use command_line::{CommandLine, RunWords, vm_name, word_text};
pub use drives::{DiskServer, Drive, drives, is_served, rewrite_drives};
pub use error::{CommandLineError, Result};
pub use lineage::{lineage_mark, lineage_of};
pub use media::{Medium, media, media_of};
pub use memory_backends::{
    LineWord, RestoreLine, backend_id, backend_object, backends_as_made, check_added,
    plan_backends, private_backend_object,
};
pub use net_gate::{NetGate, NicSockets, net_gate};
pub use network::{NetworkLink, network_links, packet_holders, replace_lan};
pub use options::{Argument, Object};
pub use restored_line::{RestorableLine, restorable_line};
pub use waiting_sockets::waiting_socket;
pub use wrapper::options_added_by_wrapper;
