//! The processors that guests have: what depends on them, one file for each.

mod aarch64;
mod riscv64;
mod x86_64;

use serde::{Deserialize, Serialize};
use std::fmt;

/// The kind of a guest's processor.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Processor {
    /// x86 with 64 bits.
    #[default]
    #[serde(rename = "x86_64")]
    X86_64,
    /// ARM with 64 bits.
    Aarch64,
    /// RISC-V with 64 bits.
    Riscv64,
}

/// What depends on the kind of processor.
#[derive(Debug)]
struct Properties {
    /// The name of QEMU's target: `qemu-system-NAME`.
    name: &'static str,
    /// The `e_machine` of its ELF files.
    elf_machine: u16,
    /// The first letters of the types of machines that Keyframe is tested with.
    known_machines: &'static [&'static str],
    /// The names of these machines in a sentence.
    machine_names: &'static str,
    /// Whether QEMU's machines have timers (HPET) that a recording turns off, unless they are of
    /// the type `microvm`.
    has_hpet: bool,
    /// The first words of the line on which the monitor's `info registers` shows the instruction
    /// pointer.
    instruction_pointer: &'static [&'static str],
    /// The general registers, with the stack pointer, as QEMU's gdbstub tells them before the
    /// instruction pointer, all of 64 bits.
    gdb_general: usize,
    /// The size of a page, as a power of two, that QEMU's streams tell for machines of
    /// `known_machines`; `None` if it is the only size.
    told_page_bits: Option<u32>,
    /// Whether QEMU's gdbstub stops before an access to a watchpoint; else after it.
    stops_before_access: bool,
    /// How the processor takes interrupts and exceptions.
    delivery: Delivery,
    /// The first series of QEMU that saves all timers of its machines; `None` if all do.
    timers_saved_since: Option<(u32, u32)>,
    /// What QEMU leaves out of the processor's state without harm to most guests; `None` if that is
    /// nothing.
    unsaved: Option<&'static str>,
    /// Whether QEMU writes firmware and kernel into RAM as it starts, also if it waits for a state.
    is_loaded_at_start: bool,
}

/// How a processor takes interrupts and exceptions.
#[derive(Clone, Copy, Debug)]
pub struct Delivery {
    /// The most bytes of an instruction that `after_instruction` looks at.
    pub code_bytes: usize,
    /// Returns the length in bytes of the instruction with this code if the processor waits for an
    /// interrupt at its end, or takes an exception; `None` for others.
    pub after_instruction: fn(code: &[u8]) -> Option<u64>,
    /// True if the processor writes a frame to the stack, and so changes the stack pointer. Else it
    /// changes registers alone.
    pub writes_frame: bool,
}

