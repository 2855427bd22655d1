//! What the fuzz targets have in common.

use keyframe_store::fuzzing::Files;
use std::path::{Path, PathBuf};

/// The top of the repository.
pub fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The golden store of that version: its files, in order of their names.
pub fn golden(version: u32) -> Files {
    let root = top().join(format!("crates/store/tests/golden/v{version}"));
    let mut files = Files::new();
    for folder in ["", "packs", "maps", "checkpoints", "tags", "worksets"] {
        let Ok(entries) = std::fs::read_dir(root.join(folder)) else { continue };
        for path in
            entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_file())
        {
            let name = path.strip_prefix(&root).expect("it was listed there").display().to_string();
            files.push((name, std::fs::read(&path).expect("a golden file")));
        }
    }
    files.sort();
    files
}

/// The store that `store_store` changes a file of: with deltas.
pub fn golden_store() -> Files {
    golden(4)
}
