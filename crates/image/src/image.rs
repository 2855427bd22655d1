//! A virtual file: its bytes are made when they are read.
//!
//! ```text
//!   │ head (core files) │ pages of extent 0 │ hole: zeros │ pages of extent 1 │ ...
//!   0                                                                          len_bytes
//! ```

use crate::core;
use crate::view::GuestView;
use keyframe_machine::{CpuRegisters, Processor, RamSource};
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange};
use std::io;

const PAGE: u64 = PAGE_BYTES as u64;

/// Adjacent pages of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    /// The offset in the file, in bytes.
    at: u64,
    pages: PageRange,
}

impl Part {
    fn end(self) -> u64 {
        self.at + self.pages.len_bytes()
    }
}

/// A checkpoint's RAM as a virtual file. The same checkpoint always gives the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    head: Vec<u8>,
    /// In rising order of offsets.
    parts: Vec<Part>,
    len_bytes: u64,
}

impl Image {
    /// Returns the raw image: guest-physical memory from address 0 to the end of main RAM.
    /// Addresses without memory are zeros.
    pub fn raw(view: &GuestView) -> Self {
        let len_bytes = view.ram_end().0;
        let within = view.extents().iter().filter(|e| e.start.0 < len_bytes);
        let parts = within.map(|e| Part { at: e.start.0, pages: e.pages }).collect();
        Self { head: Vec::new(), parts, len_bytes }
    }

    /// Returns the ELF core file: one segment for each extent, and the registers of each processor.
    pub fn core(view: &GuestView, processor: Processor, cpus: &[CpuRegisters]) -> Self {
        let (head, places) = core::head(view.extents(), processor, cpus);
        let parts: Vec<Part> = places
            .into_iter()
            .zip(view.extents())
            .map(|(at, e)| Part { at, pages: e.pages })
            .collect();
        let len_bytes = parts.last().map_or(head.len() as u64, |p| p.end());
        Self { head, parts, len_bytes }
    }

    /// Returns the length of the file in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Reads from `offset` into `bytes`. Returns the number of bytes read, which is smaller than
    /// the length of `bytes` only at the end of the file.
    ///
    /// Errors: those of `ram`.
    pub fn read_at(&self, ram: &dyn RamSource, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.len_bytes.saturating_sub(offset);
        let len = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let Some(bytes) = bytes.get_mut(..len) else { return Ok(0) };
        bytes.fill(0);
        let end = offset + len as u64;
        copy(&self.head, 0, bytes, offset);
        let first = self.parts.partition_point(|p| p.end() <= offset);
        for part in self.parts.iter().skip(first).take_while(|p| p.at < end) {
            let from = offset.saturating_sub(part.at) / PAGE;
            let to = (end - part.at).div_ceil(PAGE).min(part.pages.len_pages);
            let wanted =
                PageRange::new(PageIndex(part.pages.first.0 + from), to.saturating_sub(from));
            ram.read(wanted, &mut |page, content| {
                match page.0.checked_sub(wanted.first.0).filter(|k| *k < wanted.len_pages) {
                    Some(k) => copy(content, part.at + (from + k) * PAGE, bytes, offset),
                    None => {
                        return Err(io::Error::other(format!("page {} was not asked for", page.0)));
                    }
                }
                Ok(())
            })?;
        }
        Ok(len)
    }

    /// Returns the offset and the length, both in bytes, of each stretch that is not a hole, in
    /// rising order. The rest of the file is zeros. A stretch has at most `bytes_max` bytes, but at
    /// least one page.
    pub fn stretches(&self, bytes_max: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let bytes_max = bytes_max.max(PAGE);
        let head = Some((0, self.head.len() as u64)).filter(|(_, len)| *len > 0);
        let parts = self.parts.iter().map(|p| (p.at, p.end().min(self.len_bytes) - p.at));
        head.into_iter().chain(parts).flat_map(move |(at, len)| {
            (0..len.div_ceil(bytes_max))
                .map(move |k| (at + k * bytes_max, bytes_max.min(len - k * bytes_max)))
        })
    }
}

