//! Images and media that have moved since a checkpoint.
//!
//! The description of the checkpoint in memory gets their present paths, and so do the command
//! lines in it. What the paths lead to is then checked as for any other checkpoint
//! ([`crate::base_image`], [`crate::read_files`]), so another image is never taken for the one that
//! moved.

use crate::error::{Error, Result};
use keyframe_disk::ImageFormat;
use keyframe_disk::chain::image_files;
use keyframe_qemu::cmdline::{MovedFile, moved_path, with_moved_files};
use keyframe_store::{BaseMeta, MachineMeta, Meta};
use std::path::{Path, PathBuf};

/// Gives the images and media of the checkpoint `meta` their present paths: those of `moved`.
///
/// # Errors
///
/// - [`Error::NotNamed`] if the checkpoint names none of the files of a move.
/// - [`Error::MovedChainDiffers`] if an image names other files beneath it than the checkpoint
///   needs, at their present paths.
/// - [`Error::ImageMissing`] if an image is not at its present path.
pub fn apply(moved: &[MovedFile], meta: &mut Meta) -> Result<()> {
    if moved.is_empty() {
        return Ok(());
    }
    require_named(moved, meta)?;
    // A disk's path is absolute.
    let root = Path::new("/");
    for disk in &mut meta.disks {
        let base = &mut disk.base;
        let mut has_moved = move_text(moved, &mut base.path, root);
        for file in &mut base.files {
            has_moved |= move_text(moved, &mut file.path, root);
        }
        if has_moved && !disk.left_out {
            require_chain(&disk.base)?;
        }
    }
    let members = meta.members.iter_mut().map(|member| &mut member.machine);
    members.chain([&mut meta.machine]).for_each(|machine| move_machine(moved, machine));
    Ok(())
}

fn move_machine(moved: &[MovedFile], machine: &mut MachineMeta) {
    let directory = machine.directory();
    for file in machine.read_files.iter_mut().flatten() {
        move_text(moved, &mut file.path, &directory);
    }
    for words in [&mut machine.user_command, &mut machine.full_command] {
        *words = with_moved_files(words, &directory, moved);
    }
}

/// Replaces `path` by its present path, and returns true if it has moved.
fn move_text(moved: &[MovedFile], path: &mut String, directory: &Path) -> bool {
    let new = moved_path(moved, Path::new(path.as_str()), directory);
    let new = new.and_then(|new| new.to_str().map(str::to_owned));
    new.is_some_and(|new| {
        *path = new;
        true
    })
}

/// Checks that each move concerns a file of the checkpoint.
fn require_named(moved: &[MovedFile], meta: &Meta) -> Result<()> {
    let machines = meta.members.iter().map(|member| &member.machine).chain([&meta.machine]);
    let read = machines.flat_map(|machine| {
        let files = machine.read_files.iter().flatten();
        files.map(|file| (file.path.clone(), machine.directory()))
    });
    let bases = meta.disks.iter().map(|disk| &disk.base);
    let images =
        bases.flat_map(|base| base.files.iter().map(|file| &file.path).chain([&base.path]));
    let images = images.filter(|path| !path.is_empty());
    let directory = meta.machine.directory();
    let named: Vec<_> = images.map(|path| (path.clone(), directory.clone())).chain(read).collect();
    for one in moved {
        let applies =
            |(path, directory): &(String, PathBuf)| one.apply(Path::new(path), directory).is_some();
        if !named.iter().any(applies) {
            let mut named: Vec<String> = named.into_iter().map(|(path, _)| path).collect();
            named.sort_unstable();
            named.dedup();
            return Err(Error::NotNamed { old: one.old.clone(), named });
        }
    }
    Ok(())
}

/// Checks that the image of `base` names the files beneath it that `base` lists. The server of the
/// disk opens those that the image names.
fn require_chain(base: &BaseMeta) -> Result<()> {
    let path = Path::new(&base.path);
    let Some(format) = ImageFormat::named(&base.format) else { return Ok(()) };
    if let Err(source) = std::fs::File::open(path) {
        return Err(Error::ImageMissing { path: path.to_owned(), source });
    }
    let found = image_files(path, format)?;
    let needed = || base.files.iter().map(|file| file.path.clone());
    let resolved = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let is_same =
        found.iter().map(|path| resolved(path)).eq(needed().map(|p| resolved(p.as_ref())));
    if is_same {
        return Ok(());
    }
    Err(Error::MovedChainDiffers {
        path: path.to_owned(),
        found: found.iter().skip(1).map(|path| path.display().to_string()).collect(),
        needed: needed().skip(1).collect(),
    })
}
