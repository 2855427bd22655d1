//! `keyframe commit`: writes a disk back to an image, a new one or its own.

use super::MovedArg;
use crate::disk_writing::{NewFormat, Progress, failure};
use crate::failure::{DONE, Failure, Outcome, chain};
use crate::output;
use keyframe_disk::ImageFormat;
use keyframe_disk::commit::{self, Amount, InPlace};
use keyframe_event_text::shell_word;
use keyframe_store_keys::KeyArg;
use keyframe_vm_disks::commit_source::CommitSource;
use keyframe_vm_disks::dependents::ImageDependents;
use keyframe_vm_disks::overlay_directory::overlays_within;
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Write a disk back to an image: a checkpoint's, or a VM's own
#[expect(clippy::struct_excessive_bools, reason = "each is a word of the command line")]
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The command writes a disk to a new image (-o), or into the image that the VM started from (--in-place). The second changes the
image: checkpoints whose disks lie over it can no longer be restored. It therefore asks first, unless you give --yes. If it is
interrupted, Keyframe refuses to use the image until you run the same command again and it finishes.

With --overlay of a restored VM the blocks of its checkpoint are written first, because the overlay lies over them.

Examples:
  keyframe commit --store S 12 --disk vda -o vda.qcow2 --format qcow2
  keyframe commit --store S latest --in-place --dry-run
  keyframe commit --store S latest --in-place
  keyframe commit --store S latest --image /old/vda.img=/new/vda.img -o vda.img
  keyframe commit --overlay DIR --base disk.img -o new.img
  keyframe commit --overlay DIR --base disk.img --in-place --dry-run
  keyframe commit --overlay DIR --base disk.img --in-place"
)]
pub struct Commit {
    /// A number, a tag or `latest`
    #[arg(required_unless_present = "overlay", requires = "store")]
    checkpoint: Option<String>,
    /// The store's directory, or s3://BUCKET/PREFIX
    #[arg(long, env = "KEYFRAME_STORE", value_name = "STORE")]
    store: Option<PathBuf>,
    #[command(flatten)]
    key: KeyArg,
    /// Which disk of the checkpoint, if it has several; in a group MEMBER/NAME
    #[arg(long, value_name = "NAME")]
    disk: Option<String>,
    #[command(flatten)]
    moved: MovedArg,
    /// The overlay of a VM that has ended, instead of a checkpoint
    #[arg(long, value_name = "DIR", requires = "base", conflicts_with_all = ["checkpoint", "disk", "image"])]
    overlay: Option<PathBuf>,
    /// The image that the overlay lies over
    #[arg(long, value_name = "IMAGE", requires = "overlay")]
    base: Option<PathBuf>,
    /// How that image is encoded, instead of what its first bytes say
    #[arg(long, value_enum, value_name = "FORMAT", requires = "base")]
    base_format: Option<NewFormat>,
    /// The image to make
    #[arg(long, short, value_name = "FILE", required_unless_present_any = ["in_place", "dry_run"])]
    output: Option<PathBuf>,
    /// How the new image is encoded
    #[arg(long, value_enum, default_value = "raw", requires = "output")]
    format: NewFormat,
    /// Write into the image beneath
    #[arg(long, conflicts_with = "output")]
    in_place: bool,
    /// Do not ask
    #[arg(long, short, requires = "in_place")]
    yes: bool,
    /// Say how much would be written, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// With --dry-run: print JSON, sizes in bytes
    #[arg(long, requires = "dry_run")]
    json: bool,
    /// Report errors only
    #[arg(long, short)]
    quiet: bool,
}

/// The output of `--dry-run --json`.
#[derive(Serialize)]
struct Planned<'a> {
    source: &'a str,
    image: &'a Path,
    /// The image to make; absent if the commit is in place.
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<&'a Path>,
    disk_bytes: u64,
    data_bytes: u64,
    zero_bytes: u64,
    /// This very commit was interrupted.
    interrupted: bool,
    /// The checkpoints that lie over the image; absent if no store tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "standing")]
    dependents: Option<ImageDependents>,
}

/// Fails if `directory` holds the overlays of a VM's disks, which is the directory that a run names at
/// its end.
fn refuse_directory_of_overlays(directory: &Path) -> Result<(), Failure> {
    let overlays = overlays_within(directory);
    if overlays.is_empty() {
        return Ok(());
    }
    let list = overlays.iter().map(|path| shell_word(path)).collect::<Vec<_>>().join(", ");
    let problem = format!("{} holds the overlays of a VM's disks", directory.display());
    Err(Failure::new(problem).fix(format!("name one of them with --overlay: {list}")))
}

impl Commit {
    /// Writes it.
    pub fn run(&self) -> Outcome {
        let source = self.source()?;
        if self.dry_run {
            return self.say_amount(&source);
        }
        match &self.output {
            Some(output) => self.to_new(source, output),
            None => self.in_place(source),
        }
    }

