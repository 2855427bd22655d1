//! `keyframe commit`: writes a disk back to an image, a new one or its own.

use crate::disk_writing::{NewFormat, Progress, failure};
use crate::failure::{DONE, Failure, Outcome, chain};
use crate::output;
use keyframe_disk::commit::{self, Amount, InPlace};
use keyframe_disk::{Base, Below, Disk, Error, ImageFormat, Layer, Overlay, Readable};
use keyframe_store::{DiskMeta, Store};
use keyframe_store_keys::KeyArg;
use keyframe_units::CheckpointId;
use keyframe_vm_disks::base_image;
use keyframe_vm_disks::dependents::ImageDependents;
use keyframe_vm_disks::overlay_directory;
use keyframe_vm_disks::stored::StoredDisk;
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    /// The overlay of a VM that has ended, instead of a checkpoint
    #[arg(long, value_name = "DIR", requires = "base", conflicts_with_all = ["checkpoint", "disk"])]
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

/// A disk, as layers over its image.
struct Source {
    /// For messages, and the mark of an interrupted commit.
    name: String,
    base: PathBuf,
    format: ImageFormat,
    layer: Option<Box<dyn Layer>>,
    overlay: Option<(Overlay, PathBuf)>,
    disk_bytes: u64,
    /// Where others that stand on the image may be.
    store: Option<Store>,
    /// The required identity of the image, if a checkpoint records it.
    known: Option<DiskMeta>,
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

impl Source {
    /// Disk `name` of a checkpoint.
    fn of_checkpoint(store: Store, id: CheckpointId, name: Option<&str>) -> Result<Self, Failure> {
        let disks = store.load_disks(id).map_err(|e| Failure::store(&e, store.path()))?;
        let disk = StoredDisk::choose(Arc::new(disks), None, name)?;
        let meta = disk.meta().clone();
        let source = Self {
            // The store's path may change until an interrupted commit goes on, its id does not.
            name: one_line(&format!(
                "disk {} of checkpoint {id} of store {}",
                meta.name,
                store.id()
            )),
            base: disk.image(),
            format: disk.format()?,
            layer: Some(disk.layer()?),
            overlay: None,
            disk_bytes: meta.disk_bytes,
            known: Some(meta),
            store: Some(store),
        };
        source.require_base()?;
        Ok(source)
    }

    /// Reads the writes in the overlay in `dir`, over `base` and the checkpoint from which its VM
    /// was restored.
    fn of_overlay(dir: &Path, base: &Path, format: ImageFormat) -> Result<Self, Failure> {
        let overlay = Overlay::open(dir).map_err(|e| failure(&e))?;
        let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let mut source = Self {
            name: one_line(&format!("overlay {}", dir.display())),
            base: base.to_owned(),
            format,
            layer: None,
            disk_bytes: overlay.disk_bytes(),
            overlay: Some((overlay, dir.clone())),
            store: None,
            known: None,
        };
        let Some((path, info)) = overlay_directory::of_overlay(&dir) else { return Ok(source) };
        let store = KeyArg::from_environment().open(&path);
        if let Some(id) = info.checkpoint {
            let store = store.as_ref().map_err(|e| {
                let problem = format!("{} lies over checkpoint {id}: {}", source.name, chain(e));
                Failure::new(problem).fix("put it back into the disks/ directory of its store")
            })?;
            let own = |(_, overlay): &&(DiskMeta, String)| {
                Path::new(overlay).file_name() == dir.file_name()
            };
            let own = info.disks.iter().find(own).ok_or_else(|| {
                Failure::new(format!("{}: what is said beside it does not name it", source.name))
            })?;
            let disks =
                store.load_disks(CheckpointId(id)).map_err(|e| Failure::store(&e, &path))?;
            let disk = StoredDisk::choose(Arc::new(disks), None, Some(&own.0.name))?;
            source.layer = Some(disk.layer()?);
            let is_named = disk.image().canonicalize().ok() == base.canonicalize().ok();
            source.known = is_named.then(|| disk.meta().clone());
        }
        source.store = store.ok();
        source.require_base()?;
        Ok(source)
    }

    /// Refuses another image than the one that the blocks lie over. After an interrupted commit it
    /// cannot be what it was: then its backing files have to be.
    fn require_base(&self) -> Result<(), Failure> {
        let Some(DiskMeta { base: known, .. }) = &self.known else { return Ok(()) };
        if !self.was_interrupted() {
            return Ok(base_image::require_unchanged(known)?);
        }
        let mut beneath = known.clone();
        beneath.files.drain(..beneath.files.len().min(1));
        Ok(base_image::require_unchanged(&beneath)?)
    }

