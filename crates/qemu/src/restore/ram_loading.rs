//! Loads main RAM in each of its ways, until QEMU answers and waits for its device state.
//!
//! ```text
//!   Eager            the memfds are filled while QEMU starts
//!   Eager, riscv64   QEMU writes firmware into them as it starts: they are filled afterwards
//!   Private          QEMU's own memory is filled when it is there
//!   Shared           filled before; what QEMU wrote as it started is undone
//!   Lazy             a server gives each page when it is touched
//! ```

use super::lazy::Lazy;
use super::{Crossing, Plan, Ram, RamSource, Starting, shared};
use crate::{Qmp, Result};
use keyframe_ram_loading::{Memory, fill};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

impl Starting {
    /// Loads RAM from `ram`. Returns the monitor, the server of a lazy restore, and the time that
    /// filling took, in nanoseconds.
    pub(super) fn load_ram(
        &self,
        plan: &Plan,
        child: &mut Child,
        ram: &Ram<'_>,
        crossing: Option<&Crossing>,
    ) -> Result<(Qmp, Option<Lazy>, Option<u64>)> {
        let is_loaded_at_start = plan.source.machine.processor.is_loaded_at_start();
        let pid = child.id();
        Ok(match ram {
            Ram::Eager(source) if is_loaded_at_start => {
                let qmp = self.meet(plan, child, crossing)?;
                self.memories.iter().try_for_each(Memory::clear)?;
                let filled_ns = fill(&self.memories, *source, &AtomicBool::new(false))?;
                (qmp, None, Some(filled_ns))
            }
            Ram::Eager(source) => {
                let (qmp, filled_ns) = self.fill(plan, child, *source, crossing)?;
                (qmp, None, Some(filled_ns))
            }
            Ram::Private(source) => {
                let mut qmp = self.meet(plan, child, crossing)?;
                let memories = self.main_ram(plan, &mut qmp, pid)?;
                for memory in memories.iter().filter(|_| is_loaded_at_start) {
                    memory.zero_written(pid)?;
                }
                let filled_ns = fill(&memories, *source, &AtomicBool::new(false))?;
                (qmp, None, Some(filled_ns))
            }
            Ram::Shared(_, source) => {
                let mut qmp = self.meet(plan, child, crossing)?;
                if is_loaded_at_start {
                    shared::undo_writes(&mut qmp, pid, plan, *source)?;
                }
                (qmp, None, None)
            }
            Ram::Lazy(source) | Ram::LazyPrivate(source) => {
                let mut qmp = self.meet(plan, child, crossing)?;
                let memories = self.main_ram(plan, &mut qmp, pid)?;
                // Before anything is loaded: devices touch RAM as they come to life.
                let lazy = Lazy::attach(pid, &memories, Arc::clone(source), self.started)?;
                (qmp, Some(lazy), None)
            }
        })
    }

    /// Fills the memories while QEMU starts. Returns the time that it took.
    fn fill(
        &self,
        plan: &Plan,
        child: &mut Child,
        ram: &dyn RamSource,
        crossing: Option<&Crossing>,
    ) -> Result<(Qmp, u64)> {
        let cancelled = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let memories = &self.memories;
            let filling = scope.spawn(|| fill(memories, ram, &cancelled));
            let qmp = self.meet(plan, child, crossing);
            if qmp.is_err() {
                cancelled.store(true, Ordering::Relaxed);
            }
            let filled = filling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            qmp.and_then(|qmp| Ok((qmp, filled?)))
        })
    }
}
