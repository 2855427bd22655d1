//! Keyframe's store through its API with the default settings, as in a run of a VM with one RAM block.

use keyframe_bench_feed::{Error, FeedSink, Result, Store, StoreReader, StoreWriter};
use keyframe_store::{LoadedCheckpoint, PruneOptions, Run, SealRequest, Writer};
use keyframe_units::{
    BlockKind, CheckpointId, PAGE_BYTES, Page, PageIndex, PageRange, RamBlock, RamLayout,
};
use std::path::Path;

/// Pages that are put at once, as in the engine.
const PUT_PAGES: usize = 8192;

/// Keyframe's store.
pub struct KeyframeStore;

impl Store for KeyframeStore {
    fn create(&self, dir: &Path, image_pages: u64) -> Result<Box<dyn StoreWriter>> {
        let ram = layout(image_pages)?;
        let store = keyframe_store::Store::init(dir).map_err(failed("make a store"))?;
        let mut writer =
            store.lock_writer("keyframe-bench store").map_err(failed("lock the store"))?;
        let run = writer.begin_run("bench", &ram).map_err(failed("begin a run"))?;
        Ok(Box::new(KeyframeWriter { run, writer, ram }))
    }

    fn settle(&self, dir: &Path) -> Result<bool> {
        let store = keyframe_store::Store::open(dir).map_err(failed("open the store"))?;
        let all = PruneOptions { recompress_bytes: u64::MAX, ..PruneOptions::default() };
        store.prune(&all, &mut |_| {}).map_err(failed("recompress the store"))?;
        Ok(true)
    }

    fn open(&self, dir: &Path) -> Result<Box<dyn StoreReader>> {
        let store = keyframe_store::Store::open(dir).map_err(failed("open the store"))?;
        let ids = store.ids().map_err(failed("list checkpoints"))?;
        Ok(Box::new(KeyframeReader { store, ids }))
    }
}

struct KeyframeWriter {
    run: Run,
    /// It holds the lock of the store.
    writer: Writer,
    ram: RamLayout,
}

impl StoreWriter for KeyframeWriter {
    fn checkpoint(&mut self, pages: &[(PageIndex, &Page)]) -> Result<()> {
        for batch in pages.chunks(PUT_PAGES) {
            self.run.put_pages(batch, &mut |_, _| ()).map_err(failed("put pages"))?;
        }
        self.run.seal(request(&self.ram)).map_err(failed("seal a checkpoint")).map(drop)
    }

    fn close(self: Box<Self>) -> Result<()> {
        let Self { run, writer, .. } = *self;
        run.finish().map_err(failed("close the store"))?;
        drop(writer);
        Ok(())
    }
}

struct KeyframeReader {
    store: keyframe_store::Store,
    ids: Vec<CheckpointId>,
}

impl StoreReader for KeyframeReader {
    fn image(&mut self, checkpoint: usize, sink: FeedSink<'_>) -> Result<()> {
        let loaded = self.load(checkpoint)?;
        let all = PageRange::new(PageIndex(0), loaded.meta.ram.len_pages());
        loaded
            .read_pages_by_all_cores(all, &mut |page, content| {
                sink(page, content);
                Ok::<_, keyframe_store::Error>(())
            })
            .map_err(failed("read a checkpoint"))
    }

    fn fill(&mut self, checkpoint: usize, out: &mut [Page]) -> Result<()> {
        self.load(checkpoint)?.read_into(PageIndex(0), out).map_err(failed("read a checkpoint"))
    }

    fn uses_all_cores(&self) -> bool {
        true
    }
}

impl KeyframeReader {
    fn load(&self, checkpoint: usize) -> Result<LoadedCheckpoint> {
        let id = self.ids.get(checkpoint).copied();
        let id = id.ok_or_else(|| {
            Error::failed("keyframe: find a checkpoint", format!("no {checkpoint}"))
        })?;
        self.store.load(id).map_err(failed("load a checkpoint"))
    }
}

/// Returns a RAM layout of one block with `pages` pages.
pub fn layout(pages: u64) -> Result<RamLayout> {
    let bytes = pages * PAGE_BYTES as u64;
    let name = "pc.ram".into();
    let block = RamBlock { name, kind: BlockKind::Backend, used_bytes: bytes, total_bytes: bytes };
    RamLayout::new(vec![block]).map_err(|e| Error::failed("lay out the RAM", e))
}

/// Returns the request of a checkpoint without device state.
pub fn request(ram: &RamLayout) -> SealRequest<'static> {
    SealRequest::of_pages(ram, "interval")
}

/// Converts an error of the store.
pub fn failed(operation: &str) -> impl FnOnce(keyframe_store::Error) -> Error {
    move |e| Error::failed(format!("keyframe: {operation}"), e)
}
