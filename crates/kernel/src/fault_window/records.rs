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
use std::collections::HashSet;

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

/// Judges the records of a window, one CPU after the other.
///
/// A thread whose fault began on one CPU and ended on another has a record on each that has no
/// partner there. That is no gap, unless the thread took the lock.
pub(super) struct Judge<'a> {
    /// The process id of Keyframe, whose locks are those of its scans and reads.
    own: u32,
    /// The tracked memory, by rising address.
    ranges: &'a [HostRange],
    has_own_lock: bool,
    /// The threads that took the lock, and those with a fault of which one end is missing on a CPU.
    lockers: HashSet<u32>,
    unpaired: HashSet<u32>,
    faults: Faults,
}

/// The page faults of a window.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// The addresses of the tracked memory that faulted, some of them twice.
    pub addresses: Vec<u64>,
    /// The process and the thread of each fault, also of those on other memory.
    threads: HashSet<(u32, u32)>,
}

impl Faults {
    /// Returns true if a fault of `thread` of `process` began or ended in the window. Such a thread
    /// was in no fault without a record: a thread is in one fault at a time.
    pub fn has_thread(&self, process: u32, thread: u32) -> bool {
        self.threads.contains(&(process, thread))
    }
}

impl<'a> Judge<'a> {
    /// Begins to judge. `own` is the process id of Keyframe, and `ranges` the tracked memory, by
    /// rising address.
    pub fn new(own: u32, ranges: &'a [HostRange]) -> Self {
        Self {
            own,
            ranges,
            has_own_lock: false,
            lockers: HashSet::new(),
            unpaired: HashSet::new(),
            faults: Faults::default(),
        }
    }

    /// Adds all records of one CPU, in their order. Leaves them in another order.
    ///
    /// Error: [`WindowGap::UnnamedAccess`] if a lock belongs to no fault.
    pub fn add(&mut self, records: &mut [Record]) -> Result<(), WindowGap> {
        // A fault's process is not looked at: it may be numbered as another program's.
        let faults = records.iter().filter(|r| r.kind != RecordKind::Lock);
        let tracked = faults.map(|r| r.address).filter(|at| is_within(self.ranges, *at));
        self.faults.addresses.extend(tracked);
        records.sort_by_key(|r| r.thread);
        records.chunk_by(|a, b| a.thread == b.thread).try_for_each(|of_one| self.add_thread(of_one))
    }

    /// Adds the records of one thread on one CPU, in their order.
    fn add_thread(&mut self, records: &[Record]) -> Result<(), WindowGap> {
        let (mut before, mut paired) = (None, true);
        // The pause waits for this: nearly all records of a thread have one process.
        for of_process in records.chunk_by(|a, b| a.process == b.process) {
            if let Some(fault) = of_process.iter().find(|r| r.kind != RecordKind::Lock) {
                self.faults.threads.insert((fault.process, fault.thread));
            }
        }
        for record in records {
            let is_own = record.process == self.own;
            match (before, record.kind) {
                (_, RecordKind::Lock) if is_own => {
                    self.has_own_lock = true;
                    continue;
                }
                // Threads of another pid namespace have no number, so their records are mixed.
                (Some(RecordKind::Start), RecordKind::Lock) if record.thread != 0 => {
                    self.lockers.insert(record.thread);
                }
                (_, RecordKind::Lock) => return Err(WindowGap::UnnamedAccess),
                // An end without a start: the fault began before the window. If it began on another
                // CPU, its start has no partner there.
                (None | Some(RecordKind::Done), RecordKind::Start)
                | (None | Some(RecordKind::Start | RecordKind::Lock), RecordKind::Done) => {}
                (_, RecordKind::Start | RecordKind::Done) => paired = false,
            }
            before = Some(record.kind);
        }
        if let (Some(first), false) =
            (records.first(), paired && matches!(before, None | Some(RecordKind::Done)))
        {
            self.unpaired.insert(first.thread);
        }
        Ok(())
    }

    /// Returns the faults of all CPUs.
    ///
    /// Errors: [`WindowGap::UnnamedAccess`] if a lock may belong to no fault; [`WindowGap::Blind`]
    /// if the lock of this process's scan is not among the records.
    pub fn faults(self) -> Result<Faults, WindowGap> {
        if !self.has_own_lock {
            return Err(WindowGap::Blind);
        }
        // A fault that fails has no end, and the lock after its start may belong to an access that
        // names nothing.
        if !self.lockers.is_disjoint(&self.unpaired) {
            return Err(WindowGap::UnnamedAccess);
        }
        Ok(self.faults)
    }
}

