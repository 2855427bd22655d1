//! Where in a process's own code our system calls can be made, and how the thread finds back from
//! there by itself.
//!
//! ```text
//!   call       0f 05 c3                      syscall; ret             any function of the C library that is one system call
//!   sigreturn  48 c7 c0 0f 00 00 00 0f 05    mov $15, %rax; syscall   where each signal handler returns to
//! ```
//!
//! Each C library has both, in a shared library or in the program itself: the kernel demands the
//! second from every program that handles signals. The bytes need not begin an instruction of the
//! code they are found in. Where one is missing, or the process has a shadow stack, calls are made
//! through the vdso, as they can be in any process; then there is no way back but ours. See
//! [`crate::signal_frame`].
//!
//! Left out: code that only we would need, written into the process.

use crate::maps::{self, Mapping};
use crate::{Error, Process, Result, read_memory};
use keyframe_units::HostRange;

/// A vdso is two to four pages.
const VDSO_BYTES_MAX: u64 = 64 << 10;
/// How often, and how long apart, the mappings are looked at for a vdso.
const LOOKS_MAX: u32 = 40;
const LOOK_MS: u32 = 5;
/// Code that is read in one piece, and in all.
const PIECE_BYTES: u64 = 1 << 20;
const CODE_BYTES_MAX: u64 = 256 << 20;

const SYSCALL: [u8; 2] = [0x0f, 0x05];
const SYSCALL_RET: [u8; 3] = [0x0f, 0x05, 0xc3];
const SIGRETURN: [u8; 9] = [0x48, 0xc7, 0xc0, 0x0f, 0x00, 0x00, 0x00, 0x0f, 0x05];

/// Addresses in the code of a process, which stay right until it unmaps that code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gadgets {
    /// The address of a `syscall` instruction. A `ret` follows it if the process offers a way back.
    pub call: u64,
    /// The address of code that returns from a signal handler. `None` if there is none.
    pub sigreturn: Option<u64>,
}

impl Gadgets {
    /// Finds the gadgets of `process`. Takes a millisecond for each MiB of its C library. Errors:
    /// the memory of the process cannot be read; its vDSO has no gadget.
    pub fn find(process: &Process) -> Result<Self> {
        let maps = maps_with_vdso(process)?;
        if !has_shadow_stack(process)?
            && let Some((call, sigreturn)) = way_back(process, &maps)
        {
            return Ok(Self { call, sigreturn: Some(sigreturn) });
        }
        Self::in_vdso(process, &maps)
    }

    /// A `syscall` of the vdso, and no way back.
    fn in_vdso(process: &Process, maps: &[Mapping]) -> Result<Self> {
        let missing = || Error::NoSyscallInstruction { pid: process.pid() };
        let vdso = maps.iter().find(|mapping| is_vdso(mapping)).ok_or_else(missing)?.range;
        let mut code = vec![0; vdso.len_bytes as usize];
        read_memory(process, vdso.start, &mut code)?;
        let call = address_of(&SYSCALL, vdso, &code).ok_or_else(missing)?;
        Ok(Self { call, sigreturn: None })
    }
}

fn is_vdso(mapping: &Mapping) -> bool {
    mapping.path == "[vdso]" && mapping.range.len_bytes <= VDSO_BYTES_MAX
}

/// The code of a process that is neither in the middle of exec nor on its way out, which has a
/// vdso.
fn maps_with_vdso(process: &Process) -> Result<Vec<Mapping>> {
    for _ in 0..LOOKS_MAX {
        let maps = maps::read_code(process)?;
        if maps.iter().any(is_vdso) {
            return Ok(maps);
        }
        if process.exits_within(LOOK_MS) {
            return Err(Error::Gone { pid: process.pid(), operation: "attach" });
        }
    }
    Err(Error::NoSyscallInstruction { pid: process.pid() })
}

/// True if each return is checked against a second stack.
fn has_shadow_stack(process: &Process) -> Result<bool> {
    let features = process.status_field("x86_Thread_features")?;
    Ok(features
        .is_some_and(|features| features.split_whitespace().any(|feature| feature == "shstk")))
}

