//! The plugin that QEMU loads. This program contains one build for each plugin interface.

use crate::error::{Result, file};
use std::fmt;
use std::path::{Path, PathBuf};

/// A version of QEMU's plugin interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PluginInterface {
    /// Version 1: QEMU 6.0 to 8.1; tested with 7.2.
    V1,
    /// Version 4: QEMU 9.1 to 10.2; tested with 10.0.
    V4,
    /// Version 7: QEMU 11; tested with 11.1.
    V7,
}

impl PluginInterface {
    /// Returns the interface of QEMU `major`.`minor`; `None` for versions before 6.0 and from 8.2
    /// to 9.0.
    pub fn of_qemu(major: u32, minor: u32) -> Option<Self> {
        match (major, minor) {
            (6..=7, _) | (8, 0..=1) => Some(Self::V1),
            (9, 1..) | (10, _) => Some(Self::V4),
            (11.., _) => Some(Self::V7),
            _ => None,
        }
    }

    /// Returns the number by which QEMU calls the interface.
    pub fn number(self) -> u32 {
        match self {
            Self::V1 => 1,
            Self::V4 => 4,
            Self::V7 => 7,
        }
    }
}

impl fmt::Display for PluginInterface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interface {}", self.number())
    }
}

/// Writes the plugin for `interface` into `dir` and returns its path. An existing file is replaced
/// by a rename.
///
/// Error: [`Error::File`](crate::Error::File) if the file cannot be written or renamed.
pub fn install(dir: &Path, interface: PluginInterface) -> Result<PathBuf> {
    let bytes = match interface {
        PluginInterface::V1 => keyframe_embedded_plugins::PLUGIN_1,
        PluginInterface::V4 => keyframe_embedded_plugins::PLUGIN_4,
        PluginInterface::V7 => keyframe_embedded_plugins::PLUGIN_7,
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
