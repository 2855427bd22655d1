//! Text: characters and their colours in planes 0 and 1, the shapes of characters in plane 2.

use crate::memory::Memory;
use crate::registers::{Rgb, Vga};
use crate::screen::{Canvas, PictureProblem};

/// The largest number of characters that QEMU shows: 160 x 100.
const CHARACTERS_MAX: u32 = 16_000;
/// Lines of a character's shape in memory, used or not.
const SHAPE_LINES: u32 = 32;
/// Bytes from an address of a plane to the next: there are four planes.
const PLANES: u64 = 4;

/// A screen of text.
#[derive(Clone, Debug)]
pub(crate) struct Text {
    columns: u32,
    lines: u32,
    /// The size of a character in pixels.
    wide: u32,
    tall: u32,
    start: u64,
    line_bytes: u64,
    split: u32,
    fonts: [u32; 2],
    colours: [Rgb; 16],
    joins_line_drawings: bool,
    cursor: Option<Cursor>,
}

#[derive(Clone, Copy, Debug)]
struct Cursor {
    at: u64,
    first: u32,
    last: u32,
}

impl Text {
    /// Reads the text mode from the registers. Errors: [`PictureProblem::NoMode`] if the guest has
    /// set no mode; the text has too many characters.
    pub fn of(vga: &Vga) -> Result<Self, PictureProblem> {
        let (wide, tall) = (vga.character_width(), u32::from(vga.last_character_line()) + 1);
        let (columns, lines) = (vga.columns(), vga.text_lines(tall));
        match columns * lines {
            0 | 1 => return Err(PictureProblem::NoMode),
            2..=CHARACTERS_MAX => {}
            _ => {
                return Err(PictureProblem::TooLarge {
                    width: (columns * wide).into(),
                    height: (lines * tall).into(),
                });
            }
        }
        let cursor = vga.cursor_lines().map(|(first, last)| Cursor {
            at: vga.cursor().into(),
            first,
            last: last.min(tall - 1),
        });
        Ok(Self {
            columns,
            lines,
            wide,
            tall,
            start: vga.start().into(),
            line_bytes: vga.line_bytes().into(),
            split: vga.split(),
            fonts: vga.fonts(),
            colours: vga.sixteen(),
            joins_line_drawings: vga.joins_line_drawings(),
            cursor,
        })
    }

    /// Returns the width in pixels.
    pub fn width(&self) -> u32 {
        self.columns * self.wide
    }

    /// Returns the height in pixels.
    pub fn height(&self) -> u32 {
        self.lines * self.tall
    }

    /// Returns the first address after the memory that the picture can use, in bytes.
    pub fn end(&self) -> u64 {
        let text =
            self.start + self.line_bytes * u64::from(self.lines) + u64::from(self.columns) * PLANES;
        let font =
            u64::from(self.fonts[0].max(self.fonts[1])) + 256 * u64::from(SHAPE_LINES) * PLANES;
        text.max(font)
    }

    /// Draws the picture on `canvas`.
    pub fn draw(&self, memory: &Memory<'_>, canvas: &mut Canvas<'_>) {
        let mut line_at = self.start;
        for line in 0..self.lines {
            for column in 0..self.columns {
                let at = line_at + u64::from(column) * PLANES;
                // Text does not wrap around at the end of memory.
                if at + 2 > memory.len_bytes {
                    break;
                }
                self.character(memory, at, (column * self.wide, line * self.tall), canvas);
            }
            let y = line * self.tall;
            line_at = if y < self.split && y + self.tall >= self.split {
                0
            } else {
                line_at + self.line_bytes
            };
        }
    }

    fn character(&self, memory: &Memory<'_>, at: u64, (x, y): (u32, u32), canvas: &mut Canvas<'_>) {
        let [code, attribute] = memory.chunk(at);
        let font = self.fonts[usize::from(attribute >> 3 & 1)];
        let shape = u64::from(font + u32::from(code) * SHAPE_LINES * PLANES as u32);
        let [paper, ink] =
            [attribute >> 4, attribute & 0xf].map(|colour| self.colours[usize::from(colour)]);
        let joins = self.joins_line_drawings && (0xb0..=0xdf).contains(&code);
        let cursor = self.cursor.filter(|cursor| cursor.at == at);
        for row in 0..self.tall {
            let is_cursor =
                cursor.is_some_and(|cursor| (cursor.first..=cursor.last).contains(&row));
            let bits = if is_cursor { 0xff } else { memory.byte(shape + u64::from(row) * PLANES) };
            let bits = u16::from(bits) << 1 | u16::from((joins || is_cursor) && bits & 1 != 0);
            let pixels = canvas.line(y + row).iter_mut().skip(x as usize).take(self.wide as usize);
            for (pixel, across) in pixels.zip(0..) {
                let bit: u32 = if self.wide == 16 { across / 2 } else { across };
                *pixel = if bits >> (8 - bit) & 1 != 0 { ink } else { paper };
            }
        }
    }
}
