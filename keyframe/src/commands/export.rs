//! `keyframe export`: a checkpoint as a file that other tools read.

use super::StoreArg;
use crate::disk_writing::{Progress, failure};
use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use indicatif::{ProgressBar, ProgressStyle};
use keyframe_disk::{ImageFormat, Readable, commit};
use keyframe_image::Image;
use keyframe_inspect::display_picture as screens;
use keyframe_inspect::guest_memory::{Guest, StoredPages};
use keyframe_qemu::stream;
use keyframe_store::{LoadedCheckpoint, Store};
use keyframe_units::CheckpointId;
use keyframe_vm_disks::stored::StoredDisk;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes that are made at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// Zeros of this length become a hole in a file.
const HOLE_BYTES: usize = 4096;

/// Write a checkpoint as a file: raw RAM, ELF core, migration stream, screen, disk
#[derive(clap::Args, Debug)]
#[command(after_help = "Formats:
  raw        guest-physical RAM from address 0; addresses without memory are zeros (holes, in a file)
  elf        an ELF core with the registers of all processors, for gdb, crash and volatility
  migration  QEMU's own migration stream: a QEMU of the same version loads it with the VM's own command line, without Keyframe
  png        the picture of the VM's display, if that is a VGA (-vga std, -device VGA) or a bochs-display

With --disk the command writes a whole disk: raw (the default; sparse, in a file) or qcow2.

Examples:
  keyframe export --store S latest --format elf -o vm.elf
  keyframe export --store S 12 --format raw -o - | strings
  keyframe export --store S latest --member web --format raw -o web.raw
  keyframe export --store S latest --disk vda --format qcow2 -o vda.qcow2
  keyframe export --store S latest --format png -o screen.png
  keyframe export --store S latest --format migration -o vm.mig
  qemu-system-x86_64 THE VM'S OWN OPTIONS -incoming 'exec:cat vm.mig'")]
pub struct Export {
    #[command(flatten)]
    store: StoreArg,
    /// A number, a tag or `latest`
    checkpoint: String,
    /// Which VM, if the checkpoint is of a group
    #[arg(long, value_name = "NAME")]
    member: Option<String>,
    /// A disk, instead of the RAM
    #[arg(long, value_name = "NAME")]
    disk: Option<String>,
    /// What to write
    #[arg(long, value_enum, required_unless_present = "disk")]
    format: Option<Format>,
    /// The file to make, or - for standard output
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Replace the file if there is one
    #[arg(long, short)]
    force: bool,
    /// Report errors only
    #[arg(long, short)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Raw,
    Elf,
    Migration,
    Png,
    /// With --disk
    Qcow2,
}

/// The inputs of writing one file.
struct Job<'a> {
    pages: StoredPages<'a>,
    interrupted: Arc<AtomicBool>,
    bar: ProgressBar,
}

