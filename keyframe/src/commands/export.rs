//! `keyframe export`: a checkpoint as a file that other tools read.

use super::StoreArg;
use crate::disk_writing::{Progress, failure};
use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use crate::progress;
use keyframe_disk::{ImageFormat, Readable, commit};
use keyframe_image::Image;
use keyframe_inspect::display_picture as screens;
use keyframe_inspect::guest_memory::{Guest, StoredPages};
use keyframe_inspect::ram_export::{RamExport, write_whole};
use keyframe_store::{LoadedCheckpoint, Store};
use keyframe_units::CheckpointId;
use keyframe_vm_disks::stored::StoredDisk;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Write a checkpoint as a file: raw RAM, ELF core, migration stream, screen, disk
#[derive(clap::Args, Debug)]
#[command(after_help = "Formats:
  raw        guest-physical RAM from address 0; addresses without memory are zeros (holes, in a file)
  elf        an ELF core with the registers of all processors, for gdb, crash and volatility
  migration  QEMU's own migration stream, of a QEMU VM: a QEMU of the same version loads it with the VM's own command line, without Keyframe
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
        if format == Format::Migration && !guest.machine.has_migration_stream() {
            let vmm = guest.machine.vmm;
            return Err(Failure::new(format!("a VM of {vmm} has no migration stream")).fix(
                "start the VM: keyframe restore; or write its RAM: --format raw, or --format elf \
                 with the registers",
            ));
        }
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
        let template = "exporting {wide_bar} {bytes}/{total_bytes}";
        let bar = progress::bar(self.quiet, Some(len_bytes), template);
        let (pages, progress) = (StoredPages::new(&loaded, &guest), &|more| bar.inc(more));
        let export = RamExport { pages, interrupted, progress };
        let written = if to_stdout {
            export.stream(image.as_ref(), &guest, &mut output::Pipe::new()).map_err(Failure::from)
        } else {
            self.to_file(&export, image.as_ref(), &guest)
        };
        bar.finish_and_clear();
        written.map_err(|failure| match export.pages.failed() {
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

    fn to_file(
        &self,
        export: &RamExport<'_>,
        image: Option<&Image>,
        guest: &Guest,
    ) -> Result<(), Failure> {
        self.whole(|file| match image {
            Some(image) => {
                let fail =
                    |e: io::Error| Failure::new(format!("write {}: {e}", self.output.display()));
                export.sparse(image, file).map_err(fail)
            }
            None => export.stream(None, guest, &mut &*file).map_err(Failure::from),
        })
    }

    /// Through a temporary file beside it, so that a file of that name is always whole.
    fn whole(&self, write: impl FnOnce(&File) -> Result<(), Failure>) -> Result<(), Failure> {
        let name = self.output.display();
        let fail = |e: io::Error| Failure::new(format!("write {name}: {e}"));
        write_whole(&self.output, self.force, fail, write)
    }
}
