//! Makes a picture of a guest's display from its registers and its memory.
//!
//! ```text
//!   Registers ──Screen::new──▶ Screen ──needs──▶ the range of the display's memory
//!   (device state)               │                     │ read by the caller   
//!                                └───────draw◀─────────┘──▶ Picture: RGB
//! ```
//!
//! Invariants: registers and memory come from the guest and may have any values. Sizes are checked
//! before memory is allocated. This crate does no input or output. The picture is the one that
//! `screendump` of QEMU 10 makes of the VM at the same instant, pixel by pixel. (QEMU 7.2 leaves
//! the low bits of 15-bit colours at zero, and does not pan graphics.)
//!
//! Left out: blinking (the cursor is shown), pictures outside the display's memory, and guests
//! other than x86.

#[doc(hidden)]
pub mod fuzzing;
mod linear;
mod memory;
mod planes;
mod registers;
mod screen;
#[cfg(test)]
mod tests;
mod text;

pub use registers::{Bochs, Registers, VBE_REGISTERS, Vga};
pub use screen::{PIXELS_MAX, Picture, PictureProblem, Screen};
