//! `syscalls`: system calls of x86-64 Linux, without reading registers, which interface 1 cannot.
//!
//! ```text
//!   user      syscall                         an instruction of bytes 0f 05 runs: armed
//!   kernel    push ss, rsp, r11, cs, rcx, rax, rdi, rsi, rdx, rcx, (-ENOSYS), r8, r9, r10, ...
//!                      │             │    └ 6: the number       7 8 9            12 13 14: arguments
//!                      │             └ 5: where the program continues
//!                      └ 2: a per-CPU variable, push gs:ADDRESS
//!   event     instructions begun │ pc │ number │ arguments 0 to 5 │ pid and tid │ comm │ comm
//! ```
//!
//! The kernel's entry code saves the registers by 8-byte pushes, each 8 bytes below the previous
//! one, in the order of `struct pt_regs` since Linux 2.6. The tool reads the values from RAM after
//! each push. Pushes at other addresses end the attempt: the guest is not Linux then.
//!
//! The caller is read from RAM, too (`task=`). The address of the pushed per-CPU variable, less the
//! address in the instruction, is the begin of the CPU's variables, of which `current_task` is one.
//! They lie in the direct map of physical memory, like tasks. The difference between the access's
//! virtual and physical address is therefore the offset of every pointer to a task.
//!
//! ```text
//!   push gs:ADDRESS   reads at virtual V, physical P
//!   current_task      at physical P - ADDRESS + CURRENT holds the virtual address T
//!   task_struct       at physical T - (V - P)           pid, tgid, comm at their offsets
//! ```

use super::{Setup, Tool};
use crate::api::{self, Accesses, Block, MemoryInfo};
use crate::arguments::number;
use crate::physical::{DEVICE, Physical};
use crate::record_stream::RecordStream;
use crate::state::State;
use std::collections::HashMap;
use std::ffi::{c_uint, c_void};

/// Instead of the caller: it was not requested.
pub const NOT_ASKED: u64 = u64::MAX;
/// Instead of the caller: per-CPU variables are not in the direct map, or none is pushed.
pub const NO_DIRECT_MAP: u64 = u64::MAX - 1;
/// Instead of the caller: the task pointer does not point to RAM.
pub const NO_TASK: u64 = u64::MAX - 2;

/// The begin of the kernel's half of the address space, and of the kernel's image in it. The direct
/// map lies between the two.
const KERNEL_START: u64 = 1 << 63;
const IMAGE_START: u64 = 0xffff_ffff_8000_0000;

/// The number of pushes up to the last argument.
const PUSHES: usize = 14;

/// Where a kernel keeps the running task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TaskLayout {
    /// Address of the per-CPU variable `current_task`, as in instructions.
    current: u64,
    /// Offsets in `struct task_struct`.
    pid: u64,
    tgid: u64,
    comm: u64,
}

impl TaskLayout {
    /// Parses `CURRENT:PID:TGID:COMM`, or `none`.
    fn new(text: &str) -> Result<Option<Self>, String> {
        if text == "none" {
            return Ok(None);
        }
        let numbers: Option<Vec<u64>> = text.split(':').map(number).collect();
        match numbers.as_deref() {
            Some(&[current, pid, tgid, comm]) => Ok(Some(Self { current, pid, tgid, comm })),
            _ => Err(format!("argument task={text} is not CURRENT:PID:TGID:COMM")),
        }
    }

    /// The running task: process and thread id in one word, and the name. `variables` has the
    /// virtual and the physical address of the CPU's variables.
    fn running(&self, variables: Option<(u64, u64)>, physical: &Physical) -> [u64; 3] {
        let Some((vaddr, paddr)) = variables else { return [NO_DIRECT_MAP, 0, 0] };
        let found = || {
            let task = physical.read(paddr.wrapping_add(self.current), 8)?;
            // The direct map has a fixed offset between virtual and physical addresses.
            let at = task.wrapping_sub(vaddr.wrapping_sub(paddr));
            let read = |offset: u64, len| physical.read(at.wrapping_add(offset), len);
            let who = read(self.tgid, 4)? << 32 | read(self.pid, 4)?;
            Some([who, read(self.comm, 8)?, read(self.comm.wrapping_add(8), 8)?])
        };
        found().unwrap_or([NO_TASK, 0, 0])
    }
}

/// An instruction that pushes a per-CPU variable.
struct Site {
    /// The variable's address, without gs.
    address: u64,
    tool: *mut c_void,
}

