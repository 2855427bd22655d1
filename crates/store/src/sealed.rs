//! A sealed checkpoint, as listings show it.

use keyframe_store_backend::layout;
use keyframe_store_format::meta::Meta;
use keyframe_units::CheckpointId;
use serde::{Deserialize, Serialize};

/// A sealed checkpoint: complete, verifiable, immutable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sealed {
    /// Its number in the store.
    pub id: CheckpointId,
    /// Its description.
    pub meta: Meta,
    /// The tags that point to it now, in alphabetical order.
    pub tags: Vec<String>,
}

impl Sealed {
    /// Returns true if the checkpoint is pinned: no retention rule removes it.
    pub fn is_pinned(&self) -> bool {
        self.tags.contains(&layout::pin(self.id))
    }

    /// Splits the tags of checkpoint `id`: returns those that the user gave, and true if it is
    /// pinned.
    pub fn split_tags(id: CheckpointId, tags: &[String]) -> (Vec<String>, bool) {
        let pin = layout::pin(id);
        (tags.iter().filter(|tag| **tag != pin).cloned().collect(), tags.contains(&pin))
    }

    /// Returns the tags that the user gave, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        let pin = layout::pin(self.id);
        self.tags.iter().filter(move |tag| **tag != pin)
    }
}
