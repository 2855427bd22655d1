//! The firmware of the trial: it divides two numbers, and so raises flags that are known.
//!
//! The machine runs it again after each reset. A counter in RAM, which a reset keeps, chooses the
//! division. After it, the registers hold the values of [`general`], and the processor halts.

/// The size of the image, which ends at 4 GiB and also appears below 1 MiB.
const IMAGE_BYTES: usize = 64 << 10;
/// Offset of the processor's first instruction.
const RESET_VECTOR: usize = 0xfff0;
/// Offset of the divisions: MXCSR, dividend, divisor, unused; 32 bits each.
const TABLE: usize = 0x70;
/// The place of the division's number in [`general`].
const RCX: usize = 1;

/// All exceptions masked, no flags.
const MASKED: u32 = 0x1f80;
/// The same, with results that are denormal taken for zero.
const FLUSH_TO_ZERO: u32 = MASKED | 1 << 15;
/// The same, with operands that are denormal taken for zero.
const DENORMALS_ARE_ZEROS: u32 = MASKED | 1 << 6;

const ONE: u32 = 0x3f80_0000;
const THREE: u32 = 0x4040_0000;
const QUARTER: u32 = 0x3e80_0000;
const LARGEST: u32 = 0x7f7f_ffff;
const SMALLEST_NORMAL: u32 = 0x0080_0000;
const DENORMAL: u32 = 0x0040_0000;

/// The divisions: MXCSR, dividend, divisor. Each after the first raises a flag that none before it
/// has raised, or may do so.
pub(super) const DIVISIONS: [[u32; 3]; 9] = [
    [MASKED, ONE, ONE],
    [MASKED, 0, 0],
    [MASKED, ONE, 0],
    [MASKED, ONE, THREE],
    [MASKED, LARGEST, QUARTER],
    [MASKED, SMALLEST_NORMAL, THREE],
    [MASKED, DENORMAL, ONE],
    [FLUSH_TO_ZERO, SMALLEST_NORMAL, THREE],
    [DENORMALS_ARE_ZEROS, DENORMAL, ONE],
];
/// The number of the divisions at the head that raise a flag of their own in each QEMU, from the
/// second on: invalid, division by zero, inexact, overflow, underflow.
pub(super) const CERTAIN: usize = 6;

/// rax, rdx, rbx, rsp, rbp, rsi, rdi after a division, in the order in which the code loads them.
const RAX: u32 = 0x7e2c_91d3;
const RDX: u32 = 0x15a4_c06b;
const RBX: u32 = 0x3d90_b7e8;
const RSP: u32 = 0x40d7_ea35;
const RBP: u32 = 0x59f3_126c;
const RSI: u32 = 0x6c01_f529;
const RDI: u32 = 0x2b8e_47da;

/// Returns rax, rcx, rdx, rbx, rsp, rbp, rsi and rdi after the division `number`.
pub(super) fn general(number: usize) -> [u64; 8] {
    let mut all = [RAX, 0, RDX, RBX, RSP, RBP, RSI, RDI].map(u64::from);
    all[RCX] = number as u64;
    all
}

/// Returns what `info registers` says of rax after a division.
pub(super) fn eax() -> String {
    format!("{RAX:08x}")
}

/// The code, in real mode, at offset 0.
#[rustfmt::skip]
const CODE: &[&[u8]] = &[
    &[0xfa],                                                // cli
    &[0x31, 0xc0],                                          // xor %ax, %ax
    &[0x8e, 0xd8],                                          // mov %ax, %ds
    &[0x0f, 0x20, 0xc0],                                    // mov %cr0, %eax
    &[0x66, 0x83, 0xe0, 0xfb],                              // and $~4, %eax        no emulation of the FPU
    &[0x0c, 0x02],                                          // or $2, %al           monitor the coprocessor
    &[0x0f, 0x22, 0xc0],                                    // mov %eax, %cr0
    &[0x0f, 0x20, 0xe0],                                    // mov %cr4, %eax
    &[0x66, 0x0d, 0x00, 0x06, 0x00, 0x00],                  // or $0x600, %eax      SSE and its exceptions
    &[0x0f, 0x22, 0xe0],                                    // mov %eax, %cr4
    &[0x66, 0x0f, 0xb7, 0x0e, 0x00, 0x05],                  // movzwl 0x500, %ecx   the counter
    &[0xff, 0x06, 0x00, 0x05],                              // incw 0x500
    &[0x89, 0xcb],                                          // mov %cx, %bx
    &[0xc1, 0xe3, 0x04],                                    // shl $4, %bx
    &[0x2e, 0x0f, 0xae, 0x97, TABLE as u8, 0],              // ldmxcsr %cs:TABLE(%bx)
    &[0x2e, 0xf3, 0x0f, 0x10, 0x87, TABLE as u8 + 4, 0],    // movss %cs:TABLE+4(%bx), %xmm0
    &[0x2e, 0xf3, 0x0f, 0x5e, 0x87, TABLE as u8 + 8, 0],    // divss %cs:TABLE+8(%bx), %xmm0
];
/// `mov $value, register` with 32 bits, for each register.
const LOADS: [(u8, u32); 7] =
    [(0xb8, RAX), (0xba, RDX), (0xbb, RBX), (0xbe, RSI), (0xbf, RDI), (0xbd, RBP), (0xbc, RSP)];
/// 1: hlt; jmp 1b
const HALT: [u8; 3] = [0xf4, 0xeb, 0xfd];
/// ljmp $0xf000, $0
const JUMP: [u8; 5] = [0xea, 0, 0, 0, 0xf0];

/// Returns the image, for `-bios`.
pub(super) fn image() -> Vec<u8> {
    let mut image = CODE.concat();
    for (opcode, value) in LOADS {
        image.extend([0x66, opcode]);
        image.extend(value.to_le_bytes());
    }
    image.extend(HALT);
    debug_assert!(image.len() <= TABLE);
    image.resize(TABLE, 0);
    for [mxcsr, dividend, divisor] in DIVISIONS {
        image.extend([mxcsr, dividend, divisor, 0].iter().flat_map(|word| word.to_le_bytes()));
    }
    image.resize(RESET_VECTOR, 0);
    image.extend(JUMP);
    image.resize(IMAGE_BYTES, 0);
    image
}
