//! Devices that QEMU saves nothing of. Their registers are lost in each restore: the guest finds
//! the device as after a reset.
//!
//! A running QEMU does not report such devices. So `scripts/stateless-devices` finds them with real
//! QEMUs, and `stateless_devices.tsv` lists them. Its third column says what a guest loses; it is
//! `-` for a device of which a restore loses nothing.

use crate::device_table;

const TABLE: &str = include_str!("stateless_devices.tsv");

/// Returns what a restore loses of a device of type `kind`; `None` for nothing, as far as is known.
pub fn lost_of(kind: &str) -> Option<&'static str> {
    device_table::text_of(TABLE, kind).filter(|lost| *lost != "-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_of_the_table_has_a_device_a_version_and_what_is_lost() {
        device_table::assert_complete(TABLE);
        assert!(lost_of("edu").is_some());
        assert_eq!(lost_of("virtio-net-pci"), None);
        assert_eq!(lost_of("isa-debug-exit"), None);
    }
}
