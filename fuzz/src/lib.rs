//! What the fuzz targets have in common.

use keyframe_store::fuzzing::Files;
use std::path::{Path, PathBuf};

/// The top of the repository.
pub fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The files of the golden store, in order of their names.
pub fn golden_store() -> Files {
    let root = top().join("crates/store/tests/golden/v1");
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
