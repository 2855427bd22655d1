//! The clones of images: copies that the file system makes in the pause of a checkpoint, beside the
//! image. A checkpoint with a clone holds no blocks of that disk: without the file the disk is lost.
//!
//! ```text
//!   .disk.qcow2.keyframe-1a2b3c4d-web-17      image, begin of the store's id, VM, number
//! ```

use crate::base_image::require_unchanged;
use keyframe_store::{BaseFile, BaseMeta, CheckpointId, DiskMeta};
use serde::Serialize;
use std::path::Path;

const MARK: &str = ".keyframe-";
/// The length of the begin of a store's id in a name.
const STORE_BYTES: usize = 8;

/// Returns true if the checkpoint of `disk` has a clone of it, and no blocks. The disk of a bundle has
/// the path of a clone, but its blocks are in the store.
pub fn has_clone(disk: &DiskMeta) -> bool {
    !disk.left_out && !disk.base.is_blank() && is_clone(&disk.base.path)
}

/// Returns true if `path` has the name of a clone that a checkpoint of any store made.
fn is_clone(path: &str) -> bool {
    let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy();
    let is_store = |rest: &str| {
        let (store, rest) = rest.split_at_checked(STORE_BYTES).unwrap_or_default();
        rest.starts_with('-') && store.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    name.starts_with('.')
        && name.match_indices(MARK).any(|(at, _)| is_store(&name[at + MARK.len()..]))
}

/// Returns true if `path` has the name of a clone that a checkpoint of the store `store` made.
pub fn is_clone_of(path: &str, store: &str) -> bool {
    let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy();
    name.starts_with('.') && name.contains(&format!("{MARK}{store:.STORE_BYTES$}-"))
}

/// A clone that a checkpoint names and that is not as it was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnusableClone {
    /// The checkpoint.
    pub checkpoint: CheckpointId,
    /// The disk.
    pub disk: String,
    /// The path of the clone.
    pub path: String,
    /// What is wrong with it.
    pub problem: String,
}

/// Returns the clones that `checkpoints`, each with its disks, name and that are missing, have
/// changed or cannot be read on this host.
pub fn unusable_clones<'a>(
    checkpoints: impl IntoIterator<Item = (CheckpointId, &'a [DiskMeta])>,
) -> Vec<UnusableClone> {
    let disks = checkpoints.into_iter().flat_map(|(checkpoint, disks)| {
        disks.iter().filter(|disk| !disk.left_out).map(move |disk| (checkpoint, disk))
    });
    let files = disks.flat_map(|(checkpoint, disk)| {
        let clones = disk.base.files.iter().filter(|file| is_clone(&file.path));
        clones.map(move |file| (checkpoint, &disk.name, file))
    });
    let unusable = |(checkpoint, disk, file): (_, &String, &BaseFile)| {
        let alone = BaseMeta { files: vec![file.clone()], ..BaseMeta::default() };
        let problem = require_unchanged(&alone).err()?.to_string();
        Some(UnusableClone { checkpoint, disk: disk.clone(), path: file.path.clone(), problem })
    };
    files.filter_map(unusable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base_image::describe;
    use keyframe_disk::ImageFormat;

    #[test]
    fn a_clone_is_told_by_its_name() {
        for clone in ["/d/.a.img.keyframe-1a2b3c4d-web-17", ".keyframe-.keyframe-00000000-a-1"] {
            assert!(is_clone(clone), "{clone}");
        }
        let others = [
            "/d/a.img",
            "/d/a.img.keyframe-1a2b3c4d-w-1",
            ".a.keyframe-try",
            ".a.keyframe-é2b3c4d-w",
            "",
        ];
        for other in others {
            assert!(!is_clone(other), "{other}");
        }
        let clone = "/d/.a.img.keyframe-1a2b3c4d-web-17";
        assert!(is_clone_of(clone, "1a2b3c4d5e6f") && !is_clone_of(clone, "2a2b3c4d5e6f"));
    }

    #[test]
    fn a_clone_that_is_missing_or_has_another_size_is_found_and_an_image_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, [7; 8192]).unwrap();
            describe(&path, ImageFormat::Raw).unwrap()
        };
        let bases: Vec<_> =
            (1..4).map(|n| make(&format!(".a.img.keyframe-1a2b3c4d-web-{n}"))).collect();
        let image = make("a.img");
        let disk = |base: &BaseMeta| DiskMeta { base: base.clone(), ..DiskMeta::default() };
        let disks: Vec<_> = bases.iter().map(|base| [disk(base), disk(&image)]).collect();
        let all = || (1..4).map(CheckpointId).zip(disks.iter().map(|disks| &disks[..]));
        assert_eq!(unusable_clones(all()), []);
        assert!(has_clone(&disks[0][0]) && !has_clone(&disks[0][1]));
        let whole = BaseMeta::of_whole_image(bases[0].path.clone());
        assert!(!has_clone(&disk(&whole)));
        std::fs::remove_file(&bases[0].path).unwrap();
        std::fs::write(&bases[2].path, [7; 4096]).unwrap();
        std::fs::remove_file(&image.path).unwrap();
        let found = unusable_clones(all());
        let places: Vec<_> = found.iter().map(|one| (one.checkpoint.0, &*one.path)).collect();
        assert_eq!(places, [(1, &*bases[0].path), (3, &*bases[2].path)]);
        assert!(found[0].problem.contains("No such file"), "{}", found[0].problem);
        assert!(found[1].problem.contains("4096"), "{}", found[1].problem);
    }
}