    fn source(&self) -> Result<CommitSource, Failure> {
        if let (Some(dir), Some(base)) = (&self.overlay, &self.base) {
            refuse_directory_of_overlays(dir)?;
            let format = match self.base_format {
                Some(format) => format.into(),
                None => ImageFormat::probe(base).map_err(|e| failure(&e))?,
            };
            return Ok(CommitSource::of_overlay(dir, base, format)?);
        }
        let (Some(checkpoint), Some(path)) = (&self.checkpoint, &self.store) else {
            return Err(Failure::new("neither a checkpoint of a store nor an overlay is named"));
        };
        let store = self.key.open(path).map_err(|e| Failure::store(&e, path))?;
        let id = store.resolve(checkpoint).map_err(|e| Failure::store(&e, path))?;
        Ok(CommitSource::of_checkpoint(store, id, self.disk.as_deref(), &self.moved.image)?)
    }

    fn say_amount(&self, source: &CommitSource) -> Outcome {
        let Amount { data_bytes, zero_bytes } = source.amount()?;
        let dependents = if self.in_place { source.dependents()? } else { None };
        let interrupted = source.was_interrupted();
        if self.json {
            output::json(&Planned {
                source: &source.name,
                image: &source.base,
                output: self.output.as_deref(),
                disk_bytes: source.disk_bytes,
                data_bytes,
                zero_bytes,
                interrupted,
                dependents,
            })?;
            return Ok(DONE);
        }
        let to = match &self.output {
            Some(output) => {
                format!("beside all of {} to {}", source.base.display(), output.display())
            }
            None => format!("into {}", source.base.display()),
        };
        let mut lines = vec![format!(
            "would write {} and {} of zeros {to}, from {}",
            output::bytes(data_bytes),
            output::bytes(zero_bytes),
            source.name
        )];
        if interrupted {
            lines.push(
                "This commit was interrupted: Keyframe does not use the image until the commit is finished.".into(),
            );
        }
        if let Some(dependents) = &dependents {
            let running = dependents
                .running
                .iter()
                .map(|vm| format!("VM {vm} runs over it: it would be refused."));
            lines.extend(running.chain(dependents.losses()));
        }
        output::print_line(&lines.join("\n"))?;
        Ok(DONE)
    }

    fn to_new(&self, source: CommitSource, path: &Path) -> Outcome {
        let (name, known) = (source.name.clone(), source.known.clone());
        let disk = source.open()?;
        let progress = Progress::new("committing", path, disk.disk_bytes(), self.quiet)?;
        let progress = progress.reading(known.map(|disk| disk.base));
        let format = ImageFormat::from(self.format);
        let written = commit::to_new(&*disk, path, format, &mut |done| progress.reached(done));
        progress.end();
        written.map_err(|e| failure(&e))?;
        self.say(&format!("{name} is in {} ({format})", path.display()));
        Ok(DONE)
    }

    fn in_place(&self, source: CommitSource) -> Outcome {
        if source.is_whole() {
            let problem =
                format!("{} has no image beneath: the checkpoint holds all of it", source.name);
            return Err(Failure::new(problem).fix("write a new image: -o FILE"));
        }
        let amount = source.amount()?;
        let dependents = source.dependents()?;
        if let Some(dependents) = &dependents {
            dependents.require_stopped(&source.base)?;
        }
        if !self.yes {
            agreed(&source, amount, dependents.as_ref())?;
        }
        let progress = Progress::new(
            "committing",
            &source.base,
            amount.data_bytes + amount.zero_bytes,
            self.quiet,
        )?;
        let image = InPlace::begin(&source.base, source.format, source.disk_bytes, &source.name);
        let image = image.map_err(|e| failure(&e))?;
        let written = source.write_into(&image, &mut |done| progress.reached(done));
        progress.end();
        written.map_err(|e| {
            let again =
                "run the same command again: the image cannot be used until it has finished";
            Failure::new(chain(&e)).fix(again)
        })?;
        let size = output::bytes(amount.data_bytes + amount.zero_bytes);
        let told = format!("{} is in {} ({size})", source.name, source.base.display());
        source.clear_overlay()?;
        image.unmark().map_err(|e| failure(&e))?;
        self.say(&told);
        Ok(DONE)
    }

    fn say(&self, text: &str) {
        if !self.quiet {
            eprintln!("keyframe: {text}");
        }
    }
}

/// Asks the user at the terminal.
fn agreed(
    source: &CommitSource,
    amount: Amount,
    dependents: Option<&ImageDependents>,
) -> Result<(), Failure> {
    let base = source.base.display();
    let refused = |problem: &str| Failure::new(format!("{base}: {problem}; nothing was changed"));
    let losses = match dependents {
        Some(dependents) => dependents.losses(),
        None => vec!["Checkpoints whose disks lie over it can then no longer be restored.".into()],
    };
    if !std::io::stdin().is_terminal() {
        let problem = "writing into it was not agreed to, and there is no terminal to ask";
        return Err(refused(&[&[problem.to_owned()], &losses[..]].concat().join(". "))
            .fix("look with --dry-run, then add --yes; or write a new image with -o FILE"));
    }
    let size = output::bytes(amount.data_bytes + amount.zero_bytes);
    eprintln!("{} writes {size} into {base}.", source.name);
    for loss in losses {
        eprintln!("{loss}");
    }
    eprint!("Go on? [y/N] ");
    let _ = std::io::stderr().flush();
    let mut answer = String::new();
    std::io::stdin()
        .read_line(&mut answer)
        .map_err(|e| Failure::new(format!("read the answer: {e}")))?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(refused("writing into it was not agreed to")),
    }
}
