//! The baselines of benchmarks: no callbacks, an empty callback for each access, and a trace as
//! text.

use super::{Setup, Tool, fail};
use crate::api::{self, Accesses, Block, MemoryInfo};
use crate::physical::Physical;
use crate::state::State;
use std::ffi::{c_uint, c_void};
use std::fs::File;
use std::io::{BufWriter, Write};

/// Registers nothing: the cost of a replay with a plugin.
pub struct Nothing;

impl Tool for Nothing {
    fn translate(&mut self, _block: &Block<'_>, _data: *mut c_void) {}
}

/// An empty callback for each access: the least cost of any trace.
pub struct Callback;

extern "C" fn nothing(_vcpu: c_uint, _info: MemoryInfo, _vaddr: u64, _data: *mut c_void) {}

impl Tool for Callback {
    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        for instruction in block.instructions() {
            instruction.on_memory(Accesses::All, nothing, data);
        }
    }
}

/// A line of text for each access, with the data of `memtrace` except the count.
pub struct Text {
    physical: Physical,
    out: BufWriter<File>,
}

struct Site {
    pc: u64,
    tool: *mut c_void,
}

impl Text {
    /// Arguments: `ram`, `out`.
    pub fn new(setup: &mut Setup) -> Result<Self, String> {
        let path = setup.arguments.text("out")?;
        let out = File::create(&path).map_err(|error| format!("{path}: {error}"))?;
        Ok(Self { physical: setup.physical(false)?, out: BufWriter::with_capacity(1 << 20, out) })
    }
}

extern "C" fn line(_vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: registered with a site's data; on the vCPU's thread.
    let site = unsafe { State::<Site>::of(data) };
    // SAFETY: the tool's own data, of another state than the site.
    let tool = unsafe { State::<Text>::of(site.tool) };
    let physical = tool.physical.of_access(info, vaddr);
    let (size, way) = (api::size_bytes(info), if api::is_store(info) { 'w' } else { 'r' });
    if let Err(error) = writeln!(tool.out, "{:x} {vaddr:x} {physical:x} {size} {way}", site.pc) {
        fail(&format!("writing text: {error}"));
    }
}

impl Tool for Text {
    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        for instruction in block.instructions() {
            let site = State::leak(Site { pc: instruction.pc(), tool: data });
            instruction.on_memory(Accesses::All, line, site.data());
        }
    }

    fn exit(&mut self) {
        if let Err(error) = self.out.flush() {
            fail(&format!("writing text: {error}"));
        }
    }
}
