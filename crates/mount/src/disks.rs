//! A checkpoint's disks as files.
//!
//! Invariant: bytes of a disk come from the image that the checkpoint builds upon. The image is
//! compared before the disk is opened and after each read. Once it has changed, reads fail until it
//! is as it was and the disk is opened anew.

use super::node::DISKS_MAX;
use crate::error::Error;
use keyframe_disk::{Below, Readable};
use keyframe_store::{DiskMeta, LoadedDisks};
use keyframe_vm_disks::stored::StoredDisk;
use std::sync::Arc;

/// A disk of a checkpoint that a process has open for reading.
pub struct OpenDisk {
    stored: StoredDisk,
    disk: Below,
    /// Its name in errors.
    name: String,
}

impl OpenDisk {
    /// Opens disk number `number`, from 0 on, of a checkpoint; errors call it `name`. Errors:
    /// [`Error::NoDisk`] if the checkpoint has no such disk, [`Error::OpenDisk`] if the disk cannot
    /// be opened.
    pub fn new(disks: Arc<LoadedDisks>, number: u8, name: String) -> Result<Self, Error> {
        let stored = StoredDisk::of(disks, usize::from(number));
        let stored = stored.ok_or_else(|| Error::NoDisk(name.clone()))?;
        let disk =
            stored.open().map_err(|source| Error::OpenDisk { disk: name.clone(), source })?;
        Ok(Self { stored, disk, name })
    }

    /// Reads up to `len` bytes from byte `offset` on; fewer at the end of the disk. Error: an image
    /// or the store cannot be read, or the image has changed.
    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, Error> {
        let failed = |source| Error::ReadDisk { disk: self.name.clone(), offset, source };
        let left = self.disk.disk_bytes().saturating_sub(offset);
        let mut bytes = vec![0; usize::try_from(left).unwrap_or(usize::MAX).min(len)];
        self.disk.read(offset, &mut bytes).map_err(|e| failed(e.into()))?;
        self.stored.require_unchanged().map_err(|e| failed(e.into()))?;
        Ok(bytes)
    }
}

/// Returns the disks of `member`, or with `None` those of the only VM: their numbers, and the names
/// of their files.
pub fn files<'a>(
    all: &'a [DiskMeta],
    member: Option<&str>,
) -> impl Iterator<Item = (u8, String)> + use<'a> {
    let prefix = member.map(|member| format!("{member}/")).unwrap_or_default();
    (0u8..).zip(all).take(DISKS_MAX).filter_map(move |(number, disk)| {
        let name = disk.name.strip_prefix(&prefix)?;
        Some((number, format!("disk-{}.raw", escaped(name, |_| false))))
    })
}

/// Makes a file name of `name`: each `/`, `%` and NUL, and each ASCII character that `further`
/// chooses, becomes `%` and two hexadecimal digits.
pub fn escaped(name: &str, further: impl Fn(char) -> bool) -> String {
    let hex = |digit: u32| char::from_digit(digit, 16).map_or('0', |c| c.to_ascii_uppercase());
    let mut out = String::with_capacity(name.len());
    for c in name.chars() {
        if matches!(c, '/' | '%' | '\0') || (c.is_ascii() && further(c)) {
            out.extend(['%', hex(c as u32 / 16), hex(c as u32 % 16)]);
        } else {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_disk_has_a_file_of_its_own() {
        let named = |name: &str| DiskMeta { name: name.into(), ..DiskMeta::default() };
        let alone = ["vda", "#block/1", "100%"].map(named);
        let names: Vec<_> = files(&alone, None).collect();
        let expected =
            ["disk-vda.raw", "disk-#block%2F1.raw", "disk-100%25.raw"].map(str::to_owned);
        assert_eq!(names, (0..).zip(expected).collect::<Vec<_>>());
        let group = ["web/vda", "db/vda", "web/b/c"].map(named);
        let of = |member| files(&group, Some(member)).collect::<Vec<_>>();
        assert_eq!(of("web"), [(0, "disk-vda.raw".into()), (2, "disk-b%2Fc.raw".into())]);
        assert_eq!(of("db"), [(1, "disk-vda.raw".into())]);
    }
}
