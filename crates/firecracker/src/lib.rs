//! Drives Firecracker, as its binary is: attach, launch, pause, device state, restore.
//!
//! ```text
//!   Keyframe ── api ──▶ API socket: pause, resume, save the devices, load
//!       │  ├── whole_pause: a pause that no other client's request comes into
//!       │  └── state_pipe, state_file: what Firecracker writes its device state to
//!       ├── ram ──▶ /proc/PID/maps: where the guest's RAM is
//!       ├── registers ──▶ a saved device state: the registers of the processors
//!       ├── threads, event_loop ─▶ /proc/PID/task: whether the guest or a device ran meanwhile
//!       └── watchdog (another process) ──▶ the end of the pause, if the engine dies or stalls in it
//! ```
//!
//! Device state without RAM: Firecracker saves the devices first, and then RAM. It is given a pipe for
//! the devices, which cannot be flushed, or a path for the RAM at which no file can be made
//! ([`state_file`]). So it writes the devices whole, and answers with an error before it comes to the
//! RAM. Keyframe copies the RAM itself.
//!
//! Why a checkpoint is exact: the guest's CPUs stand still from the pause to the resumption
//! ([`threads`] tells if they did not). The one thread that runs the devices handles no packet, no
//! timer and no request of the guest in between ([`event_loop`] tells if it did). What the guest
//! had asked for before the pause and was not handled yet is in RAM, and Firecracker looks for it
//! at each resumption and after each load.
//!
//! Left out: vsock, balloons, vhost-user drives, the `Async` engine, huge pages: a VM with one of them
//! is refused before anything is done to it.

pub mod api;
pub mod attach;
pub mod audit;
mod capabilities;
pub mod config;
mod drive_paths;
mod error;
pub mod event_loop;
mod http;
pub mod identity;
pub mod launch;
mod open_drives;
mod outside_path;
mod process;
mod process_place;
pub mod ram;
pub mod registers;
pub mod restore;
pub mod state_file;
mod state_pipe;
mod succession;
mod taps;
pub mod threads;
mod uffd;
mod vm;
mod vmm;
pub mod watchdog;
mod whole_pause;

pub use capabilities::capabilities;
pub use error::{Error, Result};
pub use restore::FirecrackerRestorer;
pub use vm::FirecrackerVm;
