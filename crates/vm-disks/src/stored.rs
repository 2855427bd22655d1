//! Reads a checkpoint's disk without a VM: the checkpoint's blocks over the image.
//!
//! ```text
//!   commit, export, mount ──▶ StoredDisk::open ──▶ Below ── blocks of the checkpoint
//!                                                    └───── image, unchanged since the checkpoint
//! ```
//!
//! Invariant: an image that has changed since the checkpoint is never read.

use crate::base_image::require_unchanged;
use crate::error::{Error, Result};
use crate::layer::StoredLayer;
use keyframe_disk::{Base, Below, ImageFormat, Layer};
use keyframe_store::{DiskMeta, LoadedDisks};
use std::path::PathBuf;
use std::sync::Arc;

/// A disk of a checkpoint.
#[derive(Clone, Debug)]
pub struct StoredDisk {
    disks: Arc<LoadedDisks>,
    meta: DiskMeta,
    number: usize,
}

impl StoredDisk {
    /// Returns disk number `number` (from 0) of the checkpoint; `None` if it has no such disk.
    pub fn of(disks: Arc<LoadedDisks>, number: usize) -> Option<Self> {
        let meta = disks.meta.disks.get(number)?.clone();
        Some(Self { disks, meta, number })
    }

    /// Chooses the disk with the name `name`. In a checkpoint of a group, the name is
    /// `MEMBER/NAME`, or `NAME` if `member` is given. If there is only one disk, `name` may be
    /// `None`.
    ///
    /// Errors: [`Error::NoMember`] if the group has no such member, [`Error::NoDisks`] if the
    /// checkpoint or the member has no disk, [`Error::NoDisk`] if none has this name,
    /// [`Error::SeveralDisks`] if `name` is `None` and there are several.
    pub fn choose(
        disks: Arc<LoadedDisks>,
        member: Option<&str>,
        name: Option<&str>,
    ) -> Result<Self> {
        let (id, all) = (disks.id, &disks.meta.disks);
        if let Some(member) =
            member.filter(|m| disks.meta.members.iter().all(|known| known.name != **m))
        {
            let members = disks.meta.members.iter().map(|known| known.name.clone()).collect();
            return Err(Error::NoMember { checkpoint: id, member: member.to_owned(), members });
        }
        let prefix = member.map(|member| format!("{member}/")).unwrap_or_default();
        let candidates: Vec<usize> =
            (0..all.len()).filter(|i| all[*i].name.starts_with(&prefix)).collect();
        let holds = candidates.iter().map(|i| all[*i].name.as_str()).collect::<Vec<_>>().join(", ");
        let member = member.map(str::to_owned);
        let chosen = match (name, &candidates[..]) {
            (_, []) => return Err(Error::NoDisks { checkpoint: id, member }),
            (None, [only]) => *only,
            (None, _) => return Err(Error::SeveralDisks { checkpoint: id, member, holds }),
            (Some(name), _) => {
                let is_named = |i: &&usize| {
                    let full = &all[**i].name;
                    full == name || full.strip_prefix(&prefix) == Some(name)
                };
                let disk = name.to_owned();
                *candidates.iter().find(is_named).ok_or(Error::NoDisk {
                    checkpoint: id,
                    disk,
                    member,
                    holds,
                })?
            }
        };
        Self::of(disks, chosen).ok_or(Error::NoDisks { checkpoint: id, member: None })
    }

    /// Returns the checkpoint's description of the disk.
    pub fn meta(&self) -> &DiskMeta {
        &self.meta
    }

    /// Returns the path of the image below the disk.
    pub fn image(&self) -> PathBuf {
        PathBuf::from(&self.meta.base.path)
    }

    /// Returns the format of the image below the disk. Error: [`Error::UnknownFormat`] if Keyframe
    /// does not know the format that the checkpoint names.
    pub fn format(&self) -> Result<ImageFormat> {
        let DiskMeta { name, base, .. } = &self.meta;
        let format =
            if base.is_blank() { Some(ImageFormat::Raw) } else { ImageFormat::named(&base.format) };
        format
            .ok_or_else(|| Error::UnknownFormat { disk: name.clone(), format: base.format.clone() })
    }

    /// Returns the blocks of the disk that the checkpoint holds, as a layer over the image.
    ///
    /// Errors: [`Error::DiskLeftOut`] if the checkpoint does not hold them,
    /// [`Error::DisksTooLarge`] if its page map has no room for them.
    pub fn layer(&self) -> Result<Box<dyn Layer>> {
        if self.meta.left_out {
            return Err(Error::DiskLeftOut {
                checkpoint: self.disks.id,
                disk: self.meta.name.clone(),
            });
        }
        let layer = StoredLayer::of(Arc::clone(&self.disks), self.number);
        Ok(Box::new(layer.ok_or(Error::DisksTooLarge(self.disks.id))?))
    }

    /// Opens the disk as the guest saw it. The image stays locked against writes by Keyframe until
    /// the result is dropped.
    ///
    /// Errors: the image has changed, or a commit into it is in progress.
    pub fn open(&self) -> Result<Below> {
        let DiskMeta { disk_bytes, base: known, .. } = &self.meta;
        if known.is_blank() {
            let blank = Base::blank(*disk_bytes)?;
            return Ok(Below::new(blank, Some(self.layer()?)));
        }
        let image = Base::open(&self.image(), self.format()?).map_err(|e| match &e {
            // If the image is missing, the following error tells the user the fix.
            keyframe_disk::Error::Io { .. } => {
                require_unchanged(known).err().unwrap_or_else(|| e.into())
            }
            _ => e.into(),
        })?;
        // The image is locked, so no Keyframe command changes it from now on.
        require_unchanged(known)?;
        self.require_size(&image)?;
        Ok(Below::new(image, Some(self.layer()?)))
    }

    /// Opens the image of a disk that was left out of the checkpoint, as it is now. Errors: the image
    /// cannot be opened, or has another size than the disk.
    pub fn open_as_now(&self) -> Result<Below> {
        let image = Base::open(&self.image(), self.format()?)?;
        self.require_size(&image)?;
        Ok(Below::new(image, None))
    }

    fn require_size(&self, image: &Base) -> Result<()> {
        let DiskMeta { name, disk_bytes, base: known, .. } = &self.meta;
        if image.disk_bytes() == *disk_bytes {
            return Ok(());
        }
        Err(Error::SizeDiffers {
            path: known.path.clone().into(),
            image_bytes: image.disk_bytes(),
            disk: name.clone(),
            checkpoint: self.disks.id,
            disk_bytes: *disk_bytes,
        })
    }

    /// Checks, after a read, that the image has not changed meanwhile. Errors: those of
    /// [`crate::base_image::require_unchanged`].
    pub fn require_unchanged(&self) -> Result<()> {
        require_unchanged(&self.meta.base)
    }
}
