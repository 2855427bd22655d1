//! Counts the instructions that the guest of a VM under KVM executes, by the counters of the host's
//! processor.
//!
//! ```text
//!   thread of a virtual CPU ──▶ perf_event_open(INSTRUCTIONS, exclude_host) ──▶ guest instructions alone
//! ```
//!
//! The processor switches the counter on as it enters the guest and off as it leaves. Each counter
//! is pinned: if the kernel must give it away, because another program pins more counters than the
//! processor has, a read fails. A read also fails if the counter did not run on all of the host's
//! cores, as on a processor with two kinds of them. An estimate never takes the place of a count.
//!
//! Most processors count an interrupt or a fault as an instruction, too. So two executions of the
//! same code can differ by a few counts.

use crate::{Error, Result};
use perf_event::events::Hardware;
use perf_event::{Builder, Counter};
use std::io;

/// Counters of the instructions that the guest of one VM executes.
pub struct GuestInstructions {
    /// One counter for each thread of a virtual CPU.
    counters: Vec<Counter>,
}

impl GuestInstructions {
    /// Finds out whether this host counts a guest's instructions apart from its own. Errors:
    /// [`Error::InstructionCounter`] if the processor has no such counter, or if this user may not
    /// use it; [`Error::HostInstructionsCounted`] if it counts the host's instructions, too.
    pub fn probe() -> Result<()> {
        let thread = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        match Self::count(&[thread])?.read()? {
            0 => Ok(()),
            _ => Err(Error::HostInstructionsCounted),
        }
    }

    /// Begins to count the instructions of the guest whose virtual CPUs have these threads, from 0.
    /// Error: [`Error::InstructionCounter`] if the processor has no such counter, or if this user
    /// may not use it.
    pub fn count(threads: &[u32]) -> Result<Self> {
        let counter = |thread: &u32| {
            let refused = |source| Error::InstructionCounter { thread: *thread, source };
            let mut builder = Builder::new(Hardware::INSTRUCTIONS);
            builder
                .observe_pid(thread.cast_signed())
                .any_cpu()
                .exclude_host(true)
                .exclude_kernel(false)
                .pinned(true)
                .enabled(true);
            builder.build().map_err(refused)
        };
        Ok(Self { counters: threads.iter().map(counter).collect::<Result<_>>()? })
    }

    /// Returns the number of instructions that all virtual CPUs have executed. Takes about a
    /// microsecond for each of them. Error: [`Error::InstructionsLost`] if the kernel gave a
    /// counter away meanwhile, or if it did not run on all cores.
    pub fn read(&mut self) -> Result<u64> {
        let counts = self.counters.iter_mut().map(read_whole);
        counts.sum::<io::Result<u64>>().map_err(|source| Error::InstructionsLost { source })
    }
}

/// Reads a counter that ran for as long as its thread did, but for a thousandth.
fn read_whole(counter: &mut Counter) -> io::Result<u64> {
    let read = counter.read_full()?;
    let (Some(enabled), Some(running)) = (read.time_enabled(), read.time_running()) else {
        return Err(io::Error::other("the kernel does not say for how long the counter ran"));
    };
    if running < enabled.saturating_sub(enabled / 1000) {
        return Err(io::Error::other("the counter did not run on all of the host's cores"));
    }
    Ok(read.count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_the_counter_is_told_what_to_do() {
        match GuestInstructions::probe() {
            Ok(()) => keyframe_testing::skip!("this host has the counter"),
            Err(error) => assert!(error.fix().is_some(), "{error}"),
        }
    }

    #[test]
    fn a_thread_that_does_not_exist_is_named() {
        let error = GuestInstructions::count(&[4_194_305]).err().expect("there is no such thread");
        assert!(error.to_string().contains("4194305"), "{error}");
    }
}
