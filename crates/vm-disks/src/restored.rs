//! The disks of a checkpoint, for VMs that are restored from it and for a running VM that is rolled
//! back to it.
//!
//! ```text
//!   rollback:  stage ─▶ image, checkpoint's blocks, new overlay: open, not served
//!                exchange ─▶ served; the guest's connections stay    exchange again ─▶ as before
//!                              describe ─▶ disks.json names the checkpoint
//!                                dismiss ─▶ the disks that are not served are closed and removed
//! ```
//!
//! Invariant: only `dismiss` removes data that the guest has written.

use crate::base_image::require_unchanged;
use crate::error::{Error, Result, StoreError};
use crate::layer::LayerSource;
use crate::overlay_directory::OverlayInfo;
use crate::{DiskToServe, ServedDisks, specs};
use keyframe_disk::ImageFormat;
use keyframe_qemu::cmdline::{line_drives, options};
use keyframe_qemu::{Backing, DiskNames, DiskServer, LineDrive};
use keyframe_store::{DiskMeta, Meta, Store};
use keyframe_units::CheckpointId;
use std::path::PathBuf;

/// Returns the disks of a checkpoint that QEMU itself opens after a restore, as the VM's command
/// line says: those that were left out and that Keyframe cannot serve as the guest saw them.
///
/// Error: a command line of the checkpoint cannot be parsed.
pub fn opened_by_qemu(meta: &Meta) -> Result<Vec<&DiskMeta>> {
    let mut found = Vec::new();
    if meta.disks.iter().all(|disk| !disk.left_out) {
        return Ok(found);
    }
    let members = meta.members.iter().map(|one| (format!("{}/", one.name), &one.machine));
    let all: Vec<_> = if meta.members.is_empty() {
        vec![(String::new(), &meta.machine)]
    } else {
        members.collect()
    };
    for (prefix, machine) in all {
        let words = machine.user_command.get(1..).unwrap_or_default();
        found.extend(opened_on_line(&meta.disks, &prefix, words)?);
    }
    Ok(found)
}

/// Those of the VM with these words on its command line, whose disks have the prefix `prefix`.
fn opened_on_line<'a>(
    disks: &'a [DiskMeta],
    prefix: &str,
    words: &[String],
) -> Result<Vec<&'a DiskMeta>> {
    let line = options::parse(words).and_then(|line| line_drives(&line));
    let line = line.map_err(|e| Error::CommandLine(Box::new(e)))?;
    let is_opened = |disk: &&DiskMeta| {
        let own = disk.name.strip_prefix(prefix);
        let drive = line.iter().find(|drive| Some(drive.name.as_str()) == own);
        disk.left_out && drive.is_some_and(|drive| !can_be_served(disk, drive))
    };
    Ok(disks.iter().filter(is_opened).collect())
}

/// True if a server of `disk`, which was left out, shows the guest what `line` says.
fn can_be_served(disk: &DiskMeta, line: &LineDrive) -> bool {
    // The line can name other images beneath it than its header.
    line.drive.as_ref().is_ok_and(|drive| !drive.remote && drive.backing == Backing::default())
        && ImageFormat::named(&disk.base.format).is_some()
}

/// Returns the server at `socket` that serves the disks of a checkpoint, for the command line of
/// one of its VMs: that whose disks have names with the prefix `prefix`.
///
/// Error: a command line of the checkpoint cannot be parsed.
pub fn server(meta: &Meta, socket: PathBuf, prefix: &str) -> Result<DiskServer> {
    let own = |disk: &DiskMeta| disk.name.strip_prefix(prefix).map(str::to_owned);
    let left_out = DiskNames::of(opened_by_qemu(meta)?.into_iter().filter_map(own));
    // QEMU's own exports are of what the guest sees.
    let cut = meta.disks.iter().filter(|disk| disk.base.is_cut());
    let cut_slices = DiskNames::of(cut.filter_map(own));
    Ok(DiskServer { prefix: prefix.into(), left_out, cut_slices, ..DiskServer::at(socket) })
}

/// Returns the descriptions of the disks of checkpoint `id`, ready to be served, without those that
/// QEMU opens itself.
///
/// Errors: an image below a disk has changed since the checkpoint; a command line of the checkpoint
/// cannot be parsed.
pub fn disks_of_checkpoint(
    store: &Store,
    id: CheckpointId,
    meta: &Meta,
) -> Result<Vec<DiskToServe>> {
    let path = store.absolute_path().map_err(|e| StoreError::of(store, e))?;
    let by_qemu: Vec<&str> = opened_by_qemu(meta)?.iter().map(|disk| &*disk.name).collect();
    let mut disks = Vec::with_capacity(meta.disks.len());
    for (disk, meta) in meta.disks.iter().enumerate() {
        if by_qemu.contains(&&*meta.name) {
            continue;
        }
        require_unchanged(&meta.base)?;
        let source = LayerSource { store: path.clone(), checkpoint: id, disk };
        let layer = serde_json::to_string(&source)
            .map_err(|source| Error::Describe { object: "a layer", source })?;
        disks.push(DiskToServe { meta: meta.clone(), layer: Some(layer), temporary: false });
    }
    Ok(disks)
}

