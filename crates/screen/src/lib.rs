//! What a guest's display shows: from its registers and its memory to a picture.
//!
//! ```text
//!   Registers ──Screen::new──▶ Screen ──needs──▶ which bytes of the display's memory
//!   (device state)               │                     │ read by whoever has them
//!                                └───────draw◀─────────┘──▶ Picture: RGB
//! ```
//!
//! Invariants: registers and memory are the guest's, any values are fine; sizes are checked before
//! anything is allocated; nothing is read or written here. The picture is the one that `screendump`
//! of QEMU 10 makes of the VM at the same instant, pixel by pixel. (QEMU 7.2 leaves the low bits of
//! 15-bit colours at zero, and does not pan graphics.)
//!
//! Left out: blinking (a cursor is shown), pictures that are not in the display's memory, other
//! bytes than those of x86.

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
pub use screen::{PIXELS_MAX, Picture, Reason, Screen};
