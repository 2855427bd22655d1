//! Linux interfaces that Keyframe stands on: attach to a running process, track its writes, read
//! its memory.
//!
//! The only crate of the workspace with `unsafe` code. All of it is here because no safe crate
//! offers the call:
//!
//! ```text
//!   Process ──▶ attach::inject_userfaultfd ──▶ uffd ──▶ write_tracker::WriteTracker ──▶ pages written since the last scan
//!      │              (ptrace, 0.1 ms)                   (PAGEMAP_SCAN on /proc/PID/pagemap)        │
//!      └────▶ memory::GuestReader ◀─────────────────────────────────────────────────────────────────┘
//!               (own mapping of a sealed memfd, or process_vm_readv)
//! ```
//!
//! Two other ways to hold on to the memory of one instant: [`fault_tracker`] has each first write
//! wait for a word from us (so that it can be copied before), and [`fork`] keeps a frozen child of
//! the process.
//!
//! And the other way round: [`missing`] gives a process memory whose pages are placed when it first
//! touches them, and [`fresh`] fills memory before a process has it.
//!
//! Invariants:
//! 1. A [`Process`] never stands for another process that was given the same pid.
//! 2. No page is protected without being reported; where that cannot be told any more, the error says so
//!    ([`Error::ScanBroken`]).
//! 3. Whatever this crate did to the process is undone on drop, and by the kernel where we die first; what it does in the
//!    process's main thread, by that thread itself.
//!
//! Left out: what a page means (RAM blocks, checkpoints), policy, threads that copy (those of
//! `fault_tracker` and `fork` are there because the kernel's interfaces need them). x86-64 Linux
//! only.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("keyframe-kernel knows the interfaces of x86-64 Linux only");

mod abi;
pub mod attach;
pub mod child_setup;
pub mod cpu_affinity;
pub mod cpu_time;
mod error;
pub mod fault_tracker;
pub mod frozen_copy;
mod gadgets;
pub mod host_features;
mod interrupt;
pub mod malloc;
mod mapped_range;
mod maps;
pub mod memfd_filler;
pub mod memory;
pub mod missing_pages;
pub mod open_file;
mod pagemap;
mod pagemap_quirks;
pub mod priority;
mod process;
mod process_memory;
pub mod protection_cost;
mod ptrace;
mod ranges;
mod signal_frame;
pub mod socket;
pub mod write_tracker;

pub use error::{Error, Result};
pub use interrupt::{END_SIGNALS, Interrupt, signal_socket};
pub use maps::Mapping;
pub use process::Process;
pub use process_memory::{read_memory, write_memory};