/// The addresses of both, in code that is not writable. The C library's come first.
fn way_back(process: &Process, maps: &[Mapping]) -> Option<(u64, u64)> {
    let is_c_library = |mapping: &Mapping| {
        let name = mapping.path.rsplit('/').next().unwrap_or_default();
        name.starts_with("libc.") || name.starts_with("libc-") || name.starts_with("ld-musl")
    };
    let mut code: Vec<&Mapping> =
        maps.iter().filter(|m| m.readable && !m.writable && !m.shared && m.inode != 0).collect();
    code.sort_by_key(|mapping| !is_c_library(mapping));
    let (mut call, mut sigreturn, mut left) = (None, None, CODE_BYTES_MAX);
    for mapping in code {
        for piece in pieces(mapping.range) {
            left = left.checked_sub(piece.len_bytes)?;
            let mut bytes = vec![0; piece.len_bytes as usize];
            // Code that went away meanwhile is not what is looked for.
            if read_memory(process, piece.start, &mut bytes).is_err() {
                break;
            }
            call = call.or_else(|| address_of(&SYSCALL_RET, piece, &bytes));
            sigreturn = sigreturn.or_else(|| address_of(&SIGRETURN, piece, &bytes));
            if let Some(both) = call.zip(sigreturn) {
                return Some(both);
            }
        }
    }
    None
}

/// Splits `range` into pieces that overlap so that each gadget lies whole in one of them.
fn pieces(range: HostRange) -> impl Iterator<Item = HostRange> {
    let starts = (range.start.0..range.end().0).step_by(PIECE_BYTES as usize);
    let end = range.end().0;
    starts.map(move |start| {
        let stop = (start + PIECE_BYTES + SIGRETURN.len() as u64 - 1).min(end);
        crate::ranges::between(start, stop)
    })
}

fn address_of(gadget: &[u8], range: HostRange, code: &[u8]) -> Option<u64> {
    let (first, _) = gadget.split_first()?;
    let mut at = 0;
    // Looking for one byte is what is fast.
    while let Some(next) = code.get(at..)?.iter().position(|byte| byte == first) {
        at += next;
        if code.get(at..)?.starts_with(gadget) {
            return Some(range.start.0 + at as u64);
        }
        at += 1;
    }
    None
}

#[cfg(test)]
impl Gadgets {
    /// Finds gadgets in the vDSO of a process that offers no way back from a signal handler.
    /// Errors: those of [`Self::find`].
    pub fn without_way_back(process: &Process) -> Result<Self> {
        Self::in_vdso(process, &maps_with_vdso(process)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranges::between;

    /// This program uses a C library, as each process does that can be attached to.
    #[test]
    fn this_process_has_a_way_back() {
        let own = Process::open(std::process::id()).unwrap();
        let gadgets = Gadgets::find(&own).unwrap();
        let mut bytes = [0; 3];
        read_memory(&own, keyframe_units::HostVirt(gadgets.call), &mut bytes).unwrap();
        assert_eq!(bytes, SYSCALL_RET);
        let mut bytes = [0; 9];
        read_memory(&own, keyframe_units::HostVirt(gadgets.sigreturn.unwrap()), &mut bytes)
            .unwrap();
        assert_eq!(bytes, SIGRETURN);
    }

    #[test]
    fn no_gadget_is_cut_by_a_piece() {
        let range = between(0x1000, 0x1000 + 3 * PIECE_BYTES - 4096);
        for at in [
            0,
            PIECE_BYTES - 9,
            PIECE_BYTES - 4,
            PIECE_BYTES - 1,
            PIECE_BYTES,
            3 * PIECE_BYTES - 4096 - 9,
        ] {
            let at = range.start.0 + at;
            let whole = |piece: HostRange| piece.contains(between(at, at + SIGRETURN.len() as u64));
            assert!(pieces(range).any(whole), "{at:#x}");
        }
        assert!(pieces(range).all(|piece| range.contains(piece)));
    }
}
