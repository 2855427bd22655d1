//! `syscalls`: system calls of Linux guests, without reading registers, which interface 1 cannot.
//!
//! ```text
//!   user      syscall, svc     the instruction runs: armed
//!   kernel    entry code       stores the registers as `struct pt_regs`: read from RAM after the stores
//!   event     instructions begun │ pc │ numbering and number │ arguments 0 to 5 │ pid and tid │ comm │ comm
//! ```
//!
//! Each processor has a file, which knows the entry code and where the kernel keeps the running task.
//! The caller is read from RAM, too (`task=`). Tasks lie in the direct map of physical memory, like
//! the variables of each CPU. The difference between the virtual and the physical address of an
//! access to such a variable is therefore the offset of every pointer to a task.

mod aarch64;
mod x86_64;

pub use aarch64::SyscallsAarch64;
pub use x86_64::SyscallsX86;

use super::Setup;
use crate::arguments::number;
use crate::physical::Physical;
use crate::record_stream::RecordStream;

/// Instead of the caller: it was not requested.
pub const NOT_ASKED: u64 = u64::MAX;
/// Instead of the caller: per-CPU variables are not in the direct map, or none is read.
pub const NO_DIRECT_MAP: u64 = u64::MAX - 1;
/// Instead of the caller: the task pointer does not point to RAM.
pub const NO_TASK: u64 = u64::MAX - 2;

/// In the upper half of an event's number: the numbering of system calls that most processors
/// share (asm-generic/unistd.h). x86-64 has its own, 0.
pub const GENERIC_NUMBERS: u64 = 1;

/// Where a kernel keeps the running task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TaskLayout {
    /// Address of the per-CPU variable `current_task`, as in instructions of x86-64.
    current: u64,
    /// Offsets in `struct task_struct`.
    pid: u64,
    tgid: u64,
    comm: u64,
}

/// A virtual address in the direct map, and its physical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MappedAddress {
    virtual_address: u64,
    physical: u64,
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

    /// The task to which the variable at `pointer` points: process and thread id in one word, and
    /// the name.
    fn running(&self, pointer: Option<MappedAddress>, physical: &Physical) -> [u64; 3] {
        let Some(pointer) = pointer else { return [NO_DIRECT_MAP, 0, 0] };
        let found = || {
            let task = physical.read(pointer.physical, 8)?;
            // The direct map has a fixed offset between virtual and physical addresses.
            let at = task.wrapping_sub(pointer.virtual_address.wrapping_sub(pointer.physical));
            let read = |offset: u64, len| physical.read(at.wrapping_add(offset), len);
            let who = read(self.tgid, 4)? << 32 | read(self.pid, 4)?;
            Some([who, read(self.comm, 8)?, read(self.comm.wrapping_add(8), 8)?])
        };
        found().unwrap_or([NO_TASK, 0, 0])
    }
}

/// A system call that was read.
struct Call {
    /// The number of instructions begun.
    begun: u64,
    pc: u64,
    /// The numbering in the upper half, and the number.
    number: u64,
    arguments: [u64; 6],
}

/// What the tool of each processor has.
struct Recorder {
    stream: RecordStream,
    physical: Physical,
    tasks: Option<TaskLayout>,
}

impl Recorder {
    /// Arguments: `ram`, `ramfile`, `task` (`CURRENT:PID:TGID:COMM` or `none`).
    fn new(setup: &mut Setup) -> Result<Self, String> {
        let (stream, physical) = (RecordStream::new(setup.board)?, setup.physical(true)?);
        let tasks = TaskLayout::new(&setup.arguments.text("task")?)?;
        Ok(Self { stream, physical, tasks })
    }

    /// Writes an event. The variable at `pointer` points to the caller's task.
    fn record(&mut self, call: &Call, pointer: Option<MappedAddress>) {
        let running = |tasks: TaskLayout| tasks.running(pointer, &self.physical);
        let [who, name, rest] = self.tasks.map_or([NOT_ASKED, 0, 0], running);
        let [a0, a1, a2, a3, a4, a5] = call.arguments;
        let (begun, pc, number) = (call.begun, call.pc, call.number);
        self.stream.push_event([begun, pc, number, a0, a1, a2, a3, a4, a5, who, name, rest]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let pointer = Some(MappedAddress { virtual_address: MAP + 0x1040, physical: 0x1040 });
        let words = |text: &[u8; 8]| u64::from_le_bytes(*text);
        let found = tasks.running(pointer, &memory(MAP + 0x2000));
        assert_eq!(found, [41 << 32 | 0x2a, words(b"kfguest\0"), words(b"rest....")]);
        for task in [0, MAP + 0x2ff0, u64::MAX, 0xffff_ffff_8200_0000] {
            assert_eq!(tasks.running(pointer, &memory(task))[0], NO_TASK, "{task:x}");
        }
        assert_eq!(tasks.running(None, &memory(MAP))[0], NO_DIRECT_MAP);
        assert_eq!(TaskLayout::new("none"), Ok(None));
        assert!(TaskLayout::new("1:2:3").is_err() && TaskLayout::new("a:b:c:d").is_err());
    }
}
