//! Where a restored VM came from, written where its next engine finds it: on QEMU's own line.
//!
//! ```text
//!   -add-fd fd=N,set=19270,opaque=keyframe-from:STORE:CHECKPOINT
//! ```
//!
//! QEMU carries the word along and knows nothing of it; `restore::carried` leaves it out of what is
//! run again.

use crate::Vm;
use crate::options::{self, keys, value_of};
use keyframe_units::CheckpointId;
use keyframe_vmm::Lineage;

/// What begins the word. Like all of ours it begins with `keyframe`.
const MARK: &str = "keyframe-from:";

pub(crate) fn mark(lineage: &Lineage) -> String {
    format!("{MARK}{}:{}", options::escape(&lineage.store), lineage.checkpoint.0)
}

fn parse(mark: &str) -> Option<Lineage> {
    let (store, number) = mark.strip_prefix(MARK)?.rsplit_once(':')?;
    Some(Lineage { store: store.into(), checkpoint: CheckpointId(number.parse().ok()?) })
}

impl Vm {
    /// The checkpoint that it was brought to life from, by its line.
    pub fn lineage(&self) -> Option<Lineage> {
        let arguments = options::parse(self.full_command().get(1..)?).ok()?;
        let added = arguments.iter().filter(|a| a.name() == "add-fd");
        added.rev().find_map(|a| parse(value_of(&keys(a.value(), ""), "opaque")?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again_and_nothing_else() {
        let lineage = Lineage { store: "0af3".into(), checkpoint: CheckpointId(12) };
        assert_eq!(parse(&mark(&lineage)), Some(lineage));
        for other in
            ["keyframe", "keyframe-engine:1:2:3", "keyframe-from:x", "keyframe-from:x:y", "web"]
        {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
