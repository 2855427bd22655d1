//! The cache of parts of packs, on this host.

use super::client::ListedObject;
use crate::cache::{self, CacheLimits, PieceKey};
use std::path::PathBuf;
use std::sync::Arc;

const FOLDER: &str = "objects";
const DISK_BYTES_MAX: u64 = 1 << 30;
const MEMORY_BYTES_MAX: usize = 64 << 20;

/// A cache of parts of packs that were read from object storage.
#[derive(Debug)]
pub struct PartCache {
    pieces: cache::PieceCache,
    /// The place of the store; parts of other stores have the same names.
    place: String,
}

impl PartCache {
    /// Creates the cache in the directory `folder`, or with `None` in memory alone. `place` is a
    /// name of the store that is the same on all hosts.
    pub fn new(folder: Option<PathBuf>, place: &str) -> Self {
        let limits = CacheLimits::of_environment(DISK_BYTES_MAX, MEMORY_BYTES_MAX);
        Self { pieces: cache::PieceCache::new(folder, FOLDER, limits), place: place.to_owned() }
    }

    fn key(&self, part: &ListedObject) -> PieceKey {
        let ListedObject { name, len_bytes, tag } = part;
        PieceKey::of(&[
            self.place.as_bytes(),
            name.as_bytes(),
            tag.as_bytes(),
            &len_bytes.to_le_bytes(),
        ])
    }

    /// Returns the part `part`, if it is cached.
    pub fn get(&self, part: &ListedObject) -> Option<Arc<Vec<u8>>> {
        self.pieces.get(self.key(part)).filter(|bytes| bytes.len() as u64 == part.len_bytes)
    }

    /// Caches a part. A part without an entity tag is not cached, because it could be another one.
    pub fn put(&self, part: &ListedObject, bytes: &Arc<Vec<u8>>) {
        if !part.tag.is_empty() && bytes.len() as u64 == part.len_bytes {
            self.pieces.put(self.key(part), bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(tag: &str, len_bytes: u64) -> ListedObject {
        ListedObject { name: "packs/00000001.pack/000000000000".into(), len_bytes, tag: tag.into() }
    }

    #[test]
    fn a_part_is_found_by_place_tag_and_length() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = Arc::new(vec![7; 1000]);
        let at = |place| PartCache::new(Some(dir.path().to_path_buf()), place);
        at("here").put(&part("a", 1000), &bytes);
        at("here").put(&part("", 1000), &bytes);
        at("here").put(&part("c", 999), &bytes);
        assert_eq!(at("here").get(&part("a", 1000)), Some(bytes));
        assert_eq!(at("there").get(&part("a", 1000)), None);
        for other in [part("b", 1000), part("a", 999), part("", 1000), part("c", 999)] {
            assert_eq!(at("here").get(&other), None, "{other:?}");
        }
    }
}
