//! System calls of aarch64 Linux.
//!
//! ```text
//!   user      svc                                 runs: armed
//!   kernel    stp x0, x1, [sp]                    begins `struct pt_regs`: its address
//!             stp x2, x3, [sp, #16] ... x8 ...    the arguments, and the number in x8
//!             ldr x28, [x28, x20]                 __entry_task, a per-CPU variable: the running task
//!             stp x22, x23, [sp, #256]            where the program continues: all is in RAM
//! ```
//!
//! This is the kernel's entry code since Linux 4.9. The tool reads the values from RAM at the last
//! of these stores. A store at another address ends the attempt: the guest is not Linux then.

use super::{Call, GENERIC_NUMBERS, MappedAddress, Recorder};
use crate::api::{self, Accesses, Block, MemoryInfo};
use crate::physical::DEVICE;
use crate::state::State;
use crate::tools::{Setup, Tool};
use std::ffi::{c_uint, c_void};

/// Offsets in `struct pt_regs`.
const X8: u64 = 64;
const PC: u64 = 256;
/// The length of an instruction.
const INSTRUCTION_BYTES: u64 = 4;

/// An instruction that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A system call.
    Call,
    /// The store of the first two registers.
    FirstStore,
    /// The load of the task's address.
    Task,
    /// The store of the program counter.
    LastStore,
}

/// The tool.
pub struct SyscallsAarch64 {
    recorder: Recorder,
    /// The count at the `svc` instruction, while the kernel's stores follow.
    armed: Option<u64>,
    /// The virtual address of `struct pt_regs`.
    registers: Option<u64>,
    /// The variable with the task's address.
    task: Option<MappedAddress>,
}

impl SyscallsAarch64 {
    /// Arguments: those of [`Recorder`].
    pub fn new(setup: &mut Setup) -> Result<Self, String> {
        Ok(Self { recorder: Recorder::new(setup)?, armed: None, registers: None, task: None })
    }

    fn begin(&mut self) {
        self.armed = Some(self.recorder.stream.begun());
        self.registers = None;
        self.task = None;
    }

    /// Handles the store of the program counter, which may come as two stores.
    fn end(&mut self, info: MemoryInfo, vaddr: u64) {
        let (Some(begun), Some(registers)) = (self.armed, self.registers) else { return };
        self.armed = None;
        if vaddr != registers.wrapping_add(PC) {
            return;
        }
        let physical = &self.recorder.physical;
        // They lie in one page, at the end of the kernel's stack.
        let base = physical.of_access(info, vaddr).wrapping_sub(PC);
        let read = |offset: u64| physical.read(base.wrapping_add(offset), 8);
        let values = || {
            let mut arguments = [0; 6];
            for (register, value) in (0..).zip(&mut arguments) {
                *value = read(register * 8)?;
            }
            // The upper half of x8 is not looked at by the kernel.
            let number = GENERIC_NUMBERS << 32 | read(X8)? & 0xffff_ffff;
            let pc = read(PC)?.wrapping_sub(INSTRUCTION_BYTES);
            Some(Call { begun, pc, number, arguments })
        };
        if let Some(call) = values() {
            self.recorder.record(&call, self.task);
        }
    }

    fn load_task(&mut self, info: MemoryInfo, vaddr: u64) {
        let physical = self.recorder.physical.of_access(info, vaddr);
        if self.task.is_none() && is_direct_map(vaddr) && physical & DEVICE == 0 {
            self.task = Some(MappedAddress { virtual_address: vaddr, physical });
        }
    }
}

/// Whether `address` lies in the kernel's direct map: the lower half of its space, which has 48 or
/// 39 bits.
fn is_direct_map(address: u64) -> bool {
    matches!(address, 0xffff_0000_0000_0000..=0xffff_7fff_ffff_ffff)
        || matches!(address, 0xffff_ff80_0000_0000..=0xffff_ffbf_ffff_ffff)
}

