//! The run state in a device state: QEMU's section `globalstate`. A QEMU that loads the stream goes
//! into this state, and begins to run only if it is `running`.
//!
//! ```text
//!   globalstate, version 1:   u32 length with its zero │ name, zeros: 100 bytes │ optional parts
//! ```
//!
//! `xen-save-devices-state` writes `running` whatever the VM's state is.

use crate::Result;
use crate::accelerator_conversion::{Edit, apply};
use crate::sections::{sections, u32_at};

/// The section's name.
const GLOBAL_STATE: &str = "globalstate";
/// Length of the name's field.
const NAME_BYTES: usize = 100;

/// Returns the run state in `state`, by QEMU's name. `None` if it has none. [`crate::check`] must
/// have accepted `state`.
///
/// Error: [`crate::StreamError::DeviceState`] for a malformed state.
pub fn run_state(state: &[u8]) -> Result<Option<String>> {
    let all = sections(state)?;
    let section = all.iter().find(|section| section.name == GLOBAL_STATE);
    let body = section.and_then(|section| state.get(section.body.clone()));
    Ok(body.and_then(|body| {
        let len = (u32_at(body, 0)? as usize).checked_sub(1).filter(|len| *len < NAME_BYTES)?;
        let name = body.get(4..4 + len)?;
        name.is_ascii().then(|| String::from_utf8_lossy(name).into_owned())
    }))
}

/// Returns `state` with the run state `name`; unchanged if it has no run state. [`crate::check`]
/// must have accepted `state`.
///
/// Error: [`crate::StreamError::DeviceState`] for a malformed state.
pub fn with_run_state(state: &[u8], name: &str) -> Result<Vec<u8>> {
    let all = sections(state)?;
    let section = all.into_iter().find(|section| section.name == GLOBAL_STATE);
    let fits = |body: &std::ops::Range<usize>| body.len() >= 4 + NAME_BYTES;
    let Some(body) = section.map(|section| section.body).filter(fits) else {
        return Ok(state.to_vec());
    };
    let mut bytes = (name.len() as u32 + 1).to_be_bytes().to_vec();
    bytes.extend(name.bytes().take(NAME_BYTES - 1));
    bytes.resize(4 + NAME_BYTES, 0);
    Ok(apply(state, vec![Edit { range: body.start..body.start + 4 + NAME_BYTES, bytes }]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(name: &str, parts: &[u8]) -> Vec<u8> {
        let mut state = crate::tests::state();
        state.pop();
        state.extend(b"\x04\0\0\0\x09\x0bglobalstate\0\0\0\0\0\0\0\x01");
        state.extend((name.len() as u32 + 1).to_be_bytes());
        state.extend(name.bytes());
        state.resize(state.len() + NAME_BYTES - name.len(), 0);
        state.extend_from_slice(parts);
        state.extend(b"\x7e\0\0\0\x09\0");
        state
    }

    #[test]
    fn the_run_state_is_read_and_replaced_in_place() {
        for parts in [&b""[..], b"\x05\x0bglobalstate\0\0\0\x01"] {
            let running = state("running", parts);
            assert_eq!(run_state(&running).unwrap().as_deref(), Some("running"));
            let shut_down = with_run_state(&running, "shutdown").unwrap();
            assert_eq!(shut_down, state("shutdown", parts));
            assert_eq!(run_state(&shut_down).unwrap().as_deref(), Some("shutdown"));
            assert_eq!(with_run_state(&shut_down, "running").unwrap(), running);
        }
    }

    #[test]
    fn a_state_without_one_is_unchanged() {
        let without = crate::tests::state();
        assert_eq!(run_state(&without).unwrap(), None);
        assert_eq!(with_run_state(&without, "shutdown").unwrap(), without);
    }
}
