//! The sections of QEMU's user networks (`slirp`) in a device state, for a line that has others.
//!
//! QEMU numbers them in the order in which it makes the networks. A section without its network
//! stops a load, and one with another's number would give a network the other's connections.

use crate::Result;
use crate::accelerator_conversion::{Edit, apply};
use crate::sections::sections;

const USER_NETWORK: &str = "slirp";

/// Returns `state` with its user networks renumbered: number `n` becomes `numbers[n]`, or is
/// removed if that is `None`. Unchanged if the state has another number of user networks than
/// `numbers`. [`crate::check`] must have accepted `state`.
///
/// Error: [`crate::StreamError::DeviceState`] for a malformed state.
pub fn renumber_user_networks(state: &[u8], numbers: &[Option<u32>]) -> Result<Vec<u8>> {
    let all = sections(state)?;
    let of_user: Vec<_> = all.iter().filter(|s| s.name == USER_NETWORK).collect();
    if of_user.len() != numbers.len() {
        return Ok(state.to_vec());
    }
    let mut edits = Vec::new();
    for section in of_user {
        match numbers.get(section.instance as usize) {
            Some(None) => edits.push(Edit { range: section.whole.clone(), bytes: Vec::new() }),
            Some(Some(number)) => {
                // The header ends with instance and version.
                let instance = section.body.start - 8..section.body.start - 4;
                edits.push(Edit { range: instance, bytes: number.to_be_bytes().to_vec() });
            }
            None => return Ok(state.to_vec()),
        }
    }
    Ok(apply(state, edits))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(networks: &[(u32, &[u8])]) -> Vec<u8> {
        let mut state = crate::tests::state();
        state.pop();
        for (at, (instance, body)) in networks.iter().enumerate() {
            let id = 900 + at as u32;
            state.push(4);
            state.extend(id.to_be_bytes());
            state.extend(b"\x05slirp");
            state.extend(instance.to_be_bytes());
            state.extend(4u32.to_be_bytes());
            state.extend_from_slice(body);
            state.push(0x7e);
            state.extend(id.to_be_bytes());
        }
        state.push(0);
        state
    }

    #[test]
    fn networks_are_removed_and_renumbered() {
        let both = state(&[(0, b"a"), (1, b"b")]);
        let swapped = renumber_user_networks(&both, &[Some(1), Some(0)]).unwrap();
        assert_eq!(swapped, state(&[(1, b"a"), (0, b"b")]));
        let second = renumber_user_networks(&both, &[None, Some(0)]).unwrap();
        let names: Vec<_> =
            sections(&second).unwrap().into_iter().map(|s| (s.name, s.instance)).collect();
        assert_eq!(names.last(), Some(&("slirp".to_owned(), 0)));
        let count = names.iter().filter(|(name, _)| name == "slirp").count();
        assert_eq!(count, 1);
        assert_eq!(renumber_user_networks(&both, &[None]).unwrap(), both, "another number");
        assert_eq!(renumber_user_networks(&both, &[Some(0), Some(1)]).unwrap(), both);
    }
}
