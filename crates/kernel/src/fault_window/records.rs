//! What the records of one window mean: the pages that were written, or why they cannot be known.
//!
//! ```text
//!   a fault of user mode      start ───────────────▶ done          lock of the mapping alone
//!   a fault of the kernel     start ─▶ mmap lock ──▶ done          read(2) into guest memory
//!   anything else                      mmap lock                   get_user_pages: another process,
//!                                                                  direct I/O, KVM, KSM
//! ```
//!
//! The kernel removes the protection of a page between start and done, and both name the address.
//! A mmap lock that is not between them belongs to an access without an address: the pages of that
//! window are unknown.

use keyframe_units::HostRange;

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordKind {
    /// A thread entered the page fault handler.
    Start,
    /// A page fault was resolved.
    Done,
    /// A thread has got the lock of all mappings, for reading.
    Lock,
}

/// One record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub kind: RecordKind,
    /// The monotonic clock, in nanoseconds.
    pub time_ns: u64,
    pub process: u32,
    pub thread: u32,
    /// The address of the access; unused for a lock.
    pub address: u64,
}

/// The reasons why the pages that a window should have named are unknown, or may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowGap {
    /// A ring buffer was full, or nearly.
    Overflow,
    /// The kernel wrote a record of another kind, such as one about lost records.
    Lost,
    /// Memory was accessed in a way that names no address: by another process, by direct I/O, by
    /// the kernel's merging of pages.
    UnnamedAccess,
    /// Keyframe itself wrote to the memory of a process.
    OwnWrite,
    /// A thread may have been in the page fault handler for the whole window.
    BusyThread,
    /// A processor of the host was switched on or off.
    Processors,
    /// The records that each window must have are not there.
    Blind,
    /// The kernel did not tell what it must.
    Unreadable,
}

impl WindowGap {
    /// All reasons.
    pub const ALL: [Self; 8] = [
        Self::Overflow,
        Self::Lost,
        Self::UnnamedAccess,
        Self::OwnWrite,
        Self::BusyThread,
        Self::Processors,
        Self::Blind,
        Self::Unreadable,
    ];

    /// Returns the reason's name in a checkpoint's description, such as `unnamed-access`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Overflow => "overflow",
            Self::Lost => "lost-records",
            Self::UnnamedAccess => "unnamed-access",
            Self::OwnWrite => "own-write",
            Self::BusyThread => "busy-thread",
            Self::Processors => "host-processors",
            Self::Blind => "no-records",
            Self::Unreadable => "unreadable",
        }
    }
}

/// What a window must know of itself to judge its records.
pub(super) struct Judge<'a> {
    /// The process id of Keyframe. Its own locks are those of its scans and reads.
    pub own: u32,
    /// When every access without an address that began before the window had ended.
    pub barrier_ns: u64,
    /// The tracked memory, by rising address.
    pub ranges: &'a [HostRange],
}

