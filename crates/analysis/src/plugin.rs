//! The plugin that QEMU loads, carried in the program: one for each interface.

use crate::error::{Result, file};
use std::fmt;
use std::path::{Path, PathBuf};

/// A version of QEMU's interface for plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Interface {
    /// 1: QEMU 6.0 to 8.2; tested with 7.2.
    V1,
    /// 4: QEMU 9.1 and later; tested with 10.0.
    V4,
}

impl Interface {
    /// That of a QEMU version; `None` for those between the two, and before the first.
    pub fn of_qemu(major: u32, minor: u32) -> Option<Self> {
        match (major, minor) {
            (6..=7, _) | (8, 0..=1) => Some(Self::V1),
            (9, 1..) | (10.., _) => Some(Self::V4),
            _ => None,
        }
    }

    /// As QEMU numbers it.
    pub fn number(self) -> u32 {
        match self {
            Self::V1 => 1,
            Self::V4 => 4,
        }
    }
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interface {}", self.number())
    }
}

/// Writes the plugin into `dir`, for QEMU to load from there. What has the name already is replaced
/// by a rename.
pub fn place(dir: &Path, interface: Interface) -> Result<PathBuf> {
    let bytes = match interface {
        Interface::V1 => keyframe_carried::PLUGIN_1,
        Interface::V4 => keyframe_carried::PLUGIN_4,
    };
    let path = dir.join(format!("keyframe-plugin-{}.so", interface.number()));
    let unfinished = dir.join(format!(
        "keyframe-plugin-{}.{}.unfinished",
        interface.number(),
        std::process::id()
    ));
    std::fs::write(&unfinished, bytes).map_err(file("writing", &unfinished))?;
    std::fs::rename(&unfinished, &path).map_err(file("renaming to", &path))?;
    Ok(path)
}
