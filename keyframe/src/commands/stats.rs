//! `keyframe stats`: what a store holds and what deduplication saved.

use super::{StoreArg, warn_of_unreadable};
use crate::checkpoint_tables;
use crate::failure::{Failure, Outcome, chain};
use crate::output;
use keyframe_dashboard::growth_figure;
use keyframe_inspect::entry::{DiskSums, Entry, PauseQuantiles};
use keyframe_store::{DedupSectors, Growth, SectorBreakdown, SectorTotal, Sharing};
use serde::Serialize;
use std::path::PathBuf;

/// Show what a store holds and what deduplication saved
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  keyframe stats --store S
  keyframe stats --store S --sharing
  keyframe stats --store S --growth --plot growth.svg
  keyframe stats --store S --json --growth | jq '.growth.hours'")]
pub struct Stats {
    #[command(flatten)]
    store: StoreArg,
    /// Show which contents are shared: within an image, across checkpoints and VMs, between RAM and
    /// disks. Reads every page map
    #[arg(long)]
    sharing: bool,
    /// Show what each hour added; with --json each checkpoint, too
    #[arg(long)]
    growth: bool,
    /// Draw how the store grew, as SVG or PNG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print JSON: sizes in bytes
    #[arg(long)]
    json: bool,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    store: keyframe_store::Stats,
    pause: PauseQuantiles,
    /// Present only if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    sharing: Option<Sharing>,
    /// Present only if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    growth: Option<Growth>,
    /// Absent if no VM had disks.
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
        let sharing = self
            .sharing
            .then(|| store.sharing())
            .transpose()
            .map_err(|e| self.store.failure(&e))?;
        let growth = (self.growth || self.plot.is_some()).then(|| Growth::of(&listing.sealed));
        if let (Some(path), Some(growth)) = (&self.plot, &growth) {
            growth_figure(growth).write(path).map_err(|e| Failure::new(chain(&e)))?;
        }
        let growth = growth.filter(|_| self.growth);
        if self.json {
            let (pause, disks) = (PauseQuantiles::of(&entries), DiskSums::of(&entries));
            output::json(&Shown { store: s, pause, sharing, growth, disks })?;
            return Ok(warn_of_unreadable(&listing));
        }
        let mut lines = of_store(&s);
        lines.extend(sharing.iter().flat_map(of_sharing));
        output::print_line(&lines.join("\n"))?;
        if let Some(growth) = &growth {
            output::print_line(&format!("\n{}", hours(growth)))?;
        }
        let disks = DiskSums::of(&entries);
        if !disks.is_empty() {
            output::print_line(&format!("\n{}", checkpoint_tables::disk_table(&disks)))?;
        }
        if !entries.is_empty() {
            output::print_line(&format!("\n{}", checkpoint_tables::pause_table(&entries)))?;
        }
        Ok(warn_of_unreadable(&listing))
    }
}

/// The lines about all checkpoints and files of a store.
fn of_store(s: &keyframe_store::Stats) -> Vec<String> {
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
    lines
}

/// Returns the lines about the sectors of disks: deduplicated and stored.
fn of_sectors(sectors: &SectorBreakdown) -> Vec<String> {
    let b = output::bytes;
    let found = |label: &str, found: &DedupSectors| {
        format!(
            "  {label:<15} {} sectors, {} (whole blocks {}, single sectors {})",
            found.sectors,
            b(found.bytes),
            b(found.whole.bytes),
            b(found.parts.bytes)
        )
    };
    let plain = |label: &str, what: &SectorTotal| {
        format!("  {label:<15} {} sectors, {}", what.sectors, b(what.bytes))
    };
    vec![
        plain("zero", &sectors.zero),
        plain("unchanged", &sectors.unchanged),
        found("against disk", &sectors.against_disk),
        found("against RAM", &sectors.against_ram),
        plain("new", &sectors.not_deduplicated),
    ]
}

/// The lines about shared contents.
fn of_sharing(s: &Sharing) -> Vec<String> {
    let b = output::bytes;
    let reduction = (s.unique_bytes > 0).then(|| s.raw_bytes as f64 / s.unique_bytes as f64);
    let mut lines = vec![
        format!(
            "unique            {} of pages, {} less than all images",
            b(s.unique_bytes),
            times(reduction)
        ),
        format!(
            "  stored          {}, and {} that a prune frees",
            b(s.unique_stored_bytes),
            b(s.unused_bytes)
        ),
    ];
    for image in &s.images {
        lines.push(format!(
            "  {:<15} newest: {} pages, {} distinct; of these {} in other VMs, {} on its disks",
            image.vm,
            image.ram_pages,
            image.ram_unique_pages,
            image.with_other_vms_pages,
            image.with_disks_pages
        ));
    }
    lines
}

fn hours(growth: &Growth) -> String {
    let row = |hour: &keyframe_store::HourGrowth| {
        let from = hour.from.to_string();
        vec![
            from.get(..16).unwrap_or(&from).replace('T', " "),
            hour.checkpoints.to_string(),
            output::bytes(hour.dirty_bytes),
            output::bytes(hour.added_bytes),
        ]
    };
    let rows: Vec<_> = growth.hours.iter().map(row).collect();
    output::table(&["hour (UTC)", "checkpoints", "dirty", "added"], &rows)
}

fn times(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".into(), |r| format!("{r:.1}x"))
}
