//! A worker: takes item after item from a queue, in several slots, until none is left.

use crate::{Placement, Queue, QueueItem, Result, WorkerId};
use keyframe_locks::IgnorePoison;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// Time between two looks for items while there is none.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A worker.
#[derive(Clone, Debug)]
pub struct Worker {
    /// Its unique name.
    pub id: WorkerId,
    /// The number of items it processes at a time.
    pub slots: usize,
    /// How it chooses items.
    pub placement: Placement,
    /// A worker without a heartbeat for this long counts as lost.
    pub lease: Duration,
}

impl Worker {
    /// Runs `job` for item after item until none will come any more or `interrupted` is set.
    /// Returns how many items it settled.
    ///
    /// An item is settled when `job` returns, with any outcome. If `interrupted` is set by
    /// then, the item returns to the queue.
    ///
    /// Error: [`Error::Io`](crate::Error::Io).
    pub fn run(
        &self,
        queue: &Queue,
        interrupted: &AtomicBool,
        job: impl Fn(QueueItem) + Sync,
    ) -> Result<usize> {
        queue.heartbeat(&self.id)?;
        let (settled, ended) = (AtomicUsize::new(0), EndSignal::default());
        let worked = std::thread::scope(|scope| {
            scope.spawn(|| {
                // If the file system hangs, the worker looks lost, and others do its items.
                while !ended.within(self.lease / 6) {
                    let _ = queue.heartbeat(&self.id);
                    let _ = queue.return_stale(&self.id, self.lease);
                }
            });
            let slots: Vec<_> = (0..self.slots.max(1))
                .map(|_| scope.spawn(|| self.run_slot(queue, interrupted, &settled, &job)))
                .collect();
            let joined: Vec<_> = slots.into_iter().map(ScopedJoinHandle::join).collect();
            ended.set();
            joined
                .into_iter()
                .try_for_each(|slot| slot.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        queue.return_items(|worker| *worker == self.id)?;
        queue.remove_worker(&self.id)?;
        worked.map(|()| settled.into_inner())
    }

    fn run_slot(
        &self,
        queue: &Queue,
        interrupted: &AtomicBool,
        settled: &AtomicUsize,
        job: &(impl Fn(QueueItem) + Sync),
    ) -> Result<()> {
        let mut last = None;
        while !interrupted.load(Ordering::Relaxed) {
            // Read first: an item that is added in between is seen at the next look.
            let is_closed = queue.is_closed();
            let Some(item) = queue.take(&self.id, self.placement, last)? else {
                // Items of other workers may come back if these are lost.
                if is_closed && queue.taken()?.is_empty() && queue.items()?.is_empty() {
                    return Ok(());
                }
                std::thread::sleep(LOOK_EVERY);
                continue;
            };
            last = Some(item.index);
            job(item);
            if !interrupted.load(Ordering::Relaxed) && queue.settle(&self.id, item)? {
                settled.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

/// Tells that all slots have ended.
#[derive(Default)]
struct EndSignal(Mutex<bool>, Condvar);

impl EndSignal {
    fn set(&self) {
        *self.0.lock().ignore_poison() = true;
        self.1.notify_all();
    }

    /// Waits for at most `time`. Returns whether all slots have ended.
    fn within(&self, time: Duration) -> bool {
        let ended = self.0.lock().ignore_poison();
        *self.1.wait_timeout_while(ended, time, |ended| !*ended).ignore_poison().0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn worker(name: &str, slots: usize) -> Worker {
        let lease = Duration::from_millis(300);
        Worker { id: WorkerId::new(name), slots, placement: Placement::Neighbours, lease }
    }

    #[test]
    fn a_worker_waits_for_items_and_ends_when_none_comes() {
        let dir = tempfile::tempdir().unwrap();
        let queue = Queue::create(dir.path()).unwrap();
        let never = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let working = scope.spawn(|| worker("a", 2).run(&queue, &never, |_| ()).unwrap());
            for index in 0..20 {
                std::thread::sleep(Duration::from_millis(3));
                queue.add(QueueItem { index, weight: 1 }).unwrap();
            }
            queue.close().unwrap();
            assert_eq!(working.join().unwrap(), 20);
        });
        assert!(queue.workers().unwrap().is_empty());
    }

    #[test]
    fn what_a_dead_worker_had_is_done_by_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let queue = Queue::create(dir.path()).unwrap();
        (0..3).for_each(|index| queue.add(QueueItem { index, weight: 1 }).unwrap());
        queue.close().unwrap();
        let dead = WorkerId::new("dead");
        let began = Instant::now();
        queue.heartbeat(&dead).unwrap();
        queue.take(&dead, Placement::Neighbours, None).unwrap().unwrap();
        assert_eq!(worker("b", 1).run(&queue, &AtomicBool::new(false), |_| ()).unwrap(), 3);
        assert!(began.elapsed() >= Duration::from_millis(200), "its lease is respected");
    }

    #[test]
    fn an_interrupted_worker_gives_its_items_back() {
        let dir = tempfile::tempdir().unwrap();
        let queue = Queue::create(dir.path()).unwrap();
        (0..3).for_each(|index| queue.add(QueueItem { index, weight: 1 }).unwrap());
        let interrupted = AtomicBool::new(false);
        let job = |_| interrupted.store(true, Ordering::Relaxed);
        assert_eq!(worker("c", 1).run(&queue, &interrupted, job).unwrap(), 0);
        assert_eq!(queue.items().unwrap().len(), 3);
    }
}
