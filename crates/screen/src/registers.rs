//! The registers of the displays that can be drawn, and their meaning.

/// The number of registers of the VBE interface.
pub const VBE_REGISTERS: usize = 10;

/// Numbers of VBE registers.
pub(crate) mod vbe {
    pub const WIDTH: usize = 1;
    pub const HEIGHT: usize = 2;
    pub const BITS: usize = 3;
    pub const ENABLE: usize = 4;
    pub const VIRTUAL_WIDTH: usize = 6;
    pub const X_OFFSET: usize = 8;
    pub const Y_OFFSET: usize = 9;
    /// The bits of the register [`ENABLE`].
    pub const ENABLED: u16 = 0x01;
    pub const EIGHT_BIT_PALETTE: u16 = 0x20;
}

/// The registers of a guest's display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Registers {
    /// A VGA with VBE: `-vga std`, `-device VGA`, `secondary-vga`, `isa-vga`.
    Vga(Box<Vga>),
    /// `-device bochs-display`: VBE alone.
    Bochs(Bochs),
}

/// The registers of a VGA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vga {
    /// The sequencer's registers, by number.
    pub sequencer: [u8; 8],
    /// The graphics controller's registers, by number.
    pub graphics: [u8; 16],
    /// The attribute controller's index. Bit 5 is set if the display is on.
    pub attribute_index: u8,
    /// The attribute controller's registers, by number.
    pub attributes: [u8; 21],
    /// The CRT controller's registers, by number.
    pub crtc: [u8; 256],
    /// Red, green and blue of each of 256 colours. A value has 6 bits, or 8 in a VBE mode if bit 5
    /// of the VBE register `ENABLE` is set.
    pub palette: [u8; 768],
    /// The VBE interface's registers, by number.
    pub vbe: [u16; VBE_REGISTERS],
    /// The address of a VBE mode's picture, in units of 4 bytes.
    pub vbe_start: u32,
    /// The number of bytes from a line of a VBE mode to the next.
    pub vbe_line_bytes: u32,
    /// True if the highest byte of a pixel comes first in memory.
    pub is_big_endian: bool,
}

impl Default for Vga {
    fn default() -> Self {
        Self {
            sequencer: [0; 8],
            graphics: [0; 16],
            attribute_index: 0,
            attributes: [0; 21],
            crtc: [0; 256],
            palette: [0; 768],
            vbe: [0; VBE_REGISTERS],
            vbe_start: 0,
            vbe_line_bytes: 0,
            is_big_endian: false,
        }
    }
}

/// The registers of QEMU's `bochs-display`, which has VBE and no VGA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bochs {
    /// The VBE interface's registers, by number.
    pub vbe: [u16; VBE_REGISTERS],
    /// True if the highest byte of a pixel comes first in memory.
    pub is_big_endian: bool,
}

/// Numbers of the CRT controller's registers.
mod crtc {
    pub const TOTAL_LINES: usize = 0x06;
    pub const LAST_COLUMN: usize = 0x01;
    pub const OVERFLOW: usize = 0x07;
    pub const LINE_REPEAT: usize = 0x09;
    pub const CURSOR_FIRST: usize = 0x0a;
    pub const CURSOR_LAST: usize = 0x0b;
    pub const START_HIGH: usize = 0x0c;
    pub const START_LOW: usize = 0x0d;
    pub const CURSOR_HIGH: usize = 0x0e;
    pub const CURSOR_LOW: usize = 0x0f;
    pub const LAST_LINE: usize = 0x12;
    pub const LINE_OFFSET: usize = 0x13;
    pub const MODE: usize = 0x17;
    pub const SPLIT: usize = 0x18;
}

/// Numbers of the attribute controller's registers after the 16 of the palette.
mod attribute {
    pub const MODE: usize = 0x10;
    pub const PLANES: usize = 0x12;
    pub const PANNING: usize = 0x13;
    pub const COLOUR_SELECT: usize = 0x14;
}