impl Export {
    /// Writes the file, whole or not at all.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let id = store.resolve(&self.checkpoint).map_err(|e| self.store.failure(&e))?;
        let to_stdout = self.output == Path::new("-");
        if !to_stdout && !self.force && self.output.exists() {
            return Err(Failure::new(format!("{} exists", self.output.display()))
                .fix("name another file, or replace it with --force"));
        }
        let format = self.format.unwrap_or(Format::Raw);
        if let Some(name) = &self.disk {
            return self.disk(&store, id, name, format);
        }
        let loaded = store.load(id).map_err(|e| self.store.failure(&e))?;
        let guest = Guest::choose(&loaded, self.member.as_deref())?;
        let image = match format {
            Format::Raw => Some(guest.raw()?),
            Format::Elf => Some(guest.core()?),
            Format::Migration => None,
            Format::Png => return self.screen(&loaded, &guest),
            Format::Qcow2 => {
                return Err(Failure::new("qcow2 is a format of disks, not of RAM").fix(
                    "say which disk with --disk NAME; for RAM choose raw, elf, migration or png",
                ));
            }
        };
        let interrupted = keyframe_session::interrupt::interruption()?;
        let len_bytes = image.as_ref().map_or(guest.ram.len_bytes(), Image::len_bytes);
        let bar = if self.quiet { ProgressBar::hidden() } else { ProgressBar::new(len_bytes) };
        if let Ok(style) =
            ProgressStyle::with_template("exporting {wide_bar} {bytes}/{total_bytes}")
        {
            bar.set_style(style);
        }
        let job = Job { pages: StoredPages::new(&loaded, &guest), interrupted, bar };
        let written = if to_stdout {
            job.stream(image.as_ref(), &guest, &mut output::Pipe::new())
        } else {
            self.to_file(&job, image.as_ref(), &guest)
        };
        job.bar.finish_and_clear();
        written.map_err(|failure| match job.pages.failed() {
            Some(error) => self.store.failure(&error),
            None => failure,
        })?;
        if !to_stdout && !self.quiet {
            let size = output::bytes(len_bytes);
            eprintln!(
                "keyframe: checkpoint {id} of VM {} is in {} ({size})",
                self.member.as_ref().unwrap_or(&loaded.meta.vm),
                self.output.display()
            );
        }
        Ok(DONE)
    }

    /// Writes a disk.
    fn disk(&self, store: &Store, id: CheckpointId, name: &str, format: Format) -> Outcome {
        let to_stdout = self.output == Path::new("-");
        let format = match format {
            Format::Raw => ImageFormat::Raw,
            Format::Qcow2 if to_stdout => {
                return Err(Failure::new("qcow2 is not written from its first byte to its last")
                    .fix("name a file, or write it as raw"));
            }
            Format::Qcow2 => ImageFormat::Qcow2,
            Format::Elf | Format::Migration | Format::Png => {
                return Err(Failure::new(format!(
                    "disk {name}: a disk is written as raw or qcow2"
                ))
                .fix("leave --format out, or leave --disk out for the RAM"));
            }
        };
        let disks = store.load_disks(id).map_err(|e| self.store.failure(&e))?;
        let stored = StoredDisk::choose(Arc::new(disks), self.member.as_deref(), Some(name))?;
        let disk = stored.open()?;
        let bytes = disk.disk_bytes();
        let progress = Progress::new("exporting", &self.output, bytes, self.quiet)?;
        let progress = progress.reading(Some(stored.meta().base.clone()));
        let mut watch = |done| progress.reached(done);
        let written = if to_stdout {
            commit::to_stream(&disk, &mut output::Pipe::new(), &mut watch)
        } else {
            commit::to_file(&disk, &self.output, format, self.force, &mut watch)
        };
        progress.end();
        written.map_err(|e| failure(&e))?;
        if !to_stdout && !self.quiet {
            eprintln!(
                "keyframe: disk {} of checkpoint {id} is in {} ({format}, a disk of {})",
                stored.meta().name,
                self.output.display(),
                output::bytes(bytes)
            );
        }
        Ok(DONE)
    }

    /// Writes what the display shows.
    fn screen(&self, loaded: &LoadedCheckpoint, guest: &Guest) -> Outcome {
        let vm = self.member.as_ref().unwrap_or(&loaded.meta.vm);
        let what = format!("VM {vm} in checkpoint {}", loaded.id);
        let picture = screens::picture(loaded, guest).map_err(|e| e.into_error(&what))?;
        let file = screens::png(&picture)?;
        let fail = |e: io::Error| Failure::new(format!("write the export: {e}"));
        if self.output == Path::new("-") {
            let mut out = output::Pipe::new();
            out.write_all(&file).and_then(|()| out.flush()).map_err(fail)?;
            return Ok(DONE);
        }
        self.whole(|out| out.write_all_at(&file, 0).map_err(fail))?;
        if !self.quiet {
            let (width, height) = (picture.width, picture.height);
            eprintln!(
                "keyframe: what {what} shows is in {} ({width} x {height} pixels)",
                self.output.display()
            );
        }
        Ok(DONE)
    }

    fn to_file(&self, job: &Job<'_>, image: Option<&Image>, guest: &Guest) -> Result<(), Failure> {
        self.whole(|file| match image {
            Some(image) => {
                let fail =
                    |e: io::Error| Failure::new(format!("write {}: {e}", self.output.display()));
                job.sparse(image, file).map_err(fail)
            }
            None => job.stream(None, guest, &mut &*file),
        })
    }

    /// Through a temporary file beside it, so that a file of that name is always whole.
    fn whole(&self, write: impl FnOnce(&File) -> Result<(), Failure>) -> Result<(), Failure> {
        let name = self.output.display();
        let fail = |e: io::Error| Failure::new(format!("write {name}: {e}"));
        let directory =
            self.output.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let temporary = tempfile::Builder::new()
            .prefix(".keyframe-export-")
            .tempfile_in(directory)
            .map_err(fail)?;
        write(temporary.as_file())?;
        temporary.as_file().sync_all().map_err(fail)?;
        let kept = if self.force {
            temporary.persist(&self.output)
        } else {
            temporary.persist_noclobber(&self.output)
        };
        kept.map(drop).map_err(|e| fail(e.error))
    }
}

