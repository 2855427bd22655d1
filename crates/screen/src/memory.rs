//! The part of a display's memory that a picture needs.

/// A part of a display's memory.
pub(crate) struct Memory<'a> {
    pub bytes: &'a [u8],
    /// The address at which the part begins, in bytes from the start of the memory.
    pub first: u64,
    /// The size of the whole memory in bytes. Addresses wrap around at its end.
    pub len_bytes: u64,
}

impl Memory<'_> {
    /// Returns the byte at `address` of the display's memory, whose addresses wrap around at its
    /// end; 0 if the byte is not in this part.
    pub fn byte(&self, address: u64) -> u8 {
        let at = (address % self.len_bytes.max(1)).checked_sub(self.first);
        at.and_then(|at| self.bytes.get(usize::try_from(at).ok()?)).copied().unwrap_or_default()
    }

    /// Returns the `N` bytes from `address` on, each as [`Self::byte`] does.
    pub fn chunk<const N: usize>(&self, address: u64) -> [u8; N] {
        let at = address.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
        let found = at.and_then(|at| self.bytes.get(at..)?.first_chunk());
        found
            .copied()
            .unwrap_or_else(|| std::array::from_fn(|k| self.byte(address.saturating_add(k as u64))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_begin_anew() {
        let memory = Memory { bytes: &[1, 2, 3, 4], first: 0, len_bytes: 4 };
        assert_eq!((memory.byte(5), memory.chunk::<4>(2)), (2, [3, 4, 1, 2]));
        let part = Memory { bytes: &[3, 4], first: 2, len_bytes: 4 };
        assert_eq!((part.chunk::<4>(2), part.byte(0)), ([3, 4, 0, 0], 0));
        assert_eq!(Memory { bytes: &[], first: 0, len_bytes: 0 }.byte(u64::MAX), 0);
    }
}
