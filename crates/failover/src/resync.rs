//! The pages that a standby holds when a session begins: it sends a hash of each, and the primary
//! sends the pages that differ.
//!
//! ```text
//!   standby ──PageHashes──▶ primary
//!
//!   PageHashes   session 8 | first page 8 | the hashes of this page and the next ones, 16 each
//!   the last     session 8 | 2^64 - 1     | one byte: 1 if all pages are zeros, otherwise 0
//! ```
//!
//! The hash is BLAKE3, keyed with the session. No guest knows the session, so it cannot make two
//! pages with one hash.
//!
//! Invariant: the standby's pages do not change between the first hash and the session's first
//! epoch.

use super::frames::{FrameKind, marked};
use crate::error::PageHashesError;
use keyframe_link::Channel;
use keyframe_transfer::EpochImage;
use keyframe_units::{Page, PageIndex, ZERO_PAGE};

/// Bytes of a hash.
const HASH_BYTES: usize = 16;
/// Hashes in a frame: 1 MiB.
const FRAME_PAGES: u64 = 1 << 16;
/// The first page of the frame that ends the list.
const END: u64 = u64::MAX;
const CONTEXT: &str = "keyframe 2026-11 what a standby has";

/// Hashes page contents under the key of a session.
#[derive(Clone)]
pub struct PageHasher {
    key: [u8; 32],
    zero: [u8; HASH_BYTES],
}

impl PageHasher {
    /// Creates the hasher of the session with number `session`.
    pub fn new(session: u64) -> Self {
        let key = blake3::derive_key(CONTEXT, &session.to_le_bytes());
        let mut hasher = Self { key, zero: [0; HASH_BYTES] };
        hasher.zero = hasher.of(&ZERO_PAGE);
        hasher
    }

    fn of(&self, page: &Page) -> [u8; HASH_BYTES] {
        let hash = blake3::keyed_hash(&self.key, page);
        let mut short = [0; HASH_BYTES];
        short.copy_from_slice(hash.as_bytes().get(..HASH_BYTES).unwrap_or_default());
        short
    }
}

/// The hashes of the pages that a standby holds, as its primary has received them.
#[derive(Clone)]
pub struct RemotePageHashes {
    hasher: PageHasher,
    hashes: Vec<[u8; HASH_BYTES]>,
    /// All pages are zeros.
    blank: bool,
    complete: bool,
}

impl RemotePageHashes {
    /// Creates an empty list for a VM with `pages` pages, in the session with number `session`.
    pub fn new(session: u64, pages: u64) -> Self {
        let hasher = PageHasher::new(session);
        Self { hashes: Vec::new(), hasher, blank: pages == 0, complete: false }
    }

    /// Adds the hashes of one frame to the list. `first` is the page of the first hash, and `bytes`
    /// holds the hashes end to end. `pages` is the number of the VM's pages. Errors: the frame does
    /// not continue the list, or ends it too early.
    pub fn take_in(&mut self, first: u64, bytes: &[u8], pages: u64) -> Result<(), PageHashesError> {
        if first == END {
            self.blank = bytes == [1];
            if !self.blank && self.hashes.len() as u64 != pages {
                return Err(PageHashesError::Incomplete {
                    listed: self.hashes.len() as u64,
                    pages,
                });
            }
            self.complete = true;
            return Ok(());
        }
        let (hashes, rest) = bytes.as_chunks::<HASH_BYTES>();
        let fits = first == self.hashes.len() as u64 && first + hashes.len() as u64 <= pages;
        if !fits || !rest.is_empty() {
            return Err(PageHashesError::Misplaced { hashes: hashes.len(), first });
        }
        self.hashes.extend_from_slice(hashes);
        Ok(())
    }

    /// Returns true if the list is complete.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Returns true if all pages of the standby are zeros.
    pub fn is_blank(&self) -> bool {
        self.blank
    }

    /// Returns true if the standby holds `page` with this content. If not, the caller must send the
    /// page: the list then has the hash of `content`.
    pub fn has(&mut self, page: PageIndex, content: &Page) -> bool {
        let Some(known) = self.hashes.get_mut(page.0 as usize) else { return false };
        let hash = self.hasher.of(content);
        std::mem::replace(known, hash) == hash
    }

    /// Returns the first page from `from` to before `end` that the standby holds with another
    /// content than zeros. Returns `None` if there is none.
    pub fn next_not_zero(&self, from: u64, end: u64) -> Option<u64> {
        (from..end).find(|page| {
            self.hashes.get(*page as usize).is_some_and(|hash| *hash != self.hasher.zero)
        })
    }
}

/// Sends the hashes of the first `pages` pages of `image` over `channel`, or if `blank` is true
/// only that all pages are zeros. `session` is the session's number. Returns false if the
/// connection broke.
pub fn send_page_hashes(
    image: &dyn EpochImage,
    pages: u64,
    blank: bool,
    session: u64,
    channel: &Channel,
) -> bool {
    let send = |first: u64, bytes: &[u8]| {
        channel.send(FrameKind::PageHashes as u8, &[&marked(session, first), bytes]).is_ok()
    };
    if blank {
        return send(END, &[1]);
    }
    let hasher = PageHasher::new(session);
    let (mut page, mut frame) = (ZERO_PAGE, Vec::new());
    for first in (0..pages).step_by(FRAME_PAGES as usize) {
        frame.clear();
        for index in first..(first + FRAME_PAGES).min(pages) {
            if image.read(PageIndex(index), &mut page).is_err() {
                // No content has this hash: the page is sent.
                frame.extend_from_slice(&[0; HASH_BYTES]);
            } else {
                frame.extend_from_slice(&hasher.of(&page));
            }
        }
        if !send(first, &frame) {
            return false;
        }
    }
    send(END, &[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(byte: u8) -> Page {
        [byte; keyframe_units::PAGE_BYTES]
    }

    #[test]
    fn a_page_is_sent_until_the_standby_has_it_as_it_is() {
        let mut remote = RemotePageHashes::new(7, 3);
        let hasher = PageHasher::new(7);
        let bytes = [hasher.of(&page(1)), hasher.of(&ZERO_PAGE), hasher.of(&page(2))].concat();
        remote.take_in(0, &bytes, 3).unwrap();
        assert!(!remote.is_complete());
        remote.take_in(END, &[0], 3).unwrap();
        assert!(remote.is_complete() && !remote.is_blank());
        assert!(remote.has(PageIndex(0), &page(1)));
        assert!(!remote.has(PageIndex(0), &page(9)));
        // Other content was sent meanwhile.
        assert!(!remote.has(PageIndex(0), &page(1)));
        assert_eq!((remote.next_not_zero(0, 3), remote.next_not_zero(1, 2)), (Some(0), None));
        assert!(!remote.has(PageIndex(3), &page(1)));
        // Another session has other hashes.
        assert!(
            !remote.has(PageIndex(2), &page(3))
                && PageHasher::new(8).of(&page(2)) != hasher.of(&page(2))
        );
    }

    #[test]
    fn lists_that_make_no_sense_are_refused() {
        let mut remote = RemotePageHashes::new(7, 3);
        assert!(remote.take_in(1, &[0; 16], 3).is_err());
        assert!(remote.take_in(0, &[0; 15], 3).is_err());
        assert!(remote.take_in(0, &[0; 64], 3).is_err());
        assert!(remote.take_in(END, &[0], 3).is_err());
        remote.take_in(END, &[1], 3).unwrap();
        assert!(remote.is_blank());
    }
}
