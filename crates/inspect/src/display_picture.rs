//! Draws the guest's display as it was at a checkpoint, from the device state and the display's RAM
//! block.

use crate::error::{Error, Result};
use crate::guest_memory::{Guest, StoredPages};
use keyframe_qemu::restore::RamSource;
use keyframe_qemu::stream::{self, Display};
use keyframe_screen::{Picture, Screen};
use keyframe_store::LoadedCheckpoint;
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange, RamLayout};
use std::ops::Range;

/// The ends of the names of displays' RAM blocks.
const DISPLAY_BLOCKS: [&str; 2] = ["vga.vram", "bochs-display-vram"];

/// The reason why there is no picture of a VM's display.
pub enum NoPicture {
    /// The VM has no display.
    NoDisplay,
    /// The VM has a display that Keyframe cannot draw, for this reason.
    NotDrawn(String),
    /// The checkpoint cannot be read.
    Failed(Error),
}

impl NoPicture {
    /// Converts it to an error; `vm` names the VM whose display it is.
    pub fn into_error(self, vm: &str) -> Error {
        match self {
            Self::NoDisplay => Error::NoDisplay { vm: vm.to_owned() },
            Self::NotDrawn(reason) => Error::NotDrawn { vm: vm.to_owned(), reason },
            Self::Failed(error) => error,
        }
    }
}

/// A guest's display that can be drawn.
pub struct DrawableDisplay {
    screen: Screen,
    /// The first page of its RAM block.
    first: PageIndex,
}

impl DrawableDisplay {
    /// Finds the display of `guest` in its device state. Reads no RAM.
    ///
    /// Errors: [`NoPicture::NoDisplay`] if the VM has none, [`NoPicture::NotDrawn`] if Keyframe
    /// cannot draw it, [`NoPicture::Failed`] if the device state cannot be read.
    pub fn of(guest: &Guest) -> Result<Self, NoPicture> {
        if !guest.machine.has_migration_stream() {
            return Err(NoPicture::NoDisplay);
        }
        let display =
            stream::display(&guest.device_state).map_err(|e| NoPicture::Failed(e.into()))?;
        let (device, name, registers) = match display {
            Display::None => return Err(NoPicture::NoDisplay),
            Display::Unsupported { kind, reason } => {
                return Err(NoPicture::NotDrawn(format!("its display is {kind}: {reason}")));
            }
            Display::InRam { device, block, registers } => (device, block, registers),
        };
        let not_drawn = |why: String| NoPicture::NotDrawn(format!("its display {device}: {why}"));
        let blocks = guest.ram.blocks();
        let number = blocks.iter().position(|block| block.name == name);
        let number =
            number.ok_or_else(|| not_drawn(format!("the checkpoint has no RAM block {name}")))?;
        let memory_bytes = blocks.get(number).map_or(0, |block| block.used_bytes);
        let screen =
            Screen::new(&registers, memory_bytes).map_err(|why| not_drawn(why.to_string()))?;
        Ok(Self { screen, first: guest.ram.pages_of(number).first })
    }

    /// Draws the display, reading its memory from the checkpoint.
    ///
    /// Error: [`Error::DisplayMemory`] if the checkpoint's RAM cannot be read.
    pub fn picture(&self, loaded: &LoadedCheckpoint, guest: &Guest) -> Result<Picture> {
        Ok(self.screen.draw(&read(loaded, guest, self.first, self.screen.needs())?))
    }
}

/// Returns whether a VM with these RAM blocks may have a display that can be drawn. Only the device
/// state tells for sure.
pub fn has_display_memory(ram: &RamLayout) -> bool {
    ram.blocks().iter().any(|block| DISPLAY_BLOCKS.iter().any(|end| block.name.ends_with(end)))
}

/// Draws the display of `guest` in the checkpoint `loaded`.
///
/// Errors: [`NoPicture::NoDisplay`] if the VM has none, [`NoPicture::NotDrawn`] if Keyframe cannot
/// draw it, [`NoPicture::Failed`] if the checkpoint cannot be read.
pub fn picture(loaded: &LoadedCheckpoint, guest: &Guest) -> Result<Picture, NoPicture> {
    DrawableDisplay::of(guest)?.picture(loaded, guest).map_err(NoPicture::Failed)
}

/// Reads the range `bytes` of the RAM block that begins at page `first`.
fn read(
    loaded: &LoadedCheckpoint,
    guest: &Guest,
    first: PageIndex,
    bytes: Range<u64>,
) -> Result<Vec<u8>> {
    let page_bytes = PAGE_BYTES as u64;
    let pages = bytes.start / page_bytes..bytes.end.div_ceil(page_bytes);
    let range = PageRange::new(PageIndex(first.0 + pages.start), pages.end - pages.start);
    let mut all = vec![0; (range.len_pages * page_bytes) as usize];
    let source = StoredPages::new(loaded, guest);
    let got = source.read(range, &mut |page, content| {
        let at = (page.0 - range.first.0) as usize * PAGE_BYTES;
        if let Some(place) = all.get_mut(at..at + PAGE_BYTES) {
            place.copy_from_slice(content);
        }
        Ok(())
    });
    got.map_err(|source| Error::DisplayMemory { checkpoint: loaded.id, source })?;
    all.drain(..(bytes.start % page_bytes) as usize);
    Ok(all)
}

/// Encodes a picture as a PNG file. Error: [`Error::Png`] if the encoder refuses the picture.
pub fn png(picture: &Picture) -> Result<Vec<u8>> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, picture.width, picture.height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&picture.rgb)?;
    writer.finish()?;
    Ok(file)
}
