//! What a tool keeps between callbacks: one value that is set once and then belongs to the vCPU's
//! thread.
//!
//! A callback gets its tool as the pointer that was registered with it, which `'static` memory
//! backs: tools are never freed, as translated code may call them until QEMU ends.

use std::cell::UnsafeCell;

/// A tool's state.
pub struct State<T>(UnsafeCell<T>);

impl<T> State<T> {
    /// For ever.
    pub fn leak(value: T) -> &'static Self {
        Box::leak(Box::new(Self(UnsafeCell::new(value))))
    }

    /// The pointer to register.
    pub fn data(&'static self) -> *mut std::ffi::c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    /// The state, for the length of a callback.
    ///
    /// # Safety
    /// `data` came from [`State::data`] of the same type. The caller is a callback of QEMU: on the
    /// thread of the only vCPU, or at exit when that one has stopped. No other reference of this
    /// function is alive.
    pub unsafe fn of<'a>(data: *mut std::ffi::c_void) -> &'a mut T {
        // SAFETY: the caller's promise: it points to a leaked State<T>, which nobody else borrows.
        unsafe { &mut *(*data.cast::<Self>()).0.get() }
    }
}
