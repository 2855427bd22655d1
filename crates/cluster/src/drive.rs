//! The submitter's loop: fills the queue, lets a runner tend it, and waits until all items are
//! settled.

use crate::{Queue, QueueItem, Result, Runner};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Time between two looks at the settled items.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The answer of an [`ItemSource`]: the items that have appeared since the last call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewItems {
    /// These items; more may follow.
    Open(Vec<QueueItem>),
    /// These items, and none will follow.
    Complete(Vec<QueueItem>),
}

/// A source of items, which may appear over time.
pub trait ItemSource {
    /// Returns the items that have appeared since the last call. Error:
    /// [`Error::Source`](crate::Error::Source) if they cannot be found out.
    fn new_items(&mut self) -> Result<NewItems>;
}

/// Adds those of `items` that are not in the queue yet, and closes the queue.
///
/// Error: [`Error::Io`](crate::Error::Io) if the queue cannot be read or written.
pub fn fill(queue: &Queue, items: &[QueueItem]) -> Result<()> {
    add_new(queue, &mut known(queue)?, items)?;
    queue.close()
}

/// Adds the items whose index is not in `known_items`.
fn add_new(queue: &Queue, known_items: &mut BTreeSet<u32>, items: &[QueueItem]) -> Result<()> {
    for item in items {
        if known_items.insert(item.index) {
            queue.add(*item)?;
        }
    }
    Ok(())
}

/// The indices of all items that the queue has or had. It reads open, taken and settled items in
/// this order, in which items move, so that none is missed.
fn known(queue: &Queue) -> Result<BTreeSet<u32>> {
    let mut all: BTreeSet<u32> = queue.items()?.iter().map(|item| item.index).collect();
    all.extend(queue.taken()?.iter().map(|taken| taken.item.index));
    all.extend(queue.settled()?.iter().map(|item| item.index));
    Ok(all)
}

/// Lets the workers of `runner` process all items of `source`, and calls `settled` with each item
/// when it is settled. Returns when all are settled, or when `interrupted` is set. Items that are
/// in the queue already are not added again.
///
/// Errors: those of `source`, of `runner` and of the queue.
pub fn drive(
    queue: &Queue,
    source: &mut dyn ItemSource,
    runner: &mut dyn Runner,
    interrupted: &AtomicBool,
    settled: &mut dyn FnMut(QueueItem),
) -> Result<()> {
    let driven = until_settled(queue, source, runner, interrupted, settled);
    let ended = runner.end(queue);
    driven.and(ended)
}

fn until_settled(
    queue: &Queue,
    source: &mut dyn ItemSource,
    runner: &mut dyn Runner,
    interrupted: &AtomicBool,
    settled: &mut dyn FnMut(QueueItem),
) -> Result<()> {
    let mut known_items = known(queue)?;
    let (mut reported, mut is_last) = (BTreeSet::new(), false);
    while !interrupted.load(Ordering::Relaxed) {
        if !is_last {
            let found = source.new_items()?;
            is_last = matches!(found, NewItems::Complete(_));
            let (NewItems::Open(items) | NewItems::Complete(items)) = found;
            add_new(queue, &mut known_items, &items)?;
            if is_last {
                queue.close()?;
            }
        }
        for item in queue.settled()? {
            if reported.insert(item.index) {
                settled(item);
            }
        }
        if is_last && reported.len() >= known_items.len() {
            return Ok(());
        }
        runner.tend(queue)?;
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
