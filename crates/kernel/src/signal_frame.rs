//! The way back of a thread that runs our system calls: a signal frame that holds all it was, on
//! its own stack.
//!
//! It is what the kernel itself puts there before it calls a signal handler, and where a handler
//! returns to:
//!
//! ```text
//!   the thread's stack                              its code
//!   rsp ─▶ ┌──────────────────────────┐
//!          │ red zone, 128 bytes      │             call:      syscall        ours; the tracer stops it behind
//!          ├──────────────────────────┤                        ret    ──┐     this and sets the registers of the next
//!          │ vector registers (xsave) │                                 │
//!          ├──────────────────────────┤             sigreturn: mov $15, %rax
//!          │ registers, signal mask   │                        syscall         the kernel restores everything
//!   ours ─▶│ address of `sigreturn`   │
//!          └──────────────────────────┘
//! ```
//!
//! From the moment at which the registers are ours until they are the thread's own again, the
//! thread does not depend on the tracer. If the tracer detaches at any instant, the thread makes
//! the pending call, if there is one, returns through the frame, and continues as before.
//!
//! Invariants:
//! 1. The frame lies below the red zone, where any signal handler would write too. If the memory
//!    there is not mapped and writable, no frame is written.
//! 2. An interrupted system call is made again. `rt_sigreturn` restarts no call, so the saved
//!    instruction pointer is that of the `syscall` instruction. A call that waits for a length of
//!    time waits all of it again.
//!
//! Left out: threads with a shadow stack (CET), which a return to an address that no call has left
//! would kill. And a wait for a length of time that was interrupted before, and let go on (by
//! `restart_syscall`, see [`is_beyond_return`]): such a thread is better left alone until it has
//! done waiting. QEMU's main thread never is in one, as its wait (`ppoll`) is made again as a
//! whole.

use crate::ptrace::SignalMask;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

pub(crate) const RED_ZONE_BYTES: u64 = 128;
/// The kernel's `rt_sigframe`: the return address, a `ucontext`, a `siginfo`; in words of 8 bytes.
const FRAME_WORDS: usize = 55;
const WORD_BYTES: u64 = 8;
/// `UC_FP_XSTATE`, `UC_SIGCONTEXT_SS`, `UC_STRICT_RESTORE_SS`.
const CONTEXT_FLAGS: u64 = 1 | 2 | 4;
/// A value that is no state of an alternate signal stack: the kernel then leaves the present one
/// unchanged.
const SIGNAL_STACK_UNCHANGED: u64 = u32::MAX as u64;

/// Of the xsave area: where what the processor's structure leaves to software begins, the bits of
/// what is in use, and the least that there is of it.
const SOFTWARE_AT: usize = 464;
const IN_USE_AT: usize = 512;
const XSAVE_BYTES_MIN: usize = 576;
const MAGIC_1: u32 = 0x4650_5853;
const MAGIC_2: u32 = 0x4650_5845;
/// The tiles of AMX: state that a process has only once it has asked for it.
const DYNAMIC: u64 = 1 << 18;
const CPUID_XSAVE: u32 = 0xd;
/// The last bit says something else.
const FEATURES: usize = 63;

const ERESTARTSYS: i64 = -512;
const ERESTARTNOINTR: i64 = -513;
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;
/// Both `syscall` and `int $0x80`.
const SYSCALL_BYTES: u64 = 2;

/// A frame to be written into the thread's memory.
#[derive(Debug)]
pub(crate) struct SignalFrame {
    /// The address of the frame: the stack pointer of a thread whose next `ret` restores
    /// everything.
    pub at: u64,
    /// The bytes of the frame.
    pub bytes: Vec<u8>,
}

impl SignalFrame {
    /// Builds the frame of a stopped thread with these registers, signal mask and xsave area (in
    /// the processor's standard format, as ptrace gives it), for code at `sigreturn` that returns
    /// from signals. Returns `None` if no thread can have these values.
    pub fn new(
        registers: &libc::user_regs_struct,
        mask: SignalMask,
        xsave: &[u8],
        layout: &XsaveLayout,
        sigreturn: u64,
    ) -> Option<Self> {
        let xsave = with_marks(xsave, layout)?;
        let top = registers.rsp.checked_sub(RED_ZONE_BYTES)?;
        let xsave_at = top.checked_sub(xsave.len() as u64)? & !63;
        // Where the stack pointer of a function is on its entry.
        let at = (xsave_at.checked_sub(FRAME_WORDS as u64 * WORD_BYTES)? & !15)
            .checked_sub(WORD_BYTES)?;
        let words = words(&restarting(registers), mask, xsave_at, sigreturn);
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.resize(usize::try_from(xsave_at - at).ok()?, 0);
        bytes.extend(xsave);
        Some(Self { at, bytes })
    }
}

