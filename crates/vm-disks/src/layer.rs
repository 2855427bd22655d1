//! The layer between the image and the overlay of a restored VM's disk: the blocks of the
//! checkpoint.

use keyframe_disk::{Block, Content, DiskBlock, Error, Layer, Result};
use keyframe_store::{BlockContent, LoadedDisks};
use keyframe_store_keys::KeyArg;
use keyframe_units::{CheckpointId, PageIndex, PageRange};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;

/// Names the blocks that the disk server puts between image and overlay.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayerSource {
    /// The path or address of the store.
    pub store: PathBuf,
    /// The checkpoint.
    pub checkpoint: CheckpointId,
    /// The disk's number in the checkpoint, from 0.
    pub disk: usize,
}

/// Opens layers. The disks of one checkpoint share the memory that it is loaded into.
#[derive(Default)]
pub struct Layers {
    last: RefCell<Option<(PathBuf, Arc<LoadedDisks>)>>,
}

impl Layers {
    /// Opens the layer that `text`, a [`LayerSource`] as JSON, names.
    ///
    /// Errors: the text is malformed, the store cannot be read, the checkpoint has no such disk.
    pub fn open(&self, text: &str) -> Result<Box<dyn Layer>> {
        let refused = |problem: String| Error::Server { problem, fix: None };
        let source: LayerSource =
            serde_json::from_str(text).map_err(|e| refused(format!("no layer {text:?}: {e}")))?;
        let known = self.last.borrow().clone();
        let disks = match known {
            Some((store, disks)) if store == source.store && disks.id == source.checkpoint => disks,
            _ => {
                let loaded = KeyArg::from_environment()
                    .open(&source.store)
                    .and_then(|store| store.load_disks(source.checkpoint));
                Arc::new(loaded.map_err(|e| refused(keyframe_units::error_chain(&e)))?)
            }
        };
        *self.last.borrow_mut() = Some((source.store, Arc::clone(&disks)));
        let id = disks.id;
        let layer = StoredLayer::of(disks, source.disk);
        let layer =
            layer.ok_or_else(|| refused(format!("checkpoint {id} has no disk {}", source.disk)))?;
        Ok(Box::new(layer))
    }
}

/// The blocks of one disk of a checkpoint.
pub struct StoredLayer {
    disks: Arc<LoadedDisks>,
    blocks: PageRange,
}

impl StoredLayer {
    /// Creates the layer of disk number `disk`. Returns `None` if the checkpoint has no such disk.
    pub fn of(disks: Arc<LoadedDisks>, disk: usize) -> Option<Self> {
        let blocks = disks.meta.blocks_of(disk)?;
        Some(Self { disks, blocks })
    }
}

impl Layer for StoredLayer {
    fn read_block(&self, block: DiskBlock, into: &mut Block) -> Result<Content> {
        if block.0 >= self.blocks.len_pages {
            return Ok(Content::Absent);
        }
        let read = self.disks.read_block(PageIndex(self.blocks.first.0 + block.0), into);
        match read
            .map_err(|e| Error::Server { problem: keyframe_units::error_chain(&e), fix: None })?
        {
            BlockContent::Base => Ok(Content::Absent),
            BlockContent::Zero => Ok(Content::Zero),
            BlockContent::Data => Ok(Content::Data),
        }
    }

    fn next_block(&self, from: DiskBlock) -> Result<Option<DiskBlock>> {
        if from.0 >= self.blocks.len_pages {
            return Ok(None);
        }
        let next = self.disks.next_block(PageIndex(self.blocks.first.0 + from.0));
        Ok(next.filter(|b| *b < self.blocks.end()).map(|b| DiskBlock(b.0 - self.blocks.first.0)))
    }
}
