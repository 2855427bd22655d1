//! `keyframe diff`: what differs between two checkpoints.

use super::StoreArg;
use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use crate::progress;
use keyframe_store::{Diff as Found, RegionDiff};
use keyframe_units::PAGE_BYTES;

/// Show what differs between two checkpoints, by RAM block and disk
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The command compares the contents of two checkpoints of one store, also of different runs and VMs. It compares RAM
blocks and disks that have the same name. Of a disk it compares the blocks that the guest wrote under Keyframe.
\"unknown\" counts blocks that one checkpoint has and the other leaves to the image beneath.

Examples:
  keyframe diff --store S 12 13
  keyframe diff --store S before-upgrade latest --json | jq '.ram[].changed_bytes'"
)]
pub struct Diff {
    #[command(flatten)]
    store: StoreArg,
    /// A checkpoint: number, tag, or `latest`
    first: String,
    /// The one to compare it with
    second: String,
    /// Print JSON: pages of 4 KiB, sectors of 512 bytes
    #[arg(long)]
    json: bool,
    /// No progress
    #[arg(long, short)]
    quiet: bool,
}

impl Diff {
    /// Compares and prints.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let resolve = |name: &str| store.resolve(name).map_err(|e| self.store.failure(&e));
        let (first, second) = (resolve(&self.first)?, resolve(&self.second)?);
        let bar = progress::bar(self.quiet, None, "{msg} {wide_bar} {bytes}/{total_bytes} {eta}");
        bar.set_message("comparing");
        let mut progress = |done_pages: u64, total_pages: u64| {
            bar.set_length(total_pages * PAGE_BYTES as u64);
            bar.set_position(done_pages * PAGE_BYTES as u64);
        };
        let diff = store.diff(first, second, &mut progress).map_err(|e| self.store.failure(&e))?;
        bar.finish_and_clear();
        if self.json {
            output::json(&diff)?;
        } else {
            print(&diff)?;
        }
        Ok(DONE)
    }
}

fn print(diff: &Found) -> Result<(), Failure> {
    let header = ["", "pages", "changed", "from zero", "to zero", "sectors", "bytes"];
    let row = |region: &RegionDiff| {
        let name =
            if region.name.is_empty() { "(unnamed)".to_owned() } else { region.name.clone() };
        let numbers = [
            region.pages,
            region.changed_pages,
            region.from_zero_pages,
            region.to_zero_pages,
            region.changed_sectors,
            region.changed_bytes,
        ];
        std::iter::once(name).chain(numbers.map(|n| n.to_string())).collect::<Vec<_>>()
    };
    let rows: Vec<_> = diff.ram.iter().chain(&diff.disks).map(row).collect();
    output::print_line(&output::table(&header, &rows))?;
    for region in diff.ram.iter().chain(&diff.disks) {
        for note in notes(region, diff) {
            output::print_line(&format!("{}: {note}", region.name))?;
        }
    }
    let [first, second] = diff.device_bytes;
    let devices = if diff.same_devices { "the same" } else { "not the same" };
    output::print_line(&format!("devices: {devices} ({first} and {second} bytes)"))
}

fn notes(region: &RegionDiff, diff: &Found) -> Vec<String> {
    let alone = |id, pages: u64| format!("{pages} pages are in checkpoint {id} alone");
    let mut notes = Vec::new();
    if region.only_first_pages > 0 {
        notes.push(alone(diff.first, region.only_first_pages));
    }
    if region.only_second_pages > 0 {
        notes.push(alone(diff.second, region.only_second_pages));
    }
    if region.unknown_pages > 0 {
        notes.push(format!(
            "{} blocks unknown: one of the two leaves them to the image",
            region.unknown_pages
        ));
    }
    if region.other_image {
        notes.push(
            "the image beneath is not the same one; what both leave to it was not compared".into(),
        );
    }
    notes
}
