//! QEMU's own instruction count, by which recordings are numbered.
//!
//! A counter that translated code increments before each instruction counts an instruction again
//! that an exception has interrupted, as it runs again later. QEMU counts it once: it adds a block's
//! instructions as the block begins, and subtracts those that did not complete.
//!
//! ```text
//!   QEMU, at a block's begin   count += instructions of the block
//!   QEMU, at an exception      count -= instructions from the interrupted one on
//! ```
//!
//! So the count at a block's begin, less the block's instructions, is the number of its first one.
//! The plugin interface has no function for this count. QEMU's function that brings it up to date
//! and the one that reads it are found by name, which works if QEMU exports its symbols, as it does
//! if it was built with modules. Otherwise there is no [`QemuIcount`].
//!
//! To bring the count up to date in a block's midst changes no execution: QEMU does so at each
//! access to a device, and computes each later count from what is left of the same budget.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{NonNull, null_mut};

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Functions and variables of QEMU. They are valid on the thread that found them.
pub struct QemuIcount {
    /// Adds what `current` has executed to the count.
    update: unsafe extern "C" fn(*mut c_void),
    /// Reads the count. If there is a running vCPU on this thread, it ends QEMU, unless the vCPU is
    /// at an access to a device.
    read: unsafe extern "C" fn() -> i64,
    /// The thread's vCPU.
    current: NonNull<*mut c_void>,
}

/// Returns the symbol `name` of the process.
fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: a null handle means all libraries in their order; the name ends in a zero byte.
    NonNull::new(unsafe { dlsym(null_mut(), name.as_ptr()) })
}

impl QemuIcount {
    /// Finds QEMU's functions. Call it on the vCPU's thread, as a block begins. None if QEMU does
    /// not export them, or does not count instructions.
    pub fn find() -> Option<Self> {
        let (update, read) = (symbol(c"icount_update")?, symbol(c"icount_get_raw")?);
        let current = symbol(c"current_cpu")?.cast::<*mut c_void>();
        let is_used = symbol(c"use_icount")?.cast::<c_int>();
        // SAFETY: QEMU's variables of these names are an int (or an enumeration) and, for each
        // thread, a pointer.
        let (is_used, vcpu) = unsafe { (is_used.read() != 0, current.read()) };
        if !is_used || vcpu.is_null() {
            return None;
        }
        // SAFETY: QEMU's functions of these names have these types in all versions that load this
        // plugin.
        let (update, read) = unsafe {
            (
                std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn(*mut c_void)>(update),
                std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn() -> i64>(read),
            )
        };
        Some(Self { update, read, current })
    }

    /// Returns QEMU's count, which includes all instructions of the running block. Call it on the
    /// thread that found the functions.
    #[inline]
    pub fn with_block(&self) -> u64 {
        // SAFETY: the thread's own variable, which nothing else reads meanwhile; QEMU's functions
        // with QEMU's vCPU. Without a vCPU on the thread, reading is allowed.
        unsafe {
            let vcpu = self.current.read();
            (self.update)(vcpu);
            self.current.write(null_mut());
            let count = (self.read)();
            self.current.write(vcpu);
            count as u64
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_program_has_no_count() {
        assert!(QemuIcount::find().is_none());
        assert!(symbol(c"malloc").is_some(), "symbols are found");
    }
}
