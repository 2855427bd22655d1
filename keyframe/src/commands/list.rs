//! `keyframe list`: the checkpoints of a store.

use super::{StoreArg, warn_of_unreadable};
use crate::checkpoint_tables;
use crate::failure::Outcome;
use crate::output;
use keyframe_inspect::entry::Entry;
use keyframe_inspect::lineage::{self, TREE_COLUMNS};

/// List the checkpoints of a store
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Columns: epoch counts the checkpoints of one run. The dirty pages are zero, dedup (the store had their content already) or
stored. Stored also gives the bytes that they take in the store. Map is the size of the list of page locations.

Examples:
  keyframe list --store S
  keyframe list --store S --vm web --last 20
  keyframe list --store S --tree
  keyframe list --store S --json | jq '.[-1].pause'"
)]
pub struct List {
    #[command(flatten)]
    store: StoreArg,
    /// Only those of this VM
    #[arg(long, value_name = "NAME")]
    vm: Option<String>,
    /// Only the newest N
    #[arg(long, value_name = "N")]
    last: Option<usize>,
    /// Show which grew from which: runs, and the branches that restores, clones and rollbacks made
    #[arg(long)]
    tree: bool,
    /// Print a JSON array: times in ns, sizes in bytes
    #[arg(long)]
    json: bool,
}

impl List {
    /// Prints the list.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let listing = store.checkpoints().map_err(|e| self.store.failure(&e))?;
        let mut entries: Vec<Entry> = listing.sealed.iter().map(Entry::of).collect();
        lineage::set_parents(&mut entries);
        entries.retain(|entry| self.vm.as_ref().is_none_or(|vm| *vm == entry.vm));
        if let Some(last) = self.last {
            entries.drain(..entries.len().saturating_sub(last));
        }
        if self.json {
            output::json(&entries)?;
        } else if entries.is_empty() && listing.unreadable.is_empty() {
            output::print_line(
                "no checkpoints; take some with: keyframe run --store STORE -- qemu-system-x86_64 ...",
            )?;
        } else if self.tree {
            output::print_line(&output::table(&TREE_COLUMNS, &lineage::tree(&entries)))?;
        } else {
            output::print_line(&checkpoint_tables::table(&entries))?;
        }
        Ok(warn_of_unreadable(&listing))
    }
}
