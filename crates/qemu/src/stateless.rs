//! Devices that QEMU saves nothing of. Their registers are lost in each restore: the guest finds the
//! device as after a reset.
//!
//! A running QEMU does not report such devices. So `scripts/stateless-devices` finds them with real
//! QEMUs, and `stateless_devices.tsv` lists them. The third column says what a guest loses; it is `-`
//! for a device without registers of its own, of which a restore loses nothing. A listed device counts
//! on every version of QEMU.

/// One line for each type and version: the type, the version, what is lost.
const TABLE: &str = include_str!("stateless_devices.tsv");

/// Returns what a restore loses of a device of type `kind`; `None` for nothing, as far as is known.
pub(crate) fn lost_of(kind: &str) -> Option<&'static str> {
    let of_kind = rows().find(|(listed, ..)| *listed == kind).map(|(.., lost)| lost);
    of_kind.filter(|lost| *lost != "-")
}

fn rows() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let lines = TABLE.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| {
        let mut columns = line.split('\t');
        Some((columns.next()?, columns.next()?, columns.next()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_of_the_table_has_a_device_a_version_and_what_is_lost() {
        let lines = TABLE.lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(rows().count(), lines);
        assert!(rows().all(|(kind, version, lost)| {
            !kind.is_empty()
                && version.split('.').all(|n| n.parse::<u32>().is_ok())
                && !lost.is_empty()
        }));
        assert!(lost_of("edu").is_some());
        assert_eq!(lost_of("virtio-net-pci"), None);
        assert_eq!(lost_of("isa-debug-exit"), None);
    }
}