/// What the instruction with the code `word` at `pc` is; `None` if it does not matter.
fn step(word: u32, pc: u64) -> Option<Step> {
    let is_kernel = pc >> 63 == 1;
    if !is_kernel {
        return (word & 0xffe0_001f == 0xd400_0001).then_some(Step::Call);
    }
    // stp x0, x1, [sp]; stp x22, x23, [sp, #256]; ldr x28, [Xn, Xm]
    match word {
        0xa900_07e0 => Some(Step::FirstStore),
        0xa910_5ff6 => Some(Step::LastStore),
        _ if word & 0xffe0_fc1f == 0xf860_681c => Some(Step::Task),
        _ => None,
    }
}

extern "C" fn on_call(_vcpu: c_uint, data: *mut c_void) {
    // SAFETY: registered with this type's data; on the vCPU's thread.
    let tool = unsafe { State::<SyscallsAarch64>::of(data) };
    tool.begin();
}

extern "C" fn on_first_store(_vcpu: c_uint, _info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: as above.
    let tool = unsafe { State::<SyscallsAarch64>::of(data) };
    if tool.armed.is_some() && tool.registers.is_none() {
        tool.registers = Some(vaddr);
    }
}

extern "C" fn on_task(_vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: as above.
    let tool = unsafe { State::<SyscallsAarch64>::of(data) };
    if tool.armed.is_some() && tool.registers.is_some() && !api::is_store(info) {
        tool.load_task(info, vaddr);
    }
}

extern "C" fn on_last_store(_vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: as above.
    let tool = unsafe { State::<SyscallsAarch64>::of(data) };
    tool.end(info, vaddr);
}

impl Tool for SyscallsAarch64 {
    fn vcpu_is_there(&mut self) {
        self.recorder.stream.vcpu_is_there();
    }

    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        self.recorder.stream.count(block);
        for instruction in block.instructions() {
            let (bytes, _) = instruction.bytes();
            let word = bytes.first_chunk().map_or(0, |word| u32::from_le_bytes(*word));
            match step(word, instruction.pc()) {
                Some(Step::Call) => instruction.on_executed(on_call, data),
                Some(Step::FirstStore) => {
                    instruction.on_memory(Accesses::Writes, on_first_store, data);
                }
                Some(Step::Task) => instruction.on_memory(Accesses::All, on_task, data),
                Some(Step::LastStore) => {
                    instruction.on_memory(Accesses::Writes, on_last_store, data);
                }
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steps_of_the_entry_code_are_recognized() {
        const KERNEL: u64 = 0xffff_8000_0801_1800;
        assert_eq!(step(0xd400_0001, 0x40_0000), Some(Step::Call));
        assert_eq!(step(0xd400_0001, KERNEL), None, "a call of the kernel's own");
        // stp x0, x1, [sp]; stp x2, x3, [sp, #16]
        assert_eq!(step(0xa900_07e0, KERNEL), Some(Step::FirstStore));
        assert_eq!(step(0xa901_0fe2, KERNEL), None);
        // ldr x28, [x28, x20]; ldr x19, [x28]
        assert_eq!(step(0xf874_6b9c, KERNEL), Some(Step::Task));
        assert_eq!(step(0xf940_0393, KERNEL), None);
        // stp x22, x23, [sp, #256]; stp x30, x21, [sp, #240]
        assert_eq!(step(0xa910_5ff6, KERNEL), Some(Step::LastStore));
        assert_eq!(step(0xa90f_57fe, KERNEL), None);
        assert_eq!(step(0xa900_07e0, 0x40_0000), None);
    }

    #[test]
    fn the_direct_map_is_the_lower_half_of_the_kernels_space() {
        assert!(is_direct_map(0xffff_0000_3fc0_0000) && is_direct_map(0xffff_ff80_0000_1000));
        assert!(!is_direct_map(0xffff_8000_0801_1800) && !is_direct_map(0xffff_ffc0_0801_0000));
        assert!(!is_direct_map(0x40_0000));
    }
}
