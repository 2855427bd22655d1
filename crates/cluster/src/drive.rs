//! The loop of whoever wants the work done: feeds the queue, has a runner tend it, waits until all
//! is settled.

use crate::{Item, Queue, Result, Runner};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often it is looked what is settled.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What comes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum More {
    /// These; there may be others later.
    Items(Vec<Item>),
    /// These, and no others.
    Last(Vec<Item>),
}

/// Where items come from: all at once, or as they come about.
pub trait Feed {
    /// What has come about since the last call.
    fn more(&mut self) -> Result<More>;
}

/// Puts those of `items` that are not in the queue into it, and no others come.
pub fn fill(queue: &Queue, items: &[Item]) -> Result<()> {
    put_new(queue, &mut known(queue)?, items)?;
    queue.close()
}

/// Puts those that are not `there`, and then are.
fn put_new(queue: &Queue, there: &mut BTreeSet<u32>, items: &[Item]) -> Result<()> {
    for item in items {
        if there.insert(item.index) {
            queue.put(*item)?;
        }
    }
    Ok(())
}

/// All that it has ever had. Looked at in the order in which items go, so that none is missed that
/// goes on meanwhile.
fn known(queue: &Queue) -> Result<BTreeSet<u32>> {
    let mut all: BTreeSet<u32> = queue.items()?.iter().map(|item| item.index).collect();
    all.extend(queue.taken()?.iter().map(|taken| taken.item.index));
    all.extend(queue.settled()?.iter().map(|item| item.index));
    Ok(all)
}

/// Has all of `feed` worked off by the workers of `runner`. Returns when all is settled, or when
/// `interrupted`; `tell` gets each item when it is settled. Items that are in the queue from before
/// are not put again.
pub fn drive(
    queue: &Queue,
    feed: &mut dyn Feed,
    runner: &mut dyn Runner,
    interrupted: &AtomicBool,
    tell: &mut dyn FnMut(Item),
) -> Result<()> {
    let driven = until_settled(queue, feed, runner, interrupted, tell);
    let ended = runner.end(queue);
    driven.and(ended)
}

fn until_settled(
    queue: &Queue,
    feed: &mut dyn Feed,
    runner: &mut dyn Runner,
    interrupted: &AtomicBool,
    tell: &mut dyn FnMut(Item),
) -> Result<()> {
    let mut there = known(queue)?;
    let (mut told, mut is_last) = (BTreeSet::new(), false);
    while !interrupted.load(Ordering::Relaxed) {
        if !is_last {
            let more = feed.more()?;
            is_last = matches!(more, More::Last(_));
            let (More::Items(items) | More::Last(items)) = more;
            put_new(queue, &mut there, &items)?;
            if is_last {
                queue.close()?;
            }
        }
        for item in queue.settled()? {
            if told.insert(item.index) {
                tell(item);
            }
        }
        if is_last && told.len() >= there.len() {
            return Ok(());
        }
        runner.tend(queue)?;
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