/// The pixel format of a mode without VBE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shift {
    /// 16 colours: a bit in each of four planes.
    Planes,
    /// 4 colours: two adjacent bits, as in CGA.
    Pairs,
    /// 256 colours: a byte.
    Bytes,
}

/// A colour: red, green, blue.
pub(crate) type Rgb = [u8; 3];

impl Vga {
    pub(crate) fn vbe_is_enabled(&self) -> bool {
        self.vbe[vbe::ENABLE] & vbe::ENABLED != 0
    }

    pub(crate) fn is_blank(&self) -> bool {
        self.attribute_index & 0x20 == 0
    }

    pub(crate) fn is_graphics(&self) -> bool {
        self.graphics[6] & 1 != 0
    }

    /// The height in pixels, without VBE.
    pub(crate) fn lines(&self) -> u32 {
        self.with_overflow(crtc::LAST_LINE, 1, 6) + 1
    }

    pub(crate) fn columns(&self) -> u32 {
        u32::from(self.crtc[crtc::LAST_COLUMN]) + 1
    }

    /// The number of text lines of `tall` pixels each.
    pub(crate) fn text_lines(&self, tall: u32) -> u32 {
        // A mode of 160 x 100 dots is made this way. QEMU uses its line count unchanged.
        if self.crtc[crtc::TOTAL_LINES] == 100 { 100 } else { self.lines() / tall }
    }

    /// A register with two more bits in the overflow register.
    fn with_overflow(&self, register: usize, bit_8: u32, bit_9: u32) -> u32 {
        let over = u32::from(self.crtc[crtc::OVERFLOW]);
        u32::from(self.crtc[register]) | (over >> bit_8 & 1) << 8 | (over >> bit_9 & 1) << 9
    }

    /// The line after which the picture continues at address 0 (split screen).
    pub(crate) fn split(&self) -> u32 {
        let bit_9 = u32::from(self.crtc[crtc::LINE_REPEAT]) >> 6 & 1;
        u32::from(self.crtc[crtc::SPLIT])
            | u32::from(self.crtc[crtc::OVERFLOW]) >> 4 << 8 & 0x100
            | bit_9 << 9
    }

    /// The address of the picture without VBE, in bytes of memory: each address has four planes.
    pub(crate) fn start(&self) -> u32 {
        self.word(crtc::START_HIGH, crtc::START_LOW) * 4
    }

    /// The address of the cursor, in bytes of memory.
    pub(crate) fn cursor(&self) -> u32 {
        self.word(crtc::CURSOR_HIGH, crtc::CURSOR_LOW) * 4
    }

    fn word(&self, high: usize, low: usize) -> u32 {
        u32::from(self.crtc[high]) << 8 | u32::from(self.crtc[low])
    }

    /// Bytes from a line of a mode without VBE to the next.
    pub(crate) fn line_bytes(&self) -> u32 {
        u32::from(self.crtc[crtc::LINE_OFFSET]) << 3
    }

    /// The last line of a character, from 0.
    pub(crate) fn last_character_line(&self) -> u8 {
        self.crtc[crtc::LINE_REPEAT] & 0x1f
    }

    /// True if each line is doubled.
    pub(crate) fn doubles_lines(&self) -> bool {
        self.crtc[crtc::LINE_REPEAT] & 0x80 != 0
    }

    pub(crate) fn crtc_mode(&self) -> u8 {
        self.crtc[crtc::MODE]
    }

    /// The first and the last line of the cursor; `None` if it is off.
    pub(crate) fn cursor_lines(&self) -> Option<(u32, u32)> {
        let (first, last) = (self.crtc[crtc::CURSOR_FIRST], self.crtc[crtc::CURSOR_LAST]);
        (first & 0x20 == 0).then_some((u32::from(first & 0x1f), u32::from(last & 0x1f)))
    }

    /// The width of a character in pixels.
    pub(crate) fn character_width(&self) -> u32 {
        match self.sequencer[1] {
            clock if clock & 0x08 != 0 => 16,
            clock if clock & 0x01 != 0 => 8,
            _ => 9,
        }
    }

