//! System calls of x86-64 Linux.
//!
//! ```text
//!   user      syscall                         an instruction of bytes 0f 05 runs: armed
//!   kernel    push ss, rsp, r11, cs, rcx, rax, rdi, rsi, rdx, rcx, (-ENOSYS), r8, r9, r10, ...
//!                      │             │    └ 6: the number       7 8 9            12 13 14: arguments
//!                      │             └ 5: where the program continues
//!                      └ 2: a per-CPU variable, push gs:ADDRESS
//! ```
//!
//! The kernel's entry code saves the registers by 8-byte pushes, each 8 bytes below the previous
//! one, in the order of `struct pt_regs` since Linux 2.6. The tool reads the values from RAM after
//! each push. Pushes at other addresses end the attempt: the guest is not Linux then.
//!
//! The address of the pushed per-CPU variable, less the address in the instruction, is the begin of
//! the CPU's variables, of which `current_task` is one.
//!
//! ```text
//!   push gs:ADDRESS   reads at virtual V, physical P
//!   current_task      at physical P - ADDRESS + CURRENT holds the virtual address T
//!   task_struct       at physical T - (V - P)           pid, tgid, comm at their offsets
//! ```

use super::{Call, MappedAddress, Recorder};
use crate::api::{self, Accesses, Block, MemoryInfo};
use crate::physical::DEVICE;
use crate::state::State;
use crate::tools::{Setup, Tool};
use std::collections::HashMap;
use std::ffi::{c_uint, c_void};

/// The begin of the kernel's half of the address space, and of the kernel's image in it. The direct
/// map lies between the two.
const KERNEL_START: u64 = 1 << 63;
const IMAGE_START: u64 = 0xffff_ffff_8000_0000;

/// The number of pushes up to the last argument.
const PUSHES: usize = 14;

/// An instruction that pushes a per-CPU variable.
struct Site {
    /// The variable's address, without gs.
    address: u64,
    tool: *mut c_void,
}

/// The tool.
pub struct SyscallsX86 {
    recorder: Recorder,
    sites: HashMap<u64, &'static State<Site>>,
    /// The begin of the CPU's variables, if this call's pushes have told.
    variables: Option<MappedAddress>,
    /// The count at the `syscall` instruction, while its pushes follow.
    armed: Option<u64>,
    pushed: Vec<u64>,
    next: u64,
}

impl SyscallsX86 {
    /// Arguments: those of [`Recorder`].
    pub fn new(setup: &mut Setup) -> Result<Self, String> {
        Ok(Self {
            recorder: Recorder::new(setup)?,
            sites: HashMap::new(),
            variables: None,
            armed: None,
            pushed: Vec::with_capacity(PUSHES),
            next: 0,
        })
    }

    /// Handles a memory access of a push instruction.
    fn accessed(&mut self, info: MemoryInfo, vaddr: u64) {
        let Some(begun) = self.armed else { return };
        // QEMU 7.2 also calls for the reads of an instruction that writes.
        if api::is_store(info) && api::size_bytes(info) == 8 {
            let at = self.recorder.physical.of_access(info, vaddr);
            let value = self.recorder.physical.read(at, 8);
            self.push(begun, vaddr, value);
        }
    }

    /// Handles a read of the per-CPU variable `address` at `vaddr`.
    fn variable_is_at(&mut self, address: u64, info: MemoryInfo, vaddr: u64) {
        let at = self.recorder.physical.of_access(info, vaddr);
        let is_mapped_directly = (KERNEL_START..IMAGE_START).contains(&vaddr) && at & DEVICE == 0;
        if is_mapped_directly {
            self.variables = Some(MappedAddress {
                virtual_address: vaddr.wrapping_sub(address),
                physical: at.wrapping_sub(address),
            });
        }
    }

    fn push(&mut self, begun: u64, vaddr: u64, value: Option<u64>) {
        let follows = self.pushed.is_empty() || vaddr == self.next;
        let Some(value) = value.filter(|_| follows) else {
            self.armed = None;
            return;
        };
        self.next = vaddr.wrapping_sub(8);
        self.pushed.push(value);
        if let [_, _, _, _, after, number, a0, a1, a2, _, _, a4, a5, a3] = self.pushed[..] {
            // In pt_regs, r8, r9 and r10 are arguments 4, 5 and 3.
            let arguments = [a0, a1, a2, a3, a4, a5];
            // The kernel looks at eax alone.
            let number = number & 0xffff_ffff;
            let call = Call { begun, pc: after.wrapping_sub(2), number, arguments };
            let current = self.recorder.tasks.map_or(0, |tasks| tasks.current);
            let pointer = self.variables.map(|variables| MappedAddress {
                virtual_address: variables.virtual_address.wrapping_add(current),
                physical: variables.physical.wrapping_add(current),
            });
            self.recorder.record(&call, pointer);
            self.armed = None;
        }
    }
}

