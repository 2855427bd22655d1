//! The state that a tool keeps between callbacks: one value that belongs to the vCPU's thread.
//!
//! A callback receives its tool as the pointer that was registered with it. The memory is `'static`:
//! tools are never freed, because translated code may call them until QEMU exits.

use std::cell::UnsafeCell;

/// A tool's state.
pub struct State<T>(UnsafeCell<T>);

impl<T> State<T> {
    /// Moves the value to memory that is never freed.
    pub fn leak(value: T) -> &'static Self {
        Box::leak(Box::new(Self(UnsafeCell::new(value))))
    }

    /// The pointer to register with a callback.
    pub fn data(&'static self) -> *mut std::ffi::c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    /// The state, during a callback.
    ///
    /// # Safety
    /// `data` came from [`State::data`] of the same type. The caller is a callback of QEMU: on the
    /// thread of the only vCPU, or at exit when the vCPU has stopped. No other reference from this
    /// function is alive.
    pub unsafe fn of<'a>(data: *mut std::ffi::c_void) -> &'a mut T {
        // SAFETY: the caller promises that it points to a leaked State<T> without other borrows.
        unsafe { &mut *(*data.cast::<Self>()).0.get() }
    }
}
