//! Records the checkpoint that a VM was restored from on QEMU's command line. The VM's next engine
//! reads it there.
//!
//! ```text
//!   -add-fd fd=N,set=19270,opaque=keyframe-from:STORE:CHECKPOINT
//! ```
//!
//! QEMU keeps the word and does not read it. `restored_line` removes it before a line is run again.

use crate::options::{self, keys, value_of};
use keyframe_machine::Lineage;
use keyframe_units::CheckpointId;

/// Start of the word. Like all of Keyframe's marks it begins with `keyframe`.
const MARK: &str = "keyframe-from:";

/// Returns the text with which `lineage` is written on QEMU's command line, as the value of an
/// `opaque` key.
pub fn lineage_mark(lineage: &Lineage) -> String {
    format!("{MARK}{}:{}", options::escape(&lineage.store), lineage.checkpoint.0)
}

/// Returns the checkpoint that the VM with command line `words`, the binary first, was restored
/// from; `None` if it was not restored.
pub fn lineage_of(words: &[String]) -> Option<Lineage> {
    let arguments = options::parse(words.get(1..)?).ok()?;
    let added = arguments.iter().filter(|a| a.name() == "add-fd");
    added.rev().find_map(|a| parse(value_of(&keys(a.value(), ""), "opaque")?))
}

/// True if `added` is the value of an `-add-fd` with a lineage.
pub(crate) fn is_lineage(added: &str) -> bool {
    value_of(&keys(added, ""), "opaque").is_some_and(|mark| mark.starts_with(MARK))
}

fn parse(mark: &str) -> Option<Lineage> {
    let (store, number) = mark.strip_prefix(MARK)?.rsplit_once(':')?;
    Some(Lineage { store: store.into(), checkpoint: CheckpointId(number.parse().ok()?) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_mark_is_read_back_and_other_words_are_not() {
        let lineage = Lineage { store: "0af3".into(), checkpoint: CheckpointId(12) };
        assert_eq!(parse(&lineage_mark(&lineage)), Some(lineage));
        for other in
            ["keyframe", "keyframe-engine:1:2:3", "keyframe-from:x", "keyframe-from:x:y", "web"]
        {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
