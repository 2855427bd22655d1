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
//!                                                              └── host_effects ──┘
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
mod config_file;
mod drives;
mod error;
mod host_effects;
mod line_difference;
mod line_edits;
mod lineage;
mod media;
mod memory_backends;
mod moved_files;
mod net_gate;
mod network;
pub mod options;
mod read_files;
pub mod recording;
mod restored_line;
mod waiting_sockets;
mod wrapper;

pub use accelerator::{
    check_accelerator_line, has_accelerator_choice, machine_defaults, named_accelerator,
    with_accelerator, without_accelerator,
};
pub use clone_conflicts::{
    CloneConsole, CloneLine, CloneOptions, clone_line, console_purpose, rehearsal_obstacle,
    without_other_user,
};
pub use command_line::{CommandLine, RunWords, vm_name, word_text};
pub use config_file::config_options;
pub use drives::{
    Backing, BackingImage, DiskNames, DiskServer, Drive, LineDrive, Slice, drives, is_served,
    line_drives, rewrite_drives,
};
pub use error::{CommandLineError, Result};
pub use host_effects::{EffectRow, HostProbe, LineUse, NoHost, Rule, TABLE as HOST_EFFECTS};
pub use line_difference::{LineDifference, line_difference};
pub use line_edits::{
    LineDevice, LineEdits, MediumEdit, ReadOnlyMedium, anonymous_devices, medium_of_line,
};
pub use lineage::{lineage_mark, lineage_of};
pub use media::{Medium, media, media_of};
pub use memory_backends::{
    LineWord, RestoreLine, backend_id, backend_object, backends_as_made, check_added,
    plan_backends, private_backend_object,
};
pub use moved_files::{MovedFile, moved_path, with_moved_files};
pub use net_gate::{NetGate, NicSockets, net_gate};
pub use network::{
    NetworkLink, isolated_tap, moved_user_networks, network_links, packet_holders, replace_lan,
    user_networks, with_tap_descriptors,
};
pub use options::{Argument, Object};
pub use read_files::{NamedFile, named_files};
pub use restored_line::{RestorableLine, restorable_line};
pub use waiting_sockets::waiting_socket;
pub use wrapper::options_added_by_wrapper;