/// The kernel's `rt_sigframe`.
fn words(
    registers: &libc::user_regs_struct,
    mask: SignalMask,
    xsave_at: u64,
    sigreturn: u64,
) -> [u64; FRAME_WORDS] {
    let r = registers;
    let segments =
        r.cs & 0xffff | (r.gs & 0xffff) << 16 | (r.fs & 0xffff) << 32 | (r.ss & 0xffff) << 48;
    let mut words = [0; FRAME_WORDS];
    let filled = [
        sigreturn,
        CONTEXT_FLAGS,
        0, // no other context behind this one
        0, // the alternate signal stack: its address, its state, its size
        SIGNAL_STACK_UNCHANGED,
        0,
        r.r8,
        r.r9,
        r.r10,
        r.r11,
        r.r12,
        r.r13,
        r.r14,
        r.r15,
        r.rdi,
        r.rsi,
        r.rbp,
        r.rbx,
        r.rdx,
        r.rax,
        r.rcx,
        r.rsp,
        r.rip,
        r.eflags,
        segments,
        0, // of the last fault: its code, its number, the old mask, its address
        0,
        0,
        0,
        xsave_at,
        0, // reserved, 8 words
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        mask.0,
    ];
    for (word, value) in words.iter_mut().zip(filled) {
        *word = value;
    }
    words
}

/// Returns the registers that repeat an interrupted system call; the same registers if none was
/// interrupted.
fn restarting(registers: &libc::user_regs_struct) -> libc::user_regs_struct {
    let interrupted = matches!(
        registers.rax.cast_signed(),
        ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK
    );
    if registers.orig_rax.cast_signed() < 0 || !interrupted {
        return *registers;
    }
    let rip = registers.rip.wrapping_sub(SYSCALL_BYTES);
    libc::user_regs_struct { rax: registers.orig_rax, rip, ..*registers }
}

/// True if the stopped thread is in a timed wait that an earlier stop has interrupted. Only the
/// kernel knows the rest of that wait, and it forgets it at any `rt_sigreturn`. A return through a
/// frame would end the wait with `EINTR`, as a signal does. The return without a frame keeps the
/// wait.
pub(crate) fn is_beyond_return(registers: &libc::user_regs_struct) -> bool {
    registers.orig_rax.cast_signed() == libc::SYS_restart_syscall
        && registers.rax.cast_signed() == ERESTART_RESTARTBLOCK
}

/// The xsave area with the marks by which the kernel knows that it is more than the oldest part of
/// it.
///
/// The second mark follows the state that the kernel keeps for this thread. That is with the tiles,
/// or without them; what the thread did not ask for is not in use.
fn with_marks(xsave: &[u8], layout: &XsaveLayout) -> Option<Vec<u8>> {
    let word = |at: usize| Some(u64::from_ne_bytes(*xsave.get(at..)?.first_chunk()?));
    let (permitted, in_use) = (word(SOFTWARE_AT)?, word(IN_USE_AT)?);
    let features = if in_use & DYNAMIC == 0 { permitted & !DYNAMIC } else { permitted };
    let kept_bytes = layout.len_bytes(features);
    if kept_bytes > xsave.len() {
        return None;
    }
    let mut out = xsave.to_vec();
    out.extend(MAGIC_2.to_ne_bytes());
    let mut put = |at: usize, bytes: &[u8]| {
        out.get_mut(at..at + bytes.len())?.copy_from_slice(bytes);
        Some(())
    };
    put(kept_bytes, &MAGIC_2.to_ne_bytes())?;
    let (len, extended_len) =
        (u32::try_from(kept_bytes).ok()?, u32::try_from(kept_bytes + 4).ok()?);
    put(SOFTWARE_AT, &[0; 48])?;
    put(SOFTWARE_AT, &MAGIC_1.to_ne_bytes())?;
    put(SOFTWARE_AT + 4, &extended_len.to_ne_bytes())?;
    put(SOFTWARE_AT + 8, &features.to_ne_bytes())?;
    put(SOFTWARE_AT + 16, &len.to_ne_bytes())?;
    Some(out)
}

/// The end of each feature's part in an xsave area of standard form, by the number of the feature's
/// bit.
#[derive(Debug)]
pub(crate) struct XsaveLayout([usize; FEATURES]);

