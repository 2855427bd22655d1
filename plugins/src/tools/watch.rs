//! `watch`: writes to a range of virtual or physical addresses, with the written value.
//!
//! ```text
//!   event, two records   instructions begun │ pc │ virtual address     guest-physical address │ size in bytes │ value
//! ```
//!
//! The value is read from RAM after the write: at most the first 8 bytes. A write that partly lies
//! in the range counts.

use super::{Setup, Tool};
use crate::api::{self, Accesses, Block, MemoryInfo};
use crate::physical::Physical;
use crate::record_stream::RecordStream;
use crate::state::State;
use std::collections::HashMap;
use std::ffi::{c_uint, c_void};

/// The tool.
pub struct Watch {
    stream: RecordStream,
    physical: Physical,
    start: u64,
    len: u64,
    by_physical: bool,
    sites: HashMap<u64, &'static State<Site>>,
}

struct Site {
    pc: u64,
    tool: *mut c_void,
}

impl Watch {
    /// Arguments: `ram`, `ramfile`, `start`, `len`, `space` (virtual or physical).
    pub fn new(setup: &mut Setup) -> Result<Self, String> {
        let (start, len) = (setup.arguments.number("start")?, setup.arguments.number("len")?);
        let by_physical = match setup.arguments.text("space")?.as_str() {
            "virtual" => false,
            "physical" => true,
            other => return Err(format!("argument space={other} is neither virtual nor physical")),
        };
        let stream = RecordStream::new(setup.board)?;
        let physical = setup.physical(true)?;
        Ok(Self { stream, physical, start, len, by_physical, sites: HashMap::new() })
    }

    /// Whether `size` bytes at `at` overlap the range.
    fn hit(&self, at: u64, size: u64) -> bool {
        at.wrapping_sub(self.start) < self.len || self.start.wrapping_sub(at) < size
    }
}

extern "C" fn on_write(_vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: registered with a site's data; on the vCPU's thread.
    let site = unsafe { State::<Site>::of(data) };
    // SAFETY: the tool's own data, of another state than the site.
    let tool = unsafe { State::<Watch>::of(site.tool) };
    let size = api::size_bytes(info);
    // QEMU 7.2 also calls for the reads of an instruction that writes.
    if !api::is_store(info) {
        return;
    }
    if !tool.by_physical && !tool.hit(vaddr, size.into()) {
        return;
    }
    let at = tool.physical.of_access(info, vaddr);
    if tool.by_physical && !tool.hit(at, size.into()) {
        return;
    }
    let value = tool.physical.read(at, size).unwrap_or(0);
    let begun = tool.stream.begun();
    tool.stream.push_event([begun, site.pc, vaddr, at, size.into(), value]);
}

impl Tool for Watch {
    fn vcpu_is_there(&mut self) {
        self.stream.vcpu_is_there();
    }

    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        self.stream.count(block);
        for instruction in block.instructions() {
            let pc = instruction.pc();
            let site = self.sites.entry(pc).or_insert_with(|| State::leak(Site { pc, tool: data }));
            instruction.on_memory(Accesses::Writes, on_write, site.data());
        }
    }
}
