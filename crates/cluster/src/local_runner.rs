//! Runs workers in this process: one worker with a thread for each slot.

use crate::{Placement, Queue, QueueItem, Result, Runner, Share, Slot, Worker, WorkerId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::Scope;
use std::time::Duration;

/// Threads are not lost without their process. This is how long items that an earlier process had
/// taken stay unavailable.
const LEASE: Duration = Duration::from_secs(30);

/// The function that processes an item in a slot.
pub type LocalJob<'env> = &'env (dyn Fn(QueueItem, &Slot<'_>) + Sync);

/// A runner whose only worker is in this process.
pub struct LocalRunner<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    job: LocalJob<'env>,
    slots: usize,
    placement: Placement,
    stopped: Arc<AtomicBool>,
    result: Option<Receiver<Result<usize>>>,
}

impl<'scope, 'env> LocalRunner<'scope, 'env> {
    /// Runs `job` for each item in `slots` threads of `scope`, which choose items by `placement`.
    /// They end when the queue is done, or when `stopped` is set.
    pub fn new(
        scope: &'scope Scope<'scope, 'env>,
        slots: usize,
        placement: Placement,
        stopped: &Arc<AtomicBool>,
        job: LocalJob<'env>,
    ) -> Self {
        Self { scope, job, slots, placement, stopped: Arc::clone(stopped), result: None }
    }

    fn begin(&mut self, queue: &Queue) {
        let worker = Worker {
            id: WorkerId::local(),
            slots: self.slots,
            placement: self.placement,
            share: Some(Share { number: 0, count: 1 }),
            lease: LEASE,
        };
        let (queue, stopped, job) = (queue.clone(), Arc::clone(&self.stopped), self.job);
        let (send, receive) = channel();
        self.scope.spawn(move || {
            // The receiver is dropped if the work is over.
            let _ = send.send(worker.run(&queue, &stopped, job));
        });
        self.result = Some(receive);
    }
}

impl Runner for LocalRunner<'_, '_> {
    fn tend(&mut self, queue: &Queue) -> Result<()> {
        let Some(result) = &self.result else {
            self.begin(queue);
            return Ok(());
        };
        match result.try_recv() {
            // The worker ended with an empty queue; if items have come back, it starts again.
            Ok(Ok(_)) => {
                self.result = None;
                Ok(())
            }
            Ok(Err(error)) => Err(error),
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => Ok(()),
        }
    }

    fn end(&mut self, queue: &Queue) -> Result<()> {
        if !(queue.items()?.is_empty() && queue.taken()?.is_empty()) {
            self.stopped.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}