/// Copies the bytes that two stretches have in common. Each begins at its offset in the file.
fn copy(from: &[u8], from_at: u64, to: &mut [u8], to_at: u64) {
    let start = from_at.max(to_at);
    let end = (from_at + from.len() as u64).min(to_at + to.len() as u64);
    let Some(len) = end.checked_sub(start).map(|len| len as usize) else { return };
    let (a, b) = ((start - from_at) as usize, (start - to_at) as usize);
    if let (Some(from), Some(to)) = (from.get(a..a + len), to.get_mut(b..b + len)) {
        to.copy_from_slice(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_machine::{Aarch64Registers, RegisterValues, Riscv64Registers, X86Registers};
    use keyframe_units::{BlockKind, GuestPhys, GuestRegion, Page, RamBlock, RamLayout};
    use proptest::prelude::*;

    /// Page n holds n; every third is zero and is not told.
    struct Numbered;

    impl RamSource for Numbered {
        fn read(
            &self,
            range: PageRange,
            sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
        ) -> io::Result<()> {
            let mut pages: Vec<PageIndex> = range.iter().filter(|p| p.0 % 3 != 0).collect();
            pages.reverse();
            pages.into_iter().try_for_each(|p| sink(p, &[p.0 as u8; PAGE_BYTES]))
        }
    }

    fn view() -> GuestView {
        let bytes = 40 * PAGE;
        let block = RamBlock {
            name: "m".into(),
            kind: BlockKind::Backend,
            used_bytes: bytes,
            total_bytes: bytes,
        };
        let layout = RamLayout::new(vec![block]).unwrap();
        let region = |start: u64, pages: u64, offset: u64| GuestRegion {
            start: GuestPhys(start * PAGE),
            len_bytes: pages * PAGE,
            block: "m".into(),
            offset_bytes: offset * PAGE,
        };
        GuestView::new(&layout, &[region(0, 10, 5), region(13, 7, 20), region(30, 2, 30)], None)
            .unwrap()
    }

    /// The raw image, page by page.
    fn oracle() -> Vec<u8> {
        let page = |at: u64| match at {
            0..10 => at + 5,
            13..20 => at + 7,
            30..32 => at,
            _ => 0,
        };
        let byte = |at: u64| if page(at) % 3 == 0 { 0 } else { page(at) as u8 };
        (0..32).flat_map(|at| [byte(at); PAGE_BYTES]).collect()
    }

    proptest! {
        #[test]
        fn any_piece_of_a_raw_image_is_as_the_whole(offset in 0u64..140_000, len in 0usize..40_000) {
            let (image, oracle) = (Image::raw(&view()), oracle());
            prop_assert_eq!(image.len_bytes(), oracle.len() as u64);
            let mut bytes = vec![0xee; len];
            let read = image.read_at(&Numbered, offset, &mut bytes).unwrap();
            let start = (offset as usize).min(oracle.len());
            let expected = &oracle[start..(start + len).min(oracle.len())];
            prop_assert!(bytes[..read] == *expected);
        }

        #[test]
        fn stretches_cover_all_that_is_not_zero(max in 0u64..60_000) {
            for image in [Image::raw(&view()), Image::core(&view(), Processor::X86_64, &[cpu(0)])] {
                let mut whole = vec![0; image.len_bytes() as usize];
                image.read_at(&Numbered, 0, &mut whole).unwrap();
                let mut pieced = vec![0; whole.len()];
                for (at, len) in image.stretches(max) {
                    let (at, len) = (at as usize, len as usize);
                    prop_assert_eq!(image.read_at(&Numbered, at as u64, &mut pieced[at..at + len]).unwrap(), len);
                }
                prop_assert!(pieced == whole);
            }
        }
    }

    fn cpu(rip: u64) -> CpuRegisters {
        let values = RegisterValues::X86_64(X86Registers { rip, ..X86Registers::default() });
        CpuRegisters { index: 0, values }
    }

    /// The words of the first note's registers, and `e_machine`, of a core of `processor`.
    fn registers(processor: Processor, values: RegisterValues) -> (u16, Vec<u64>) {
        let cpus = [CpuRegisters { index: 0, values }];
        let image = Image::core(&view(), processor, &cpus);
        let mut bytes = vec![0; image.len_bytes() as usize];
        image.read_at(&Numbered, 0, &mut bytes).unwrap();
        let note = 64 + 56 * (1 + view().extents().len());
        let len = u32::from_le_bytes(bytes[note + 4..note + 8].try_into().unwrap()) as usize;
        let status = &bytes[note + 20..note + 20 + len];
        let words = status[112..len - 8].as_chunks::<8>().0;
        let machine = u16::from_le_bytes(bytes[18..20].try_into().unwrap());
        (machine, words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    #[test]
    fn a_core_of_another_processor_has_its_machine_and_registers() {
        let general = std::array::from_fn(|k| k as u64);
        let arm = Aarch64Registers { general, sp: 31, pc: 32, pstate: 33 };
        let words: Vec<u64> = (0..34).collect();
        let found = registers(Processor::Aarch64, RegisterValues::Aarch64(arm));
        assert_eq!(found, (183, words));
        let riscv = Riscv64Registers { general: std::array::from_fn(|k| k as u64), pc: 99 };
        let words: Vec<u64> = std::iter::once(99).chain(1..32).collect();
        let found = registers(Processor::Riscv64, RegisterValues::Riscv64(riscv));
        assert_eq!(found, (243, words));
    }

    #[test]
    fn a_core_holds_the_same_pages_where_its_headers_say() {
        let image = Image::core(&view(), Processor::X86_64, &[cpu(0x1234)]);
        let mut bytes = vec![0; image.len_bytes() as usize];
        image.read_at(&Numbered, 0, &mut bytes).unwrap();
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        for k in 0..3 {
            let header = 64 + 56 * (1 + k);
            let (offset, address, len) = (word(header + 8), word(header + 24), word(header + 32));
            let found = &bytes[offset as usize..(offset + len) as usize];
            assert!(*found == oracle()[address as usize..(address + len) as usize], "segment {k}");
        }
        assert_eq!(word(64 + 56 * 4 + 20 + 112 + 16 * 8), 0x1234, "rip in the first note");
    }
}
