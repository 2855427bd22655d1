//! The configuration of a VM, as `GET /vm/config` tells it and `--config-file` gives it.

use keyframe_vmm::WritableDrive;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The unit in which a drive is measured.
const SECTOR_BYTES: u64 = 512;

/// The sections of a configuration that Keyframe knows. A VM with another one is refused: it may
/// have a device that writes to RAM unseen.
pub const KNOWN_SECTIONS: [&str; 13] = [
    "balloon",
    "boot-source",
    "cpu-config",
    "drives",
    "entropy",
    "logger",
    "machine-config",
    "metrics",
    "mmds-config",
    "network-interfaces",
    "serial-device",
    "snapshot",
    "vsock",
];

/// The configuration of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct VmConfig {
    /// Processors and memory.
    #[serde(default, rename = "machine-config")]
    pub machine: MachineConfig,
    /// The drives.
    #[serde(default)]
    pub drives: Vec<Drive>,
    /// The network cards.
    #[serde(default, rename = "network-interfaces")]
    pub network: Vec<NetworkInterface>,
    /// The balloon, if there is one.
    #[serde(default)]
    pub balloon: Option<Value>,
    /// The source of random numbers, if there is one.
    #[serde(default)]
    pub entropy: Option<Value>,
    /// The vsock device, if there is one.
    #[serde(default)]
    pub vsock: Option<Value>,
    /// The metadata service, if there is one.
    #[serde(default, rename = "mmds-config")]
    pub mmds: Option<Value>,
    /// The sections that Keyframe does not know, without those that are empty.
    #[serde(skip)]
    pub unknown: Vec<String>,
}

/// Processors and memory of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct MachineConfig {
    /// The number of virtual CPUs.
    pub vcpu_count: u32,
    /// The size of RAM.
    pub mem_size_mib: u64,
    /// Whether Firecracker tracks dirty pages for its own snapshots.
    #[serde(default)]
    pub track_dirty_pages: bool,
    /// `None`, or the size of huge pages.
    #[serde(default)]
    pub huge_pages: Option<String>,
}

impl Default for MachineConfig {
    /// Firecracker's own defaults.
    fn default() -> Self {
        Self { vcpu_count: 1, mem_size_mib: 128, track_dirty_pages: false, huge_pages: None }
    }
}

/// A drive.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Drive {
    /// Its id.
    pub drive_id: String,
    /// Its file, as Firecracker's process names it; `None` for a vhost-user drive.
    #[serde(default)]
    pub path_on_host: Option<PathBuf>,
    /// The absolute path of the same file on this host, if Firecracker names it by another one, in a
    /// jail. Firecracker does not know this field: Keyframe adds it to the configuration that a
    /// checkpoint has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_outside: Option<PathBuf>,
    /// Whether the guest can only read it.
    #[serde(default)]
    pub is_read_only: Option<bool>,
    /// The socket of a vhost-user drive; `None` for others.
    #[serde(default)]
    pub socket: Option<PathBuf>,
    /// `Sync` or `Async`; `None` for Firecracker's default, `Sync`.
    #[serde(default)]
    pub io_engine: Option<String>,
}

impl Drive {
    /// Returns true if the guest can write to it.
    pub fn is_writable(&self) -> bool {
        !self.is_read_only.unwrap_or(false)
    }

    /// Returns the path of its file on this host. A relative path begins in `directory`. `None` for a
    /// vhost-user drive.
    pub fn host_path(&self, directory: &Path) -> Option<PathBuf> {
        let path = self.path_outside.as_ref().or(self.path_on_host.as_ref())?;
        Some(directory.join(path))
    }
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct NetworkInterface {
    /// Its id.
    pub iface_id: String,
    /// The tap device on the host.
    pub host_dev_name: String,
}

impl VmConfig {
    /// Reads a configuration. Error: it has another form than Firecracker's have.
    pub fn of(value: &Value) -> Result<Self, serde_json::Error> {
        let mut config = Self::deserialize(value)?;
        let is_empty = |section: &Value| {
            section.is_null()
                || section.as_array().is_some_and(Vec::is_empty)
                || section.as_object().is_some_and(serde_json::Map::is_empty)
        };
        let sections = value.as_object().into_iter().flatten();
        config.unknown = sections
            .filter(|(name, section)| !KNOWN_SECTIONS.contains(&&***name) && !is_empty(section))
            .map(|(name, _)| name.clone())
            .collect();
        Ok(config)
    }

