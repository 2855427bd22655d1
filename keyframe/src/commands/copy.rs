//! `keyframe copy`: checkpoints into another store.

use super::{StoreArg, warn_of_unreadable};
use crate::failure::{DONE, Failure, Outcome, WARNED};
use crate::output;
use crate::progress;
use keyframe_store::{CheckpointId, CopyProgress, CopyReport, Store};
use keyframe_store_keys::{TargetKeyArg, fix_of_target};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Copy checkpoints to another store: only what is missing there
#[derive(clap::Args, Debug)]
#[command(
    group(clap::ArgGroup::new("which").required(true).args(["checkpoints", "all", "name"])),
    after_help = "A copy is a new checkpoint with the same RAM, devices, disks, tags and pin, and another number. It records its origin, so the
same command run again copies nothing. The command may be killed at any instant: run it again, and it continues after the
last checkpoint that it has sealed. The target store keeps only pages that it does not have yet, from any VM.

Images beneath disks are not copied: the copy names the same files. Other processes may write to both stores
meanwhile, but a target in object storage has one writer.

Each store may be encrypted with a key of its own. --key-file, KEYFRAME_KEY_FILE or KEYFRAME_PASSPHRASE opens the source;
--to-key-file, KEYFRAME_TO_KEY_FILE or KEYFRAME_TO_PASSPHRASE opens the target.

Exit code 3: a checkpoint could not be copied, or the target store has its tag already. The output names it.

Examples:
  keyframe init /backup/S
  keyframe copy --store S latest --to /backup/S
  keyframe copy --store S --all --to /backup/S --json | jq '.copied | length'
  keyframe copy --store S --name web --to /backup/S
  keyframe init /backup/E --encrypt --key-file new.key
  keyframe copy --store S --key-file old.key --all --to /backup/E --to-key-file new.key"
)]
pub struct Copy {
    #[command(flatten)]
    store: StoreArg,
    /// Which: numbers, tags, or `latest`
    #[arg(value_name = "CHECKPOINT")]
    checkpoints: Vec<String>,
    /// All checkpoints
    #[arg(long)]
    all: bool,
    /// All of this VM
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The store to copy to
    #[arg(long, value_name = "STORE")]
    to: PathBuf,
    #[command(flatten)]
    to_key: TargetKeyArg,
    /// Print JSON: sizes in bytes
    #[arg(long)]
    json: bool,
    /// No progress
    #[arg(long, short)]
    quiet: bool,
}

impl Copy {
    /// Copies and reports.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let target = self
            .to_key
            .open(&self.to)
            .map_err(|e| Failure::store(&e, &self.to).with_fix(fix_of_target(&e)))?;
        let (ids, mut code) = self.which(&store)?;
        let count = Some(ids.len() as u64);
        let bar = progress::bar(self.quiet, count, "{msg} {wide_bar} {pos}/{len} {eta}");
        let mut progress = |p: CopyProgress| {
            bar.set_message(format!("checkpoint {}", p.checkpoint));
            bar.set_position(p.done);
        };
        let copied = store.copy_to(&target, &ids, &mut progress);
        bar.finish_and_clear();
        let report = copied.map_err(|e| self.failure(&e))?;
        for left in &report.damaged {
            eprintln!("keyframe: checkpoint {} is not copied: {}", left.from, left.problem);
            code = WARNED;
        }
        for tag in &report.tags_left {
            eprintln!(
                "keyframe: tag {tag} is another checkpoint's in {}: it stays there",
                self.to.display()
            );
            code = WARNED;
        }
        if self.json {
            output::json(&report)?;
        } else {
            print(&report)?;
        }
        Ok(code)
    }

    fn which(&self, store: &Store) -> Result<(BTreeSet<CheckpointId>, u8), Failure> {
        if !self.checkpoints.is_empty() {
            let ids = self.checkpoints.iter().map(|name| store.resolve(name));
            return Ok((ids.collect::<Result<_, _>>().map_err(|e| self.store.failure(&e))?, DONE));
        }
        let listing = store.checkpoints().map_err(|e| self.store.failure(&e))?;
        let is_of = |vm: &str| self.name.as_ref().is_none_or(|name| name == vm);
        let of = listing.sealed.iter().filter(|sealed| is_of(&sealed.meta.vm));
        Ok((of.map(|sealed| sealed.id).collect(), warn_of_unreadable(&listing)))
    }

    fn failure(&self, error: &keyframe_store::Error) -> Failure {
        use keyframe_store::Error;
        let failure = Failure::store(error, &self.to);
        if error.is_disk_full() {
            return failure.fix("free some space and run the same command: what is copied stays");
        }
        match error {
            Error::UnknownCheckpoint { .. } => self.store.failure(error),
            Error::SameStore { .. } => failure.fix("make another one: keyframe init STORE2"),
            _ => failure,
        }
    }
}

fn print(report: &CopyReport) -> Result<(), Failure> {
    for copied in &report.copied {
        output::print_line(&format!("{} is {} there", copied.from, copied.to))?;
    }
    output::print_line(&format!(
        "{} checkpoints copied, {} were there; {} pages read, {} stored",
        report.copied.len(),
        report.known.len(),
        report.read_pages,
        output::bytes(report.stored_bytes)
    ))
}