impl XsaveLayout {
    /// Returns the layout of this processor, read once: under a hypervisor each CPUID instruction
    /// is slow.
    pub fn of_this_processor() -> &'static Self {
        static LAYOUT: OnceLock<XsaveLayout> = OnceLock::new();
        LAYOUT.get_or_init(|| {
            let mut ends = [XSAVE_BYTES_MIN; FEATURES];
            // The first two are in the oldest part.
            for (bit, end) in ends.iter_mut().enumerate().skip(2) {
                let feature = __cpuid_count(CPUID_XSAVE, bit as u32);
                *end = feature.ebx as usize + feature.eax as usize;
            }
            Self(ends)
        })
    }

    /// The length of an area that holds these features.
    fn len_bytes(&self, features: u64) -> usize {
        let ends = self.0.iter().enumerate().filter(|(bit, _)| features >> bit & 1 == 1);
        ends.map(|(_, end)| *end).fold(XSAVE_BYTES_MIN, usize::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers(rax: i64, orig_rax: i64) -> libc::user_regs_struct {
        // SAFETY: a C structure of integers, of which any bytes are a value.
        let zeros: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        libc::user_regs_struct {
            rax: rax.cast_unsigned(),
            orig_rax: orig_rax.cast_unsigned(),
            rip: 0x1002,
            rsp: 0x7fff_0000_1238,
            ..zeros
        }
    }

    #[test]
    fn only_an_interrupted_call_is_made_again() {
        for (rax, orig_rax, expected) in [
            (-512, 7, (7, 0x1000)),
            (-513, 0, (0, 0x1000)),
            (-514, 271, (271, 0x1000)),
            (-516, 35, (35, 0x1000)),
            // Another answer; not in a system call.
            (-515, 7, (-515, 0x1002)),
            (-4, 7, (-4, 0x1002)),
            (12, 7, (12, 0x1002)),
            (-512, -1, (-512, 0x1002)),
        ] {
            let found = restarting(&registers(rax, orig_rax));
            assert_eq!((found.rax.cast_signed(), found.rip), expected, "{rax} of {orig_rax}");
        }
    }

    #[test]
    fn it_lies_below_the_red_zone_as_the_kernel_aligns_it() {
        let mut xsave = vec![0; XSAVE_BYTES_MIN];
        xsave[SOFTWARE_AT] = 3;
        for rsp in 0x7fff_0000_1200..0x7fff_0000_1300_u64 {
            let frame = SignalFrame::new(
                &libc::user_regs_struct { rsp, ..registers(1, -1) },
                SignalMask(5),
                &xsave,
                XsaveLayout::of_this_processor(),
                0x4242,
            )
            .unwrap();
            let word =
                |index: usize| u64::from_ne_bytes(*frame.bytes[index * 8..].first_chunk().unwrap());
            assert!(frame.at + frame.bytes.len() as u64 <= rsp - RED_ZONE_BYTES);
            assert_eq!(frame.at % 16, 8);
            assert_eq!((word(0), word(21), word(22), word(38)), (0x4242, rsp, 0x1002, 5));
            let vectors = word(29);
            assert_eq!(vectors % 64, 0);
            assert!(vectors >= frame.at + FRAME_WORDS as u64 * 8);
            let vectors = &frame.bytes[(vectors - frame.at) as usize..];
            assert_eq!(vectors[SOFTWARE_AT..SOFTWARE_AT + 4], MAGIC_1.to_ne_bytes());
            assert_eq!(vectors[XSAVE_BYTES_MIN..], MAGIC_2.to_ne_bytes());
        }
    }

    #[test]
    fn no_frame_is_made_of_what_no_thread_has() {
        let xsave = vec![0; XSAVE_BYTES_MIN];
        let frame = |rsp, xsave: &[u8]| {
            SignalFrame::new(
                &libc::user_regs_struct { rsp, ..registers(1, -1) },
                SignalMask(0),
                xsave,
                XsaveLayout::of_this_processor(),
                1,
            )
        };
        assert!(frame(0x7fff_0000_0000, &xsave).is_some());
        for rsp in [0, 127, 128, 700] {
            assert!(frame(rsp, &xsave).is_none(), "{rsp}");
        }
        assert!(frame(0x7fff_0000_0000, &xsave[..XSAVE_BYTES_MIN - 1]).is_none());
        assert!(frame(0x7fff_0000_0000, &[]).is_none());
    }
}