    /// Returns the drives to which the guest can write. Their relative paths begin in `directory`.
    /// Error: the file of a drive cannot be looked at.
    pub fn writable_drives(&self, directory: &Path) -> crate::Result<Vec<WritableDrive>> {
        let mut drives = Vec::new();
        for drive in self.drives.iter().filter(|drive| drive.is_writable()) {
            let (name, Some(path)) = (drive.drive_id.clone(), drive.host_path(directory)) else {
                continue;
            };
            let file = std::fs::metadata(&path).map_err(crate::Error::io(format!(
                "look at the file of drive {name}, {}",
                path.display()
            )))?;
            // As for each raw image, a last sector that is not whole counts.
            let disk_bytes = file.len().div_ceil(SECTOR_BYTES) * SECTOR_BYTES;
            let identity = (file.dev(), file.ino());
            let is_in_jail = drive.path_outside.is_some();
            drives.push(WritableDrive { name, path, disk_bytes, identity, is_in_jail });
        }
        Ok(drives)
    }

    /// Returns `text`, this configuration as Firecracker tells it, with the paths of its drives outside
    /// of a jail.
    pub fn described(&self, text: &str) -> String {
        if self.drives.iter().all(|drive| drive.path_outside.is_none()) {
            return text.into();
        }
        let Ok(mut value) = serde_json::from_str::<Value>(text) else { return text.into() };
        for drive in value["drives"].as_array_mut().into_iter().flatten() {
            let known = self.drives.iter().find(|one| drive["drive_id"] == *one.drive_id);
            let outside = known.and_then(|one| one.path_outside.as_ref());
            if let (Some(fields), Some(outside)) = (drive.as_object_mut(), outside) {
                fields.insert("path_outside".into(), outside.to_string_lossy().into());
            }
        }
        value.to_string()
    }

    /// Reads the text of a configuration. Error: it has another form than Firecracker's have.
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        Self::of(&serde_json::from_str(text)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// As Firecracker 1.12.1 tells it.
    fn told() -> Value {
        json!({
            "balloon": null, "boot-source": { "kernel_image_path": "/k", "initrd_path": null },
            "drives": [{
                "drive_id": "d1", "partuuid": null, "is_root_device": false,
                "cache_type": "Unsafe", "is_read_only": false, "path_on_host": "d.img",
                "rate_limiter": null, "io_engine": "Sync", "socket": null,
            }],
            "cpu-config": null, "logger": null, "metrics": null, "mmds-config": null,
            "machine-config": {
                "vcpu_count": 1, "mem_size_mib": 128, "smt": false, "track_dirty_pages": false,
                "huge_pages": "None",
            },
            "network-interfaces": [], "vsock": null, "entropy": null,
        })
    }

    #[test]
    fn a_configuration_is_read_as_firecracker_tells_it() {
        let config = VmConfig::of(&told()).unwrap();
        assert_eq!((config.machine.vcpu_count, config.machine.mem_size_mib), (1, 128));
        assert!(config.drives[0].is_writable() && config.unknown.is_empty());
        assert_eq!(config.drives[0].path_on_host.as_deref(), Some("d.img".as_ref()));
    }

    #[test]
    fn sections_that_are_not_known_are_named_unless_they_are_empty() {
        let mut value = told();
        value["pmem"] = json!([{ "id": "p" }]);
        value["memory-hotplug"] = json!(null);
        value["other"] = json!([]);
        assert_eq!(VmConfig::of(&value).unwrap().unknown, ["pmem"]);
        assert!(VmConfig::of(&json!({ "drives": [{}] })).is_err(), "a drive without an id");
        let default = VmConfig::of(&json!({})).unwrap().machine;
        assert_eq!((default.vcpu_count, default.mem_size_mib), (1, 128));
    }
}
