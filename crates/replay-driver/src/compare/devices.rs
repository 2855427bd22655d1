//! Compares the processors and devices of a paused VM, by the state that QEMU saves of them.

use crate::error::{Error, Result};
use keyframe_qemu::restore::Restored;
use keyframe_qemu::stream::{DifferingSection, differing_sections};
use keyframe_session::launch::follow_sse_flags;
use keyframe_units::NoEvents;
use serde::Serialize;
use std::ops::Range;

/// The section of a processor.
const PROCESSOR: &str = "cpu";

/// A section of QEMU's device state that differs. In JSON it is the triple `[name, instance,
/// offset_bytes]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "(String, u32, usize)")]
pub struct DifferingDevice(pub DifferingSection);

impl From<DifferingDevice> for (String, u32, usize) {
    fn from(DifferingDevice(section): DifferingDevice) -> Self {
        (section.name, section.instance, section.offset_bytes)
    }
}

/// The processors and devices that differ.
#[derive(Clone, Debug, Default)]
pub struct DeviceDifference {
    /// The sections of processors.
    pub processors: Vec<DifferingDevice>,
    /// The other sections.
    pub devices: Vec<DifferingDevice>,
}

impl DeviceDifference {
    /// Returns true if nothing differs.
    pub fn is_none(&self) -> bool {
        self.processors.is_empty() && self.devices.is_empty()
    }
}

/// Saves the state of the devices of a paused VM, with the SSE flags of its processors. Error: QEMU
/// refuses or does not answer.
pub fn device_state(restored: &mut Restored) -> Result<Vec<u8>> {
    let vm = restored.vm();
    follow_sse_flags(vm, &NoEvents);
    let mut state = vm.save_devices()?;
    vm.add_sse_flags(&mut state)?;
    Ok(state)
}

/// Compares two device states of one machine at one instruction. Error: a state is malformed.
pub fn compare_devices(one: &[u8], other: &[u8]) -> Result<DeviceDifference> {
    let all = differing_sections(one, other, ignored).map_err(keyframe_qemu::Error::from);
    let all = all.map_err(Error::from)?.into_iter().map(DifferingDevice);
    let (processors, devices) = all.partition(|one| one.0.name == PROCESSOR);
    Ok(DeviceDifference { processors, devices })
}

/// Returns the bytes of a section that say nothing about what the guest sees; `None` for a section
/// that says nothing at all.
fn ignored(name: &str) -> Option<Range<usize>> {
    match name {
        // The host's clocks. A guest that counts instructions has its time from them alone, which
        // follow as a part of their own.
        "timer" => Some(0..24),
        // The place in the log, and what was read of it in advance; whether QEMU stood still when it
        // saved; the host's end of a user network, which a replay does not have, because its packets
        // come from the log.
        "replay" | "globalstate" | "slirp" => None,
        _ => Some(0..0),
    }
}
