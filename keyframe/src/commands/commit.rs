//! `keyframe commit`: writes a disk back to an image, a new one or its own.

use crate::failure::{DONE, Failure, Outcome, chain};
use crate::output;
use indicatif::{ProgressBar, ProgressStyle};
use keyframe_disk::commit::{self, Amount, InPlace};
use keyframe_disk::{Base, Disk, Error, ImageFormat, Layer, Overlay};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Write a disk back to an image: a checkpoint's, or what a VM has written since its start
#[expect(clippy::struct_excessive_bools, reason = "each is a word of the command line")]
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Into a new image, or into the image that the VM started from, which then is no longer what it was: checkpoints whose
disks lie over it can no longer be restored. That is asked for, or takes --yes. Where it is interrupted, the image is used by
nobody until the same command has finished it.

Examples:
  keyframe commit --store S 12 --disk vda -o vda.qcow2 --format qcow2
  keyframe commit --overlay DIR --base disk.img -o new.img
  keyframe commit --overlay DIR --base disk.img --in-place --dry-run
  keyframe commit --overlay DIR --base disk.img --in-place"
)]
pub struct Commit {
    /// A number, a tag or `latest`
    #[arg(required_unless_present = "overlay", requires = "store")]
    checkpoint: Option<String>,
    /// The store's directory
    #[arg(long, env = "KEYFRAME_STORE", value_name = "STORE")]
    store: Option<PathBuf>,
    /// Which disk of the checkpoint, where it has several
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
    base_format: Option<Format>,
    /// The image to make
    #[arg(long, short, value_name = "FILE", required_unless_present_any = ["in_place", "dry_run"])]
    output: Option<PathBuf>,
    /// How the new image is encoded
    #[arg(long, value_enum, default_value = "raw", requires = "output")]
    format: Format,
    /// Write into the image beneath
    #[arg(long, conflicts_with = "output")]
    in_place: bool,
    /// Do not ask
    #[arg(long, short, requires = "in_place")]
    yes: bool,
    /// Say how much would be written, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Say nothing but errors
    #[arg(long, short)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Raw,
    Qcow2,
}

impl From<Format> for ImageFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Raw => Self::Raw,
            Format::Qcow2 => Self::Qcow2,
        }
    }
}

/// A disk, as layers over its image.
struct Source {
    /// For messages, and the mark of an interrupted commit.
    name: String,
    base: PathBuf,
    format: ImageFormat,
    layer: Option<Box<dyn Layer>>,
    overlay: Option<Overlay>,
    disk_bytes: u64,
}

impl Source {
    /// Lowest first.
    fn layers(&self) -> impl Iterator<Item = &dyn Layer> {
        let overlay = self.overlay.as_ref().map(|overlay| overlay as &dyn Layer);
        self.layer.as_deref().into_iter().map(|layer| layer as &dyn Layer).chain(overlay)
    }

    fn amount(&self) -> Result<Amount, Failure> {
        self.layers().try_fold(Amount::default(), |sum, layer| {
            let one = commit::measure(layer).map_err(|e| failure(&e))?;
            let data_bytes = sum.data_bytes + one.data_bytes;
            Ok(Amount { data_bytes, zero_bytes: sum.zero_bytes + one.zero_bytes })
        })
    }
}

fn failure(error: &Error) -> Failure {
    let failed = Failure::new(chain(error));
    if error.is_disk_full() { failed.fix("free some space, and run it again") } else { failed }
}

