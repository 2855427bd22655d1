//! Linux interfaces: attach to a running process, track its writes, read and place its memory.
//!
//! This crate holds the `unsafe` code for calls that no safe crate offers.
//!
//! ```text
//!   Process ─▶ attach::inject_userfaultfd ─▶ uffd ─▶ write_tracker::WriteTracker ─▶ written pages
//!      │             (ptrace, 0.1 ms)              (PAGEMAP_SCAN on /proc/PID/pagemap)    │
//!      └────▶ memory::GuestReader ◀───────────────────────────────────────────────────────┘
//!               (own mapping of a sealed memfd, or process_vm_readv)
//! ```
//!
//! - [`access_gate`] holds each access to some files until the old content was read.
//! - [`fault_tracker`] stops each first write until a hook has seen the page: for copy-on-write.
//! - [`fault_window`] names the pages that a process writes in a few milliseconds, without a scan.
//! - [`frozen_copy`] keeps a child of the process that never runs: the memory of one instant.
//! - [`missing_pages`] gives a process memory whose pages are placed when it first touches them.
//! - [`reopened_file`] makes a process open a file anew.
//! - [`guest_instructions`] counts what a guest under KVM executes.
//! - [`memfd_filler`] fills memory before a process uses it.
//!
//! Invariants:
//! 1. A [`Process`] never stands for another process that got the same pid.
//! 2. No page is protected without being reported. If that is uncertain, the error is
//!    [`Error::ScanBroken`].
//! 3. Dropping a value of this crate undoes its changes to the process. If we are killed, the
//!    kernel undoes them; the main thread of the process restores its own registers.
//!
//! Absent: the meaning of pages (RAM blocks, checkpoints), policy, and copying threads. The crate
//! supports x86-64 Linux only.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("keyframe-kernel knows the interfaces of x86-64 Linux only");

mod abi;
pub mod access_gate;
pub mod attach;
pub mod child_setup;
pub mod cpu_affinity;
pub mod cpu_time;
mod error;
pub mod fault_tracker;
pub mod fault_window;
pub mod frozen_copy;
mod gadgets;
pub mod guest_instructions;
pub mod host_features;
pub mod inherited_descriptor;
mod interrupt;
pub mod isolated_tap;
pub mod malloc;
mod mapped_range;
mod maps;
pub mod memfd_filler;
pub mod memory;
pub mod missing_pages;
pub mod open_file;
mod own_pages;
mod pagemap;
mod pagemap_quirks;
pub mod priority;
mod process;
mod process_memory;
pub mod protection_cost;
mod ptrace;
mod ranges;
pub mod reopened_file;
mod signal_frame;
pub mod socket;
pub mod write_tracker;

pub use error::{Error, Result};
pub use interrupt::{END_SIGNALS, Interrupt, signal_socket};
pub use maps::Mapping;
pub use own_pages::own_pages;
pub use process::Process;
pub use process_memory::{read_memory, write_memory};
