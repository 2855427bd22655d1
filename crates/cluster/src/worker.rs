//! A worker: takes item after item from a queue, in several slots, until none is left.
//!
//! ```text
//!   slot   take 4 ─▶ job: item 4 ends, take_number(5) ─▶ item 5 ends, take_number(6): taken
//!                              └ settle 4                       └ settle 5           └ the job returns
//! ```

use crate::{LiveRanges, Placement, Preference, Queue, QueueItem, Result, Share, WorkerId};
use keyframe_locks::IgnorePoison;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// Time between two looks for items while there is none.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Takes items from a queue and processes them, several at a time.
#[derive(Clone, Debug)]
pub struct Worker {
    /// Its unique name.
    pub id: WorkerId,
    /// The number of items it processes at a time.
    pub slots: usize,
    /// How it chooses items.
    pub placement: Placement,
    /// Its share of the work, which its slots divide among them; `None` if it is not known.
    pub share: Option<Share>,
    /// A worker without a heartbeat for this long counts as lost.
    pub lease: Duration,
}

/// A slot of a worker, with the items that it has at present.
pub struct Slot<'a> {
    queue: &'a Queue,
    worker: &'a WorkerId,
    /// The number of the slot in its worker, from 0 on.
    number: u32,
    held: Mutex<HeldItems>,
    settled: &'a AtomicUsize,
}

/// The items of a slot.
#[derive(Default)]
struct HeldItems {
    items: Vec<QueueItem>,
    /// The item that was taken last.
    last: Option<u32>,
}

impl Slot<'_> {
    /// Returns the number of the slot in its worker, from 0 on.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Takes item `index` in addition to those that the slot has. Returns false if the item is not
    /// open. Error: [`Error::Io`](crate::Error::Io) if the queue cannot be read or written.
    pub fn take_number(&self, index: u32) -> Result<bool> {
        let taken = self.queue.take_number(self.worker, index)?;
        if let Some(item) = taken {
            self.hold(item);
        }
        Ok(taken.is_some())
    }

    /// Notes an item that was taken for the slot.
    fn hold(&self, item: QueueItem) {
        let mut held = self.held.lock().ignore_poison();
        held.items.push(item);
        held.last = Some(item.index);
    }

    /// Settles item `index`. Does nothing if the slot does not have it. Error:
    /// [`Error::Io`](crate::Error::Io) if the queue cannot be written.
    pub fn settle(&self, index: u32) -> Result<()> {
        let mut held = self.held.lock().ignore_poison();
        let Some(at) = held.items.iter().position(|item| item.index == index) else {
            return Ok(());
        };
        if self.queue.settle(self.worker, held.items[at])? {
            self.settled.fetch_add(1, Ordering::Relaxed);
        }
        held.items.remove(at);
        Ok(())
    }

    /// Settles all items that the slot has.
    fn settle_all(&self) -> Result<()> {
        let held = self.held.lock().ignore_poison().items.clone();
        held.iter().map(|item| item.index).try_for_each(|index| self.settle(index))
    }
}

impl Worker {
    /// Runs `job` for item after item until none will come any more or `interrupted` is set.
    /// Returns how many items it settled.
    ///
    /// A job may take further items through its slot, and settle items before it returns. All other
    /// items of the slot are settled when `job` returns, with any outcome. If `interrupted` is set
    /// by then, they return to the queue.
    ///
    /// Error: [`Error::Io`](crate::Error::Io) if the queue cannot be read or written.
    pub fn run(
        &self,
        queue: &Queue,
        interrupted: &AtomicBool,
        job: impl Fn(QueueItem, &Slot<'_>) + Sync,
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
            let slot = |number: usize| Slot {
                queue,
                worker: &self.id,
                number: number as u32,
                held: Mutex::default(),
                settled: &settled,
            };
            let job = &job;
            let slots: Vec<_> = (0..self.slots.max(1))
                .map(slot)
                .map(|slot| scope.spawn(move || self.run_slot(&slot, interrupted, job)))
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
        slot: &Slot<'_>,
        interrupted: &AtomicBool,
        job: &(impl Fn(QueueItem, &Slot<'_>) + Sync),
    ) -> Result<()> {
        let Slot { queue, number, .. } = *slot;
        let share = self.share.map(|share| share.of_slot(number, self.slots.max(1) as u32));
        while !interrupted.load(Ordering::Relaxed) {
            // Read first: an item that is added in between is seen at the next look.
            let is_closed = queue.is_closed();
            let last = slot.held.lock().ignore_poison().last;
            let taken = if is_closed { None } else { Some(queue.taken_numbers()?) };
            let live =
                taken.as_ref().map(|taken| LiveRanges { taken, length: queue.range_length() });
            let preference = Preference { last, share: share.filter(|_| is_closed), live };
            let Some(item) = queue.take(&self.id, self.placement, preference)? else {
                // Items of other workers may come back if these are lost.
                if is_closed && queue.taken()?.is_empty() && queue.items()?.is_empty() {
                    return Ok(());
                }
                std::thread::sleep(LOOK_EVERY);
                continue;
            };
            slot.hold(item);
            job(item, slot);
            if !interrupted.load(Ordering::Relaxed) {
                slot.settle_all()?;
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
        let (id, placement) = (WorkerId::new(name), Placement::Neighbours);
        Worker { id, slots, placement, share: None, lease }
    }

    #[test]
    fn a_worker_waits_for_items_and_ends_when_none_comes() {
        let dir = tempfile::tempdir().unwrap();
        let queue = Queue::create(dir.path()).unwrap();
        let never = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let working = scope.spawn(|| worker("a", 2).run(&queue, &never, |_, _| ()).unwrap());
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
        queue.take(&dead, Placement::Neighbours, Preference::default()).unwrap().unwrap();
        assert_eq!(worker("b", 1).run(&queue, &AtomicBool::new(false), |_, _| ()).unwrap(), 3);
        assert!(began.elapsed() >= Duration::from_millis(200), "its lease is respected");
    }

    #[test]
    fn an_interrupted_worker_gives_its_items_back() {
        let dir = tempfile::tempdir().unwrap();
        let queue = Queue::create(dir.path()).unwrap();
        (0..3).for_each(|index| queue.add(QueueItem { index, weight: 1 }).unwrap());
        let interrupted = AtomicBool::new(false);
        let job = |_, _: &Slot<'_>| interrupted.store(true, Ordering::Relaxed);
        assert_eq!(worker("c", 1).run(&queue, &interrupted, job).unwrap(), 0);
        assert_eq!(queue.items().unwrap().len(), 3);
    }
}
