//! A checkpoint's RAM as image files, over the store.

use crate::failure::{Failure, chain};
use keyframe_image::{GuestView, Image};
use keyframe_qemu::restore::RamSource;
use keyframe_qemu::stream;
use keyframe_store::Loaded;
use keyframe_units::{Page, PageIndex, PageRange};
use std::io;
use std::sync::Mutex;

/// The pages of a checkpoint.
pub struct StoredPages<'a> {
    loaded: &'a Loaded,
    /// Why the store could not be read, where it was that.
    failed: Mutex<Option<keyframe_store::Error>>,
}

/// What ends the reading of pages: the store, or whoever takes them.
enum Stop {
    Store(keyframe_store::Error),
    Taker(io::Error),
}

impl From<keyframe_store::Error> for Stop {
    fn from(error: keyframe_store::Error) -> Self {
        Self::Store(error)
    }
}

impl<'a> StoredPages<'a> {
    /// Those of `loaded`.
    pub fn new(loaded: &'a Loaded) -> Self {
        Self { loaded, failed: Mutex::default() }
    }

    /// The store's error behind the last failed read, once.
    pub fn failed(&self) -> Option<keyframe_store::Error> {
        self.failed.lock().ok().and_then(|mut failed| failed.take())
    }
}

impl RamSource for StoredPages<'_> {
    fn read(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        match self.loaded.read_pages(range, &mut |page, content| sink(page, content).map_err(Stop::Taker)) {
            Ok(()) => Ok(()),
            Err(Stop::Taker(error)) => Err(error),
            Err(Stop::Store(error)) => {
                let text = chain(&error);
                if let Ok(mut failed) = self.failed.lock() {
                    *failed = Some(error);
                }
                Err(io::Error::other(text))
            }
        }
    }
}

/// The raw image of a checkpoint's RAM.
pub fn raw(loaded: &Loaded) -> Result<Image, Failure> {
    Ok(Image::raw(&view(loaded)?))
}

/// Its core file.
pub fn core(loaded: &Loaded) -> Result<Image, Failure> {
    let view = view(loaded)?;
    let cpus = stream::cpu_registers(&loaded.device_state).map_err(|e| Failure::qemu(&e))?;
    Ok(Image::core(&view, &cpus))
}

/// Where the guest sees its RAM.
fn view(loaded: &Loaded) -> Result<GuestView, Failure> {
    let (ram, machine) = (&loaded.meta.ram, &loaded.meta.machine);
    let fail = |e: keyframe_image::Error| {
        let fix = e.fix();
        Failure { fix, ..Failure::new(format!("checkpoint {}: {}", loaded.id, chain(&e))) }
    };
    let worked_out;
    let map = if let Some(map) = &machine.guest_map {
        map
    } else {
        worked_out = GuestView::flat_map(ram, &machine.machine_type, &machine.user_command).map_err(fail)?;
        &worked_out
    };
    let shadows = stream::shadowed(&loaded.device_state).map_err(|e| Failure::qemu(&e))?;
    GuestView::new(ram, map, shadows.as_deref()).map_err(fail)
}
