//! What is known of each descriptor, and which writes are needed.
//!
//! ```text
//!              opened              read            write: kernel
//!   OTHER ──────────────▶ NEW ──────────────▶ CLEAR ─────────────▶ SIGNALLED ─┐ write: left out
//!     ▲   closed            └ write: kernel     ▲        read          │  ▲───┘
//!     └── from each                             └──────────────────────┘
//! ```
//!
//! A reader says `CLEAR` when the kernel has answered it, not before: a writer between the two
//! would else signal what the reader then takes away unseen, and all later writes would be left
//! out. What a writer leaves out between the kernel's answer and `CLEAR` the reader has read, as
//! far as anybody can tell: the writer's exchange comes before the reader's, and so does all that
//! the writer did before.

use core::sync::atomic::{AtomicU8, Ordering};

/// Not an eventfd, or one that counts.
const OTHER: u8 = 0;
/// An eventfd that no thread has read through this library.
const NEW: u8 = 1;
/// One that has been read, and not written to since.
const CLEAR: u8 = 2;
/// One whose counter is not zero; or is about to be so; or was read, and the reader has not
/// returned.
const SIGNALLED: u8 = 3;

/// Descriptors from 0 on; others are passed on.
#[derive(Debug)]
pub struct Table<const N: usize>([AtomicU8; N]);

impl<const N: usize> Table<N> {
    /// Of which none is an eventfd.
    #[must_use]
    pub const fn new() -> Self {
        Self([const { AtomicU8::new(OTHER) }; N])
    }

    fn of(&self, fd: i32) -> Option<&AtomicU8> {
        self.0.get(usize::try_from(fd).ok()?)
    }

    /// `fd` is a new eventfd, whose counter a read sets to zero.
    pub fn opened(&self, fd: i32) {
        if let Some(state) = self.of(fd) {
            state.store(NEW, Ordering::SeqCst);
        }
    }

    /// `fd` is about to be closed.
    pub fn closes(&self, fd: i32) {
        if let Some(state) = self.of(fd) {
            state.store(OTHER, Ordering::SeqCst);
        }
    }

    /// Whether `fd` is an eventfd of which writes may be left out.
    pub fn is_looked_after(&self, fd: i32) -> bool {
        self.of(fd).is_some_and(|state| state.load(Ordering::SeqCst) >= CLEAR)
    }

    /// Reads `fd` by `read`.
    pub fn read<T>(&self, fd: i32, read: impl FnOnce() -> T) -> T {
        let answer = read();
        if let Some(state) = self.of(fd) {
            // Closed meanwhile, it stays so.
            let clear = |was| (was != OTHER).then_some(CLEAR);
            let _ = state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, clear);
        }
        answer
    }

    /// Adds 1 to the counter of `fd` by `write`, or answers `written` where that would change
    /// nothing that anybody can see.
    pub fn write<T>(&self, fd: i32, write: impl FnOnce() -> Result<T, T>, written: T) -> T {
        let signal = |was| (was >= CLEAR).then_some(SIGNALLED);
        let state = self.of(fd);
        if state.is_some_and(|s| {
            s.fetch_update(Ordering::SeqCst, Ordering::SeqCst, signal) == Ok(SIGNALLED)
        }) {
            return written;
        }
        write().unwrap_or_else(|failed| {
            // No reader was woken, so the next writer must try as well.
            if let Some(state) = state {
                let _ = state.compare_exchange(SIGNALLED, NEW, Ordering::SeqCst, Ordering::SeqCst);
            }
            failed
        })
    }
}

