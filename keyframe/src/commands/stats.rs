//! `keyframe stats`: what a store holds and what deduplication saved.

use super::{StoreArg, warn_of_unreadable};
use crate::failure::Outcome;
use crate::output;
use crate::report::{self, DiskSums, Entry, PauseQuantiles};
use keyframe_store::{Breakdown, Found, Sectors};
use serde::Serialize;

/// Show what a store holds and what deduplication saved
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  keyframe stats --store S
  keyframe stats --store S --json")]
pub struct Stats {
    #[command(flatten)]
    store: StoreArg,
    /// Print JSON: sizes in bytes
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    store: keyframe_store::Stats,
    pause: PauseQuantiles,
    /// Absent where no VM had disks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    disks: Vec<DiskSums>,
}

impl Stats {
    /// Prints them.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let s = store.stats().map_err(|e| self.store.failure(&e))?;
        let listing = store.checkpoints().map_err(|e| self.store.failure(&e))?;
        let entries: Vec<Entry> = listing.sealed.iter().map(Entry::of).collect();
        if self.json {
            let (pause, disks) = (PauseQuantiles::of(&entries), DiskSums::of(&entries));
            output::json(&Shown { store: s, pause, disks })?;
            return Ok(warn_of_unreadable(&listing));
        }
        let b = output::bytes;
        let mut lines = vec![
            format!("checkpoints       {} in {} runs", s.checkpoints, s.runs),
            format!("full images       {} if each were stored whole", b(s.raw_bytes)),
            format!("dirty pages       {} captured", b(s.dirty_bytes)),
            format!("  zero            {} pages, free", s.zero_pages),
            format!(
                "  deduplicated    {} pages, {} of them against disks (and {} unchanged)",
                s.dedup_pages, s.dedup_disk_pages, s.unchanged_pages
            ),
            format!("  stored          {} pages in {}", s.stored_pages, b(s.stored_bytes)),
            format!(
                "disks             {} written, stored in {}",
                b(s.disk_dirty_bytes),
                b(s.disk_stored_bytes)
            ),
        ];
        if s.disk_dirty_bytes > 0 {
            lines.extend(of_sectors(&s.disk_sectors));
        }
        lines.extend([
            format!("packs             {}", b(s.pack_bytes)),
            format!("page maps         {}", b(s.map_bytes)),
            format!("device state etc. {}", b(s.checkpoint_file_bytes)),
            format!("on disk           {}", b(s.total_bytes)),
            format!(
                "saved             {} by deduplication, {} by compression, {} against full images",
                times(s.dedup_ratio),
                times(s.compression_ratio),
                times(s.reduction_ratio)
            ),
        ]);
        output::print_line(&lines.join("\n"))?;
        let disks = DiskSums::of(&entries);
        if !disks.is_empty() {
            output::print_line(&format!("\n{}", report::disk_table(&disks)))?;
        }
        if !entries.is_empty() {
            output::print_line(&format!("\n{}", report::pause_table(&entries)))?;
        }
        Ok(warn_of_unreadable(&listing))
    }
}

/// What became of the sectors of disks.
fn of_sectors(sectors: &Breakdown) -> Vec<String> {
    let b = output::bytes;
    let found = |label: &str, found: &Found| {
        format!(
            "  {label:<15} {} sectors, {} (whole blocks {}, single sectors {})",
            found.sectors,
            b(found.bytes),
            b(found.whole.bytes),
            b(found.parts.bytes)
        )
    };
    let plain =
        |label: &str, what: &Sectors| format!("  {label:<15} {} sectors, {}", what.sectors, b(what.bytes));
    let mut lines = vec![
        plain("zero", &sectors.zero),
        plain("unchanged", &sectors.unchanged),
        found("against disk", &sectors.against_disk),
        found("against RAM", &sectors.against_ram),
        plain("new", &sectors.not_deduplicated),
    ];
    if sectors.not_counted.sectors > 0 {
        lines.push(plain("not counted", &sectors.not_counted) + ", by an early version");
    }
    lines
}

fn times(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".into(), |r| format!("{r:.1}x"))
}
