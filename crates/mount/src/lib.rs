//! The store as a read-only file system.
//!
//! ```text
//!   DIR/
//!     latest -> 12            and each tag, as symbolic links
//!     12/                     a checkpoint
//!       info.json             what `show --json` prints
//!       device.state          as QEMU gave it
//!       ram.raw  ram.elf      made as they are read; absent if the checkpoint lacks the RAM's addresses
//!       screen.png            what the VM's display showed; absent if there is none, or it cannot be drawn
//!       disk-NAME.raw         each disk, whole: the checkpoint's blocks over the image; while the image is not what it
//!                             was, opening it is an error (EIO), and info.json says why
//!       MEMBER/               if the checkpoint is a group's: these files but info.json, of each of its VMs
//! ```
//!
//! Each listing and each name reads the store anew, so checkpoints come and go while it is mounted.
//! A checkpoint does not change, so the kernel may cache it.
//!
//! Invariants: nothing is ever written; a page that cannot be read correctly is an error for its
//! readers alone; memory is bounded ([`tree::LOADED_MAX`],
//! `files::DISKS_OPEN_MAX`) whatever is read. The image beneath a disk is in use, and cannot be
//! committed to, as long as the disk's file is open.

pub mod disks;
mod error;
pub mod files;
pub mod node;
mod session;
pub mod tree;

pub use error::Error;
pub use files::MountedFiles;
pub use session::MountedStore;
pub use tree::CheckpointTree;
