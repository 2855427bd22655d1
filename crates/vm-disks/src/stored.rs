//! A checkpoint's disk without a VM: its blocks over the image that it stands on, to be read.
//!
//! ```text
//!   commit, export, mount ──▶ StoredDisk::open ──▶ Below ── blocks of the checkpoint
//!                                                    └───── image, unchanged since
//! ```
//!
//! Invariant: nothing is read of an image that is not what it was.

use super::base;
use super::layer::StoredLayer;
use super::writing::failure;
use keyframe_disk::{Base, Below, Error, ImageFormat, Layer};
use keyframe_failure::Failure;
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
    /// Disk number `number` of the checkpoint.
    pub fn of(disks: Arc<LoadedDisks>, number: usize) -> Option<Self> {
        let meta = disks.meta.disks.get(number)?.clone();
        Some(Self { disks, meta, number })
    }

    /// The disk called `name`; of a group's as `MEMBER/NAME`, or as `NAME` of `member`. It need not
    /// be named where there is only one.
    pub fn choose(
        disks: Arc<LoadedDisks>,
        member: Option<&str>,
        name: Option<&str>,
    ) -> Result<Self, Failure> {
        let (id, all) = (disks.id, &disks.meta.disks);
        if let Some(member) =
            member.filter(|m| disks.meta.members.iter().all(|known| known.name != **m))
        {
            let names: Vec<&str> =
                disks.meta.members.iter().map(|known| known.name.as_str()).collect();
            let fix = if names.is_empty() {
                "it is of one VM: leave --member out".to_owned()
            } else {
                format!("its members are {}", names.join(", "))
            };
            return Err(Failure::new(format!("checkpoint {id} has no member {member}")).fix(fix));
        }
        let prefix = member.map(|member| format!("{member}/")).unwrap_or_default();
        let candidates: Vec<usize> =
            (0..all.len()).filter(|i| all[*i].name.starts_with(&prefix)).collect();
        let list = candidates.iter().map(|i| all[*i].name.as_str()).collect::<Vec<_>>().join(", ");
        let of = member.map(|member| format!(" of member {member}")).unwrap_or_default();
        let chosen = match (name, &candidates[..]) {
            (_, []) => {
                let problem = format!(
                    "checkpoint {id} holds no disk{of}: the guest could write to none, or it was left out"
                );
                return Err(Failure::new(problem));
            }
            (None, [only]) => *only,
            (None, _) => {
                return Err(Failure::new(format!(
                    "checkpoint {id} holds several disks{of}: {list}"
                ))
                .fix("say which one with --disk NAME"));
            }
            (Some(name), _) => {
                let is_named = |i: &&usize| {
                    let full = &all[**i].name;
                    full == name || full.strip_prefix(&prefix) == Some(name)
                };
                *candidates.iter().find(is_named).ok_or_else(|| {
                    Failure::new(format!("checkpoint {id} holds no disk {name}{of}"))
                        .fix(format!("it holds {list}"))
                })?
            }
        };
        Self::of(disks, chosen)
            .ok_or_else(|| Failure::new(format!("checkpoint {id} has no such disk")))
    }

    /// What is known of it.
    pub fn meta(&self) -> &DiskMeta {
        &self.meta
    }

    /// Its image.
    pub fn image(&self) -> PathBuf {
        PathBuf::from(&self.meta.base.path)
    }

    /// How that is encoded.
    pub fn format(&self) -> Result<ImageFormat, Failure> {
        let DiskMeta { name, base, .. } = &self.meta;
        let format =
            if base.is_blank() { Some(ImageFormat::Raw) } else { ImageFormat::named(&base.format) };
        format.ok_or_else(|| Failure::new(format!("disk {name}: unknown format {}", base.format)))
    }

    /// What the checkpoint holds of it.
    ///
    /// Error: it was left out of the checkpoint.
    pub fn layer(&self) -> Result<Box<dyn Layer>, Failure> {
        if self.meta.left_out {
            return Err(Failure::new(format!(
                "disk {} was left out of checkpoint {}, as whoever took it wished",
                self.meta.name, self.disks.id
            )));
        }
        let layer = StoredLayer::of(Arc::clone(&self.disks), self.number);
        let layer = layer.ok_or_else(|| {
            Failure::new(format!(
                "checkpoint {}: its disks are larger than they can be",
                self.disks.id
            ))
        })?;
        Ok(Box::new(layer))
    }

    /// The disk as the guest saw it. Its image is nobody's to write for as long as this is there.
    ///
    /// Errors: the image has changed, or a commit into it is under way.
    pub fn open(&self) -> Result<Below, Failure> {
        let DiskMeta { name, disk_bytes, base: known, .. } = &self.meta;
        if known.is_blank() {
            let blank = Base::blank(*disk_bytes).map_err(|e| failure(&e))?;
            return Ok(Below::new(blank, Some(self.layer()?)));
        }
        let image = Base::open(&self.image(), self.format()?).map_err(|e| match &e {
            // It says what to do about one that is not there.
            Error::Io { .. } => base::require_unchanged(known).err().unwrap_or_else(|| failure(&e)),
            _ => failure(&e),
        })?;
        // Behind the lock: nobody of ours changes it from here on.
        base::require_unchanged(known)?;
        if image.disk_bytes() != *disk_bytes {
            return Err(Failure::new(format!(
                "{}: a disk of {} bytes, disk {name} of checkpoint {} has {disk_bytes}",
                known.path,
                image.disk_bytes(),
                self.disks.id
            ))
            .fix("put the image back as it was"));
        }
        Ok(Below::new(image, Some(self.layer()?)))
    }

    /// Refuses what was read of the image where it has changed meanwhile.
    pub fn require_unchanged(&self) -> Result<(), Failure> {
        base::require_unchanged(&self.meta.base)
    }
}
