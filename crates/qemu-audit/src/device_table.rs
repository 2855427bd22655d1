//! Tables of device types that scripts make with real QEMUs: `unsavable_devices.tsv` and
//! `stateless_devices.tsv`.
//!
//! A table has one line for each type and version of QEMU: the type, the version, a text. A listed
//! type counts on every version: versions between the tested ones are not known to be better.

/// Returns the text of `table` about the device type `kind`; `None` if it is not listed.
pub(crate) fn text_of(table: &'static str, kind: &str) -> Option<&'static str> {
    rows(table).find(|(listed, ..)| *listed == kind).map(|(.., text)| text)
}

fn rows(table: &'static str) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let lines = table.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| {
        let mut columns = line.split('\t');
        Some((columns.next()?, columns.next()?, columns.next()?))
    })
}

/// Asserts that each line of a table has a type, a version and a text.
#[cfg(test)]
pub(crate) fn assert_complete(table: &'static str) {
    let lines = table.lines().filter(|line| !line.starts_with('#')).count();
    assert_eq!(rows(table).count(), lines);
    assert!(rows(table).all(|(kind, version, text)| {
        !kind.is_empty() && version.split('.').all(|n| n.parse::<u32>().is_ok()) && !text.is_empty()
    }));
}
