//! `keyframe mount`: the store's checkpoints as files.

use super::StoreArg;
use crate::failure::{DONE, Failure, Outcome, chain};
use keyframe_mount::{CheckpointTree, MountedStore};
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

const POLL: Duration = Duration::from_millis(50);

/// Show every checkpoint as files under a directory, until Ctrl-C or umount
#[derive(clap::Args, Debug)]
#[command(after_help = "  DIR/12/ram.raw        guest-physical RAM
  DIR/12/ram.elf        an ELF core for gdb, crash and volatility
  DIR/12/screen.png     what the VM's display showed, if it has a VGA
  DIR/12/device.state   the state of all devices, in the format of QEMU or Firecracker
  DIR/12/info.json      what `show --json` prints
  DIR/12/disk-NAME.raw  each disk, whole; reading fails if the image beneath it has changed
  DIR/12/MEMBER/        these files, except info.json, of each VM of a group
  DIR/latest, DIR/TAG   links

Files are made while they are read, so nothing is copied in advance. New checkpoints appear while a VM runs. Only the user that ran
this command can read them.

Examples:
  keyframe mount /mnt --store S
  qemu-nbd -r -f raw /mnt/12/disk-vda.raw
  gdb -ex 'info registers' vmlinux /mnt/latest/ram.elf
  umount /mnt")]
pub struct Mount {
    #[command(flatten)]
    store: StoreArg,
    /// An empty directory
    dir: PathBuf,
    /// Report errors only
    #[arg(long, short)]
    quiet: bool,
}

impl Mount {
    /// Mounts, and waits for the end.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let path = store.path().to_path_buf();
        let dir = check_directory(&self.dir)?;
        let interrupted = keyframe_session::interrupt::interruption()?;
        let tree = CheckpointTree::new(store, Box::new(report));
        let mounted = MountedStore::mount(tree, &dir).map_err(|e| cannot_mount(&dir, &e))?;
        if !self.quiet {
            eprintln!(
                "keyframe: the checkpoints of {} are in {}; Ctrl-C or umount ends it",
                path.display(),
                dir.display()
            );
        }
        while !mounted.has_ended() {
            if interrupted.load(Ordering::Relaxed) {
                return end(mounted, &dir);
            }
            std::thread::sleep(POLL);
        }
        // Unmounted by somebody else.
        mounted.join().map_err(|e| Failure::new(format!("serve {}: {e}", dir.display())))?;
        Ok(DONE)
    }
}

/// Prints why something cannot be shown.
fn report(error: &keyframe_mount::Error) {
    eprintln!("keyframe: {}", chain(error));
}

/// Unmounts the store, even if programs still use it: they get errors.
fn end(mounted: MountedStore, dir: &Path) -> Outcome {
    let note_use = || {
        eprintln!(
            "keyframe: {} was still in use: programs that have files open in it get errors",
            dir.display()
        );
    };
    let ended = mounted.unmount(note_use);
    ended.map_err(|e| Failure::new(format!("unmount {}: {e}", dir.display())))?;
    Ok(DONE)
}

/// An empty directory, by its absolute path.
fn check_directory(dir: &Path) -> Result<PathBuf, Failure> {
    let name = dir.display();
    let entries = std::fs::read_dir(dir).map_err(|e| {
        match e.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NOTCONN) => {
                Failure::new(format!("{name} is still mounted, by a keyframe that was killed"))
                    .fix(format!("clear it with: umount {name}"))
            }
            Some(Errno::NOENT) => {
                Failure::new(format!("there is no directory {name}")).fix(format!("mkdir {name}"))
            }
            _ => Failure::new(format!("mount on {name}: {e}")),
        }
    })?;
    if entries.into_iter().next().is_some() {
        return Err(Failure::new(format!("{name} is not empty: what is in it would be hidden"))
            .fix("mount on an empty directory"));
    }
    std::fs::canonicalize(dir).map_err(|e| Failure::new(format!("mount on {name}: {e}")))
}

fn cannot_mount(dir: &Path, error: &io::Error) -> Failure {
    let failure = Failure::new(format!("mount on {}: {error}", dir.display()));
    if !Path::new("/dev/fuse").exists() {
        return failure.fix(
            "this kernel has no /dev/fuse: modprobe fuse; in a container, start it with --device /dev/fuse",
        );
    }
    failure.fix("mount as root, or install fusermount3 (Debian package fuse3), which lets other users mount")
}
