//! `keyframe diff`: what differs between two checkpoints.

use super::StoreArg;
use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use crate::progress;
use keyframe_event_text::shell_word;
use keyframe_store::{Diff as Found, DiskMeta, RegionDiff};
use keyframe_units::PAGE_BYTES;
use keyframe_vm_disks::clone_files::has_clone;
use std::path::Path;

/// Show what differs between two checkpoints, by RAM block and disk
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The command compares the contents of two checkpoints of one store, also of different runs and VMs. It compares RAM
blocks and disks that have the same name. Of a disk it compares the blocks that the guest wrote under Keyframe. Of disks of
which each checkpoint has a clone (--disk reflink, Firecracker's drives) it names the two files to compare.
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
            let disks = |id| store.sealed(id).map(|sealed| sealed.meta.disks);
            let disks = [disks(first), disks(second)].map(Result::unwrap_or_default);
            print(&diff, &disks)?;
        }
        Ok(DONE)
    }
}

fn print(diff: &Found, disks: &[Vec<DiskMeta>; 2]) -> Result<(), Failure> {
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
    let (cloned, compared): (Vec<_>, Vec<_>) =
        diff.disks.iter().partition(|disk| clones(&disk.name, disks).is_some());
    let rows: Vec<_> = diff.ram.iter().chain(compared.iter().copied()).map(row).collect();
    output::print_line(&output::table(&header, &rows))?;
    for region in diff.ram.iter().chain(compared) {
        for note in notes(region, diff) {
            output::print_line(&format!("{}: {note}", region.name))?;
        }
    }
    for disk in cloned {
        let Some([first, second]) = clones(&disk.name, disks) else { continue };
        output::print_line(&format!(
            "{}: not compared: each checkpoint has a clone of the disk; cmp -l {} {}",
            disk.name,
            shell_word(Path::new(first)),
            shell_word(Path::new(second))
        ))?;
    }
    let [first, second] = diff.device_bytes;
    let devices = if diff.same_devices { "the same" } else { "not the same" };
    output::print_line(&format!("devices: {devices} ({first} and {second} bytes)"))
}

/// The clones of the disk `name` that both checkpoints have; `None` if one of them has none.
fn clones<'a>(name: &str, disks: &'a [Vec<DiskMeta>; 2]) -> Option<[&'a str; 2]> {
    let clone = |disks: &'a [DiskMeta]| {
        let disk = disks.iter().find(|disk| disk.name == name)?;
        has_clone(disk).then_some(&*disk.base.path)
    };
    Some([clone(&disks[0])?, clone(&disks[1])?])
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
