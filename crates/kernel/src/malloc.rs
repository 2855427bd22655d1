//! Makes the C library's allocator keep freed memory.
//!
//! By default it returns blocks of more than 128 KiB, and free memory at the end of a heap, to the
//! kernel at once. A thread that allocates and frees some megabytes in a loop then spends half of
//! its time in page faults.

/// The most that the C library allows for blocks from its heaps.
#[cfg(target_env = "gnu")]
const BLOCK_BYTES_MAX: libc::c_int = 32 << 20;
/// The most free bytes at the end of the heap that are kept.
#[cfg(target_env = "gnu")]
const FREE_BYTES_MAX: libc::c_int = 512 << 20;

/// Makes this process keep freed memory instead of returning it to the kernel. Returns false if the
/// C library has no such setting.
#[cfg(target_env = "gnu")]
pub fn keep_freed_memory() -> bool {
    let set = |parameter, value| {
        // SAFETY: mallopt takes two numbers, and may be called by any thread at any time.
        unsafe { libc::mallopt(parameter, value) == 1 }
    };
    set(libc::M_MMAP_THRESHOLD, BLOCK_BYTES_MAX) & set(libc::M_TRIM_THRESHOLD, FREE_BYTES_MAX)
}

/// Returns false: musl's allocator has no such setting.
#[cfg(not(target_env = "gnu"))]
pub fn keep_freed_memory() -> bool {
    false
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    #[test]
    fn this_c_library_can_keep_memory() {
        assert!(super::keep_freed_memory());
        assert_eq!(vec![7_u8; 1 << 20].iter().map(|byte| u32::from(*byte)).sum::<u32>(), 7 << 20);
    }
}
