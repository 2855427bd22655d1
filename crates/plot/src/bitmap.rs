//! Draws bitmaps with plotters' bitmap backend, and text in a built-in font, so that the machine
//! needs no font.

use crate::SizePx;
use noto_sans_mono_bitmap::{
    FontWeight, RasterHeight, RasterizedChar, get_raster, get_raster_width,
};
use plotters::prelude::BitMapBackend;
use plotters_backend::text_anchor::{HPos, VPos};
use plotters_backend::{
    BackendColor, BackendCoord, BackendStyle, BackendTextStyle, DrawingBackend, DrawingErrorKind,
};

const WEIGHT: FontWeight = FontWeight::Regular;
const HEIGHT: RasterHeight = RasterHeight::Size16;

/// An image in memory with three bytes for each pixel.
pub(crate) struct Bitmap<'a>(BitMapBackend<'a>);

impl<'a> Bitmap<'a> {
    /// Draws into `pixels`, which must have `width * height * 3` bytes.
    pub fn new(pixels: &'a mut [u8], size: SizePx) -> Self {
        Self(BitMapBackend::with_buffer(pixels, (size.width, size.height)))
    }
}

/// Encodes `pixels` as a PNG file.
pub(crate) fn encode(pixels: &[u8], size: SizePx) -> Result<Vec<u8>, String> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, size.width, size.height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().map_err(|e| e.to_string())?;
    writer.write_image_data(pixels).map_err(|e| e.to_string())?;
    writer.finish().map_err(|e| e.to_string())?;
    Ok(file)
}

/// Returns the shape of a character, or that of `?` if the font lacks it.
fn glyph(c: char) -> Option<RasterizedChar> {
    get_raster(c, WEIGHT, HEIGHT).or_else(|| get_raster('?', WEIGHT, HEIGHT))
}

fn text_size_px(text: &str) -> (u32, u32) {
    (text.chars().count() as u32 * get_raster_width(WEIGHT, HEIGHT) as u32, HEIGHT.val() as u32)
}

type Drawn<B> = Result<(), DrawingErrorKind<<B as DrawingBackend>::ErrorType>>;

impl<'a> DrawingBackend for Bitmap<'a> {
    type ErrorType = <BitMapBackend<'a> as DrawingBackend>::ErrorType;

    fn get_size(&self) -> (u32, u32) {
        self.0.get_size()
    }

    fn ensure_prepared(&mut self) -> Drawn<Self> {
        self.0.ensure_prepared()
    }

    fn present(&mut self) -> Drawn<Self> {
        self.0.present()
    }

    fn draw_pixel(&mut self, point: BackendCoord, color: BackendColor) -> Drawn<Self> {
        self.0.draw_pixel(point, color)
    }

    fn draw_line<S: BackendStyle>(
        &mut self,
        from: BackendCoord,
        to: BackendCoord,
        style: &S,
    ) -> Drawn<Self> {
        self.0.draw_line(from, to, style)
    }

    fn draw_rect<S: BackendStyle>(
        &mut self,
        upper_left: BackendCoord,
        bottom_right: BackendCoord,
        style: &S,
        fill: bool,
    ) -> Drawn<Self> {
        self.0.draw_rect(upper_left, bottom_right, style, fill)
    }

    fn draw_text<S: BackendTextStyle>(
        &mut self,
        text: &str,
        style: &S,
        pos: BackendCoord,
    ) -> Drawn<Self> {
        let color = style.color();
        let (width, height) = text_size_px(text);
        let (width, height) = (width as i32, height as i32);
        let left = match style.anchor().h_pos {
            HPos::Left => 0,
            HPos::Center => -width / 2,
            HPos::Right => -width,
        };
        let top = match style.anchor().v_pos {
            VPos::Top => 0,
            VPos::Center => -height / 2,
            VPos::Bottom => -height,
        };
        let turn = style.transform();
        for (index, glyph) in text.chars().filter_map(glyph).enumerate() {
            for (row, line) in glyph.rows().enumerate() {
                for (column, intensity) in line.iter().enumerate().filter(|(_, i)| **i > 0) {
                    let x = left + (index * glyph.width() + column) as i32;
                    let (dx, dy) = turn.transform(x, top + row as i32);
                    let alpha = color.alpha * f64::from(*intensity) / 255.0;
                    self.0.draw_pixel((pos.0 + dx, pos.1 + dy), BackendColor { alpha, ..color })?;
                }
            }
        }
        Ok(())
    }

    fn estimate_text_size<S: BackendTextStyle>(
        &self,
        text: &str,
        _style: &S,
    ) -> Result<(u32, u32), DrawingErrorKind<Self::ErrorType>> {
        Ok(text_size_px(text))
    }
}
