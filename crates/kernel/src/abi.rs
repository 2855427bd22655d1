//! The kernel's own structures and numbers that neither `libc` nor `rustix` declares: userfaultfd,
//! `PAGEMAP_SCAN`, requests of perf events.
//!
//! Invariant: every structure has the size that the kernel's header gives it (asserted at compile
//! time), because the size is part of the ioctl number.

use std::ffi::CStr;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

const READ: u64 = 2;
const WRITE: u64 = 1;

/// The number of an ioctl, as the kernel's `_IOC` makes it. The kernel reads 32 bits of it,
/// whatever the C library calls them.
const fn ioc(direction: u64, kind: u8, number: u8, len_bytes: usize) -> libc::Ioctl {
    (direction << 30 | (len_bytes as u64) << 16 | (kind as u64) << 8 | number as u64) as libc::Ioctl
}

pub const UFFD_API: u64 = 0xAA;
pub const UFFD_USER_MODE_ONLY: u64 = 1;

pub const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1;
pub const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
pub const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
pub const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
pub const FEATURE_WP_ASYNC: u64 = 1 << 15;

/// The userfaultfd features that tracking needs: the bit, its name, and the kernel version that
/// introduced it.
pub const FEATURES_NEEDED: [(u64, &str, &str); 4] = [
    (FEATURE_PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP", "5.7"),
    (FEATURE_WP_HUGETLBFS_SHMEM, "WP_HUGETLBFS_SHMEM", "5.19"),
    (FEATURE_WP_UNPOPULATED, "WP_UNPOPULATED", "6.4"),
    (FEATURE_WP_ASYNC, "WP_ASYNC", "6.7"),
];

/// Returns all bits of [`FEATURES_NEEDED`].
pub fn features_needed() -> u64 {
    FEATURES_NEEDED.iter().fold(0, |all, (bit, ..)| all | bit)
}

/// The userfaultfd features that watching first writes needs: the bit, its name, and the kernel
/// version that introduced it.
pub const FAULT_FEATURES_NEEDED: [(u64, &str, &str); 4] = [
    (FEATURE_EVENT_REMOVE, "EVENT_REMOVE", "4.11"),
    (FEATURE_PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP", "5.7"),
    (FEATURE_WP_HUGETLBFS_SHMEM, "WP_HUGETLBFS_SHMEM", "5.19"),
    (FEATURE_WP_UNPOPULATED, "WP_UNPOPULATED", "6.4"),
];

/// Returns all bits of [`FAULT_FEATURES_NEEDED`].
pub fn fault_features_needed() -> u64 {
    FAULT_FEATURES_NEEDED.iter().fold(0, |all, (bit, ..)| all | bit)
}

/// The feature of userfaultfd that handles missing pages of shared memory.
pub const FEATURE_MISSING_SHMEM: u64 = 1 << 5;

pub const REGISTER_MODE_MISSING: u64 = 1;
pub const REGISTER_MODE_WP: u64 = 1 << 1;

/// The argument of `UFFDIO_API` (`struct uffdio_api`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct UffdApi {
    pub api: u64,
    pub features: u64,
    pub ioctls: u64,
}

/// A range of addresses (`struct uffdio_range`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct UffdRange {
    pub start: u64,
    pub len_bytes: u64,
}

/// The argument of `UFFDIO_REGISTER` (`struct uffdio_register`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct UffdRegister {
    pub range: UffdRange,
    pub mode: u64,
    pub ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct UffdWriteProtect {
    range: UffdRange,
    mode: u64,
}

/// The arguments of `UFFDIO_COPY` and `UFFDIO_ZEROPAGE`: the kernel answers in `done` how many
/// bytes it placed, or a negative error.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct UffdCopy {
    dst: u64,
    src: u64,
    len_bytes: u64,
    mode: u64,
    done: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct UffdZeroPage {
    range: UffdRange,
    mode: u64,
    done: i64,
}

const WRITEPROTECT_MODE_WP: u64 = 1;

/// The number of bytes of a message of userfaultfd.
pub const MESSAGE_BYTES: usize = 32;
const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_REMOVE: u8 = 0x15;

/// A message of userfaultfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A thread waits, or waited, to write at this address.
    Fault { address: u64 },
    /// A thread is about to discard this range, as soon as the message is read.
    Remove { start: u64, end: u64 },
    /// An event of another kind, which Keyframe does not request.
    Other(u8),
}

impl Message {
    /// Parses a `uffd_msg`: the event in its first byte, and two words after the first word.
    pub fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |index: usize| words.get(index).map_or(0, |word| u64::from_ne_bytes(*word));
        match bytes[0] {
            EVENT_PAGEFAULT => Self::Fault { address: word(2) },
            EVENT_REMOVE => Self::Remove { start: word(1), end: word(2) },
            other => Self::Other(other),
        }
    }
}

