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
/// `other` has come last. `ignored` returns the range of a section's body that is not compared, or `None`
/// for a section that is not compared at all.
///
/// Errors: [`StreamError::DeviceState`] for a malformed state.
pub fn differing_sections(
    one: &[u8],
    other: &[u8],
    ignored: impl Fn(&str) -> Option<Range<usize>>,
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
        let Some(ignored) = ignored(&section.name) else { continue };
        let Some(same) = find(&of_other, section) else {
            all.push(differs(section, 0));
            continue;
        };
        let (a, b) = (body(one, section)?, body(other, &same)?);
        let is_compared = |at: &usize| !ignored.contains(at);
        let first = (0..a.len().min(b.len())).filter(is_compared).find(|&at| a[at] != b[at]);
        let first = first.or_else(|| (a.len() != b.len()).then_some(a.len().min(b.len())));
        all.extend(first.map(|offset_bytes| differs(section, offset_bytes)));
    }
    let is_new =
        |section: &&Section| ignored(&section.name).is_some() && find(&of_one, section).is_none();
    all.extend(of_other.iter().filter(is_new).map(|section| differs(section, 0)));
    Ok(all)
}

fn body<'a>(state: &'a [u8], section: &Section) -> Result<&'a [u8]> {
    state.get(section.body.clone()).ok_or_else(|| StreamError::DeviceState {
        offset: section.body.start as u64,
        problem: format!("section {} does not lie in it", section.name),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A state with a section of each name and body.
    fn state(all: &[(&str, &[u8])]) -> Vec<u8> {
        let mut state = crate::tests::state();
        state.pop();
        for (number, (name, body)) in all.iter().enumerate() {
            let id = 100 + number as u8;
            state.extend([4, 0, 0, 0, id, name.len() as u8]);
            state.extend(name.bytes());
            state.extend([0, 0, 0, 0, 0, 0, 0, 1]);
            state.extend_from_slice(body);
            state.extend([0x7e, 0, 0, 0, id]);
        }
        state.push(0);
        state
    }

    fn differing(one: &[(&str, &[u8])], other: &[(&str, &[u8])]) -> Vec<(String, usize)> {
        let ignored = |name: &str| match name {
            "clock" => Some(0..2),
            "host" => None,
            _ => Some(0..0),
        };
        let all = differing_sections(&state(one), &state(other), ignored).unwrap();
        all.into_iter().map(|one| (one.name, one.offset_bytes)).collect()
    }

    #[test]
    fn sections_are_compared_byte_by_byte() {
        let one: [(&str, &[u8]); 2] = [("uart", b"abcd"), ("disk", b"xy")];
        assert_eq!(differing(&one, &one), []);
        assert_eq!(differing(&one, &[("disk", b"xy"), ("uart", b"abcd")]), [], "in any order");
        let other: [(&str, &[u8]); 2] = [("uart", b"abXd"), ("disk", b"xyz")];
        assert_eq!(differing(&one, &other), [("uart".to_owned(), 2), ("disk".to_owned(), 2)]);
        assert_eq!(differing(&one, &one[..1]), [("disk".to_owned(), 0)]);
        assert_eq!(differing(&one[..1], &one), [("disk".to_owned(), 0)]);
    }

    #[test]
    fn ignored_bytes_and_sections_do_not_count() {
        assert_eq!(differing(&[("clock", b"abcd")], &[("clock", b"XXcd")]), []);
        let later = differing(&[("clock", b"abcd")], &[("clock", b"XXcX")]);
        assert_eq!(later, [("clock".to_owned(), 3)]);
        assert_eq!(differing(&[("host", b"abcd")], &[("host", b"ab")]), []);
        assert_eq!(differing(&[("host", b"abcd")], &[]), []);
        assert_eq!(differing(&[], &[("host", b"abcd")]), []);
    }

    #[test]
    fn malformed_states_are_errors() {
        let whole = state(&[("uart", b"abcd")]);
        for len in 0..whole.len() {
            assert!(differing_sections(&whole[..len], &whole, |_| Some(0..0)).is_err(), "{len}");
        }
    }
}
