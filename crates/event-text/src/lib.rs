//! Turns the typed events of sessions, of replays, and of VMs with a standby into lines for users.
//!
//! ```text
//!   Event, FailoverEvent, ReplayEvent ──line──▶ importance, text ──▶ the program prints it, or not
//! ```
//!
//! A program that runs sessions tells its users the same as `keyframe` with these lines. The crate
//! prints nothing.

pub mod failover;
pub mod replay;
pub mod session;

use std::path::Path;

/// The importance of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Importance {
    /// Shown only with `--verbose`.
    Detail,
    /// Shown unless `--quiet` is given.
    Usual,
    /// Always shown.
    Always,
}

/// Returns `path` as a word that a shell takes as it is.
pub fn shell_word(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+=:,@%".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_gets_back_the_path_that_a_word_was_made_of() {
        for path in ["/a/b.c", "a b", "it's", "$HOME`ls`", "a\nb", "日本", "", "\"x\""] {
            let line = format!("printf %s {}", shell_word(Path::new(path)));
            let said = std::process::Command::new("sh").args(["-c", &line]).output();
            assert_eq!(said.expect("sh").stdout, path.as_bytes(), "{line}");
        }
    }
}
