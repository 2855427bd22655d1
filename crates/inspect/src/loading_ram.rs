//! The RAM of a checkpoint whose page map is still being read: QEMU starts meanwhile.

use crate::guest_memory::ReadStop;
use keyframe_qemu::restore::RamSource;
use keyframe_store::{LoadedCheckpoint, UnmappedCheckpoint};
use keyframe_units::{Page, PageIndex, PageRange, error_chain};
use std::io;
use std::sync::{Arc, Mutex, OnceLock};

/// A [`RamSource`] over all pages of a checkpoint. A thread of its own reads the page map.
pub struct LoadingRam {
    loaded: OnceLock<Option<LoadedCheckpoint>>,
    on_read: Box<dyn Fn(u64) + Send + Sync>,
    /// The store's first error.
    failed: Mutex<Option<keyframe_store::Error>>,
}

impl LoadingRam {
    /// Begins to read the page map of `head`. The thread that reads it calls `prepare_thread`
    /// first. After each range that QEMU has read, `on_read` gets the range's length in bytes.
    ///
    /// Error: the thread cannot be started.
    pub fn new(
        head: UnmappedCheckpoint,
        prepare_thread: fn(),
        on_read: impl Fn(u64) + Send + Sync + 'static,
    ) -> io::Result<Arc<Self>> {
        let (loaded, failed) = (OnceLock::new(), Mutex::default());
        let this = Arc::new(Self { loaded, on_read: Box::new(on_read), failed });
        let reading = Arc::clone(&this);
        std::thread::Builder::new().name("page-map".into()).spawn(move || {
            prepare_thread();
            let loaded = head.load().map_err(|error| reading.fail(error)).ok();
            let _ = reading.loaded.set(loaded);
        })?;
        Ok(this)
    }

    /// Waits for the page map, and returns the checkpoint. Error: the map cannot be read.
    pub fn loaded(&self) -> io::Result<&LoadedCheckpoint> {
        self.loaded
            .wait()
            .as_ref()
            .ok_or_else(|| io::Error::other("the checkpoint's page map cannot be read"))
    }

    /// Returns the store's first error, and forgets it; `None` if there is none.
    pub fn failed(&self) -> Option<keyframe_store::Error> {
        self.failed.lock().ok().and_then(|mut failed| failed.take())
    }

    fn fail(&self, error: keyframe_store::Error) -> io::Error {
        let text = error_chain(&error);
        if let Ok(mut failed) = self.failed.lock() {
            failed.get_or_insert(error);
        }
        io::Error::other(text)
    }

    fn ended(&self, read: Result<(), ReadStop>) -> io::Result<()> {
        match read {
            Ok(()) => Ok(()),
            Err(ReadStop::Receiver(error)) => Err(error),
            Err(ReadStop::Store(error)) => Err(self.fail(error)),
        }
    }
}

impl RamSource for LoadingRam {
    fn read(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        let read = self.loaded()?.read_pages(range, &mut |page, content| {
            sink(page, content).map_err(ReadStop::Receiver)
        });
        (self.on_read)(range.len_bytes());
        self.ended(read)
    }

    fn read_some(
        &self,
        pages: &[PageIndex],
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        self.ended(
            self.loaded()?.read_some(pages, &mut |page, content| {
                sink(page, content).map_err(ReadStop::Receiver)
            }),
        )
    }

    fn wanted_first(&self) -> Vec<PageIndex> {
        self.loaded().map(LoadedCheckpoint::expected_first).unwrap_or_default()
    }
}
