//! The registers of the guest's processors, as a core file holds them.

/// The registers of a virtual CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuRegisters {
    /// The index of the CPU, from 0.
    pub index: u32,
    /// Their values.
    pub values: RegisterValues,
}

/// The values of a virtual CPU's registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegisterValues {
    /// Of [`Processor::X86_64`](crate::Processor::X86_64).
    X86_64(X86Registers),
    /// Of [`Processor::Aarch64`](crate::Processor::Aarch64).
    Aarch64(Aarch64Registers),
    /// Of [`Processor::Riscv64`](crate::Processor::Riscv64).
    Riscv64(Riscv64Registers),
}

/// The registers of an x86-64 processor that a core file holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct X86Registers {
    /// The general registers: rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 to r15.
    pub general: [u64; 16],
    /// The instruction pointer.
    pub rip: u64,
    /// The flags.
    pub rflags: u64,
    /// The segment registers: es, cs, ss, ds, fs, gs.
    pub segments: [SegmentRegister; 6],
    /// The local descriptor table.
    pub ldt: SegmentRegister,
    /// The task register.
    pub tr: SegmentRegister,
    /// The global descriptor table register; it has no selector.
    pub gdt: SegmentRegister,
    /// The interrupt descriptor table register; it has no selector.
    pub idt: SegmentRegister,
    /// The control registers cr0 to cr4. cr1 does not exist, and its entry is 0.
    pub control: [u64; 5],
    /// The GS base that `swapgs` exchanges.
    pub kernel_gs_base: u64,
}

/// A segment register of an x86-64 processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentRegister {
    /// The selector.
    pub selector: u32,
    /// The address of the segment's first byte.
    pub base: u64,
    /// Offset of the segment's last byte.
    pub limit: u32,
    /// Upper 32 bits of the descriptor.
    pub flags: u32,
}

/// The registers of an aarch64 processor that a core file holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Aarch64Registers {
    /// The general registers x0 to x30.
    pub general: [u64; 31],
    /// The stack pointer.
    pub sp: u64,
    /// The program counter.
    pub pc: u64,
    /// The state of the processor: flags, exception level, masked interrupts.
    pub pstate: u64,
}

/// The registers of a riscv64 processor that a core file holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Riscv64Registers {
    /// The general registers x0, which is 0, to x31.
    pub general: [u64; 32],
    /// The program counter.
    pub pc: u64,
}
