//! What a figure and a timeline have in common: their size, and their way into a file.

use crate::bitmap::{self, Bitmap};
use crate::{Error, FigureFormat};
use plotters::backend::SVGBackend;
use plotters::prelude::DrawingBackend;
use std::path::Path;

/// The size of a picture in pixels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SizePx {
    pub width: u32,
    pub height: u32,
}

/// Something that is drawn: a figure or a timeline.
pub(crate) trait Picture {
    /// Returns the title.
    fn title(&self) -> &str;

    /// Returns the size.
    fn size_px(&self) -> SizePx;

    /// Returns [`Error::Draw`] if the picture has too many parts, or contradicts itself.
    fn check(&self) -> Result<(), Error>;

    /// Draws with a backend of plotters. The error is the text of the backend's error.
    fn draw<B: DrawingBackend>(&self, backend: B) -> Result<(), String>;

    /// Draws the picture as an SVG document.
    ///
    /// Errors: [`Error::Draw`].
    fn to_svg(&self) -> Result<String, Error> {
        self.check()?;
        let mut text = String::new();
        let SizePx { width, height } = self.size_px();
        self.draw(SVGBackend::with_string(&mut text, (width, height)))
            .map_err(|problem| self.failed(problem))?;
        Ok(text)
    }

    /// Draws the picture as a PNG image.
    ///
    /// Error: [`Error::Draw`] if it fails [`Self::check`], or the library fails.
    fn to_png(&self) -> Result<Vec<u8>, Error> {
        self.check()?;
        let size = self.size_px();
        let mut pixels = vec![0; (size.width * size.height * 3) as usize];
        self.draw(Bitmap::new(&mut pixels, size)).map_err(|problem| self.failed(problem))?;
        bitmap::encode(&pixels, size).map_err(|problem| self.failed(problem))
    }

    /// Writes the picture to `path`, in the format that its extension names.
    ///
    /// Errors: [`Error::Name`] if the extension is neither `svg` nor `png`, [`Error::Draw`] as for
    /// [`Self::to_svg`], [`Error::Write`] if the file cannot be written.
    fn write_to(&self, path: &Path) -> Result<(), Error> {
        let bytes = match FigureFormat::of(path)? {
            FigureFormat::Svg => self.to_svg()?.into_bytes(),
            FigureFormat::Png => self.to_png()?,
        };
        std::fs::write(path, bytes).map_err(|source| Error::Write { path: path.into(), source })
    }

    /// Returns the error that tells `problem` of this picture.
    fn failed(&self, problem: impl Into<String>) -> Error {
        Error::Draw { title: self.title().to_owned(), problem: problem.into() }
    }
}