const UFFDIO_API: libc::Ioctl = ioc(READ | WRITE, 0xAA, 0x3F, size_of::<UffdApi>());
const UFFDIO_REGISTER: libc::Ioctl = ioc(READ | WRITE, 0xAA, 0x00, size_of::<UffdRegister>());
const UFFDIO_WRITEPROTECT: libc::Ioctl =
    ioc(READ | WRITE, 0xAA, 0x06, size_of::<UffdWriteProtect>());
const UFFDIO_COPY: libc::Ioctl = ioc(READ | WRITE, 0xAA, 0x03, size_of::<UffdCopy>());
const UFFDIO_ZEROPAGE: libc::Ioctl = ioc(READ | WRITE, 0xAA, 0x04, size_of::<UffdZeroPage>());
const UFFDIO_WAKE: libc::Ioctl = ioc(READ, 0xAA, 0x02, size_of::<UffdRange>());
const UFFDIO_UNREGISTER: libc::Ioctl = ioc(READ, 0xAA, 0x01, size_of::<UffdRange>());

pub const SCAN_WP_MATCHING: u64 = 1;
pub const SCAN_CHECK_WPASYNC: u64 = 1 << 1;

pub const PAGE_WRITTEN: u64 = 1 << 1;
pub const PAGE_FILE: u64 = 1 << 2;
pub const PAGE_PRESENT: u64 = 1 << 3;
pub const PAGE_SWAPPED: u64 = 1 << 4;
pub const PAGE_PFNZERO: u64 = 1 << 5;

/// The argument of `PAGEMAP_SCAN`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ScanArg {
    pub size: u64,
    pub flags: u64,
    pub start: u64,
    pub end: u64,
    pub walk_end: u64,
    pub vec: u64,
    pub vec_len: u64,
    pub max_pages: u64,
    pub category_inverted: u64,
    pub category_mask: u64,
    pub category_anyof_mask: u64,
    pub return_mask: u64,
}

/// One answer of `PAGEMAP_SCAN`: the pages at the addresses `start..end` have these categories.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageRegion {
    pub start: u64,
    pub end: u64,
    pub categories: u64,
}

/// The argument of `PROCMAP_QUERY`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

const PROCMAP_QUERY: libc::Ioctl = ioc(READ | WRITE, b'f', 17, size_of::<MapQuery>());
const PAGEMAP_SCAN: libc::Ioctl = ioc(READ | WRITE, b'f', 16, size_of::<ScanArg>());

const _: () = assert!(size_of::<UffdApi>() == 24);
const _: () = assert!(size_of::<UffdRange>() == 16);
const _: () = assert!(size_of::<UffdRegister>() == 32);
const _: () = assert!(size_of::<ScanArg>() == 96);
const _: () = assert!(size_of::<PageRegion>() == 24);
const _: () = assert!(size_of::<MapQuery>() == 104 && PROCMAP_QUERY as u32 == 0xC068_6611);
const _: () = assert!(UFFDIO_API as u32 == 0xC018_AA3F && UFFDIO_REGISTER as u32 == 0xC020_AA00);
const _: () =
    assert!(UFFDIO_WRITEPROTECT as u32 == 0xC018_AA06 && UFFDIO_WAKE as u32 == 0x8010_AA02);
const _: () = assert!(UFFDIO_COPY as u32 == 0xC028_AA03 && UFFDIO_ZEROPAGE as u32 == 0xC020_AA04);
const _: () =
    assert!(UFFDIO_UNREGISTER as u32 == 0x8010_AA01 && PAGEMAP_SCAN as u32 == 0xC060_6610);

/// Calls `UFFDIO_API` with the wanted `features`. Returns the features that the kernel has. Error:
/// that of the call.
pub fn uffd_api(uffd: BorrowedFd<'_>, features: u64) -> io::Result<u64> {
    let mut api = UffdApi { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: the descriptor is open while borrowed; UFFDIO_API reads and writes one `uffdio_api`,
    // which `api` is, and which lives over the call.
    let code = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut api) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(api.features) }
}

/// Calls `UFFDIO_REGISTER` for write protection of `len_bytes` bytes from `start` on. Error: that
/// of the call.
pub fn uffd_register(uffd: BorrowedFd<'_>, start: u64, len_bytes: u64) -> io::Result<()> {
    uffd_register_as(uffd, start, len_bytes, REGISTER_MODE_WP)
}

/// Calls `UFFDIO_REGISTER` for missing pages in `len_bytes` bytes from `start` on: from now on a
/// thread that touches one waits until the page is placed. Error: that of the call.
pub fn uffd_register_missing(uffd: BorrowedFd<'_>, start: u64, len_bytes: u64) -> io::Result<()> {
    uffd_register_as(uffd, start, len_bytes, REGISTER_MODE_MISSING)
}

