//! What can go wrong, and what to do about it.
//!
//! The message of an [`Error`] names the object and the operation; [`Error::fix`] is separate, so
//! that a caller may print both, or the first alone in a log.

use keyframe_units::{HostRange, HostVirt};
use std::io;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed operation on a process, its memory, or the kernel's tracking of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no process with this number, or the kernel gives no handle to it.
    #[error("process {pid}: open: {source}")]
    Open {
        /// The number asked for.
        pid: u32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The process has exited.
    #[error("process {pid}: {operation}: the process has exited")]
    Gone {
        /// Its process id.
        pid: u32,
        /// The operation that was to be carried out, such as "read maps".
        operation: &'static str,
    },
    /// A file of `/proc/PID` could not be used.
    #[error("process {pid}: {operation} /proc/{pid}/{file}: {source}")]
    ProcFile {
        /// Its process id.
        pid: u32,
        /// The file, under `/proc/PID`.
        file: String,
        /// The operation.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// A line of `/proc/PID/maps` is not of the form that the kernel documents.
    #[error("process {pid}: /proc/{pid}/maps line {line_number} is not a mapping: {line:?}")]
    MapsLine {
        /// Its process id.
        pid: u32,
        /// The number of the line, counted from 1.
        line_number: usize,
        /// The line, cut to 200 characters.
        line: String,
    },
    /// Memory of the process could not be read or written.
    #[error("process {pid}: {operation} {len_bytes} bytes at {at}: {source}")]
    Transfer {
        /// Its process id.
        pid: u32,
        /// `read` or `write`.
        operation: &'static str,
        /// The address from which on nothing was transferred.
        at: HostVirt,
        /// The number of bytes that were left to transfer.
        len_bytes: u64,
        /// The kernel's error.
        source: io::Error,
    },
    /// The destination is not as long as the ranges to read into it.
    #[error("read memory: the ranges hold {ranges_bytes} bytes, the destination {dst_bytes}")]
    Length {
        /// The sum of the ranges in bytes.
        ranges_bytes: u64,
        /// The length of the destination in bytes.
        dst_bytes: u64,
    },
    /// A range to read lies in no region of the reader.
    #[error("read memory {start}+{len_bytes:#x}: outside the regions of this reader", start = .range.start, len_bytes = .range.len_bytes)]
    OutsideRegions {
        /// The range.
        range: HostRange,
    },
    /// Two regions of a reader overlap, or one is empty or ends after the address space.
    #[error("memory region {start}+{len_bytes:#x}: empty, overflowing, or overlapping another", start = .range.start, len_bytes = .range.len_bytes)]
    BadRegion {
        /// The region.
        range: HostRange,
    },
    /// Part of a range is not mapped in the process.
    #[error("process {pid}: {operation} {start}+{len_bytes:#x}: not mapped from {hole} on", start = .range.start, len_bytes = .range.len_bytes)]
    Unmapped {
        /// Its process id.
        pid: u32,
        /// The requested operation.
        operation: &'static str,
        /// The range asked for.
        range: HostRange,
        /// The first address of it that is not mapped.
        hole: HostVirt,
    },
    /// Another process traces the target already.
    #[error("process {pid}: attach: it is traced by process {tracer} already")]
    Traced {
        /// Its process id.
        pid: u32,
        /// The process id of the tracer.
        tracer: u32,
    },
    /// The seccomp filter of the target cannot be suspended, and would end it for an unknown call.
    #[error(
        "process {pid}: attach: its seccomp filter cannot be suspended, and would end it for a \
         system call that it does not know"
    )]
    SeccompStays {
        /// Its process id.
        pid: u32,
    },
    /// The kernel refused one step of the attachment.
    #[error("process {pid}: attach: {operation}: {source}")]
    Attach {
        /// Its process id.
        pid: u32,
        /// The step.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The target did not do one step of the attachment in time.
    #[error("process {pid}: attach: {operation}: no answer within {waited_ms} ms")]
    AttachTimeout {
        /// Its process id.
        pid: u32,
        /// The step.
        operation: &'static str,
        /// The time that was waited, in milliseconds.
        waited_ms: u64,
    },
    /// The kernel does not hold accesses to files.
    #[error("{operation}: {source}")]
    AccessGate {
        /// What failed.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The page faults of the host cannot be recorded.
    #[error("{operation}: {source}")]
    FaultWindow {
        /// What failed.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The guest's instructions cannot be counted.
    #[error("thread {thread}: open a counter of the guest's instructions: {source}")]
    InstructionCounter {
        /// The thread of the virtual CPU.
        thread: u32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The counter counts the host's instructions, too.
    #[error("the processor counts the host's instructions together with the guest's")]
    HostInstructionsCounted,
    /// A count of the guest's instructions is lost.
    #[error("read a counter of the guest's instructions: {source}")]
    InstructionsLost {
        /// The kernel's error.
        source: io::Error,
    },
    /// The target has no place from which a system call could be made.
    #[error("process {pid}: attach: no syscall instruction in its vdso")]
    NoSyscallInstruction {
        /// Its process id.
        pid: u32,
    },
    /// The system call injected into the target failed there.
    #[error("process {pid}: attach: {call} inside the process: {source}")]
    Injected {
        /// Its process id.
        pid: u32,
        /// The name of the system call.
        call: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel lacks a feature of userfaultfd that tracking needs.
    #[error("userfaultfd: the kernel lacks {feature}, which came with Linux {since}")]
    MissingFeature {
        /// Its name, without the `UFFD_FEATURE`_ prefix.
        feature: &'static str,
        /// The kernel version that brought it.
        since: &'static str,
    },
    /// The kernel refused an operation of the tracker.
    #[error("process {pid}: {operation}: {source}")]
    Tracker {
        /// Its process id.
        pid: u32,
        /// The operation.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel refused an operation of the tracker on a range.
    #[error("process {pid}: {operation} {start}+{len_bytes:#x}: {source}", start = .range.start, len_bytes = .range.len_bytes)]
    TrackRange {
        /// Its process id.
        pid: u32,
        /// The operation.
        operation: &'static str,
        /// The range.
        range: HostRange,
        /// The kernel's error.
        source: io::Error,
    },
    /// A range is not (wholly) tracked.
    #[error("process {pid}: {operation} {start}+{len_bytes:#x}: not registered with this tracker from {hole} on", start = .range.start, len_bytes = .range.len_bytes)]
    NotRegistered {
        /// Its process id.
        pid: u32,
        /// The requested operation.
        operation: &'static str,
        /// The range asked for.
        range: HostRange,
        /// The first address of it that is not registered.
        hole: HostVirt,
    },
    /// A range to track is registered already, in whole or in part.
    #[error("process {pid}: register {start}+{len_bytes:#x}: part of it is registered already", start = .range.start, len_bytes = .range.len_bytes)]
    Registered {
        /// Its process id.
        pid: u32,
        /// The range asked for.
        range: HostRange,
    },
    /// A range does not begin and end at a page of its mapping.
    #[error("process {pid}: {operation} {start}+{len_bytes:#x}: not made of whole pages of {page_bytes} bytes", start = .range.start, len_bytes = .range.len_bytes)]
    Unaligned {
        /// Its process id.
        pid: u32,
        /// The requested operation.
        operation: &'static str,
        /// The range asked for.
        range: HostRange,
        /// The number of bytes in a page of that mapping.
        page_bytes: u64,
    },
    /// The kernel cannot track pages of this size.
    #[error("process {pid}: register {start}+{len_bytes:#x}: the kernel cannot track pages of {page_bytes} bytes", start = .range.start, len_bytes = .range.len_bytes)]
    PageSize {
        /// Its process id.
        pid: u32,
        /// The part of the range that has them.
        range: HostRange,
        /// The number of bytes in a page there.
        page_bytes: u64,
    },
    /// Discards of this memory cannot be seen, and the tracker was told that the memory can be
    /// discarded.
    #[error("process {pid}: {operation} {start}+{len_bytes:#x}: what is discarded of private huge pages (hugetlbfs) cannot be seen", start = .range.start, len_bytes = .range.len_bytes)]
    DiscardsUnseen {
        /// Its process id.
        pid: u32,
        /// The requested operation.
        operation: &'static str,
        /// The part of the range whose discards cannot be seen.
        range: HostRange,
    },
    /// A scan failed after it may have protected pages that it did not report. EVERY page of
    /// `range` must be taken as written since the last scan.
    #[error("process {pid}: scan for written pages {start}+{len_bytes:#x} broke off, every page of it counts as written: {source}", start = .range.start, len_bytes = .range.len_bytes)]
    ScanBroken {
        /// Its process id.
        pid: u32,
        /// The whole range of the scan.
        range: HostRange,
        /// The kernel's error.
        source: io::Error,
    },
    /// The process was permitted a userfaultfd for faults of user mode alone: a write by the kernel
    /// (a `read` into guest RAM) would fail in it instead of waiting.
    #[error("process {pid}: watch first writes: its userfaultfd is for user-mode faults only")]
    UserModeOnly {
        /// Its process id.
        pid: u32,
    },
    /// The process was permitted a userfaultfd for faults of user mode alone. If the kernel touches
    /// a missing page for it (a `read` into guest RAM, KVM), that access would fail instead of
    /// waiting.
    #[error("process {pid}: serve missing pages: its userfaultfd is for user-mode faults only")]
    MissingUserModeOnly {
        /// Its process id.
        pid: u32,
    },
    /// First writes to this memory cannot be waited on.
    #[error("process {pid}: register {start}+{len_bytes:#x}: first writes to memory of a file on disk cannot be watched", start = .range.start, len_bytes = .range.len_bytes)]
    NotWatchable {
        /// Its process id.
        pid: u32,
        /// The range asked for.
        range: HostRange,
    },
    /// The kernel merges like pages of this memory (KSM), which takes their protection away unseen.
    #[error("process {pid}: register {start}+{len_bytes:#x}: the kernel merges its pages (KSM), so first writes go unseen", start = .range.start, len_bytes = .range.len_bytes)]
    Merged {
        /// Its process id.
        pid: u32,
        /// The part of the range that the kernel merges.
        range: HostRange,
    },
    /// A fork would not freeze this memory.
    #[error("process {pid}: fork {start}+{len_bytes:#x}: {why}", start = .range.start, len_bytes = .range.len_bytes)]
    NotForkable {
        /// Its process id.
        pid: u32,
        /// The part of the range that would not be frozen.
        range: HostRange,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The process runs under seccomp: a filter that denies a new process kills the one that asks
    /// for it.
    #[error("process {pid}: fork: it runs under a seccomp filter, which may kill it for that")]
    Seccomp {
        /// Its process id.
        pid: u32,
    },
    /// The kernel did not tell which parts of a range hold data.
    #[error("process {pid}: find data in {start}+{len_bytes:#x}: {source}", start = .range.start, len_bytes = .range.len_bytes)]
    Extents {
        /// Its process id.
        pid: u32,
        /// The range.
        range: HostRange,
        /// The kernel's error.
        source: io::Error,
    },
    /// Memory for a scratch buffer could not be had.
    #[error("scratch buffer of {len_bytes} bytes: {operation}: {source}")]
    PrefaultedBuffer {
        /// The length of the buffer in bytes.
        len_bytes: u64,
        /// The step.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl Error {
    /// Returns what the user can do about the error, in a sentence or two without a final full
    /// stop; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        let denied = |source: &io::Error| source.kind() == io::ErrorKind::PermissionDenied;
        Some(match self {
            Self::Traced { tracer, .. } => {
                format!("end the tracer, process {tracer} (a debugger or strace), or detach it, then try again")
            }
            Self::SeccompStays { .. } => "run keyframe as root or with CAP_SYS_ADMIN, outside of a sandbox with a seccomp filter of its \
                 own, on a kernel with CONFIG_CHECKPOINT_RESTORE"
                .into(),
            Self::Attach { source, .. } if denied(source) => {
                "run keyframe as root or with CAP_SYS_PTRACE; as the same user, set kernel.yama.ptrace_scope=0".into()
            }
            Self::Attach { operation: "pidfd_getfd", source, .. } if source.raw_os_error() == Some(libc::ENOSYS) => {
                "run Linux 5.6 or newer".into()
            }
            Self::Injected { call: "userfaultfd", source, .. } => match source.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => "set vm.unprivileged_userfaultfd=1 (sysctl), or run QEMU with CAP_SYS_PTRACE; \
                     if QEMU's sandbox forbids userfaultfd, allow it there"
                    .into(),
                Some(libc::ENOSYS) => "run a kernel with CONFIG_USERFAULTFD; if QEMU's sandbox forbids userfaultfd, \
                     allow it there"
                    .into(),
                Some(libc::EMFILE) => "raise the limit of open files of QEMU (ulimit -n)".into(),
                _ => return None,
            },
            Self::Injected { call: "clone", source, .. } => match source.raw_os_error() {
                Some(libc::ENOMEM) => "free memory, or set vm.overcommit_memory=1 (sysctl): a fork counts the VM's memory twice"
                    .into(),
                Some(libc::EAGAIN) => "raise the limit of processes of QEMU's user or control group (ulimit -u, pids.max)"
                    .into(),
                _ => return None,
            },
            Self::AccessGate { source, .. } => match source.raw_os_error() {
                Some(libc::EACCES | libc::EPERM) => "run keyframe as root, or with CAP_SYS_ADMIN".into(),
                Some(libc::EINVAL | libc::ENOSYS) => {
                    "run Linux 6.14 or newer, with CONFIG_FANOTIFY_ACCESS_PERMISSIONS".into()
                }
                Some(libc::EOPNOTSUPP | libc::ENODEV) => "put the file on ext4, XFS or btrfs".into(),
                _ => return None,
            },
            Self::FaultWindow { source, .. } => match source.raw_os_error() {
                Some(libc::EACCES | libc::EPERM) => "run keyframe as root, or with CAP_PERFMON and a tracefs that it may read; \
                     in a container, allow perf_event_open (seccomp)"
                    .into(),
                Some(libc::ENOENT | libc::ENODEV | libc::ENOSYS) => {
                    "run a kernel with CONFIG_PERF_EVENTS and CONFIG_TRACING".into()
                }
                _ => "leave --tracker out, or use --tracker write-protect: the pause then has a scan"
                    .into(),
            },
            Self::InstructionCounter { source, .. } => match source.raw_os_error() {
                Some(libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP) => "this host's processor shows no free counter of instructions: \
                     use a host that is no VM, give this one a counter (QEMU: -cpu host,pmu=on), or start the guest with pmu=off"
                    .into(),
                Some(libc::EACCES | libc::EPERM) => "run keyframe as root or with CAP_PERFMON, set kernel.perf_event_paranoid=1 \
                     (sysctl), or allow perf_event_open in the container (seccomp) that this runs in"
                    .into(),
                Some(libc::ENOSYS) => "run a kernel with CONFIG_PERF_EVENTS".into(),
                _ => return None,
            },
            Self::HostInstructionsCounted => "use a host that is no VM".into(),
            Self::InstructionsLost { .. } => "end the program that uses the processor's counters (perf), and start the run again".into(),
            Self::UserModeOnly { .. } | Self::MissingUserModeOnly { .. } => {
                "set vm.unprivileged_userfaultfd=1 (sysctl), or run QEMU with CAP_SYS_PTRACE".into()
            }
            Self::NotWatchable { .. } => {
                "give the VM's memory by memory-backend-ram or memory-backend-memfd, not by a file on disk".into()
            }
            Self::DiscardsUnseen { .. } => {
                "give the VM ordinary pages (no hugetlbfs), or leave balloon, free page reporting and virtio-mem out".into()
            }
            Self::Merged { .. } => {
                "start QEMU with -machine mem-merge=off, or end KSM on this host (echo 2 > /sys/kernel/mm/ksm/run)".into()
            }
            Self::NotForkable { .. } => {
                "give the VM private memory of ordinary pages (memory-backend-ram, share=off, without hugetlb)".into()
            }
            Self::Seccomp { .. } => "start QEMU without -sandbox on (whose spawn=deny kills a QEMU that forks)".into(),
            Self::AttachTimeout { .. } => {
                "check that the process is not frozen (cgroup freezer) or stuck in the kernel (state D in ps)".into()
            }
            Self::MissingFeature { since, .. } => format!("run Linux {since} or newer (6.7 has all that is needed)"),
            Self::ProcFile { source, .. } | Self::Transfer { source, .. } if denied(source) => {
                "run keyframe as root, or as the user who runs QEMU, with CAP_SYS_PTRACE".into()
            }
            Self::Transfer { source, .. } if source.raw_os_error() == Some(libc::EPERM) => {
                "run keyframe as root, or as the user who runs QEMU, with CAP_SYS_PTRACE".into()
            }
            Self::TrackRange { operation: "register", source, .. } if source.raw_os_error() == Some(libc::EBUSY) => {
                "another userfaultfd (QEMU's own, for a postcopy migration or a background snapshot, or another keyframe) \
                 tracks this memory: end it first"
                    .into()
            }
            Self::PageSize { .. } => "give the VM's memory 2 MiB or ordinary pages (hugetlbsize=2M of the memory backend)".into(),
            Self::PrefaultedBuffer { .. } => "free memory, or take fewer pages at a time".into(),
            _ => return None,
        })
    }
}
