//! Workers of this process: one, with a thread for each slot.

use crate::{Item, Placement, Queue, Result, Runner, Worker, WorkerId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::Scope;
use std::time::Duration;

/// Of threads nobody loses one without the process; the longest that a queue of an earlier process
/// is waited for.
const LEASE: Duration = Duration::from_secs(30);

/// A runner whose worker is here.
pub struct Local<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    job: &'env (dyn Fn(Item) + Sync),
    slots: usize,
    stopped: Arc<AtomicBool>,
    result: Option<Receiver<Result<usize>>>,
}

impl<'scope, 'env> Local<'scope, 'env> {
    /// One that has `job` done in `slots` threads of `scope`. They end with the work, or when
    /// `stopped` is set.
    pub fn new(
        scope: &'scope Scope<'scope, 'env>,
        slots: usize,
        stopped: &Arc<AtomicBool>,
        job: &'env (dyn Fn(Item) + Sync),
    ) -> Self {
        Self { scope, job, slots, stopped: Arc::clone(stopped), result: None }
    }

    fn begin(&mut self, queue: &Queue) {
        let worker = Worker {
            id: WorkerId::local(),
            slots: self.slots,
            placement: Placement::LongestFirst,
            lease: LEASE,
        };
        let (queue, stopped, job) = (queue.clone(), Arc::clone(&self.stopped), self.job);
        let (send, receive) = channel();
        self.scope.spawn(move || {
            // Nobody listens where the work is over.
            let _ = send.send(worker.run(&queue, &stopped, job));
        });
        self.result = Some(receive);
    }
}

impl Runner for Local<'_, '_> {
    fn tend(&mut self, queue: &Queue) -> Result<()> {
        let Some(result) = &self.result else {
            self.begin(queue);
            return Ok(());
        };
        match result.try_recv() {
            // It saw nothing left and ended; what came back since it does again.
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
