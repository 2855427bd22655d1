//! Epochs at fixed intervals.

use super::*;
use keyframe_scheduling::replication::FixedInterval;

/// A VM under fixed intervals of 100 ms, whose captures take 30 ms.
struct Fixed(Test);

impl Fixed {
    const MS: u64 = 1_000_000;

    fn new() -> Self {
        let policy = Box::new(FixedInterval::every(100 * Self::MS));
        let mut test = Test::with(FakeVm::default(), Script::default(), policy);
        test.vm.state().capture_takes = Some((Arc::clone(&test.clock), 30 * Self::MS));
        test.step(VmAction::MayCapture(true));
        Self(test)
    }

    /// Lets time pass until `ms`, as the loop's waits do.
    fn until(&mut self, ms: u64) {
        while self.0.clock.load(Ordering::Relaxed) < ms * Self::MS {
            let wait = self.0.vm_loop.step(None).as_nanos() as u64;
            let left = (ms * Self::MS).saturating_sub(self.0.clock.load(Ordering::Relaxed));
            self.0.clock.fetch_add(wait.min(left), Ordering::Relaxed);
        }
        self.0.vm_loop.step(None);
    }

    /// The standby has the `seq`th capture.
    fn acknowledge(&mut self, seq: u64) {
        self.0.step(sent(seq));
        self.0.step(VmAction::Acknowledged { epoch: Epoch(seq) });
    }

    fn captures(&self) -> u64 {
        self.0.vm.state().captures
    }
}

#[test]
fn a_fixed_interval_counts_from_the_start_of_a_capture() {
    let mut fixed = Fixed::new();
    for n in 1..=5 {
        fixed.until(n * 100 - 1);
        assert_eq!(fixed.captures(), n - 1, "before {n}00 ms");
        fixed.until(n * 100);
        assert_eq!(fixed.captures(), n, "at {n}00 ms");
        fixed.acknowledge(n);
    }
}

#[test]
fn an_overdue_interval_is_taken_at_the_acknowledgement_and_the_next_counts_from_there() {
    let mut fixed = Fixed::new();
    fixed.until(100);
    fixed.until(350);
    assert_eq!(fixed.captures(), 1, "one is in flight");
    fixed.acknowledge(1);
    assert_eq!(fixed.captures(), 2);
    fixed.acknowledge(2);
    fixed.until(449);
    assert_eq!(fixed.captures(), 2);
    fixed.until(450);
    assert_eq!(fixed.captures(), 3);
}

#[test]
fn a_failed_capture_begins_no_interval() {
    let mut fixed = Fixed::new();
    fixed.until(99);
    fixed.0.vm.state().capture = CaptureResult::Failed;
    fixed.until(100);
    assert_eq!((fixed.captures(), fixed.0.told()), (0, vec!["failed: pause the VM".into()]));
    fixed.0.vm.state().capture = CaptureResult::Captured;
    fixed.0.vm_loop.step(None);
    assert_eq!(fixed.captures(), 1, "it is still due");
}
