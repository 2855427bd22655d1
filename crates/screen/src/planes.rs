//! Graphics of the VGA without VBE, and VBE modes of 16 colours: each address of memory has a byte
//! in each of four planes.

use crate::memory::Memory;
use crate::registers::{Rgb, Shift, Vga, vbe};
use crate::screen::{Canvas, Mode};

/// The memory that a VGA addresses without VBE.
const ADDRESSED_BYTES: u64 = 256 << 10;
/// Bytes of one address in all planes.
const PLANES: u64 = 4;
/// Pixels that are drawn at once.
const AT_ONCE: usize = 8;

/// A picture in planes.
#[derive(Clone, Debug)]
pub(crate) struct Planes {
    height: u32,
    /// Addresses in a line. Each has eight pixels before doubling.
    line_addresses: u32,
    start: u64,
    line_bytes: u64,
    split: Option<u32>,
    /// Lines of the picture for each line of memory, minus one.
    repeats: u32,
    /// The interleaving of CGA and Hercules: lines lie in two or four parts of memory.
    interleave: Interleave,
    shift: Shift,
    doubled: bool,
    shown: u8,
    panning: u8,
    panning_ends_at_split: bool,
    colours: Box<[Rgb; 256]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Interleave {
    /// The bit of the address that the lowest bit of the line number sets.
    first: Option<u32>,
    /// True if the next bit of the line number sets bit 15 of the address.
    second: bool,
}

impl Planes {
    /// Returns width and height in pixels and the mode of a VGA in a graphics mode without VBE.
    pub fn of(vga: &Vga) -> (u32, u32, Mode) {
        let (width, height) = (vga.columns() * 8, vga.lines());
        let mode = vga.crtc_mode();
        let doubles = u32::from(vga.doubles_lines());
        let repeats = if mode & 1 != 0 {
            ((u32::from(vga.last_character_line()) + 1) << doubles) - 1
        } else {
            doubles
        };
        let shift = vga.shift();
        // Each byte of 256 colours is two pixels.
        let doubled = shift != Shift::Bytes && vga.doubles_pixels();
        let (panning, panning_ends_at_split) = vga.panning();
        let planes = Self {
            height,
            line_addresses: width / 8,
            start: vga.start().into(),
            line_bytes: vga.line_bytes().into(),
            split: Some(vga.split()),
            repeats,
            interleave: Interleave {
                first: (mode & 1 == 0).then(|| 14 + u32::from(mode >> 6 & 1)),
                second: mode & 2 == 0,
            },
            shift,
            doubled,
            shown: vga.shown_planes(),
            panning,
            panning_ends_at_split,
            colours: colours(vga, shift),
        };
        (width << u32::from(doubled), height, Mode::Planes(Box::new(planes)))
    }

    /// Returns width and height in pixels and the mode of a VBE mode of 16 colours.
    pub fn with_vbe(vga: &Vga) -> (u32, u32, Mode) {
        let [width, height] = [vbe::WIDTH, vbe::HEIGHT].map(|number| u32::from(vga.vbe[number]));
        let planes = Self {
            height,
            line_addresses: width / 8,
            start: u64::from(vga.vbe_start) * PLANES,
            line_bytes: vga.vbe_line_bytes.into(),
            split: None,
            repeats: 0,
            interleave: Interleave::default(),
            shift: Shift::Planes,
            doubled: false,
            shown: vga.shown_planes(),
            panning: 0,
            panning_ends_at_split: false,
            colours: colours(vga, Shift::Planes),
        };
        (width, height, Mode::Planes(Box::new(planes)))
    }

    /// Returns the first address after the memory that the picture can use, in bytes.
    #[allow(clippy::unused_self)] // Like the other modes'.
    pub fn end(&self) -> u64 {
        ADDRESSED_BYTES
    }

    /// Draws the picture on `canvas`.
    pub fn draw(&self, memory: &Memory<'_>, canvas: &mut Canvas<'_>) {
        let (mut at, mut line, mut again) = (self.start, 0, self.repeats);
        let mut panning = self.panning;
        let mut pixels = Vec::new();
        for y in 0..self.height {
            self.line(memory, self.interleave.address(at, line), panning, &mut pixels);
            for (pixel, colour) in canvas.line(y).iter_mut().zip(&pixels) {
                *pixel = *colour;
            }
            if again == 0 {
                let last_of_parts = self.interleave.last_of_parts();
                if line & last_of_parts == last_of_parts {
                    at += self.line_bytes;
                }
                line += 1;
                again = self.repeats;
            } else {
                again -= 1;
            }
            if self.split == Some(y) {
                at = 0;
                if self.panning_ends_at_split {
                    panning = 0;
                }
            }
        }
    }

    fn line(&self, memory: &Memory<'_>, at: u64, panning: u8, pixels: &mut Vec<Rgb>) {
        pixels.clear();
        // With 256 colours QEMU pans by whole addresses, for every second step.
        let (skipped_bytes, skipped_pixels) = if self.shift == Shift::Bytes {
            (u64::from(panning >> 1) * PLANES, 0)
        } else {
            (0, usize::from(panning))
        };
        let further = u32::from(skipped_pixels > 0);
        for k in 0..self.line_addresses + further {
            let address = (at + skipped_bytes + u64::from(k) * PLANES) % ADDRESSED_BYTES;
            let eight = self.eight(memory.chunk(address));
            let times = if self.doubled { 2 } else { 1 };
            pixels.extend(eight.into_iter().flat_map(|pixel| std::iter::repeat_n(pixel, times)));
        }
        let times = if self.doubled { 2 } else { 1 };
        pixels.drain(..(skipped_pixels * times).min(pixels.len()));
    }

    /// The pixels of an address.
    fn eight(&self, planes: [u8; PLANES as usize]) -> [Rgb; AT_ONCE] {
        if self.shift == Shift::Bytes {
            return std::array::from_fn(|x| self.colours[usize::from(planes[x / 2])]);
        }
        let planes: [u8; 4] =
            std::array::from_fn(
                |plane| if self.shown >> plane & 1 != 0 { planes[plane] } else { 0 },
            );
        std::array::from_fn(|x| {
            let number = match self.shift {
                Shift::Pairs => {
                    // Planes 0 and 2 give the first four pixels, two bits each; planes 1 and 3 the
                    // others.
                    let (odd, place) = (x / 4, 6 - x % 4 * 2);
                    (planes[odd] >> place & 3) | (planes[odd + 2] >> place & 3) << 2
                }
                _ => {
                    (0..4).fold(0, |number, plane| number | (planes[plane] >> (7 - x) & 1) << plane)
                }
            };
            self.colours[usize::from(number)]
        })
    }
}

impl Interleave {
    fn address(self, at: u64, line: u64) -> u64 {
        let at = match self.first {
            Some(bit) => at & !(1 << bit) | (line & 1) << bit,
            None => at,
        };
        if self.second { at & !0x8000 | (line & 2) << 14 } else { at }
    }

    /// The bits of the line number that are set in the last line before the next line of memory.
    fn last_of_parts(self) -> u64 {
        u64::from(self.first.is_some()) | u64::from(self.second) << 1
    }
}

fn colours(vga: &Vga, shift: Shift) -> Box<[Rgb; 256]> {
    if shift == Shift::Bytes {
        return Box::new(vga.all_colours());
    }
    let sixteen = vga.sixteen();
    Box::new(std::array::from_fn(|at| sixteen[at % 16]))
}