    /// True if this commit was interrupted before: its blocks are written again.
    fn was_interrupted(&self) -> bool {
        commit::interrupted(&self.base).is_some_and(|source| source == self.name)
    }

    /// Lowest first.
    fn layers(&self) -> impl Iterator<Item = &dyn Layer> {
        let overlay = self.overlay.as_ref().map(|(overlay, _)| overlay as &dyn Layer);
        self.layer.as_deref().into_iter().map(|layer| layer as &dyn Layer).chain(overlay)
    }

    fn amount(&self) -> Result<Amount, Failure> {
        self.layers().try_fold(Amount::default(), |sum, layer| {
            let one = commit::measure(layer).map_err(|e| failure(&e))?;
            let data_bytes = sum.data_bytes + one.data_bytes;
            Ok(Amount { data_bytes, zero_bytes: sum.zero_bytes + one.zero_bytes })
        })
    }

    fn dependents(&self) -> Result<Option<ImageDependents>, Failure> {
        let own = self.overlay.as_ref().map(|(_, dir)| dir.as_path());
        let on = |store| ImageDependents::on(&self.base, store, own);
        Ok(self.store.as_ref().map(on).transpose()?)
    }

    /// True if the checkpoint holds all of the disk.
    fn is_whole(&self) -> bool {
        self.known.as_ref().is_some_and(|disk| disk.base.is_blank())
    }

    /// The disk, to be read.
    fn open(self) -> Result<Box<dyn Readable>, Failure> {
        let base = if self.is_whole() {
            Base::blank(self.disk_bytes)
        } else {
            Base::open(&self.base, self.format)
        };
        let base = base.map_err(|e| failure(&e))?;
        if base.disk_bytes() != self.disk_bytes {
            let (image, disk) = (base.disk_bytes(), self.disk_bytes);
            return Err(Failure::new(format!(
                "{}: a disk of {image} bytes, {} is of one of {disk}",
                self.base.display(),
                self.name
            ))
            .fix("name the image that the VM ran on"));
        }
        Ok(match self.overlay {
            Some((overlay, _)) => Box::new(Disk::new(overlay, base, self.layer)),
            None => Box::new(Below::new(base, self.layer)),
        })
    }
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

    fn source(&self) -> Result<Source, Failure> {
        if let (Some(dir), Some(base)) = (&self.overlay, &self.base) {
            let format = match self.base_format {
                Some(format) => format.into(),
                None => ImageFormat::probe(base).map_err(|e| failure(&e))?,
            };
            return Source::of_overlay(dir, base, format);
        }
        let (Some(checkpoint), Some(path)) = (&self.checkpoint, &self.store) else {
            return Err(Failure::new("neither a checkpoint of a store nor an overlay is named"));
        };
        let store = self.key.open(path).map_err(|e| Failure::store(&e, path))?;
        let id = store.resolve(checkpoint).map_err(|e| Failure::store(&e, path))?;
        Source::of_checkpoint(store, id, self.disk.as_deref())
    }

    fn say_amount(&self, source: &Source) -> Outcome {
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

    fn to_new(&self, source: Source, path: &Path) -> Outcome {
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

    fn in_place(&self, source: Source) -> Outcome {
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
        let written = write_layers(&source, &image, &progress);
        progress.end();
        written.map_err(|e| {
            let again =
                "run the same command again: the image cannot be used until it has finished";
            Failure::new(chain(&e)).fix(again)
        })?;
        if let Some((overlay, _)) = source.overlay {
            overlay.clear().map_err(|e| failure(&e))?;
        }
        image.unmark().map_err(|e| failure(&e))?;
        let size = output::bytes(amount.data_bytes + amount.zero_bytes);
        self.say(&format!("{} is in {} ({size})", source.name, source.base.display()));
        Ok(DONE)
    }

    fn say(&self, text: &str) {
        if !self.quiet {
            eprintln!("keyframe: {text}");
        }
    }
}

fn write_layers(source: &Source, image: &InPlace, progress: &Progress) -> Result<(), Error> {
    let mut before = 0;
    for layer in source.layers() {
        let mut told = |done| progress.reached(before + done);
        let done = image.write(layer, source.disk_bytes, &mut told)?;
        before += done.data_bytes + done.zero_bytes;
    }
    image.finish()
}

/// Replaces control characters by `?`, for a mark, which is one line.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Asks the user at the terminal.
fn agreed(
    source: &Source,
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