fn uffd_register_as(uffd: BorrowedFd<'_>, start: u64, len_bytes: u64, mode: u64) -> io::Result<()> {
    let range = UffdRange { start, len_bytes };
    let mut register = UffdRegister { range, mode, ioctls: 0 };
    // SAFETY: the descriptor is open while borrowed; UFFDIO_REGISTER reads and writes one
    // `uffdio_register`, which `register` is, and which lives over the call. The addresses are the
    // other process's: no memory of ours is touched, and memory of ours is only touched where
    // `uffd` is ours; neither mode changes any content.
    let code = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Calls `UFFDIO_COPY`: places `content` (whole pages) from `start` on, where no page is yet, and
/// wakes the threads that wait there. Returns the number of bytes that were placed before the first
/// page that was present, or before the kernel was interrupted. Errors: `EEXIST` if the first page
/// is present; those of the call.
pub fn uffd_copy(uffd: BorrowedFd<'_>, start: u64, content: &[u8]) -> io::Result<u64> {
    let (src, len_bytes) = (content.as_ptr() as u64, content.len() as u64);
    let mut copy = UffdCopy { dst: start, src, len_bytes, mode: 0, done: 0 };
    // SAFETY: the descriptor is open while borrowed; UFFDIO_COPY reads and writes one
    // `uffdio_copy`, which `copy` is, and which lives over the call; it reads `len_bytes` bytes at
    // `src`, which are `content`, borrowed over the call. It writes to memory of the process that
    // made `uffd`, and only where no page is.
    let code = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_COPY, &raw mut copy) };
    placed(code, copy.done)
}

/// Calls `UFFDIO_ZEROPAGE`: places `len_bytes` bytes of zeros from `start` on, as [`uffd_copy`]
/// places content. Returns the number of bytes placed. Errors: those of [`uffd_copy`].
pub fn uffd_zero(uffd: BorrowedFd<'_>, start: u64, len_bytes: u64) -> io::Result<u64> {
    let mut zero = UffdZeroPage { range: UffdRange { start, len_bytes }, mode: 0, done: 0 };
    // SAFETY: the descriptor is open while borrowed; UFFDIO_ZEROPAGE reads and writes one
    // `uffdio_zeropage`, which `zero` is, and which lives over the call. It writes to memory of the
    // process that made `uffd`, only where no page is.
    let code = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_ZEROPAGE, &raw mut zero) };
    placed(code, zero.done)
}

/// Returns the number of bytes that a call has placed, or its error if it has placed none.
fn placed(code: libc::c_int, done: i64) -> io::Result<u64> {
    let error = io::Error::last_os_error();
    match u64::try_from(done) {
        Ok(done) if code >= 0 || done > 0 => Ok(done),
        _ => Err(error),
    }
}

/// Calls `UFFDIO_UNREGISTER` for `len_bytes` bytes from `start` on: protection ends, content stays.
/// It does not wake threads that wait to write there. Error: that of the call.
pub fn uffd_unregister(uffd: BorrowedFd<'_>, start: u64, len_bytes: u64) -> io::Result<()> {
    let mut range = UffdRange { start, len_bytes };
    // SAFETY: the descriptor is open while borrowed; UFFDIO_UNREGISTER reads one `uffdio_range`,
    // which `range` is, and which lives over the call.
    let code = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_UNREGISTER, &raw mut range) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Calls `UFFDIO_WRITEPROTECT`: protects every page of the `len_bytes` bytes from `start` on, with
/// a marker if there is no page. Error: that of the call.
pub fn uffd_write_protect(uffd: BorrowedFd<'_>, start: u64, len_bytes: u64) -> io::Result<()> {
    uffd_set_protection(uffd, start, len_bytes, WRITEPROTECT_MODE_WP)
}

/// Calls `UFFDIO_WRITEPROTECT`: removes the protection of every page of the `len_bytes` bytes from
/// `start` on, and wakes the threads that wait to write there. Error: that of the call.
pub fn uffd_remove_protection(uffd: BorrowedFd<'_>, start: u64, len_bytes: u64) -> io::Result<()> {
    uffd_set_protection(uffd, start, len_bytes, 0)
}

fn uffd_set_protection(
    uffd: BorrowedFd<'_>,
    start: u64,
    len_bytes: u64,
    mode: u64,
) -> io::Result<()> {
    let mut protect = UffdWriteProtect { range: UffdRange { start, len_bytes }, mode };
    // SAFETY: the descriptor is open while borrowed; UFFDIO_WRITEPROTECT reads one
    // `uffdio_writeprotect`, which `protect` is, and which lives over the call. No content changes.
    let code = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut protect) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Calls `UFFDIO_WAKE`: threads that wait in the `len_bytes` bytes from `start` on try their access
