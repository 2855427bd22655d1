//! The picture of a display, and the range of memory that it needs.

use crate::linear::Linear;
use crate::memory::Memory;
use crate::planes::Planes;
use crate::registers::{Registers, Vga};
use crate::text::Text;
use std::ops::Range;

/// The largest number of pixels: 8192 x 4096, which is above 8K.
pub const PIXELS_MAX: u64 = 32 << 20;

/// Bytes of a pixel in a [`Picture`].
const PIXEL_BYTES: usize = 3;

/// The reason why there is no picture of a display.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PictureProblem {
    /// The guest does not use the display yet.
    #[error("the guest has set no mode")]
    NoMode,
    /// The picture has more than [`PIXELS_MAX`] pixels.
    #[error("a picture of {width} x {height} pixels is larger than is drawn")]
    TooLarge {
        /// The width in pixels.
        width: u64,
        /// The height in pixels.
        height: u64,
    },
    /// A mode that the display does not have.
    #[error("a mode with {bits} bits a pixel, which the display does not have")]
    Bits {
        /// The number of bits of a pixel.
        bits: u16,
    },
    /// The lines do not fit into the display's memory.
    #[error("the picture reaches beyond the display's memory of {memory_bytes} bytes")]
    Beyond {
        /// The size of the memory in bytes.
        memory_bytes: u64,
    },
}

/// A picture of a display, line by line from the top.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// The width in pixels.
    pub width: u32,
    /// The height in pixels.
    pub height: u32,
    /// Red, green and blue of each pixel, a byte each.
    pub rgb: Vec<u8>,
}

/// The picture of a display, before its memory is read.
#[derive(Clone, Debug)]
pub struct Screen {
    width: u32,
    height: u32,
    memory_bytes: u64,
    needs: Range<u64>,
    mode: Mode,
}

#[derive(Clone, Debug)]
pub(crate) enum Mode {
    Blank,
    Text(Box<Text>),
    Planes(Box<Planes>),
    Linear(Box<Linear>),
}

impl Screen {
    /// Finds the picture that `registers` describe in a memory of `memory_bytes` bytes. Error: the
    /// registers describe a mode that cannot be drawn, or one that the memory cannot hold.
    pub fn new(registers: &Registers, memory_bytes: u64) -> Result<Self, PictureProblem> {
        match registers {
            Registers::Bochs(bochs) => {
                let linear = Linear::of_bochs(bochs, memory_bytes)?;
                Self::checked(
                    linear.width,
                    linear.height,
                    memory_bytes,
                    Mode::Linear(Box::new(linear)),
                )
            }
            Registers::Vga(vga) => Self::of_vga(vga, memory_bytes),
        }
    }

    fn of_vga(vga: &Vga, memory_bytes: u64) -> Result<Self, PictureProblem> {
        let (width, height, mode) = if vga.vbe_is_enabled() {
            match Linear::of_vga(vga, memory_bytes)? {
                Some(linear) => (linear.width, linear.height, Mode::Linear(Box::new(linear))),
                None => Planes::with_vbe(vga),
            }
        } else if vga.is_graphics() {
            Planes::of(vga)
        } else {
            let text = Text::of(vga)?;
            (text.width(), text.height(), Mode::Text(Box::new(text)))
        };
        let mode = if vga.is_blank() { Mode::Blank } else { mode };
        Self::checked(width, height, memory_bytes, mode)
    }

    fn checked(
        width: u32,
        height: u32,
        memory_bytes: u64,
        mode: Mode,
    ) -> Result<Self, PictureProblem> {
        let pixels = u64::from(width) * u64::from(height);
        if pixels == 0 {
            return Err(PictureProblem::NoMode);
        }
        if pixels > PIXELS_MAX {
            return Err(PictureProblem::TooLarge { width: width.into(), height: height.into() });
        }
        let needs = match &mode {
            Mode::Blank => 0..0,
            Mode::Text(text) => 0..text.end(),
            Mode::Planes(planes) => 0..planes.end(),
            Mode::Linear(linear) => linear.needs(),
        };
        // Addresses wrap around at the end.
        let needs = if needs.end > memory_bytes { 0..memory_bytes } else { needs };
        Ok(Self { width, height, memory_bytes, needs, mode })
    }

    /// Returns the width in pixels.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Returns the height in pixels.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// Returns the range of the display's memory that [`Self::draw`] needs, in bytes.
    pub fn needs(&self) -> Range<u64> {
        self.needs.clone()
    }

    /// Draws the picture. `memory` has the bytes of [`Self::needs`]; missing bytes count as zeros.
    pub fn draw(&self, memory: &[u8]) -> Picture {
        let memory =
            Memory { bytes: memory, first: self.needs.start, len_bytes: self.memory_bytes };
        let line_bytes = self.width as usize * PIXEL_BYTES;
        let mut rgb = vec![0; line_bytes * self.height as usize];
        let mut canvas = Canvas { rgb: &mut rgb, line_bytes };
        match &self.mode {
            Mode::Blank => {}
            Mode::Text(text) => text.draw(&memory, &mut canvas),
            Mode::Planes(planes) => planes.draw(&memory, &mut canvas),
            Mode::Linear(linear) => linear.draw(&memory, &mut canvas),
        }
        Picture { width: self.width, height: self.height, rgb }
    }
}

/// A picture in progress. Pixels outside of it are dropped.
pub(crate) struct Canvas<'a> {
    rgb: &'a mut [u8],
    line_bytes: usize,
}

impl Canvas<'_> {
    /// Returns the pixels from line `y` to the end of the picture.
    pub fn line(&mut self, y: u32) -> &mut [[u8; PIXEL_BYTES]] {
        let start = (y as usize).saturating_mul(self.line_bytes);
        let end = start.saturating_add(self.line_bytes);
        self.rgb.get_mut(start..end).unwrap_or_default().as_chunks_mut().0
    }
}
