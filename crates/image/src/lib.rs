//! A checkpoint's RAM as the guest sees it: raw images and core files whose bytes are made when
//! they are read.
//!
//! ```text
//!   RamLayout + GuestRegions + PAM ──▶ GuestView ──┬─ Image::raw ──▶ ram.raw    byte = guest-physical address
//!   (checkpoint's meta, device state)              └─ Image::core ─▶ ram.elf    header, notes, segments
//!                                                                      │
//!   RamSource (pages from the store) ───────────── read_at ◀───────────┘
//! ```
//!
//! Invariants: a page is read only when a caller asks for its bytes. Every byte of an image belongs
//! to its head or to a page, or is zero. The images of one checkpoint are always the same bytes.
//!
//! Left out: disks, video RAM and other memory of devices; writing files, which the binary does.

mod core;
mod error;
mod image;
mod view;

pub use error::{Error, Result};
pub use image::Image;
pub use view::{GuestExtent, GuestView};