/// The tool.
pub struct Syscalls {
    stream: RecordStream,
    physical: Physical,
    tasks: Option<TaskLayout>,
    sites: HashMap<u64, &'static State<Site>>,
    /// The virtual and physical address of the CPU's variables, if this call's pushes have told.
    variables: Option<(u64, u64)>,
    /// The count at the `syscall` instruction, while its pushes follow.
    armed: Option<u64>,
    pushed: Vec<u64>,
    next: u64,
}

impl Syscalls {
    /// Arguments: `ram`, `ramfile`, `task` (`CURRENT:PID:TGID:COMM` or `none`).
    pub fn new(setup: &mut Setup) -> Result<Self, String> {
        let (stream, physical) = (RecordStream::new(setup.board)?, setup.physical(true)?);
        Ok(Self {
            stream,
            physical,
            tasks: TaskLayout::new(&setup.arguments.text("task")?)?,
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
            let at = self.physical.of_access(info, vaddr);
            let value = self.physical.read(at, 8);
            self.push(begun, vaddr, value);
        }
    }

    /// Handles a read of the per-CPU variable `address` at `vaddr`.
    fn variable_is_at(&mut self, address: u64, info: MemoryInfo, vaddr: u64) {
        let at = self.physical.of_access(info, vaddr);
        let is_mapped_directly = (KERNEL_START..IMAGE_START).contains(&vaddr) && at & DEVICE == 0;
        if is_mapped_directly {
            self.variables = Some((vaddr.wrapping_sub(address), at.wrapping_sub(address)));
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
            let running = |tasks: TaskLayout| tasks.running(self.variables, &self.physical);
            let [who, name, rest] = self.tasks.map_or([NOT_ASKED, 0, 0], running);
            let pc = after.wrapping_sub(2);
            self.stream.push_event([begun, pc, number, a0, a1, a2, a3, a4, a5, who, name, rest]);
            self.armed = None;
        }
    }
}

extern "C" fn on_syscall(_vcpu: c_uint, data: *mut c_void) {
    // SAFETY: registered with this type's data; on the vCPU's thread.
    let tool = unsafe { State::<Syscalls>::of(data) };
    tool.armed = Some(tool.stream.begun());
    tool.variables = None;
    tool.pushed.clear();
}

extern "C" fn on_push(_vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: as above.
    let tool = unsafe { State::<Syscalls>::of(data) };
    tool.accessed(info, vaddr);
}

extern "C" fn on_push_of_variable(_vcpu: c_uint, info: MemoryInfo, vaddr: u64, data: *mut c_void) {
    // SAFETY: registered with a site's data; on the vCPU's thread.
    let site = unsafe { State::<Site>::of(data) };
    // SAFETY: the tool's own data, of another state than the site.
    let tool = unsafe { State::<Syscalls>::of(site.tool) };
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

    /// Guest memory with per-CPU variables at 0x1000 and a task at 0x2000.
    fn memory(task: u64) -> Physical {
        let mut bytes = vec![0_u8; 0x3000];
        bytes[0x1040..0x1048].copy_from_slice(&task.to_le_bytes());
        bytes[0x2010..0x2014].copy_from_slice(&42_u32.to_le_bytes());
        bytes[0x2014..0x2018].copy_from_slice(&41_u32.to_le_bytes());
        bytes[0x2020..0x2030].copy_from_slice(b"kfguest\0rest....");
        let path =
            std::env::temp_dir().join(format!("keyframe-tasks-{}-{task:x}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        let physical = Physical::new("0:0:0x3000", &[format!("0:{}", path.display())]);
        std::fs::remove_file(&path).unwrap();
        physical.unwrap()
    }

    #[test]
    fn the_running_task_is_found_by_the_per_cpu_variables() {
        const MAP: u64 = 0xffff_9a80_0000_0000;
        let tasks = TaskLayout::new("0x40:0x10:0x14:0x20").unwrap().unwrap();
        let words = |text: &[u8; 8]| u64::from_le_bytes(*text);
        let found = tasks.running(Some((MAP + 0x1000, 0x1000)), &memory(MAP + 0x2000));
        assert_eq!(found, [41 << 32 | 0x2a, words(b"kfguest\0"), words(b"rest....")]);
        for task in [0, MAP + 0x2ff0, u64::MAX, 0xffff_ffff_8200_0000] {
            assert_eq!(
                tasks.running(Some((MAP + 0x1000, 0x1000)), &memory(task))[0],
                NO_TASK,
                "{task:x}"
            );
        }
        assert_eq!(tasks.running(None, &memory(MAP))[0], NO_DIRECT_MAP);
        assert_eq!(TaskLayout::new("none"), Ok(None));
        assert!(TaskLayout::new("1:2:3").is_err() && TaskLayout::new("a:b:c:d").is_err());
    }
}