/// Checks that no disk was left out of checkpoint `id`.
///
/// Error: [`Error::DisksLeftOut`].
pub fn require_all(id: CheckpointId, meta: &Meta) -> Result<()> {
    let lacking: Vec<_> = meta.disks.iter().filter(|disk| disk.left_out).collect();
    if lacking.is_empty() {
        return Ok(());
    }
    let named: Vec<_> =
        lacking.iter().map(|disk| format!("{} ({})", disk.name, disk.base.path)).collect();
    Err(Error::DisksLeftOut { checkpoint: id, disks: named.join(", ") })
}

/// Returns whether two lists name the same disks, of the same sizes, over the same images.
pub fn are_same(these: &[DiskMeta], those: &[DiskMeta]) -> bool {
    let same = |(a, b): (&DiskMeta, &DiskMeta)| {
        (&a.name, a.disk_bytes, &a.base) == (&b.name, b.disk_bytes, &b.base)
    };
    these.len() == those.len() && these.iter().zip(those).all(same)
}

impl ServedDisks {
    /// Opens the disks of checkpoint `id` in the server, beside those that are served, without
    /// serving them. Errors: an image has changed since the checkpoint; a disk cannot be opened.
    pub fn stage(&mut self, store: &Store, id: CheckpointId, meta: &Meta) -> Result<()> {
        let disks = disks_of_checkpoint(store, id, meta)?;
        self.round += 1;
        let staged = specs(&self.directory, &disks, self.round)?;
        self.disks.stage(&staged).map_err(|e| {
            for spec in &staged {
                let _ = std::fs::remove_dir_all(&spec.overlay);
            }
            e.into()
        })
    }

    /// Writes to `disks.json` that the disks of checkpoint `id` are served. Error: the file cannot
    /// be written.
    pub fn describe(&mut self, id: CheckpointId) -> Result<()> {
        let info = self.info.with_overlays(self.disks.specs());
        self.info = OverlayInfo { checkpoint: Some(id.0), ..info };
        self.directory.describe(&self.info)
    }

    /// Closes the disks that are open but not served, and removes their overlays. Error: the server
    /// does not answer.
    pub fn dismiss(&mut self) -> Result<()> {
        let dismissed = self.disks.dismiss()?;
        for spec in dismissed {
            // An overlay that is left over takes space and does no other harm.
            let _ = std::fs::remove_dir_all(&spec.overlay);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_store::BaseMeta;

    fn disk((name, format, left_out): (&str, &str, bool)) -> DiskMeta {
        DiskMeta {
            name: format!("vm/{name}"),
            base: BaseMeta { format: format.into(), ..BaseMeta::default() },
            left_out,
            ..DiskMeta::default()
        }
    }

    #[test]
    fn qemu_opens_the_disks_that_were_left_out_and_that_no_server_can_serve() {
        let words = [
            ["-drive", "file=a.raw,format=raw,id=a"],
            ["-drive", "file=b.vmdk,format=vmdk,id=b"],
            ["-blockdev", "nbd,node-name=c,path=/s"],
            ["-blockdev", "luks,node-name=d,key-secret=s,file.driver=file,file.filename=d"],
            ["-drive", "file=e.qcow2,format=qcow2,id=e,encrypt.key-secret=s"],
            ["-drive", "file=f.qcow2,format=qcow2,id=f,backing.file.filename=g"],
            ["-drive", "file=g.raw,format=raw,id=g"],
        ];
        let disks = [
            ("a", "raw", true),
            ("b", "vmdk", true),
            ("c", "raw", true),
            ("d", "luks", true),
            ("e", "qcow2", true),
            ("f", "qcow2", true),
            ("g", "blank", false),
        ];
        let words: Vec<String> = words.as_flattened().iter().map(|w| (*w).to_owned()).collect();
        let disks = disks.map(disk);
        let names =
            |found: Vec<&DiskMeta>| found.iter().map(|d| d.name.clone()).collect::<Vec<_>>();
        let found = names(opened_on_line(&disks, "vm/", &words).unwrap());
        assert_eq!(found, ["vm/b", "vm/c", "vm/d", "vm/e", "vm/f"]);
        // They are another member's, or nothing was left out.
        assert!(opened_on_line(&disks, "other/", &words).unwrap().is_empty());
        let captured = disks.map(|disk| DiskMeta { left_out: false, ..disk });
        assert!(opened_on_line(&captured, "vm/", &words).unwrap().is_empty());
    }
}