    /// True if each pixel is doubled horizontally.
    pub(crate) fn doubles_pixels(&self) -> bool {
        self.sequencer[1] & 0x08 != 0 && !self.vbe_is_enabled()
    }

    /// The addresses of the two fonts, in bytes of memory.
    pub(crate) fn fonts(&self) -> [u32; 2] {
        let map = u32::from(self.sequencer[3]);
        let number = [map >> 4 & 1 | map << 1 & 6, map >> 5 & 1 | map >> 1 & 6];
        // They have 8 KiB each, in plane 2.
        number.map(|font| font * 0x8000 + 2)
    }

    /// True if line-drawing characters extend into the ninth pixel.
    pub(crate) fn joins_line_drawings(&self) -> bool {
        self.attributes[attribute::MODE] & 0x04 != 0
    }

    pub(crate) fn shift(&self) -> Shift {
        match self.graphics[5] >> 5 & 3 {
            0 => Shift::Planes,
            1 => Shift::Pairs,
            _ => Shift::Bytes,
        }
    }

    pub(crate) fn shown_planes(&self) -> u8 {
        self.attributes[attribute::PLANES] & 0xf
    }

    /// The number of pixels by which the picture is shifted to the left. On a split screen this
    /// concerns only the part above the split.
    pub(crate) fn panning(&self) -> (u8, bool) {
        (self.attributes[attribute::PANNING] & 7, self.attributes[attribute::MODE] & 0x20 != 0)
    }

    /// The colours of text and of modes with 16 colours.
    pub(crate) fn sixteen(&self) -> [Rgb; 16] {
        let select = self.attributes[attribute::COLOUR_SELECT];
        let has_four_bits = self.attributes[attribute::MODE] & 0x80 != 0;
        std::array::from_fn(|at| {
            let colour = self.attributes[at];
            let number = if has_four_bits {
                (select & 0xf) << 4 | colour & 0xf
            } else {
                (select & 0xc) << 4 | colour & 0x3f
            };
            self.colour(number, false)
        })
    }

    /// The whole palette.
    pub(crate) fn all_colours(&self) -> [Rgb; 256] {
        let whole_bytes = self.vbe[vbe::ENABLE] & vbe::EIGHT_BIT_PALETTE != 0;
        std::array::from_fn(|at| self.colour(at as u8, whole_bytes))
    }

    fn colour(&self, number: u8, whole_bytes: bool) -> Rgb {
        let at = usize::from(number) * 3;
        let parts =
            self.palette.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or_default();
        if whole_bytes { parts } else { parts.map(six_bits) }
    }
}

/// Extends 6 bits to 8: the lowest bit is repeated.
fn six_bits(value: u8) -> u8 {
    let low = value & 1;
    (value & 0x3f) << 2 | low << 1 | low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_brightest_colour_is_white_and_the_darkest_black() {
        assert_eq!([0, 1, 0x2a, 0x3f, 0xff].map(six_bits), [0, 7, 0xa8, 0xff, 0xff]);
    }

    #[test]
    fn heights_have_ten_bits() {
        let mut vga = Vga::default();
        vga.crtc[crtc::LAST_LINE] = 0xdf;
        vga.crtc[crtc::OVERFLOW] = 0x02;
        assert_eq!(vga.lines(), 480);
        vga.crtc[crtc::OVERFLOW] = 0x42 | 0x10;
        vga.crtc[crtc::LINE_REPEAT] = 0x40;
        vga.crtc[crtc::SPLIT] = 0xff;
        assert_eq!((vga.lines(), vga.split()), (480 + 512, 1023));
    }

    #[test]
    fn fonts_are_chosen_bit_by_bit() {
        let mut vga = Vga::default();
        vga.sequencer[3] = 0b0010_0000 | 0b01_00 | 0b01;
        assert_eq!(vga.fonts(), [2 * 0x8000 + 2, 3 * 0x8000 + 2]);
    }
}
