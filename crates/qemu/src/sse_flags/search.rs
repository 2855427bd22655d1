//! Finds the virtual CPUs in a QEMU's memory: the places that hold the vendor and the model of
//! their CPU model at the right distance.

use super::layout::CpuLayout;
use crate::{Qmp, Result};
use keyframe_kernel::{Mapping, Process, read_memory};
use keyframe_units::{HostRange, HostVirt};
use memchr::memmem::Finder;
use serde_json::json;

/// Length of a vendor's name.
const VENDOR_BYTES: usize = 12;
/// Length of a model's name, with zeros after a shorter one.
const MODEL_BYTES: usize = 48;
/// The longest mapping that is searched. QEMU's heap is smaller; guest RAM may not be.
const MAPPING_BYTES_MAX: u64 = 256 << 20;
/// The bytes that are read at once.
const CHUNK_BYTES: usize = 1 << 20;
/// More places than virtual CPUs that a VM can have.
const FOUND_MAX: usize = 1 << 16;

/// The names of a CPU model as a virtual CPU holds them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CpuNames {
    pub vendor: [u8; VENDOR_BYTES],
    pub model: [u8; MODEL_BYTES],
}

impl CpuNames {
    /// Returns the names of the first virtual CPU of `qmp`'s machine. Errors: QEMU does not answer,
    /// or its CPU model has no vendor.
    pub fn of(qmp: &mut Qmp) -> Result<Self> {
        let answer = qmp.execute("query-cpus-fast", None)?;
        let path = answer.get(0).and_then(|cpu| cpu.get("qom-path")).cloned().unwrap_or_default();
        let mut get = |property: &str| -> Result<String> {
            let request = json!({ "path": path, "property": property });
            let answer = qmp.execute("qom-get", Some(request))?;
            Ok(answer.as_str().unwrap_or_default().to_owned())
        };
        Self::new(&get("vendor")?, &get("model-id")?)
            .ok_or_else(|| super::trial::unknown("its CPU model has no vendor"))
    }

    /// Creates the names. Returns `None` if `vendor` does not have the length of a vendor's name.
    pub fn new(vendor: &str, model: &str) -> Option<Self> {
        let vendor = vendor.as_bytes().try_into().ok()?;
        let mut padded = [0; MODEL_BYTES];
        for (to, from) in padded.iter_mut().zip(model.bytes()) {
            *to = from;
        }
        Some(Self { vendor, model: padded })
    }
}

/// Returns the addresses of the registers of all virtual CPUs, which are not in `ram`. Some may be
/// those of CPUs that are no more. Error: QEMU's memory cannot be read.
pub(super) fn find(
    process: &Process,
    layout: &CpuLayout,
    names: &CpuNames,
    ram: &[HostRange],
) -> Result<Vec<HostVirt>> {
    let is_cpu = |registers: u64| {
        let holds = |distance: usize, name: &[u8]| {
            let mut bytes = vec![0; name.len()];
            let at = HostVirt(registers.wrapping_add(distance as u64));
            read_memory(process, at, &mut bytes).is_ok() && bytes == name
        };
        registers.is_multiple_of(8)
            && holds(layout.vendor, &names.vendor)
            && holds(layout.model, &names.model)
    };
    let vendors = places_of(process, &names.vendor, ram)?;
    let registers = vendors.iter().map(|at| at.wrapping_sub(layout.vendor as u64));
    Ok(registers.filter(|at| is_cpu(*at)).map(HostVirt).collect())
}

/// Returns the addresses at which `wanted` lies in the process's own memory, but for that in `ram`.
pub(super) fn places_of(process: &Process, wanted: &[u8], ram: &[HostRange]) -> Result<Vec<u64>> {
    let finder = Finder::new(wanted);
    let mut found = Vec::new();
    let mut chunk = vec![0; CHUNK_BYTES + wanted.len() - 1];
    let is_in_ram =
        |place: u64| ram.iter().any(|block| block.start.0 <= place && place < block.end().0);
    let is_heap = |mapping: &Mapping| {
        mapping.writable
            && mapping.is_private_anonymous()
            && !mapping.path.starts_with("[stack")
            && mapping.range.len_bytes <= MAPPING_BYTES_MAX
    };
    let mappings = process.maps().map_err(|error| super::trial::unreadable(&error))?;
    for mapping in mappings.iter().filter(|mapping| is_heap(mapping)) {
        let mut at = mapping.range.start.0;
        let end = mapping.range.start.0 + mapping.range.len_bytes;
        while at < end && found.len() < FOUND_MAX {
            let len = (end - at).min(chunk.len() as u64) as usize;
            let Some(part) = chunk.get_mut(..len) else { break };
            // A mapping that is gone by now holds no CPU.
            if read_memory(process, HostVirt(at), part).is_ok() {
                let places = finder.find_iter(part).map(|offset| at + offset as u64);
                found.extend(places.filter(|place| !is_in_ram(*place)));
            }
            at += CHUNK_BYTES as u64;
        }
    }
    found.dedup();
    Ok(found)
}
