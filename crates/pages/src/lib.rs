//! A page in few bytes, as the store keeps it and as it travels to a standby: its words, or what
//! differs from another page.
//!
//! - [`bytes`]: reading what comes from outside.
//! - [`patch`]: a page as a difference.
//! - [`words`]: a page as its 64-bit words.
//!
//! Invariants: no payload of a page is longer than the page; whatever a payload's bytes are,
//! reading it ends with a page or a problem, and never with a panic. No I/O happens here; what
//! pages mean is the caller's.

pub mod bytes;
pub mod patch;
pub mod words;

#[cfg(test)]
mod tests {
    use keyframe_units::{PAGE_BYTES, Page};

    /// A page of noise from a seed.
    pub fn noise(seed: u64) -> Page {
        let mut page = [0; PAGE_BYTES];
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut page);
        page
    }
}