extern "C" fn on_syscall(_vcpu: c_uint, data: *mut c_void) {
    // SAFETY: registered with this type's data; on the vCPU's thread.
    let tool = unsafe { State::<SyscallsX86>::of(data) };
    tool.armed = Some(tool.recorder.stream.begun());
    tool.variables = None;
    tool.pushed.clear();
}

extern "C" fn on_push(_vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: as above.
    let tool = unsafe { State::<SyscallsX86>::of(data) };
    tool.accessed(info, vaddr);
}

extern "C" fn on_push_of_variable(_vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: registered with a site's data; on the vCPU's thread.
    let site = unsafe { State::<Site>::of(data) };
    // SAFETY: the tool's own data, of another state than the site.
    let tool = unsafe { State::<SyscallsX86>::of(site.tool) };
    if tool.armed.is_some() && !api::is_store(info) {
        tool.variable_is_at(site.address, info, vaddr);
    }
    tool.accessed(info, vaddr);
}

/// The address of the per-CPU variable that the instruction at `pc` pushes, if it is such a push:
/// absolute, or relative to the next instruction (since Linux 6.15).
fn pushed_variable(bytes: &[u8], pc: u64) -> Option<u64> {
    let (displacement, base) = match bytes {
        [0x65, 0xff, 0x34, 0x25, displacement @ ..] => (displacement, 0),
        [0x65, 0xff, 0x35, displacement @ ..] => {
            (displacement, pc.wrapping_add(bytes.len() as u64))
        }
        _ => return None,
    };
    let displacement = i32::from_le_bytes(displacement.try_into().ok()?);
    Some(base.wrapping_add_signed(displacement.into()))
}

/// Whether the bytes are a push of 64-bit code: a register, an immediate, or memory.
fn is_push(bytes: &[u8]) -> bool {
    match bytes {
        [0x50..=0x57 | 0x68 | 0x6a, ..] | [0x41, 0x50..=0x57] => true,
        // push r/m64, with a gs: prefix for per-CPU variables.
        [0xff, mode, ..] | [0x65, 0xff, mode, ..] => (mode >> 3) & 7 == 6,
        _ => false,
    }
}

impl Tool for SyscallsX86 {
    fn vcpu_is_there(&mut self) {
        self.recorder.stream.vcpu_is_there();
    }

    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        self.recorder.stream.count(block);
        for instruction in block.instructions() {
            let (bytes, len) = instruction.bytes();
            let kernel = instruction.pc() >> 63 == 1;
            if !kernel && bytes[..len] == [0x0f, 0x05] {
                instruction.on_executed(on_syscall, data);
            } else if kernel && let Some(address) = pushed_variable(&bytes[..len], instruction.pc())
            {
                let site = || State::leak(Site { address, tool: data });
                let site = self.sites.entry(instruction.pc()).or_insert_with(site);
                instruction.on_memory(Accesses::All, on_push_of_variable, site.data());
            } else if kernel && is_push(&bytes[..len]) {
                instruction.on_memory(Accesses::Writes, on_push, data);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pushes_of_the_entry_code_are_recognized() {
        // entry_SYSCALL_64: push $0x2b; push gs:0x6014; push r11; push $0x33; push rcx; push rax;
        // push rdi; push r8
        let entry: [&[u8]; 8] = [
            &[0x6a, 0x2b],
            &[0x65, 0xff, 0x34, 0x25, 0x14, 0x60, 0, 0],
            &[0x41, 0x53],
            &[0x6a, 0x33],
            &[0x51],
            &[0x50],
            &[0x57],
            &[0x41, 0x50],
        ];
        for bytes in entry {
            assert!(is_push(bytes), "{bytes:x?}");
        }
        // call, mov, jmp *rax, inc
        let others: [&[u8]; 5] =
            [&[0xe8, 0, 0, 0, 0], &[0x48, 0x89, 0xe0], &[0xff, 0xe0], &[0xff, 0xc0], &[]];
        for bytes in others {
            assert!(!is_push(bytes), "{bytes:x?}");
        }
    }

    #[test]
    fn per_cpu_variables_are_found_in_pushes() {
        assert_eq!(
            pushed_variable(&[0x65, 0xff, 0x34, 0x25, 0x14, 0x60, 0, 0], 0x9000),
            Some(0x6014)
        );
        assert_eq!(
            pushed_variable(&[0x65, 0xff, 0x35, 0xf8, 0xff, 0xff, 0xff], 0x9000),
            Some(0x8fff)
        );
        assert_eq!(pushed_variable(&[0x65, 0xff, 0x34, 0x25, 0x14], 0), None);
        assert_eq!(pushed_variable(&[0xff, 0x34, 0x25, 0x14, 0x60, 0, 0], 0), None);
    }
}
