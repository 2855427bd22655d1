//! What a guest's display shows in a checkpoint, as a PNG: made from the device state and the
//! display's RAM block, whenever it is wanted.

use crate::images::{Guest, StoredPages};
use keyframe_failure::{Failure, chain};
use keyframe_qemu::restore::RamSource;
use keyframe_qemu::stream::{self, Display};
use keyframe_screen::{Picture, Screen};
use keyframe_store::Loaded;
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange, RamLayout};
use std::ops::Range;

/// How the names of displays' RAM blocks end.
const DISPLAY_BLOCKS: [&str; 2] = ["vga.vram", "bochs-display-vram"];

/// Why there is no picture.
pub enum NoPicture {
    /// The VM has no display.
    NoDisplay,
    /// It has one, and what it shows cannot be drawn.
    NotDrawn(String),
    /// The checkpoint cannot be read.
    Failed(Failure),
}

impl NoPicture {
    /// For a person; `what` is whose display it is.
    pub fn said(self, what: &str) -> Failure {
        match self {
            Self::NoDisplay => Failure::new(format!("{what} has no display"))
                .fix("its console may be on a serial line"),
            Self::NotDrawn(why) => Failure::new(format!("{what}: {why}")).fix(
                "restore it, and look at its display; -vga std is one that checkpoints can show",
            ),
            Self::Failed(failure) => failure,
        }
    }
}

/// A guest's display that can be drawn.
pub struct Shown {
    screen: Screen,
    /// The first page of its RAM block.
    first: PageIndex,
}

impl Shown {
    /// That of `guest`. Reads nothing.
    pub fn of(guest: &Guest) -> Result<Self, NoPicture> {
        let display = stream::display(&guest.device_state)
            .map_err(|e| NoPicture::Failed(Failure::qemu(&e)))?;
        let (device, name, registers) = match display {
            Display::None => return Err(NoPicture::NoDisplay),
            Display::Elsewhere { kind, why } => {
                return Err(NoPicture::NotDrawn(format!("its display is {kind}: {why}")));
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

    /// What it shows.
    pub fn picture(&self, loaded: &Loaded, guest: &Guest) -> Result<Picture, Failure> {
        Ok(self.screen.draw(&read(loaded, guest, self.first, self.screen.needs())?))
    }
}

/// Whether a VM with these RAM blocks has a display that may be drawn: known without its device
/// state.
pub fn may_be(ram: &RamLayout) -> bool {
    ram.blocks().iter().any(|block| DISPLAY_BLOCKS.iter().any(|end| block.name.ends_with(end)))
}

/// What the display of `guest` of `loaded` shows.
pub fn picture(loaded: &Loaded, guest: &Guest) -> Result<Picture, NoPicture> {
    Shown::of(guest)?.picture(loaded, guest).map_err(NoPicture::Failed)
}

/// The `bytes` of the RAM block that begins with page `first`.
fn read(
    loaded: &Loaded,
    guest: &Guest,
    first: PageIndex,
    bytes: Range<u64>,
) -> Result<Vec<u8>, Failure> {
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
    got.map_err(|e| {
        Failure::new(format!("read the display's memory of checkpoint {}: {e}", loaded.id))
    })?;
    all.drain(..(bytes.start % page_bytes) as usize);
    Ok(all)
}

/// The picture as a file.
pub fn png(picture: &Picture) -> Result<Vec<u8>, Failure> {
    let fail = |e: png::EncodingError| Failure::new(format!("write the picture: {}", chain(&e)));
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, picture.width, picture.height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    let mut writer = encoder.write_header().map_err(fail)?;
    writer.write_image_data(&picture.rgb).map_err(fail)?;
    writer.finish().map_err(fail)?;
    Ok(file)
}
