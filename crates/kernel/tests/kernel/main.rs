//! This crate against real processes: attach, track, read.
//!
//! Each test starts a process of its own (`testing/target.rs`) and tells it what to do with its
//! memory. Tests need the right to trace it and Linux 6.7. A test that needs more, such as huge
//! pages, swap or `CAP_SYS_ADMIN`, is skipped if the host or the user lacks it.

mod attach;
mod copy_on_write;
mod fault_oracle;
mod fault_tracking;
mod fork;
mod killed;
mod missing;
mod oracle;
mod qemu;
mod reading;
mod target;
mod tracking;
mod windows;
