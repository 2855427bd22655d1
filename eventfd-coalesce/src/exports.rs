//! What stands in for the C library's functions.

use crate::table::Table;
use core::ffi::{c_int, c_long, c_uint, c_void};
use core::panic::PanicInfo;

/// Descriptors that are looked after; QEMU has some dozens.
static TABLE: Table<4096> = Table::new();

/// Numbers of system calls (x86-64), and a flag of `eventfd2`.
const READ: c_long = 0;
const WRITE: c_long = 1;
const CLOSE: c_long = 3;
const EVENTFD2: c_long = 290;
const EFD_SEMAPHORE: c_int = 1;

unsafe extern "C" {
    /// The C library's own, which sets `errno`.
    fn syscall(number: c_long, ...) -> c_long;
}

/// `eventfd(2)`.
#[unsafe(no_mangle)]
pub extern "C" fn eventfd(value: c_uint, flags: c_int) -> c_int {
    // SAFETY: takes numbers alone.
    let fd = unsafe { syscall(EVENTFD2, value, flags) } as c_int;
    if fd >= 0 && flags & EFD_SEMAPHORE == 0 {
        TABLE.opened(fd);
    }
    fd
}

/// `close(2)`.
#[unsafe(no_mangle)]
pub extern "C" fn close(fd: c_int) -> c_int {
    TABLE.closes(fd);
    // SAFETY: the caller owns the descriptor and wants it closed.
    unsafe { syscall(CLOSE, fd) as c_int }
}

/// `read(2)`.
///
/// # Safety
///
/// As its own: `count` bytes at `buffer` are the caller's to write to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, count: usize) -> isize {
    // SAFETY: the kernel looks after the address; the bytes are as the caller says.
    TABLE.read(fd, || unsafe { syscall(READ, fd, buffer, count) as isize })
}

/// `write(2)`.
///
/// # Safety
///
/// As its own: `count` bytes at `buffer` can be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, count: usize) -> isize {
    // SAFETY: as above.
    let kernel = || unsafe { syscall(WRITE, fd, buffer, count) as isize };
    // SAFETY: eight bytes can be read there if `count` is eight; they need not be aligned.
    if count == size_of::<u64>()
        && TABLE.is_looked_after(fd)
        && unsafe { buffer.cast::<u64>().read_unaligned() } == 1
    {
        let told = || match kernel() {
            failed @ ..0 => Err(failed),
            written => Ok(written),
        };
        TABLE.write(fd, told, count as isize)
    } else {
        kernel()
    }
}

/// Nothing here panics; the language wants it.
#[panic_handler]
fn panic(_: &PanicInfo) -> ! {
    loop {}
}