impl Judge<'_> {
    /// Returns the addresses of the tracked memory that faulted, in the order of the records.
    ///
    /// Errors: [`WindowGap::UnnamedAccess`] if a lock belongs to no fault; [`WindowGap::Blind`] if
    /// the lock of this process's scan is not among the records.
    pub fn faults(&self, records: &mut [Record]) -> Result<Vec<u64>, WindowGap> {
        let is_lock = |r: &Record| r.kind == RecordKind::Lock && r.time_ns >= self.barrier_ns;
        if !records.iter().any(|r| is_lock(r) && r.process == self.own) {
            return Err(WindowGap::Blind);
        }
        if records.iter().any(|r| is_lock(r) && r.process != self.own) {
            records.sort_by_key(|r| (r.thread, r.time_ns));
            let mut threads = records.chunk_by(|a, b| a.thread == b.thread);
            if !threads.all(|records| self.are_explained(records)) {
                return Err(WindowGap::UnnamedAccess);
            }
        }
        let named = records
            .iter()
            .filter(|r| r.kind != RecordKind::Lock && r.process != self.own)
            .filter(|r| self.is_tracked(r.address));
        Ok(named.map(|r| r.address).collect())
    }

    /// Returns true if each lock in the records of one thread, in their order, lies between the
    /// start and the end of a fault.
    fn are_explained(&self, records: &[Record]) -> bool {
        #[derive(PartialEq)]
        enum Thread {
            Outside,
            Started,
            Locked,
        }
        let mut now = Thread::Outside;
        for record in records {
            now = match (record.kind, now) {
                (RecordKind::Start, Thread::Outside | Thread::Started) => Thread::Started,
                (RecordKind::Done, _) => Thread::Outside,
                (RecordKind::Lock, now)
                    if record.process == self.own || record.time_ns < self.barrier_ns =>
                {
                    now
                }
                (RecordKind::Lock, Thread::Started) if record.thread != 0 => Thread::Locked,
                // A failed fault looks like the start of this lock, or the lock has no start.
                // Threads of another pid namespace have no number, so their records are mixed.
                (RecordKind::Lock, _) | (RecordKind::Start, Thread::Locked) => return false,
            };
        }
        now != Thread::Locked
    }

    fn is_tracked(&self, address: u64) -> bool {
        let at = self.ranges.partition_point(|range| range.start.0 <= address);
        at.checked_sub(1).is_some_and(|at| address < self.ranges[at].end().0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranges::between;

    const OWN: u32 = 7;
    const VM: u32 = 20;

    fn judge(text: &str) -> Result<Vec<u64>, WindowGap> {
        let ranges = [between(0x1000, 0x3000), between(0x8000, 0x9000)];
        let mut records: Vec<Record> = Vec::new();
        for (at, word) in text.split_whitespace().enumerate() {
            let (who, what) = word.split_once(':').unwrap();
            let (kind, address) = what.split_at(1);
            let kind = match kind {
                "s" => RecordKind::Start,
                "d" => RecordKind::Done,
                _ => RecordKind::Lock,
            };
            let thread = if who == "own" { OWN } else { who.parse().unwrap() };
            let process = if thread == OWN { OWN } else { VM };
            let address = u64::from_str_radix(address, 16).unwrap_or(0);
            records.push(Record { kind, time_ns: at as u64, process, thread, address });
        }
        // In whatever order the rings of the processors hold them.
        records.reverse();
        Judge { own: OWN, barrier_ns: 1, ranges: &ranges }.faults(&mut records).map(|mut found| {
            found.sort_unstable();
            found
        })
    }

    #[test]
    fn faults_name_their_pages_and_others_memory_is_left_out() {
        assert_eq!(
            judge("own:l own:l 21:s1010 21:d1010 22:s8fff"),
            Ok(vec![0x1010, 0x1010, 0x8fff])
        );
        assert_eq!(judge("own:l own:l 21:s9000 21:dfff 21:s3000 own:s1000"), Ok(vec![]));
    }

    #[test]
    fn a_fault_of_the_kernel_explains_its_lock() {
        assert_eq!(judge("own:l own:l 21:s1000 22:s2000 21:l 22:d2000 21:d1000").unwrap().len(), 4);
    }

    #[test]
    fn a_lock_without_a_fault_is_a_gap() {
        for text in [
            "own:l own:l 21:l",
            "own:l own:l 21:s1000 21:d1000 21:l",
            // A fault that failed, then an access that names nothing.
            "own:l own:l 21:s1000 21:l",
            "own:l own:l 21:s1000 21:l 21:s2000 21:d2000",
            // A fault that was tried again.
            "own:l own:l 21:s1000 21:l 21:l 21:d1000",
            // Threads without a number are many.
            "own:l own:l 0:s1000 0:l 0:d1000",
            // Another thread's fault explains nothing.
            "own:l own:l 21:s1000 22:l 21:d1000",
        ] {
            assert_eq!(judge(text), Err(WindowGap::UnnamedAccess), "{text}");
        }
    }

    #[test]
    fn a_lock_from_before_the_barrier_is_none() {
        assert_eq!(judge("21:l own:l own:l"), Ok(vec![]));
    }

    #[test]
    fn a_window_without_the_lock_of_its_own_scan_is_blind() {
        assert_eq!(judge("own:l"), Err(WindowGap::Blind));
        assert_eq!(judge("own:s1000 21:s1000"), Err(WindowGap::Blind));
    }
}