impl Job<'_> {
    /// Writes an image with holes where it is zero.
    fn sparse(&self, image: &Image, file: &File) -> io::Result<()> {
        file.set_len(image.len_bytes())?;
        let mut bytes = vec![0; CHUNK_BYTES as usize];
        for (at, len) in image.stretches(CHUNK_BYTES) {
            self.check()?;
            let chunk = bytes.get_mut(..len as usize).unwrap_or_default();
            image.read_at(&self.pages, at, chunk)?;
            let mut offset = at;
            for run in chunk.chunks(HOLE_BYTES) {
                if run.iter().any(|byte| *byte != 0) {
                    file.write_all_at(run, offset)?;
                }
                offset += run.len() as u64;
            }
            self.bar.set_position(at + len);
        }
        Ok(())
    }

    /// Writes an image, or a migration stream, from its first byte to its last.
    fn stream(
        &self,
        image: Option<&Image>,
        guest: &Guest,
        out: &mut dyn Write,
    ) -> Result<(), Failure> {
        let fail = |e: io::Error| Failure::new(format!("write the export: {e}"));
        let mut out = BufWriter::with_capacity(CHUNK_BYTES as usize, Watched { job: self, out });
        let Some(image) = image else {
            let (machine, state) = (&guest.machine, &guest.device_state);
            let (machine_type, processor) = (&*machine.machine_type, machine.processor);
            let head = stream::MigrationHead { machine_type, processor };
            return stream::export(&head, &guest.ram, &self.pages, state, &mut out)
                .map_err(|e| Failure::qemu(&e.into()));
        };
        let mut bytes = vec![0; CHUNK_BYTES as usize];
        let mut at = 0;
        while at < image.len_bytes() {
            let read = image.read_at(&self.pages, at, &mut bytes).map_err(fail)?;
            out.write_all(bytes.get(..read).unwrap_or_default()).map_err(fail)?;
            at += read as u64;
        }
        out.flush().map_err(fail)
    }

    fn check(&self) -> io::Result<()> {
        if self.interrupted.load(Ordering::Relaxed) {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "it was given up"));
        }
        Ok(())
    }
}

/// Counts what is written, and ends when asked to.
struct Watched<'a> {
    job: &'a Job<'a>,
    out: &'a mut dyn Write,
}

impl Write for Watched<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Not as `Interrupted`, which would be tried again.
        self.job.check().map_err(|e| io::Error::other(e.to_string()))?;
        let written = self.out.write(bytes)?;
        self.job.bar.inc(written as u64);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
