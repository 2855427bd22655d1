//! The lineage of checkpoints: the order of each run, and branches by restores, clones and
//! rollbacks.
//!
//! ```text
//!   1-4     web     4 checkpoints
//!   ├─ 5-6  web     2 checkpoints           the same run continued
//!   └─ 7-9  web-1   3 checkpoints           a clone of 4, or the run after a rollback to 4
//! ```
//!
//! Invariant: every checkpoint is in the tree once. A checkpoint whose parent is not listed is a
//! root. A parent is always older, so there are no circles.

use crate::entry::Entry;
use std::collections::{BTreeMap, HashMap};

/// The titles of the columns of [`tree`].
pub const TREE_COLUMNS: [&str; 5] = ["checkpoints", "vm", "count", "taken (UTC)", "tags"];

/// Sets the parent of each entry: the checkpoint that its VM was restored from, or else the
/// previous checkpoint of its run. `None` if there is neither. The entries must be sorted by
/// checkpoint number.
pub fn set_parents(entries: &mut [Entry]) {
    let mut newest_of_run: HashMap<String, u64> = HashMap::new();
    for entry in entries {
        let before = newest_of_run.insert(entry.run.clone(), entry.id);
        entry.parent = entry.restored_from.or(before);
    }
}

/// Consecutive checkpoints of one run without a branch between them.
#[derive(Debug)]
struct Stretch<'a> {
    entries: Vec<&'a Entry>,
    children: Vec<usize>,
}

/// Draws the tree of `entries` and returns its rows, each with the cells of [`TREE_COLUMNS`]. The
/// entries must be sorted by checkpoint number, and [`set_parents`] must have set their parents.
pub fn tree(entries: &[Entry]) -> Vec<Vec<String>> {
    let (stretches, roots) = stretches(entries);
    let mut rows = Vec::new();
    // Depth first, without recursion: a chain of rollbacks may be long.
    let mut stack: Vec<(usize, String, Option<bool>)> =
        roots.iter().rev().map(|root| (*root, String::new(), None)).collect();
    while let Some((number, prefix, last)) = stack.pop() {
        let Some(stretch) = stretches.get(number) else { continue };
        let (own, below) = match last {
            None => ("", ""),
            Some(false) => ("├─ ", "│  "),
            Some(true) => ("└─ ", "   "),
        };
        rows.push(row(stretch, &format!("{prefix}{own}"), entries));
        let prefix = format!("{prefix}{below}");
        let children = stretch.children.iter().enumerate().rev();
        stack.extend(
            children
                .map(|(i, child)| (*child, prefix.clone(), Some(i + 1 == stretch.children.len()))),
        );
    }
    rows
}

fn row(stretch: &Stretch<'_>, prefix: &str, all: &[Entry]) -> Vec<String> {
    let (Some(first), Some(last)) = (stretch.entries.first(), stretch.entries.last()) else {
        return Vec::new();
    };
    let ids = if first.id == last.id {
        first.id.to_string()
    } else {
        format!("{}-{}", first.id, last.id)
    };
    let time = |e: &Entry| e.taken_at.get(..19).unwrap_or(&e.taken_at).replace('T', " ");
    let taken = if first.id == last.id {
        time(first)
    } else {
        format!("{} to {}", time(first), time(last).get(11..).unwrap_or_default())
    };
    let tags =
        stretch.entries.iter().flat_map(|e| e.tags.iter().map(|tag| format!("{tag}={}", e.id)));
    let pinned = stretch.entries.iter().filter(|e| e.pinned).map(|e| format!("(pinned)={}", e.id));
    let mut tags: Vec<String> = tags.chain(pinned).collect();
    // The parent of a branch is at the end of the line above it, unless the parent is not listed.
    if let Some(parent) =
        first.parent.filter(|parent| all.binary_search_by_key(parent, |e| e.id).is_err())
    {
        tags.push(format!("(from {parent}, not listed)"));
    }
    vec![
        format!("{prefix}{ids}"),
        first.vm.clone(),
        stretch.entries.len().to_string(),
        taken,
        tags.join(" "),
    ]
}

/// The stretches, and the numbers of those without a parent.
fn stretches(entries: &[Entry]) -> (Vec<Stretch<'_>>, Vec<usize>) {
    let mut children: BTreeMap<u64, usize> = BTreeMap::new();
    for parent in entries.iter().filter_map(|e| e.parent) {
        *children.entry(parent).or_default() += 1;
    }
    let mut all: Vec<Stretch<'_>> = Vec::new();
    let mut roots = Vec::new();
    // The stretch that ends in each checkpoint.
    let mut ends: HashMap<u64, usize> = HashMap::new();
    for entry in entries {
        let above = entry.parent.and_then(|parent| Some((parent, *ends.get(&parent)?)));
        let number = match above {
            Some((parent, above))
                if entry.restored_from.is_none() && children.get(&parent) == Some(&1) =>
            {
                above
            }
            _ => {
                let number = all.len();
                match above.and_then(|(_, above)| all.get_mut(above)) {
                    Some(stretch) => stretch.children.push(number),
                    None => roots.push(number),
                }
                all.push(Stretch { entries: Vec::new(), children: Vec::new() });
                number
            }
        };
        if let Some(stretch) = all.get_mut(number) {
            stretch.entries.push(entry);
        }
        ends.insert(entry.id, number);
    }
    (all, roots)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(id: u64, run: &str, restored_from: Option<u64>) -> Entry {
        let pause = json!({"stop": 0, "scan": 0, "copy": 0, "device_state": 0, "resume": 0});
        let mut value = json!({
            "id": id, "vm": format!("vm-{run}"), "run": run, "taken_at": "2026-01-02T03:04:05Z", "reason": "interval",
            "tags": [], "strategy": "x", "round_pages": [], "pause": pause
        });
        for key in [
            "epoch",
            "pause_ns",
            "precopy_rounds",
            "dirty_pages",
            "zero_pages",
            "dedup_pages",
            "unchanged_pages",
            "stored_pages",
            "stored_bytes",
            "map_bytes",
            "device_bytes",
            "interval_ns",
            "backlog_ns",
            "encode_ns",
            "ram_bytes",
        ] {
            value[key] = json!(0);
        }
        Entry { restored_from, ..serde_json::from_value(value).unwrap() }
    }

    fn shown(mut entries: Vec<Entry>) -> Vec<String> {
        set_parents(&mut entries);
        tree(&entries).into_iter().map(|row| row[0].clone()).collect()
    }

    #[test]
    fn runs_split_where_branches_grow() {
        let mut entries = vec![entry(1, "a", None), entry(2, "a", None), entry(3, "a", None)];
        entries.extend([entry(4, "a", Some(2)), entry(5, "a", None), entry(6, "b", Some(5))]);
        entries.extend([entry(7, "c", Some(2)), entry(8, "d", None), entry(9, "e", Some(100))]);
        let lines = shown(entries);
        assert_eq!(lines[0], "1-2");
        assert_eq!(lines, ["1-2", "├─ 3", "├─ 4-5", "│  └─ 6", "└─ 7", "8", "9"]);
    }

    #[test]
    fn a_long_chain_of_rollbacks_is_no_deep_recursion() {
        let entries: Vec<_> =
            (1..3000).map(|id| entry(id, "a", (id > 1).then_some(id - 1))).collect();
        let mut parents = entries;
        set_parents(&mut parents);
        assert_eq!(stretches(&parents).0.len(), 2999);
    }
}
