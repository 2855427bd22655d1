//! Devices with which QEMU ends when its device state is saved. A checkpoint of a VM that has one
//! would end the VM.
//!
//! `-only-migratable` accepts some of them, and an attached QEMU takes all of them by `device_add`.
//! So `scripts/unsavable-devices` finds them with real QEMUs, and `unsavable_devices.tsv` lists
//! them. A listed device is refused on every version of QEMU.

use crate::device_table;

const TABLE: &str = include_str!("unsavable_devices.tsv");

/// Returns how QEMU ends if it saves a device of type `kind`. `None` if it survives that, as far as
/// is known.
pub fn how_qemu_ends(kind: &str) -> Option<&'static str> {
    device_table::text_of(TABLE, kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_of_the_table_has_a_device_a_version_and_a_reason() {
        device_table::assert_complete(TABLE);
        assert!(how_qemu_ends("pci-serial-2x").is_some_and(|how| how.contains("segmentation")));
        assert!(how_qemu_ends("vmbus-bridge").is_some());
        assert_eq!(how_qemu_ends("pci-serial"), None);
    }
}
