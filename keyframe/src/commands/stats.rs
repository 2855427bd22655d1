//! `keyframe stats`: what a store holds and what deduplication saved.

use super::StoreArg;
use crate::failure::{DONE, Outcome};
use crate::output;

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

impl Stats {
    /// Prints them.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let s = store.stats().map_err(|e| self.store.failure(&e))?;
        if self.json {
            output::json(&s)?;
            return Ok(DONE);
        }
        let b = output::bytes;
        let lines = [
            format!("checkpoints       {} in {} runs", s.checkpoints, s.runs),
            format!("full images       {} if each were stored whole", b(s.raw_bytes)),
            format!("dirty pages       {} captured", b(s.dirty_bytes)),
            format!("  zero            {} pages, free", s.zero_pages),
            format!("  deduplicated    {} pages (and {} unchanged)", s.dedup_pages, s.unchanged_pages),
            format!("  stored          {} pages in {}", s.stored_pages, b(s.stored_bytes)),
            format!("packs             {}", b(s.pack_bytes)),
            format!("page maps         {}", b(s.map_bytes)),
            format!("device state etc. {}", b(s.checkpoint_file_bytes)),
            format!("on disk           {}", b(s.total_bytes)),
            format!(
                "saved             {:.1}x by deduplication, {:.1}x by compression",
                s.dedup_ratio, s.compression_ratio
            ),
        ];
        output::print_line(&lines.join("\n"))?;
        Ok(DONE)
    }
}
