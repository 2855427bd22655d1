//! The disks of the command lines of VMs that are about to be launched: served, or left out.

use super::StartedVm;
use crate::error::Result;
use crate::event::{Event, EventSink};
use keyframe_disk_capture::{DiskError, DiskOwner, ExcludedDisks};
use keyframe_qemu::{DiskServer, Drive, Invocation, LineDrive, QemuIdentity};
use keyframe_store::Store;
use keyframe_vm_disks::overlay_directory::newest_over;
use keyframe_vm_disks::{self as disks, DiskToServe, ServedDisks};
use std::path::Path;

/// A VM's command line and its binary.
type Starting = (Invocation, QemuIdentity);

/// How the disks of command lines are named.
pub(super) struct LineDisks<'a> {
    /// The names of the lines' VMs; `None` if there is one VM, whose disks have no prefix.
    pub members: Option<&'a [String]>,
    /// The disks that stay out of checkpoints.
    pub leave_out: &'a ExcludedDisks,
}

impl LineDisks<'_> {
    /// The prefix of the names of the disks of line `number`.
    fn prefix(&self, number: usize) -> String {
        let member = self.members.and_then(|members| members.get(number));
        member.map_or_else(String::new, |member| format!("{member}/"))
    }

    /// The disks of line `number` that are left out, and the others. Error: one of the others
    /// cannot be served.
    fn parted(&self, number: usize, line: &Invocation) -> Result<(Vec<LineDrive>, Vec<Drive>)> {
        let all = line.line_drives()?;
        let left_out = self.leave_out.in_line(&self.prefix(number), &all);
        let (left_out, captured): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|disk| disk.is_in(&left_out));
        let captured = captured.into_iter().map(|disk| disk.drive);
        Ok((left_out, captured.collect::<Result<_, _>>().map_err(keyframe_qemu::Error::from)?))
    }

    /// Returns the disks of all lines that are captured, with absolute paths if the relative ones
    /// begin at `directory`.
    ///
    /// Errors: a disk that is not left out cannot be served; a disk that is to be left out is on no
    /// line.
    pub fn captured(&self, starting: &[Starting], directory: &Path) -> Result<Vec<Drive>> {
        self.require_known(starting)?;
        let mut all = Vec::new();
        for (number, (line, _)) in starting.iter().enumerate() {
            let (_, captured) = self.parted(number, line)?;
            all.extend(captured.into_iter().map(|drive| drive.at(directory)));
        }
        Ok(all)
    }

    fn require_known(&self, starting: &[Starting]) -> Result<()> {
        if self.leave_out.0.is_empty() {
            return Ok(());
        }
        let mut lines = Vec::new();
        for (number, (line, _)) in starting.iter().enumerate() {
            lines.push((self.prefix(number), line.line_drives()?));
        }
        let is_unknown = |name: &&String| {
            let one = ExcludedDisks(vec![(*name).clone()]);
            let has = |(prefix, drives): &(String, Vec<LineDrive>)| {
                let named = one.in_line(prefix, drives);
                drives.iter().any(|drive| drive.is_in(&named))
            };
            *name != "all" && !lines.iter().any(has)
        };
        match self.leave_out.0.iter().find(is_unknown) {
            Some(name) => {
                let of_line = |(prefix, drives): &(String, Vec<LineDrive>)| -> Vec<String> {
                    drives.iter().map(|disk| full_name(prefix, disk)).collect()
                };
                let disks = lines.iter().flat_map(of_line).collect();
                Err(DiskError::UnknownDisk { name: name.clone(), disks }.into())
            }
            None => Ok(()),
        }
    }

    /// Serves all disks that the guests can write to and that are not left out, and makes the
    /// command lines in `starting` name the server. Relative paths begin at `directory`. Returns
    /// `None` if no disk is served. Errors: a disk cannot be served; two drives use one image; a
    /// command line cannot be changed.
    pub fn serve(
        &self,
        (store, name, run_dir): (&Store, &str, &Path),
        starting: &mut [Starting],
        directory: &Path,
        events: &dyn EventSink<Event>,
    ) -> Result<Option<ServedDisks>> {
        let socket = run_dir.join("disks.sock");
        let mut wanted = Vec::new();
        for (number, (line, _)) in starting.iter_mut().enumerate() {
            let prefix = self.prefix(number);
            let (left_out, captured) = self.parted(number, line)?;
            let before = wanted.len();
            for drive in &captured {
                wanted.push(DiskToServe::of_drive(drive, &prefix)?);
            }
            let of_line = wanted.get(before..).unwrap_or_default();
            let read = disks::read_files::describe(line.words(), Path::new(""));
            disks::require_separate_images(of_line, &read)?;
            let left_out: Vec<Drive> = left_out
                .into_iter()
                .filter_map(|disk| disk.drive.ok().map(|drive| drive.at(directory)))
                .collect();
            disks::require_apart_from(of_line, &left_out)?;
            if !captured.is_empty() {
                let left_out = self.leave_out.in_line(&prefix, &line.line_drives()?);
                line.serve_drives(&DiskServer {
                    prefix,
                    left_out,
                    ..DiskServer::at(socket.clone())
                })?;
            }
        }
        if wanted.is_empty() {
            return Ok(None);
        }
        let bases: Vec<&str> = wanted.iter().map(|disk| disk.meta.base.path.as_str()).collect();
        for overlay in newest_over(store, &bases) {
            events.event(&Event::LeftoverOverlay(overlay));
        }
        Ok(disks::serve(store, name, None, wanted, &socket).map(Some)?)
    }
}

/// The name of a disk of a line, with the ids of its devices.
fn full_name(prefix: &str, disk: &LineDrive) -> String {
    match &disk.devices[..] {
        [] => format!("{prefix}{}", disk.name),
        devices => format!("{prefix}{} ({})", disk.name, devices.join(", ")),
    }
}

/// Returns the VMs `found` as the owners of disks.
pub fn disk_owners(found: &mut [StartedVm]) -> Vec<DiskOwner<'_>> {
    let mut owners = Vec::with_capacity(found.len());
    for StartedVm { name, directory, vm, .. } in found {
        owners.push(DiskOwner { name, directory, vm });
    }
    owners
}