impl Processor {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::X86_64, Self::Aarch64, Self::Riscv64];

    fn properties(self) -> &'static Properties {
        match self {
            Self::X86_64 => &x86_64::PROPERTIES,
            Self::Aarch64 => &aarch64::PROPERTIES,
            Self::Riscv64 => &riscv64::PROPERTIES,
        }
    }

    /// Returns the kind with this name, as QEMU's `query-target` tells it; `None` for others.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }

    /// Returns its name: `x86_64`, `aarch64`, `riscv64`.
    pub fn name(self) -> &'static str {
        self.properties().name
    }

    /// Returns the number of its ELF files (`e_machine`).
    pub fn elf_machine(self) -> u16 {
        self.properties().elf_machine
    }

    /// Returns true if Keyframe is tested with machines of the type `machine_type`, whose aliases
    /// are resolved.
    pub fn knows_machine(self, machine_type: &str) -> bool {
        self.properties().known_machines.iter().any(|known| machine_type.starts_with(known))
    }

    /// Returns the names of the machines that Keyframe is tested with, for a sentence.
    pub fn machine_names(self) -> &'static str {
        self.properties().machine_names
    }

    /// Returns true if QEMU's machines, other than `microvm`, have an HPET.
    pub fn has_hpet(self) -> bool {
        self.properties().has_hpet
    }

    /// Returns true if KVM of the hosts that Keyframe runs on, x86-64, executes its instructions.
    /// Guests of other processors run under TCG.
    pub fn has_kvm(self) -> bool {
        self == Self::X86_64
    }

    /// Returns true if it has SSE, whose exception flags QEMU does not save.
    pub fn has_sse(self) -> bool {
        self == Self::X86_64
    }

    /// Returns true if QEMU tells which features of its model a processor lacks. A processor under
    /// TCG lacks none otherwise.
    pub fn tells_lacking_features(self) -> bool {
        self == Self::X86_64
    }

    /// Returns true if `line` of the monitor's `info registers` shows the instruction pointer.
    pub fn shows_instruction_pointer(self, line: &str) -> bool {
        let line = line.trim_start();
        self.properties().instruction_pointer.iter().any(|word| line.starts_with(word))
    }

    /// Returns how many registers of 64 bits QEMU's gdbstub tells before the instruction pointer:
    /// the general ones, with the stack pointer.
    pub fn gdb_general_registers(self) -> usize {
        self.properties().gdb_general
    }

    /// Returns the first series of QEMU that saves the timers of its machines: a guest that is
    /// restored by an earlier one waits for ever. `None` if all series do.
    pub fn timers_saved_since(self) -> Option<(u32, u32)> {
        self.properties().timers_saved_since
    }

    /// Returns what QEMU leaves out of the processor's state, as a sentence's subject.
    pub fn unsaved(self) -> Option<&'static str> {
        self.properties().unsaved
    }

    /// Returns true if QEMU writes the files of its command line into RAM as it starts, also if it
    /// waits for the state of a checkpoint.
    pub fn is_loaded_at_start(self) -> bool {
        self.properties().is_loaded_at_start
    }

    /// Returns the size of a page of [a machine that is known](Self::knows_machine), as a power of
    /// two in bytes, if a whole migration stream must tell it.
    pub fn told_page_bits(self) -> Option<u32> {
        self.properties().told_page_bits
    }

    /// Returns true if QEMU's gdbstub stops before the instruction that accesses a watchpoint. It
    /// then stops again at the same instruction unless the watchpoint is removed for a step.
    pub fn stops_before_access(self) -> bool {
        self.properties().stops_before_access
    }

    /// Returns how it takes interrupts and exceptions.
    pub fn delivery(self) -> Delivery {
        self.properties().delivery
    }

    /// True for [`Processor::X86_64`], which the JSON of a [`MachineSpec`](crate::MachineSpec)
    /// leaves out.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_qemu_and_of_checkpoints() {
        for one in Processor::ALL {
            assert_eq!(Processor::named(one.name()), Some(one));
            assert_eq!(serde_json::to_value(one).unwrap(), one.name());
        }
        assert_eq!(Processor::named("arm"), None);
    }

    #[test]
    fn instructions_with_deliveries_are_known() {
        let len =
            |processor: Processor, code: &[u8]| (processor.delivery().after_instruction)(code);
        assert_eq!(len(Processor::X86_64, &[0xf4, 0, 0]), Some(1));
        assert_eq!(len(Processor::X86_64, &[0xcd, 0x80]), Some(2));
        assert_eq!(len(Processor::X86_64, &[0x0f, 0x05]), None);
        // wfi, svc #3, brk #0x800, ret
        assert_eq!(len(Processor::Aarch64, &0xd503_207f_u32.to_le_bytes()), Some(4));
        assert_eq!(len(Processor::Aarch64, &0xd400_0061_u32.to_le_bytes()), Some(4));
        assert_eq!(len(Processor::Aarch64, &0xd421_0000_u32.to_le_bytes()), Some(4));
        assert_eq!(len(Processor::Aarch64, &0xd65f_03c0_u32.to_le_bytes()), None);
        // wfi, ecall, c.ebreak, ret
        assert_eq!(len(Processor::Riscv64, &0x1050_0073_u32.to_le_bytes()), Some(4));
        assert_eq!(len(Processor::Riscv64, &0x0000_0073_u32.to_le_bytes()), Some(4));
        assert_eq!(len(Processor::Riscv64, &0x9002_u16.to_le_bytes()), Some(2));
        assert_eq!(len(Processor::Riscv64, &0x0000_8067_u32.to_le_bytes()), None);
        for processor in Processor::ALL {
            assert_eq!(len(processor, &[]), None);
        }
    }
}
