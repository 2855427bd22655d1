//! Pictures whose pixels follow one another in memory: VBE modes of 8 bits (through the palette),
//! 15, 16, 24 and 32.

use crate::memory::Memory;
use crate::registers::{Bochs, Rgb, Vga, vbe};
use crate::screen::{Canvas, PictureProblem};
use std::ops::Range;

/// The smallest width and height of a display without VGA.
const BOCHS_SIDE_MIN: u16 = 64;

/// A linear picture.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    /// The width in pixels.
    pub width: u32,
    /// The height in pixels.
    pub height: u32,
    start: u64,
    line_bytes: u64,
    format: Format,
    is_big_endian: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "there is one for each picture")]
enum Format {
    /// Indices into the palette.
    Palette([Rgb; 256]),
    /// Five bits for each colour. `whole_range` also fills the lower bits, so that white is 255.
    Bits15 {
        whole_range: bool,
    },
    /// Five bits of red, six of green, five of blue.
    Bits16 {
        whole_range: bool,
    },
    Bits24,
    Bits32,
}

impl Linear {
    /// Returns the picture of a VGA in a VBE mode; `None` in a mode of 16 colours, whose pixels lie
    /// in planes. `memory_bytes` is the size of its memory. Error: [`PictureProblem::Bits`] for a
    /// mode that the VGA does not have.
    pub fn of_vga(vga: &Vga, memory_bytes: u64) -> Result<Option<Self>, PictureProblem> {
        let bits = vga.vbe[vbe::BITS];
        let format = match bits {
            4 => return Ok(None),
            8 => Format::Palette(vga.all_colours()),
            15 => Format::Bits15 { whole_range: true },
            16 => Format::Bits16 { whole_range: true },
            24 => Format::Bits24,
            32 => Format::Bits32,
            _ => return Err(PictureProblem::Bits { bits }),
        };
        let mut linear = Self {
            width: vga.vbe[vbe::WIDTH].into(),
            height: vga.vbe[vbe::HEIGHT].into(),
            start: u64::from(vga.vbe_start) * 4,
            line_bytes: vga.vbe_line_bytes.into(),
            format,
            is_big_endian: vga.is_big_endian,
        };
        // QEMU then draws pixel by pixel and leaves the lower bits at zero.
        if linear.needs().end > memory_bytes
            && let Format::Bits15 { whole_range } | Format::Bits16 { whole_range } =
                &mut linear.format
        {
            *whole_range = false;
        }
        Ok(Some(linear))
    }

    /// Returns the picture of a `bochs-display` with `memory_bytes` bytes of memory.
    ///
    /// Errors: [`PictureProblem::NoMode`] if the guest has set no mode, [`PictureProblem::Bits`]
    /// for a mode that the display does not have, [`PictureProblem::Beyond`] if the picture does
    /// not fit into the memory.
    pub fn of_bochs(bochs: &Bochs, memory_bytes: u64) -> Result<Self, PictureProblem> {
        let register = |number: usize| bochs.vbe[number];
        let (width, height) = (register(vbe::WIDTH), register(vbe::HEIGHT));
        let format = match register(vbe::BITS) {
            0 => return Err(PictureProblem::NoMode),
            16 => Format::Bits16 { whole_range: true },
            32 => Format::Bits32,
            bits => return Err(PictureProblem::Bits { bits }),
        };
        if width < BOCHS_SIDE_MIN || height < BOCHS_SIDE_MIN {
            return Err(PictureProblem::NoMode);
        }
        let pixel_bytes = format.pixel_bytes();
        let line_bytes = u64::from(register(vbe::VIRTUAL_WIDTH).max(width)) * pixel_bytes;
        let linear = Self {
            width: width.into(),
            height: height.into(),
            start: u64::from(register(vbe::X_OFFSET)) * pixel_bytes
                + u64::from(register(vbe::Y_OFFSET)) * line_bytes,
            line_bytes,
            format,
            // 16-bit pixels always have the host's byte order.
            is_big_endian: bochs.is_big_endian && pixel_bytes == 4,
        };
        if linear.start + line_bytes * u64::from(height) > memory_bytes {
            return Err(PictureProblem::Beyond { memory_bytes });
        }
        Ok(linear)
    }

    /// Returns the range of display memory that the picture needs, in bytes.
    pub fn needs(&self) -> Range<u64> {
        let below = self.line_bytes * u64::from(self.height).saturating_sub(1);
        let end = self.start + below + u64::from(self.width) * self.format.pixel_bytes();
        self.start..end
    }

    /// Draws the picture on `canvas`.
    pub fn draw(&self, memory: &Memory<'_>, canvas: &mut Canvas<'_>) {
        let step = self.format.pixel_bytes();
        for y in 0..self.height {
            let line = self.start + u64::from(y) * self.line_bytes;
            for (pixel, at) in canvas.line(y).iter_mut().zip((line..).step_by(step as usize)) {
                *pixel = self.pixel(memory, at);
            }
        }
    }

    fn pixel(&self, memory: &Memory<'_>, at: u64) -> Rgb {
        let word = || {
            let bytes = memory.chunk(at);
            if self.is_big_endian { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) }
        };
        match &self.format {
            Format::Palette(colours) => colours[usize::from(memory.byte(at))],
            Format::Bits15 { whole_range } => {
                let word = word();
                let parts = [word >> 7, word >> 2, word << 3].map(|part| part as u8 & 0xf8);
                if *whole_range { parts.map(|part| part | part >> 5) } else { parts }
            }
            Format::Bits16 { whole_range } => {
                let word = word();
                let [r, g, b] =
                    [word >> 8 & 0xf8, word >> 3 & 0xfc, word << 3 & 0xf8].map(|part| part as u8);
                if *whole_range { [r | r >> 5, g | g >> 6, b | b >> 5] } else { [r, g, b] }
            }
            Format::Bits24 | Format::Bits32 => {
                let [first, g, last] = match (&self.format, self.is_big_endian) {
                    (Format::Bits32, true) => memory.chunk(at + 1),
                    _ => memory.chunk(at),
                };
                if self.is_big_endian { [first, g, last] } else { [last, g, first] }
            }
        }
    }
}

impl Format {
    fn pixel_bytes(&self) -> u64 {
        match self {
            Self::Palette(_) => 1,
            Self::Bits15 { .. } | Self::Bits16 { .. } => 2,
            Self::Bits24 => 3,
            Self::Bits32 => 4,
        }
    }
}
