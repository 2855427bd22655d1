//! `syscalls`: system calls of x86-64 Linux, without reading a register, as interface 1 cannot.
//!
//! ```text
//!   user      syscall                         an instruction of bytes 0f 05 runs: armed
//!   kernel    push ss, rsp, r11, cs, rcx, rax, rdi, rsi, rdx, rcx, (-ENOSYS), r8, r9, r10, ...
//!                            │              └ 6: the number       7 8 9            12 13 14: arguments
//!                            └ rcx, 5th: where the program goes on
//!   event, three records     instructions begun │ pc │ number     arguments 0, 1, 2     arguments 3, 4, 5
//! ```
//!
//! The kernel's entry saves the registers as 8-byte pushes, each 8 bytes below the one before, which since 2.6 has been
//! their order (`struct pt_regs`). Their values are read from RAM behind each push. Pushes that do not follow each other disarm: then
//! it was no Linux.

use super::{Setup, Tool};
use crate::api::{self, Accesses, Block, MemoryInfo};
use crate::physical::Physical;
use crate::state::State;
use crate::stream::Stream;
use std::ffi::{c_uint, c_void};

/// Pushes from the first to the last one that holds an argument.
const PUSHES: usize = 14;

/// The tool.
pub struct Syscalls {
    stream: Stream,
    physical: Physical,
    /// Instructions begun at the `syscall`, while its pushes come.
    armed: Option<u64>,
    pushed: Vec<u64>,
    next: u64,
}

impl Syscalls {
    /// Takes `ram` and `ramfile`.
    pub fn new(setup: &mut Setup) -> Result<Self, String> {
        let (stream, physical) = (Stream::new(setup.board)?, setup.physical(true)?);
        Ok(Self { stream, physical, armed: None, pushed: Vec::with_capacity(PUSHES), next: 0 })
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
            // In the order of pt_regs r8, r9, r10 are arguments 4, 5 and 3.
            self.stream.push([begun, after.wrapping_sub(2), number]);
            self.stream.push([a0, a1, a2]);
            self.stream.push([a3, a4, a5]);
            self.armed = None;
        }
    }
}

extern "C" fn on_syscall(_vcpu: c_uint, data: *mut c_void) {
    // SAFETY: registered with this type's data; on the vCPU's thread.
    let tool = unsafe { State::<Syscalls>::of(data) };
    tool.armed = Some(tool.stream.begun());
    tool.pushed.clear();
}

extern "C" fn on_push(_vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: as above.
    let tool = unsafe { State::<Syscalls>::of(data) };
    let Some(begun) = tool.armed else { return };
    // QEMU 7.2 calls for the reads of an instruction that also writes, too.
    if api::is_store(info) && api::size_bytes(info) == 8 {
        let at = tool.physical.of_access(info, vaddr);
        let value = tool.physical.read(at, 8);
        tool.push(begun, vaddr, value);
    }
}

/// Whether the bytes are a push of 64-bit code: of a register, an immediate, or memory.
fn is_push(bytes: &[u8]) -> bool {
    match bytes {
        [0x50..=0x57 | 0x68 | 0x6a, ..] | [0x41, 0x50..=0x57] => true,
        // push r/m64, here with a gs: prefix as per-CPU variables have it.
        [0xff, mode, ..] | [0x65, 0xff, mode, ..] => (mode >> 3) & 7 == 6,
        _ => false,
    }
}

impl Tool for Syscalls {
    fn vcpu_is_there(&mut self) {
        self.stream.vcpu_is_there();
    }

    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        for (index, instruction) in block.instructions().enumerate() {
            self.stream.count(&instruction, index);
            let (bytes, len) = instruction.bytes();
            let kernel = instruction.pc() >> 63 == 1;
            if !kernel && bytes[..len] == [0x0f, 0x05] {
                instruction.on_executed(on_syscall, data);
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
    fn pushes_of_the_entry_are_known() {
        // entry_SYSCALL_64: push $0x2b; push gs:0x6014; push r11; push $0x33; push rcx; push rax; push rdi; push r8
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
}
