//! Pages with known content, for tests.

use keyframe_units::{PAGE_BYTES, Page, ZERO_PAGE};

/// Returns a page of random bytes, which `seed` determines.
pub fn noise(seed: u64) -> Page {
    let mut page = [0; PAGE_BYTES];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut page);
    page
}

/// Returns a page of 64-byte lines, each of which other pages have too.
pub fn lines(seed: u64) -> Page {
    let (mut page, order) = (ZERO_PAGE, noise(seed));
    for (line, which) in page.chunks_mut(64).zip(order) {
        line.copy_from_slice(&noise(u64::from(which % 32))[..64]);
    }
    page
}