/// Returns true if one of `ranges`, which rise, holds `address`.
fn is_within(ranges: &[HostRange], address: u64) -> bool {
    let at = ranges.partition_point(|range| range.start.0 <= address);
    at.checked_sub(1).is_some_and(|at| address < ranges[at].end().0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranges::between;

    const OWN: u32 = 7;
    const VM: u32 = 20;

    /// Judges records such as `21:s1010`, thread 21 starts a fault there; `|` begins another CPU.
    fn judge(text: &str) -> Result<Vec<u64>, WindowGap> {
        faults(text).map(|faults| faults.addresses)
    }

    fn faults(text: &str) -> Result<Faults, WindowGap> {
        let ranges = [between(0x1000, 0x3000), between(0x8000, 0x9000)];
        let mut judge = Judge::new(OWN, &ranges);
        for cpu in text.split('|') {
            let mut records: Vec<Record> = cpu.split_whitespace().map(record).collect();
            judge.add(&mut records)?;
        }
        judge.faults()
    }

    fn record(word: &str) -> Record {
        let (who, what) = word.split_once(':').unwrap();
        let (kind, address) = what.split_at(1);
        let kind = match kind {
            "s" => RecordKind::Start,
            "d" => RecordKind::Done,
            _ => RecordKind::Lock,
        };
        let thread = if who == "own" { OWN } else { who.parse().unwrap() };
        let process = if thread == OWN { OWN } else { VM };
        Record { kind, process, thread, address: u64::from_str_radix(address, 16).unwrap_or(0) }
    }

    #[test]
    fn faults_name_their_pages_and_others_memory_is_left_out() {
        assert_eq!(judge("own:l 21:s1010 21:d1010 22:s8fff"), Ok(vec![0x1010, 0x1010, 0x8fff]));
        assert_eq!(judge("own:l 21:s9000 21:dfff 21:s3000 22:s0"), Ok(vec![]));
    }

    /// Where another program records page faults, too, the kernel may number processes as that
    /// program sees them.
    #[test]
    fn a_page_is_named_whatever_the_number_of_its_process() {
        assert_eq!(judge("own:l own:s1000 own:d1000"), Ok(vec![0x1000, 0x1000]));
    }

    #[test]
    fn a_fault_of_the_kernel_explains_its_lock() {
        assert_eq!(judge("own:l 21:s1000 22:s2000 21:l 22:d2000 21:d1000").unwrap().len(), 4);
        assert_eq!(judge("own:l 21:d1000 21:s2000 21:l 21:d2000").unwrap().len(), 3);
        assert_eq!(judge("own:l | 21:s1000 own:l 21:l 21:d1000 | 22:d2000").unwrap().len(), 3);
    }

    #[test]
    fn a_fault_without_a_lock_may_move_to_another_cpu() {
        assert_eq!(judge("own:l 21:s1000 | 21:d1000").unwrap().len(), 2);
    }

    #[test]
    fn a_lock_without_a_fault_is_a_gap() {
        for text in [
            "own:l 21:l",
            "own:l 21:s1000 21:d1000 21:l",
            // A fault that failed, then an access that names nothing.
            "own:l 21:s1000 21:l",
            "own:l 21:s1000 21:l 21:s2000 21:d2000",
            "own:l 21:s1000 21:l 21:d2000 | 21:s2000",
            // A fault that was tried again.
            "own:l 21:s1000 21:l 21:l 21:d1000",
            // A fault that moved to another CPU after it took the lock.
            "own:l 21:s1000 21:l | 21:d1000",
            // Threads without a number are many.
            "own:l 0:s1000 0:l 0:d1000",
            // Another thread's fault explains nothing.
            "own:l 21:s1000 22:l 21:d1000",
        ] {
            assert_eq!(judge(text), Err(WindowGap::UnnamedAccess), "{text}");
        }
    }

    #[test]
    fn a_thread_with_a_fault_in_the_window_is_known() {
        let faults = faults("own:l 21:s1000 21:d1000 | 22:dfff 23:s1000 23:l 23:d1000").unwrap();
        let known = [20, 21, 22, 23, 24].map(|thread| faults.has_thread(VM, thread));
        assert_eq!(known, [false, true, true, true, false]);
        // The kernel numbers threads in each namespace.
        assert!(!faults.has_thread(OWN, 21));
    }

    #[test]
    fn a_window_without_the_lock_of_its_own_scan_is_blind() {
        assert_eq!(judge("own:s1000 21:s1000"), Err(WindowGap::Blind));
    }
}
