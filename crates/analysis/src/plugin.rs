//! The plugin that QEMU loads. This program contains one build for each plugin interface.

use crate::error::{Result, file};
use std::fmt;
use std::path::{Path, PathBuf};

/// A text that each plugin prints when QEMU calls it without arguments. It then refuses to be
/// installed, and QEMU ends.
pub const REFUSAL: &str = "keyframe plugin: argument tool is missing";

/// A version of QEMU's plugin interface. QEMU accepts some, which it is asked for by loading
/// plugins; its version does not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PluginInterface {
    /// Version 1: tested with QEMU 7.2.
    V1,
    /// Version 4: tested with QEMU 10.0.
    V4,
    /// Version 7: tested with QEMU 11.1, which accepts no other.
    V7,
}

impl PluginInterface {
    /// All versions for which there is a plugin, the newest first.
    pub const ALL: [Self; 3] = [Self::V7, Self::V4, Self::V1];

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
