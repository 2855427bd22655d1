//! Drives Firecracker, as its binary is: attach, launch, pause, device state, restore.
//!
//! ```text
//!   Keyframe ── api ──▶ API socket: pause, resume, save the devices, load
//!       │  └── state_file: what Firecracker writes its device state to
//!       ├── ram ──▶ /proc/PID/maps: where the guest's RAM is
//!       ├── threads, event_loop ─▶ /proc/PID/task: whether the guest or a device ran meanwhile
//!       └── watchdog (another process) ── api ──▶ resume, if the engine dies in a pause
//! ```
//!
//! Device state without RAM: Firecracker saves the devices first, and then RAM. It is given a path
//! for the RAM at which no file can be made. So it writes the devices whole, and answers that it
//! cannot open the file for the RAM ([`state_file`]). Keyframe copies the RAM itself.
//!
//! Why a checkpoint is exact: the guest's CPUs stand still from the pause to the resumption
//! ([`threads`] tells if they did not). The one thread that runs the devices handles no packet, no
//! timer and no request of the guest in between ([`event_loop`] tells if it did). What the guest
//! had asked for before the pause and was not handled yet is in RAM, and Firecracker looks for it
//! at each resumption and after each load.
//!
//! Left out: vsock, balloons, vhost-user drives, huge pages, writable drives: a VM with one of them
//! is refused before anything is done to it.

pub mod api;
pub mod attach;
pub mod audit;
mod capabilities;
pub mod config;
mod error;
pub mod event_loop;
mod http;
pub mod identity;
pub mod launch;
mod open_drives;
mod process;
pub mod ram;
pub mod restore;
pub mod state_file;
mod taps;
pub mod threads;
mod uffd;
mod vm;
mod vmm;
pub mod watchdog;

pub use capabilities::capabilities;
pub use error::{Error, Result};
pub use restore::FirecrackerRestorer;
pub use vm::FirecrackerVm;
