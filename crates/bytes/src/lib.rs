//! Readers for untrusted bytes, and the two encodings that formats and wires share.
//!
//! - [`ByteReader`] reads a slice from its front and returns an error at its end.
//! - [`StreamReader`] does the same for an [`std::io::Read`] and bounds each allocation.
//! - [`varint`] writes integers of variable length and differences between integers.
//! - [`hex`] converts between bytes and lower-case hexadecimal digits.
//!
//! Invariants: no input makes a reader panic; no reader allocates more bytes than its caller
//! allows.

pub mod hex;
mod slice;
mod stream;
pub mod varint;

pub use slice::{ByteReader, ReadError};
pub use stream::StreamReader;