/// again. Error: that of the call.
pub fn uffd_wake(uffd: BorrowedFd<'_>, start: u64, len_bytes: u64) -> io::Result<()> {
    let mut range = UffdRange { start, len_bytes };
    // SAFETY: the descriptor is open while borrowed; UFFDIO_WAKE reads one `uffdio_range`, which
    // `range` is, and which lives over the call.
    let code = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WAKE, &raw mut range) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the end of the mapping that holds `address`. Returns `None` if none does. `maps` is an
/// open `/proc/PID/maps`. Errors: `Unsupported` before Linux 6.11; that of the call.
pub fn mapping_end(maps: BorrowedFd<'_>, address: u64) -> io::Result<Option<u64>> {
    let mut query =
        MapQuery { size: size_of::<MapQuery>() as u64, query_addr: address, ..MapQuery::default() };
    // SAFETY: the descriptor is open while borrowed; PROCMAP_QUERY reads and writes one
    // `procmap_query` of the `size` it holds, which `query` is, and which lives over the call; name
    // and build id are not asked for (sizes of zero).
    let code = unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY, &raw mut query) };
    if code >= 0 {
        return Ok(Some(query.vma_end));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOENT) => Ok(None),
        Some(libc::ENOTTY | libc::EINVAL) => Err(io::ErrorKind::Unsupported.into()),
        _ => Err(error),
    }
}

/// Calls `PAGEMAP_SCAN`: fills `out` from its start. Returns the number of entries and the address
/// at which the walk ended. Sets `arg.size`, `arg.vec` and `arg.vec_len`. Error: that of the call.
pub fn pagemap_scan(
    pagemap: BorrowedFd<'_>,
    arg: ScanArg,
    out: &mut [PageRegion],
) -> io::Result<(usize, u64)> {
    let mut arg = ScanArg {
        size: size_of::<ScanArg>() as u64,
        vec: out.as_mut_ptr() as u64,
        vec_len: out.len() as u64,
        ..arg
    };
    // SAFETY: the descriptor is open while borrowed; PAGEMAP_SCAN reads and writes one
    // `pm_scan_arg`, which `arg` is, and which lives over the call; it writes at most `vec_len`
    // `page_region`s at `vec`, which are `out`, borrowed mutably over the call, for which any bytes
    // are valid.
    let code = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
    if code < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((usize::try_from(code).unwrap_or(0).min(out.len()), arg.walk_end))
}

const PERF_EVENT_SET_OUTPUT: libc::Ioctl = ioc(0, b'$', 5, 0);
const PERF_EVENT_SET_FILTER: libc::Ioctl = ioc(WRITE, b'$', 6, size_of::<usize>());
const _: () =
    assert!(PERF_EVENT_SET_OUTPUT as u32 == 0x2405 && PERF_EVENT_SET_FILTER as u32 == 0x4008_2406);

/// Calls `PERF_EVENT_IOC_SET_OUTPUT`: the records of `event` go to the ring buffer of `leader`.
/// Error: that of the call.
pub fn perf_set_output(event: &impl AsRawFd, leader: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: the owners of both descriptors are borrowed, so they are open; the request takes a
    // number.
    let code = unsafe { libc::ioctl(event.as_raw_fd(), PERF_EVENT_SET_OUTPUT, leader.as_raw_fd()) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Calls `PERF_EVENT_IOC_SET_FILTER`: the kernel records only what `filter` selects by the fields
/// of the tracepoint. Error: that of the call.
pub fn perf_set_filter(event: &impl AsRawFd, filter: &CStr) -> io::Result<()> {
    // SAFETY: the owner of the descriptor is borrowed, so it is open; the request reads a string
    // that ends with a zero, which `filter` is, and which lives over the call.
    let code = unsafe { libc::ioctl(event.as_raw_fd(), PERF_EVENT_SET_FILTER, filter.as_ptr()) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_the_kernel_lays_them_out() {
        let message = |event: u8, words: [u64; 3]| {
            let mut bytes = [0; MESSAGE_BYTES];
            bytes[0] = event;
            for (index, word) in words.iter().enumerate() {
                bytes[8 * (index + 1)..8 * (index + 2)].copy_from_slice(&word.to_ne_bytes());
            }
            Message::parse(&bytes)
        };
        assert_eq!(message(0x12, [3, 0x7000, 0]), Message::Fault { address: 0x7000 });
        assert_eq!(
            message(0x15, [0x1000, 0x3000, 0]),
            Message::Remove { start: 0x1000, end: 0x3000 }
        );
        assert_eq!(message(0x16, [1, 2, 3]), Message::Other(0x16));
    }
}
