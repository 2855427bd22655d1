//! A fixed interval that gives way: a checkpoint waits until the one before it is sealed.
//!
//! As in the thesis of Eicher (2015, section 4.1.1), the pause stays short and the interval grows
//! if processing is late. The delay is reported. A late checkpoint moves the grid: the next one is
//! due a whole interval later, because two checkpoints in a row would pause the guest twice for the
//! work of one.

/// The times at which checkpoints are due. Times are nanoseconds on one monotonic clock that the
/// caller chooses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cadence {
    interval_ns: u64,
    due_ns: u64,
}

impl Cadence {
    /// Creates a cadence whose first checkpoint is due at `now_ns`, the present time, and each
    /// later one `interval_ns` after the one before.
    pub fn new(interval_ns: u64, now_ns: u64) -> Self {
        Self { interval_ns, due_ns: now_ns }
    }

    /// Returns the time at which the next checkpoint is due, in nanoseconds on the clock of
    /// [`Cadence`].
    pub fn due_ns(&self) -> u64 {
        self.due_ns
    }

    /// Records that a checkpoint starts at `now_ns`. Returns its backlog: how late it is, in
    /// nanoseconds.
    pub fn start(&mut self, now_ns: u64) -> u64 {
        let backlog_ns = now_ns.saturating_sub(self.due_ns);
        // A wake-up that is a little late is not a backlog: the grid stays if less than a tenth of
        // an interval is lost.
        let base = if backlog_ns < self.interval_ns / 10 { self.due_ns } else { now_ns };
        self.due_ns = base.saturating_add(self.interval_ns);
        backlog_ns
    }

    /// Changes the interval; the next checkpoint is due one interval after the newest.
    pub fn set_interval(&mut self, interval_ns: u64) {
        self.due_ns = self.due_ns.saturating_sub(self.interval_ns).saturating_add(interval_ns);
        self.interval_ns = interval_ns;
    }

    /// Records that a checkpoint was taken by command, at `now_ns`. The next checkpoint is due one
    /// interval after it.
    pub fn restart(&mut self, now_ns: u64) {
        self.due_ns = now_ns.saturating_add(self.interval_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn punctual_checkpoints_stay_on_the_grid() {
        let mut cadence = Cadence::new(1000, 500);
        for k in 0..20 {
            assert_eq!(cadence.due_ns(), 500 + k * 1000);
            let wakeup_ns = cadence.due_ns() + k % 7;
            assert_eq!(cadence.start(wakeup_ns), k % 7, "a late wake-up must not drift the grid");
        }
    }

    #[test]
    fn a_late_checkpoint_reports_its_delay_and_moves_the_grid() {
        let mut cadence = Cadence::new(1000, 0);
        cadence.start(0);
        assert_eq!(cadence.start(3400), 2400);
        assert_eq!(cadence.due_ns(), 4400, "the missed ones are not made up for");
        cadence.restart(4000);
        assert_eq!(cadence.due_ns(), 5000);
        cadence.set_interval(2500);
        assert_eq!(cadence.due_ns(), 6500, "counted from the newest checkpoint");
    }
}
