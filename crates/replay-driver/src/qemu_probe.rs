//! Asks a QEMU binary for the version of its log and for its plugin interface.
//!
//! The answers are in the cache, under the binary's hash.

use crate::{Error, Result};
use keyframe_analysis::plugin::{self, PluginInterface};
use keyframe_qemu::QemuIdentity;
use keyframe_qemu::probe::{self, PluginCandidate};
use keyframe_replay::log::LogVersion;
use keyframe_scratch_directory::ScratchDirectory;
use std::path::{Path, PathBuf};

/// The analysis plugin in a file, and the interface that it is built for.
pub(crate) struct InstalledPlugin {
    pub interface: PluginInterface,
    pub path: PathBuf,
}

/// Returns the version of the record/replay logs that the binary `qemu` writes.
///
/// # Errors
///
/// [`Error::UnknownLog`] if Keyframe does not read logs of this version; QEMU cannot be run, or does
/// not record.
pub fn log_version_of(qemu: &QemuIdentity) -> Result<LogVersion> {
    let header = probe::log_header(qemu, cache().as_deref())?;
    let found = LogVersion(u32::from_be_bytes(header));
    if found.is_known() {
        return Ok(found);
    }
    Err(Error::UnknownLog { qemu: qemu.path.clone(), found })
}

/// Checks that the binary `qemu` accepts a plugin of this program.
///
/// # Errors
///
/// It accepts none, or it cannot be run.
pub(crate) fn require_plugin(qemu: &QemuIdentity) -> Result<()> {
    let folder = ScratchDirectory::new("plugin");
    let folder = folder.map_err(|e| Error::io("make a directory for the plugin", e))?;
    install_plugin(qemu, folder.path()).map(drop)
}

/// Writes the plugin that the binary `qemu` accepts into `folder`.
///
/// # Errors
///
/// The binary accepts no plugin of this program, or it is gone; the plugin cannot be written.
pub(crate) fn install_plugin(qemu: &QemuIdentity, folder: &Path) -> Result<InstalledPlugin> {
    let mut plugins = PluginInterface::ALL
        .into_iter()
        .map(|interface| {
            Ok(InstalledPlugin { interface, path: plugin::install(folder, interface)? })
        })
        .collect::<Result<Vec<_>>>()?;
    let candidate = |plugin: &InstalledPlugin| PluginCandidate {
        interface: plugin.interface.number(),
        library: plugin.path.clone(),
        refusal: plugin::REFUSAL,
    };
    let candidates: Vec<_> = plugins.iter().map(candidate).collect();
    let accepted = probe::plugin_interface(qemu, &candidates, cache().as_deref())?;
    Ok(plugins.swap_remove(accepted))
}

fn cache() -> Option<PathBuf> {
    keyframe_store::backend::cache_root(&|name| std::env::var(name).ok())
}
