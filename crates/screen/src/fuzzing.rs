//! The entry point of the fuzzer in `fuzz/`: a display from arbitrary bytes.
//!
//! It is not part of the interface. It must neither panic nor take memory out of proportion to its
//! input.

use crate::{Bochs, PIXELS_MAX, Registers, Screen, Vga};

/// The largest number of pixels drawn here, to save time.
const DRAWN_MAX: u64 = 1 << 20;
/// The most bytes of memory allocated here.
const MEMORY_BYTES_MAX: u64 = 4 << 20;

/// Yields the input's bytes, then zeros.
struct Source<'a>(&'a [u8]);

impl Source<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let len = N.min(self.0.len());
        let (head, tail) = self.0.split_at(len);
        taken[..len].copy_from_slice(head);
        self.0 = tail;
        taken
    }

    fn word(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }
}

/// The registers and the size of the memory from the beginning of `bytes`, and the rest of `bytes`.
fn registers(bytes: &[u8]) -> (Registers, u64, &[u8]) {
    let mut source = Source(bytes);
    let [kind, size] = source.take();
    // Most displays have a power of two.
    let memory_bytes = 1u64 << (size % 40) | u64::from(kind >> 4);
    let vbe = std::array::from_fn(|_| source.word());
    let is_big_endian = kind & 2 != 0;
    let registers = if kind & 1 == 0 {
        Registers::Bochs(Bochs { vbe, is_big_endian })
    } else {
        Registers::Vga(Box::new(Vga {
            vbe,
            is_big_endian,
            vbe_start: u32::from_le_bytes(source.take()),
            vbe_line_bytes: u32::from_le_bytes(source.take()),
            sequencer: source.take(),
            graphics: source.take(),
            attribute_index: source.take::<1>()[0],
            attributes: source.take(),
            crtc: {
                let mut crtc = [0; 256];
                crtc[..32].copy_from_slice(&source.take::<32>());
                crtc
            },
            palette: source.take(),
        }))
    };
    (registers, memory_bytes, source.0)
}

/// Draws the display whose registers and memory `bytes` describe.
pub fn draw(bytes: &[u8]) {
    let (registers, memory_bytes, rest) = registers(bytes);
    let Ok(screen) = Screen::new(&registers, memory_bytes) else { return };
    let pixels = u64::from(screen.width()) * u64::from(screen.height());
    let needs = screen.needs();
    assert!((1..=PIXELS_MAX).contains(&pixels), "{pixels} pixels");
    assert!(
        needs.start <= needs.end && needs.end <= memory_bytes,
        "{needs:?} of {memory_bytes} bytes"
    );
    if pixels > DRAWN_MAX {
        return;
    }
    let len = (needs.end - needs.start).min(MEMORY_BYTES_MAX) as usize;
    let memory: Vec<u8> =
        rest.iter().copied().chain((0..).map(|at: u32| at as u8)).take(len).collect();
    let picture = screen.draw(&memory);
    assert_eq!(picture.rgb.len() as u64, pixels * 3);
    assert_eq!(picture, screen.draw(&memory), "two pictures of the same");
}
