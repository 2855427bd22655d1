//! Reads and writes the memory of another process by `process_vm_readv` and `process_vm_writev`.
//!
//! Both calls stop at the first page that they cannot access. These functions transfer all bytes or
//! fail.

use crate::{Error, Process, Result};
use keyframe_units::{HostRange, HostVirt};
use std::ffi::c_void;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// Ranges in one call, the kernel's own limit (`IOV_MAX`).
const RANGES_MAX: usize = 1024;

/// How often this process began to write the memory of another one, by the last digits of its pid.
static WRITES: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

fn writes_to(process: &Process) -> &'static AtomicU64 {
    &WRITES[process.pid() as usize % WRITES.len()]
}

/// Returns how often [`write_memory`] has been called for `process`, or for some other processes,
/// too. A page that it writes is not named by a page fault.
pub(crate) fn writes_begun(process: &Process) -> u64 {
    writes_to(process).load(Ordering::SeqCst)
}

/// Reads `dst.len()` bytes at address `at` of `process`.
///
/// Errors: the process is gone, or a part is not mapped or not readable. `dst` then holds an
/// unspecified mixture.
pub fn read_memory(process: &Process, at: HostVirt, dst: &mut [u8]) -> Result<()> {
    gather(process, &[HostRange { start: at, len_bytes: dst.len() as u64 }], dst)
}

/// Writes `src` at address `at` of `process`. Errors: the process is gone, or a part is not mapped
/// or not writable. A part may then have been written.
pub fn write_memory(process: &Process, at: HostVirt, src: &[u8]) -> Result<()> {
    writes_to(process).fetch_add(1, Ordering::SeqCst);
    let mut done = 0;
    while let Some(left) = src.get(done..).filter(|left| !left.is_empty()) {
        let local = libc::iovec { iov_base: left.as_ptr().cast_mut().cast(), iov_len: left.len() };
        let to = at.0.wrapping_add(done as u64);
        let remote = libc::iovec { iov_base: to as *mut c_void, iov_len: left.len() };
        // SAFETY: `local` describes `left`, which is borrowed over the call and only read; `remote`
        // is an address of the other process, which the kernel checks; both counts are the one
        // element that each pointer points to.
        let code = unsafe {
            libc::process_vm_writev(process.raw_pid(), &raw const local, 1, &raw const remote, 1, 0)
        };
        done += moved(process, code, "write", HostVirt(to), left.len() as u64)?;
    }
    process.ensure_alive("write memory")
}

/// Reads `ranges`, one after the other, into `dst`, whose length must be their sum.
pub(crate) fn gather(process: &Process, ranges: &[HostRange], dst: &mut [u8]) -> Result<()> {
    let mut remote: Vec<libc::iovec> = Vec::with_capacity(ranges.len().min(RANGES_MAX));
    let mut left = ranges.iter().copied().filter(|r| r.len_bytes > 0).peekable();
    let mut done = 0;
    while left.peek().is_some() {
        remote.clear();
        let mut want = 0;
        while let Some(range) = left.next_if(|_| remote.len() < RANGES_MAX) {
            remote.push(libc::iovec {
                iov_base: range.start.0 as *mut c_void,
                iov_len: range.len_bytes as usize,
            });
            want += range.len_bytes as usize;
        }
        let end = done + want;
        let part = dst
            .get_mut(done..end)
            .ok_or(Error::Length { ranges_bytes: end as u64, dst_bytes: done as u64 })?;
        gather_batch(process, &mut remote, part)?;
        done = end;
    }
    // The call knows only a pid: it was ours if the process lives now.
    process.ensure_alive("read memory")
}

/// Reads one batch, going on behind what a short read brought.
fn gather_batch(process: &Process, remote: &mut [libc::iovec], mut dst: &mut [u8]) -> Result<()> {
    let mut remote = remote;
    while let Some(first) = remote.first().copied() {
        let local = libc::iovec { iov_base: dst.as_mut_ptr().cast(), iov_len: dst.len() };
        // SAFETY: `local` describes `dst`, which is borrowed mutably over the call and for which
        // any bytes are valid; `remote` holds addresses of the other process, which the kernel
        // checks; the counts are the lengths of what the pointers point to, and `remote` has at
        // most IOV_MAX elements.
        let code = unsafe {
            libc::process_vm_readv(
                process.raw_pid(),
                &raw const local,
                1,
                remote.as_ptr(),
                remote.len() as libc::c_ulong,
                0,
            )
        };
        let mut n =
            moved(process, code, "read", HostVirt(first.iov_base as u64), first.iov_len as u64)?;
        dst = dst.get_mut(n..).unwrap_or_default();
        let whole = remote.iter().take_while(|r| {
            let fits = r.iov_len <= n;
            n -= if fits { r.iov_len } else { 0 };
            fits
        });
        let whole = whole.count();
        remote = remote.get_mut(whole..).unwrap_or_default();
        if let Some(partial) = remote.first_mut() {
            partial.iov_base = partial.iov_base.wrapping_byte_add(n);
            partial.iov_len -= n;
        }
    }
    Ok(())
}

/// The bytes a call moved; nothing moved is an error, so that every loop ends.
fn moved(
    process: &Process,
    code: isize,
    operation: &'static str,
    at: HostVirt,
    len_bytes: u64,
) -> Result<usize> {
    let source = match usize::try_from(code) {
        Ok(0) => io::Error::from_raw_os_error(libc::EFAULT),
        Ok(n) => return Ok(n),
        Err(_) => io::Error::last_os_error(),
    };
    if source.raw_os_error() == Some(libc::ESRCH) || !process.is_alive() {
        return Err(Error::Gone { pid: process.pid(), operation });
    }
    Err(Error::Transfer { pid: process.pid(), operation, at, len_bytes, source })
}