impl<const N: usize> Default for Table<N> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
    use rustix::fd::{AsRawFd, OwnedFd};
    use std::cell::Cell;
    use std::sync::atomic::AtomicU64;
    use std::time::{Duration, Instant};

    const FD: i32 = 3;

    /// Writes, and whether that went to the kernel.
    fn goes_on(table: &Table<8>, fd: i32) -> bool {
        let went = Cell::new(false);
        let kernel = || {
            went.set(true);
            Ok(8)
        };
        assert_eq!(table.write(fd, kernel, 8), 8);
        went.get()
    }

    #[test]
    fn a_write_is_left_out_between_another_and_its_read() {
        let table = Table::<8>::new();
        table.opened(FD);
        // Its reader is not known yet.
        assert!(goes_on(&table, FD) && goes_on(&table, FD) && !table.is_looked_after(FD));
        for _ in 0..2 {
            assert_eq!(table.read(FD, || 8), 8);
            assert!(table.is_looked_after(FD) && goes_on(&table, FD));
            assert!(!goes_on(&table, FD) && !goes_on(&table, FD));
        }
    }

    #[test]
    fn what_is_no_eventfd_goes_to_the_kernel() {
        let table = Table::<8>::new();
        for fd in [FD, -1, 8, i32::MAX, i32::MIN] {
            table.read(fd, || 8);
            assert!(
                goes_on(&table, fd) && goes_on(&table, fd) && !table.is_looked_after(fd),
                "{fd}"
            );
        }
        // Nor is what has its number later.
        table.opened(FD);
        table.read(FD, || 8);
        assert!(goes_on(&table, FD) && !goes_on(&table, FD));
        table.closes(FD);
        table.read(FD, || 8);
        assert!(goes_on(&table, FD) && goes_on(&table, FD));
        // Closed while it is read, it is not looked after again.
        table.opened(FD);
        table.read(FD, || table.closes(FD));
        assert!(!table.is_looked_after(FD));
    }

    #[test]
    fn after_one_that_failed_the_next_is_tried() {
        let table = Table::<8>::new();
        table.opened(FD);
        table.read(FD, || 8);
        assert_eq!(table.write(FD, || Err(-1), 8), -1);
        assert!(goes_on(&table, FD));
    }

    #[test]
    fn what_is_signalled_while_a_reader_reads_is_signalled_again_later() {
        let table = Table::<8>::new();
        table.opened(FD);
        table.read(FD, || 8);
        assert!(goes_on(&table, FD));
        // The kernel has answered, and the reader not returned: this one has been read.
        table.read(FD, || assert!(!goes_on(&table, FD)));
        assert!(goes_on(&table, FD));
        // One that finds nothing, while a writer is on its way.
        table.read(FD, || ());
        let slow = || {
            table.read(FD, || ());
            Ok(8)
        };
        table.write(FD, slow, 8);
        assert!(goes_on(&table, FD), "the counter may be either");
    }

    /// Writers tell a reader what they have done, which sleeps when all that it has heard of is
    /// seen; none of it may be slept over.
    #[test]
    fn no_signal_is_slept_over() {
        const EACH: u64 = 200_000;
        let fd: OwnedFd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        let number = fd.as_raw_fd();
        let (table, done, calls) =
            (Table::<4096>::new(), [const { AtomicU64::new(0) }; 2], AtomicU64::new(0));
        table.opened(number);
        table.read(number, || 8);
        std::thread::scope(|scope| {
            for done in &done {
                scope.spawn(|| {
                    for step in 1..=EACH {
                        done.store(step, Ordering::Release);
                        let kernel = || {
                            calls.fetch_add(1, Ordering::Relaxed);
                            rustix::io::write(&fd, &1_u64.to_ne_bytes())
                                .map(usize::cast_signed)
                                .map_err(|_| -1)
                        };
                        assert_eq!(table.write(number, kernel, 8), 8);
                        if step % 64 == 0 {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let began = Instant::now();
            let mut seen = 0;
            while seen < 2 * EACH {
                let mut fds = [PollFd::new(&fd, PollFlags::IN)];
                let timeout = Timespec { tv_sec: 10, tv_nsec: 0 };
                let ready = poll(&mut fds, Some(&timeout)).unwrap();
                assert!(
                    ready == 1 && began.elapsed() < Duration::from_mins(2),
                    "slept over, at {seen}"
                );
                table.read(number, || rustix::io::read(&fd, &mut [0; 8])).unwrap();
                seen = done.iter().map(|done| done.load(Ordering::Acquire)).sum();
            }
        });
        assert!(calls.into_inner() < 2 * EACH, "none was left out");
    }
}
