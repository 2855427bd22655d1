//! Paths as processes in other directories, and on other hosts, need them.

use super::Failure;
use keyframe_store::backend::is_remote;
use std::path::{Path, PathBuf};

/// Returns `path` as a word that a shell takes as it is.
pub fn shell(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+=:,@%".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Returns the absolute form of a path.
pub fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|e| Failure::new(format!("resolve {}: {e}", path.display())))
}

/// The same of a store, which need not be a path.
pub fn absolute_store(place: &Path) -> Result<PathBuf, Failure> {
    if is_remote(place) { Ok(place.to_owned()) } else { absolute(place) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_gets_back_the_path_that_a_word_was_made_of() {
        for path in ["/a/b.c", "a b", "it's", "$HOME`ls`", "a\nb", "日本", "", "\"x\""] {
            let line = format!("printf %s {}", shell(Path::new(path)));
            let said = std::process::Command::new("sh").args(["-c", &line]).output();
            assert_eq!(said.expect("sh").stdout, path.as_bytes(), "{line}");
        }
    }
}
