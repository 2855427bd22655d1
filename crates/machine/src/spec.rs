//! The description of a virtual machine.

use crate::{Processor, RecordingPosition, VmmKind};
use keyframe_units::GuestRegion;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// What a virtual machine is: the VMM, its command line and the machine that the guest sees.
///
/// The JSON names of the fields are part of the checkpoint format. Fields that were added for a
/// VMM other than QEMU are left out of QEMU's JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineSpec {
    /// The VMM.
    #[serde(default, skip_serializing_if = "VmmKind::is_default")]
    pub vmm: VmmKind,
    /// Path of the VMM's binary.
    #[serde(rename = "qemu_path")]
    pub binary_path: String,
    /// The VMM's version, as the binary reports it (`7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)`).
    #[serde(rename = "qemu_version")]
    pub vmm_version: String,
    /// BLAKE3 hash of the binary, in hexadecimal.
    #[serde(rename = "qemu_blake3")]
    pub binary_blake3: String,
    /// The guest's processor. The JSON of x86-64 leaves it out.
    #[serde(default, skip_serializing_if = "Processor::is_default")]
    pub processor: Processor,
    /// Machine type with aliases resolved (`pc-i440fx-7.2`).
    pub machine_type: String,
    /// The number of virtual CPUs.
    #[serde(rename = "cpus")]
    pub vcpus: u32,
    /// Directory that relative paths of the command line start from.
    pub working_directory: String,
    /// Command line as the user gave it, the binary first.
    pub user_command: Vec<String>,
    /// Command line as it was run, with the options that Keyframe added.
    pub full_command: Vec<String>,
    /// Features of the processor model that the guest does not have because the accelerator or the
    /// host lacks them. `None` if the VMM was not asked.
    #[serde(rename = "cpu_lacks", default, skip_serializing_if = "Option::is_none")]
    pub missing_cpu_features: Option<Vec<String>>,
    /// Position of the RAM blocks in the guest's physical address space. `None` if the VMM was not
    /// asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_map: Option<Vec<GuestRegion>>,
    /// Position of the VM in its recording. `None` if the VM is not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded: Option<RecordingPosition>,
    /// Number of guest instructions that the host's processor has executed since the session began.
    /// `None` if they were not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counted_instructions: Option<u64>,
    /// The VM's configuration as its VMM tells it, for a VMM whose command line does not hold it.
    /// JSON text. `None` for other VMMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmm_config: Option<String>,
    /// The files of the command line that the VMM only reads. `None` if they were not noted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_files: Option<Vec<ReadFile>>,
}

/// A file that a VM only reads, and its identity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadFile {
    /// Its absolute path.
    pub path: String,
    /// The option that names it (`-kernel`, `-cdrom`).
    pub option: String,
    /// True if the guest reads it while it runs (a disk, a CD). Else QEMU reads it at its start,
    /// and again at none of the guest's resets.
    pub is_medium: bool,
    /// Its length, in bytes.
    pub len_bytes: u64,
    /// The time of its last change (`mtime`), as seconds and nanoseconds since 1970.
    pub modified: (i64, u32),
    /// The time at which its inode was last changed (`ctime`), in the same form.
    pub changed: (i64, u32),
    /// The BLAKE3 hash of samples spread over its length, in hexadecimal.
    pub sample_blake3: String,
}

impl MachineSpec {
    /// Returns the path of the VMM's binary.
    pub fn binary(&self) -> &Path {
        Path::new(&self.binary_path)
    }

    /// Returns whether the device state is a migration stream of QEMU's. Such a stream can be
    /// exported, and Keyframe reads some devices in it, for example the display. Of other VMMs'
    /// states Keyframe reads the registers of the processors alone.
    pub fn has_migration_stream(&self) -> bool {
        self.vmm == VmmKind::Qemu
    }

    /// Returns the directory from which relative paths of the command line start.
    pub fn directory(&self) -> PathBuf {
        PathBuf::from(&self.working_directory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spec() -> MachineSpec {
        MachineSpec {
            binary_path: "/usr/bin/qemu-system-x86_64".into(),
            vmm_version: "7.2.22".into(),
            binary_blake3: "5a".repeat(32),
            machine_type: "pc-i440fx-7.2".into(),
            vcpus: 2,
            working_directory: "/home/u".into(),
            user_command: vec!["qemu-system-x86_64".into()],
            full_command: vec!["qemu-system-x86_64".into(), "-S".into()],
            ..MachineSpec::default()
        }
    }

    #[test]
    fn json_field_names_of_a_qemu_machine_are_fixed() {
        let expected = json!({
            "qemu_path": "/usr/bin/qemu-system-x86_64",
            "qemu_version": "7.2.22",
            "qemu_blake3": "5a".repeat(32),
            "machine_type": "pc-i440fx-7.2",
            "cpus": 2,
            "working_directory": "/home/u",
            "user_command": ["qemu-system-x86_64"],
            "full_command": ["qemu-system-x86_64", "-S"],
        });
        assert_eq!(serde_json::to_value(spec()).unwrap(), expected);
        assert_eq!(serde_json::from_value::<MachineSpec>(expected).unwrap(), spec());
    }

    #[test]
    fn optional_fields_survive_json() {
        let full = MachineSpec {
            vmm: VmmKind::Firecracker,
            processor: Processor::Riscv64,
            missing_cpu_features: Some(vec!["rtm".into()]),
            guest_map: Some(Vec::new()),
            recorded: Some(RecordingPosition { recording: "ab".into(), icount: 7 }),
            counted_instructions: Some(9),
            vmm_config: Some("{}".into()),
            ..spec()
        };
        let json = serde_json::to_value(&full).unwrap();
        assert_eq!(json["vmm"], "firecracker");
        assert_eq!(json["processor"], "riscv64");
        assert_eq!(json["cpu_lacks"], json!(["rtm"]));
        assert_eq!(json["recorded"], json!({ "recording": "ab", "icount": 7 }));
        assert_eq!(serde_json::from_value::<MachineSpec>(json).unwrap(), full);
    }
}