impl Commit {
    /// Writes it.
    pub fn run(&self) -> Outcome {
        let source = self.source()?;
        if self.dry_run {
            return self.say_amount(&source);
        }
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&interrupted))
                .map_err(|e| Failure::new(format!("catch signal {signal}: {e}")))?;
        }
        match &self.output {
            Some(output) => self.to_new(source, output, &interrupted),
            None => self.in_place(source, &interrupted),
        }
    }

    fn source(&self) -> Result<Source, Failure> {
        let (Some(dir), Some(base)) = (&self.overlay, &self.base) else { return self.of_checkpoint() };
        let format = match self.base_format {
            Some(format) => format.into(),
            None => ImageFormat::probe(base).map_err(|e| failure(&e))?,
        };
        let overlay = Overlay::open(dir).map_err(|e| failure(&e))?;
        let dir = dir.canonicalize().unwrap_or_else(|_| dir.clone());
        Ok(Source {
            name: format!("overlay {}", dir.display()),
            base: base.clone(),
            format,
            layer: None,
            disk_bytes: overlay.disk_bytes(),
            overlay: Some(overlay),
        })
    }

    /// The blocks that a checkpoint holds, as a layer over the image that it names.
    fn of_checkpoint(&self) -> Result<Source, Failure> {
        let checkpoint = self.checkpoint.as_deref().unwrap_or("latest");
        Err(Failure::new(format!("checkpoint {checkpoint}: its disks cannot be read from a store yet"))
            .fix("commit what the VM wrote, from its overlay: keyframe commit --overlay DIR --base IMAGE"))
    }

    fn say_amount(&self, source: &Source) -> Outcome {
        let Amount { data_bytes, zero_bytes } = source.amount()?;
        let to = match &self.output {
            Some(output) => format!("beside all of {} to {}", source.base.display(), output.display()),
            None => format!("into {}", source.base.display()),
        };
        output::print_line(&format!(
            "would write {} and {} of zeros {to}, from {}",
            output::bytes(data_bytes),
            output::bytes(zero_bytes),
            source.name
        ))?;
        Ok(DONE)
    }

    fn to_new(&self, source: Source, path: &Path, interrupted: &AtomicBool) -> Outcome {
        let base = Base::open(&source.base, source.format).map_err(|e| failure(&e))?;
        if base.disk_bytes() != source.disk_bytes {
            let (image, disk) = (base.disk_bytes(), source.disk_bytes);
            return Err(Failure::new(format!(
                "{}: a disk of {image} bytes, {} is of one of {disk}",
                source.base.display(),
                source.name
            ))
            .fix("name the image that the VM ran on"));
        }
        let Some(overlay) = source.overlay else {
            return Err(Failure::new(format!("{}: no overlay", source.name)));
        };
        let disk = Disk::new(overlay, base, source.layer);
        let bar = self.bar(disk.disk_bytes());
        let format = ImageFormat::from(self.format);
        let written = commit::to_new(&disk, path, format, &mut |done| watch(&bar, interrupted, path, done));
        bar.finish_and_clear();
        written.map_err(|e| failure(&e))?;
        self.say(&format!("{} is in {} ({format})", source.name, path.display()));
        Ok(DONE)
    }

    fn in_place(&self, source: Source, interrupted: &AtomicBool) -> Outcome {
        let amount = source.amount()?;
        if !self.yes {
            agreed(&source, amount)?;
        }
        let fail = |e: Error| failure(&e);
        let image = InPlace::begin(&source.base, source.format, &source.name).map_err(fail)?;
        let bar = self.bar(amount.data_bytes + amount.zero_bytes);
        let mut before = 0;
        for layer in source.layers() {
            let mut told = |done| watch(&bar, interrupted, &source.base, before + done);
            let done = image.write(layer, source.disk_bytes, &mut told).map_err(fail)?;
            before += done.data_bytes + done.zero_bytes;
        }
        image.finish().map_err(fail)?;
        bar.finish_and_clear();
        if let Some(overlay) = source.overlay {
            overlay.clear().map_err(fail)?;
        }
        image.unmark().map_err(fail)?;
        let size = output::bytes(amount.data_bytes + amount.zero_bytes);
        self.say(&format!("{} is in {} ({size})", source.name, source.base.display()));
        Ok(DONE)
    }

    fn bar(&self, bytes: u64) -> ProgressBar {
        let bar = if self.quiet { ProgressBar::hidden() } else { ProgressBar::new(bytes) };
        if let Ok(style) = ProgressStyle::with_template("committing {wide_bar} {bytes}/{total_bytes}") {
            bar.set_style(style);
        }
        bar
    }

    fn say(&self, text: &str) {
        if !self.quiet {
            eprintln!("keyframe: {text}");
        }
    }
}

fn watch(bar: &ProgressBar, interrupted: &AtomicBool, path: &Path, done: u64) -> Result<(), Error> {
    bar.set_position(done);
    if interrupted.load(Ordering::Relaxed) {
        let source = std::io::Error::other("it was given up");
        return Err(Error::Io { object: path.display().to_string(), operation: "commit", source });
    }
    Ok(())
}

/// Asks whoever sits before the terminal.
fn agreed(source: &Source, amount: Amount) -> Result<(), Failure> {
    let base = source.base.display();
    let refused = |problem: &str| Failure::new(format!("{base}: {problem}; nothing was changed"));
    if !std::io::stdin().is_terminal() {
        return Err(refused("writing into it was not agreed to, and there is no terminal to ask")
            .fix("look with --dry-run, then add --yes; or write a new image with -o FILE"));
    }
    eprint!(
        "{} writes {} into {base}. Checkpoints whose disks lie over it can then no longer be restored.\nGo on? [y/N] ",
        source.name,
        output::bytes(amount.data_bytes + amount.zero_bytes)
    );
    let _ = std::io::stderr().flush();
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).map_err(|e| Failure::new(format!("read the answer: {e}")))?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(refused("writing into it was not agreed to")),
    }
}
