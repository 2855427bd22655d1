//! A checkpoint's RAM as the guest sees it: raw images and core files whose bytes are made as they
//! are read.
//!
//! ```text
//!   RamLayout + GuestRegions + PAM ──▶ GuestView ──┬─ Image::raw ──▶ ram.raw    byte = guest-physical address
//!   (checkpoint's meta, device state)              └─ Image::core ─▶ ram.elf    header, notes, segments
//!                                                                      │
//!   RamSource (pages from the store) ───────────── read_at ◀───────────┘
//! ```
//!
//! Invariants: nothing is read before it is asked for; every byte of an image is its head's, a
//! page's, or zero; images of one checkpoint are always the same bytes.
//!
//! Left out: disks (checkpoints hold none yet), video RAM and other memory of devices, where files
//! go (the binary's).

mod core;
mod error;
mod image;
mod view;

pub use error::{Error, Result};
pub use image::Image;
pub use view::{Extent, GuestView};
