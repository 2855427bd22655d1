//! Compares two device states of the same machine, section by section.

use crate::sections::{Section, sections};
use crate::{Result, StreamError};
use std::ops::Range;

/// A section that differs between two device states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DifferingSection {
    /// The device's name, as in QEMU's stream.
    pub name: String,
    /// Its number among the devices of that name; for a processor, its index.
    pub instance: u32,
    /// The offset of the first differing byte in the section's body. It is the length of the
    /// shorter body if one begins with the other, and 0 if one state lacks the section.
    pub offset_bytes: usize,
}

/// Returns the sections of `one` and `other` that differ, in the order of `one`. Sections that only
/// `other` has come last. `ignored` returns the ranges of a section's body that are not compared.
///
/// Errors: [`StreamError::DeviceState`] for a malformed state.
pub fn differing_sections(
    one: &[u8],
    other: &[u8],
    ignored: impl Fn(&str) -> &'static [Range<usize>],
) -> Result<Vec<DifferingSection>> {
    let read = |state| -> Result<Vec<Section>> {
        crate::check(state)?;
        sections(state)
    };
    let (of_one, of_other) = (read(one)?, read(other)?);
    let find = |all: &[Section], wanted: &Section| {
        let same = |s: &&Section| s.name == wanted.name && s.instance == wanted.instance;
        all.iter().find(same).cloned()
    };
    let mut all = Vec::new();
    let differs = |section: &Section, offset_bytes| DifferingSection {
        name: section.name.clone(),
        instance: section.instance,
        offset_bytes,
    };
    for section in &of_one {
        let Some(same) = find(&of_other, section) else {
            all.push(differs(section, 0));
            continue;
        };
        let (a, b) = (body(one, section)?, body(other, &same)?);
        let ignored = ignored(&section.name);
        let is_compared = |at: &usize| !ignored.iter().any(|range| range.contains(at));
        let first = (0..a.len().min(b.len())).filter(is_compared).find(|&at| a[at] != b[at]);
        let first = first.or_else(|| (a.len() != b.len()).then_some(a.len().min(b.len())));
        all.extend(first.map(|offset_bytes| differs(section, offset_bytes)));
    }
    let is_new = |section: &&Section| find(&of_one, section).is_none();
    all.extend(of_other.iter().filter(is_new).map(|section| differs(section, 0)));
    Ok(all)
}

fn body<'a>(state: &'a [u8], section: &Section) -> Result<&'a [u8]> {
    state.get(section.body.clone()).ok_or_else(|| StreamError::DeviceState {
        offset: section.body.start as u64,
        problem: format!("section {} does not lie in it", section.name),
    })
}
