//! A queue of items in a directory that the workers of all hosts share.
//!
//! ```text
//!   items/000007-000000001200000000             open: index and weight
//!      │ rename: of several workers that try, one succeeds                ▲ its worker is lost
//!      ▼                                                                  │
//!   taken/000007-000000001200000000@WORKER ───────────────────────────────┘
//!      │ rename
//!      ▼
//!   settled/000007-000000001200000000           done, or given up
//!
//!   workers/WORKER      heartbeat: the file's time      closed      no more items will come
//!   range               the items that a worker gets in a row while more items come
//! ```
//!
//! An item's state is its file's name; a change of state is one rename, which is atomic on all file
//! systems, including NFS. There are no locks that a dead worker could leave. A worker that was
//! wrongly taken for lost learns it when it settles an item: the name is gone.
//!
//! Only times of the file system are compared with each other, never a host's clock.

use crate::{Error, Placement, Preference, Result};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

const ITEMS: &str = "items";
const TAKEN: &str = "taken";
const SETTLED: &str = "settled";
const WORKERS: &str = "workers";
const CLOSED: &str = "closed";
const RANGE: &str = "range";
/// The most names that are read from a directory of the queue.
const NAMES_MAX: usize = 1 << 22;

/// An item of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueueItem {
    /// Its number.
    pub index: u32,
    /// Its expected duration, in any unit that all items of the queue share.
    pub weight: u64,
}

impl QueueItem {
    fn name(self) -> String {
        format!("{:06}-{:018}", self.index, self.weight)
    }

    fn parse(name: &str) -> Option<Self> {
        let (index, weight) = name.split_once('-')?;
        Some(Self { index: index.parse().ok()?, weight: weight.parse().ok()? })
    }
}

/// A worker's name, part of file names: letters, digits, `.`, `_`, `-` and `+`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WorkerId(String);

impl WorkerId {
    /// Makes a name from `text`: replaces all other characters by `_` and keeps the first 120.
    pub fn new(text: &str) -> Self {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-+".contains(c);
        Self(text.chars().take(120).map(|c| if is_plain(c) { c } else { '_' }).collect())
    }

    /// Returns the name of the worker of this process, outside of a cluster: `local.PID`.
    pub fn local() -> Self {
        Self::new(&format!("local.{}", std::process::id()))
    }

    /// Returns whether this is the name of a worker in a process outside of a cluster.
    pub fn is_local(&self) -> bool {
        self.0.starts_with("local.")
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// An item that a worker has taken and not settled yet.
#[derive(Clone, Debug)]
pub struct TakenItem {
    /// The item.
    pub item: QueueItem,
    /// The worker that has it.
    pub worker: WorkerId,
}

impl TakenItem {
    fn name(&self) -> String {
        format!("{}@{}", self.item.name(), self.worker.0)
    }

    fn parse(name: &str) -> Option<Self> {
        let (item, worker) = name.split_once('@')?;
        Some(Self { item: QueueItem::parse(item)?, worker: WorkerId::new(worker) })
    }
}

/// A queue of items in a directory, which workers on several hosts can share.
#[derive(Clone, Debug)]
pub struct Queue {
    dir: PathBuf,
}

/// Returns false if another process has moved or removed the file.
fn unless_gone(result: io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

impl Queue {
    /// Creates the queue in `dir`, or opens an existing one. An existing queue that was closed is
    /// open for new items again.
    ///
    /// Error: [`Error::Io`] if a directory of the queue cannot be created.
    pub fn create(dir: &Path) -> Result<Self> {
        for part in [ITEMS, TAKEN, SETTLED, WORKERS] {
            let path = dir.join(part);
            fs::create_dir_all(&path).map_err(Error::io("make", &path))?;
        }
        let closed = dir.join(CLOSED);
        unless_gone(fs::remove_file(&closed)).map_err(Error::io("remove", &closed))?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// Opens the queue in `dir`. Error: [`Error::Io`] if there is none.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(ITEMS);
        fs::metadata(&path).map_err(Error::io("look at", &path))?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// Returns the queue's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn names<T>(&self, part: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<T>> {
        let path = self.dir.join(part);
        let failed = |e| Error::io("read", &path)(e);
        let mut all = Vec::new();
        for entry in fs::read_dir(&path).map_err(failed)?.take(NAMES_MAX) {
            let name = entry.map_err(Error::io("read", &path))?.file_name();
            all.extend(name.to_str().and_then(&parse));
        }
        Ok(all)
    }

    /// Returns the open items (neither taken nor settled), in the order of their numbers. Error:
    /// [`Error::Io`] if the queue cannot be read.
    pub fn items(&self) -> Result<Vec<QueueItem>> {
        let mut all = self.names(ITEMS, QueueItem::parse)?;
        all.sort_unstable();
        all.dedup_by_key(|item| item.index);
        Ok(all)
    }

    /// Returns the items that workers have taken, in no order. Error: [`Error::Io`] if the queue
    /// cannot be read.
    pub fn taken(&self) -> Result<Vec<TakenItem>> {
        self.names(TAKEN, TakenItem::parse)
    }

    /// Returns the numbers of the items that workers have taken, in no order. Error: [`Error::Io`]
    /// if the queue cannot be read.
    pub fn taken_numbers(&self) -> Result<Vec<u32>> {
        Ok(self.taken()?.into_iter().map(|taken| taken.item.index).collect())
    }

    /// Returns the settled items, in the order of their numbers. Error: [`Error::Io`] if the queue
    /// cannot be read.
    pub fn settled(&self) -> Result<Vec<QueueItem>> {
        let mut all = self.names(SETTLED, QueueItem::parse)?;
        all.sort_unstable();
        Ok(all)
    }

    /// Adds an open item. Error: [`Error::Io`] if the queue cannot be written.
    pub fn add(&self, item: QueueItem) -> Result<()> {
        let path = self.dir.join(ITEMS).join(item.name());
        fs::write(&path, []).map_err(Error::io("write", &path))
    }

    /// Settles those of `items` that no worker has: open ones, and those that the queue does not
    /// know. Error: [`Error::Io`] if the queue cannot be read or written.
    pub fn settle_free(&self, items: &[QueueItem]) -> Result<()> {
        let open = self.items()?;
        for item in items {
            let at = open.binary_search_by_key(&item.index, |open| open.index);
            let Ok(at) = at else {
                self.add_settled(*item)?;
                continue;
            };
            let name = open[at].name();
            let (from, to) = (self.dir.join(ITEMS).join(&name), self.dir.join(SETTLED).join(&name));
            if !unless_gone(fs::rename(&from, &to)).map_err(Error::io("rename", &from))? {
                self.add_settled(*item)?;
            }
        }
        Ok(())
    }

    /// Adds an item that is settled already.
    fn add_settled(&self, item: QueueItem) -> Result<()> {
        let path = self.dir.join(SETTLED).join(item.name());
        fs::write(&path, []).map_err(Error::io("write", &path))
    }

    /// Closes the queue: no more items will come, and workers that find none end. Error:
    /// [`Error::Io`] if the queue cannot be written.
    pub fn close(&self) -> Result<()> {
        let path = self.dir.join(CLOSED);
        fs::write(&path, []).map_err(Error::io("write", &path))
    }

    /// Returns whether the queue is closed.
    pub fn is_closed(&self) -> bool {
        self.dir.join(CLOSED).exists()
    }

    /// Sets the number of items that a worker gets in a row while more items come to `length`.
    /// Error: [`Error::Io`] if the queue cannot be written.
    pub fn set_range_length(&self, length: u32) -> Result<()> {
        let (new, path) = (self.dir.join("range.new"), self.dir.join(RANGE));
        fs::write(&new, length.to_string()).map_err(Error::io("write", &new))?;
        fs::rename(&new, &path).map_err(Error::io("rename", &new))
    }

    /// Returns the number of items that a worker gets in a row while more items come, at least 1.
    pub fn range_length(&self) -> u32 {
        // Ten digits.
        let mut text = String::new();
        let read = fs::File::open(self.dir.join(RANGE))
            .and_then(|file| file.take(10).read_to_string(&mut text));
        read.ok().and_then(|_| text.parse().ok()).unwrap_or(1).max(1)
    }

    /// Takes an item for `worker`. `placement` chooses it, and considers the worker's `preference`.
    /// Returns `None` if all items are taken or settled. Error: [`Error::Io`] if the queue cannot
    /// be read or written.
    pub fn take(
        &self,
        worker: &WorkerId,
        placement: Placement,
        preference: Preference<'_>,
    ) -> Result<Option<QueueItem>> {
        let mut open = self.items()?;
        while let Some(item) = placement.choose(&open, preference) {
            if self.try_take(worker, item)? {
                return Ok(Some(item));
            }
            // Another worker was faster.
            open.retain(|other| other.index != item.index);
        }
        Ok(None)
    }

    /// Takes item number `index` for `worker`. Returns `None` if it is not open. Error:
    /// [`Error::Io`] if the queue cannot be read or written.
    pub fn take_number(&self, worker: &WorkerId, index: u32) -> Result<Option<QueueItem>> {
        let item = self.items()?.into_iter().find(|item| item.index == index);
        let Some(item) = item else { return Ok(None) };
        Ok(self.try_take(worker, item)?.then_some(item))
    }

    /// Takes `item` for `worker`. Returns false if another worker was faster.
    fn try_take(&self, worker: &WorkerId, item: QueueItem) -> Result<bool> {
        let from = self.dir.join(ITEMS).join(item.name());
        let to = self.dir.join(TAKEN).join(TakenItem { item, worker: worker.clone() }.name());
        unless_gone(fs::rename(&from, &to)).map_err(Error::io("rename", &from))
    }

    /// Settles an item of `worker`. Returns false if the worker was taken for lost meanwhile.
    /// Error: [`Error::Io`] if the queue cannot be written.
    pub fn settle(&self, worker: &WorkerId, item: QueueItem) -> Result<bool> {
        let from = self.dir.join(TAKEN).join(TakenItem { item, worker: worker.clone() }.name());
        let to = self.dir.join(SETTLED).join(item.name());
        unless_gone(fs::rename(&from, &to)).map_err(Error::io("rename", &from))
    }

    /// Makes items that lost workers have taken open again. `is_lost` tells which workers are lost.
    /// Returns the number of these items. Error: [`Error::Io`] if the queue cannot be read or
    /// written.
    pub fn return_items(&self, is_lost: impl Fn(&WorkerId) -> bool) -> Result<usize> {
        let mut count = 0;
        for taken in self.taken()?.into_iter().filter(|taken| is_lost(&taken.worker)) {
            let from = self.dir.join(TAKEN).join(taken.name());
            let to = self.dir.join(ITEMS).join(taken.item.name());
            count += usize::from(
                unless_gone(fs::rename(&from, &to)).map_err(Error::io("rename", &from))?,
            );
        }
        Ok(count)
    }

    /// Makes settled items open again if `again` returns true for their number: for items that were
    /// given up and are to be tried once more. Error: [`Error::Io`] if the queue cannot be read or
    /// written.
    pub fn reopen(&self, again: impl Fn(u32) -> bool) -> Result<()> {
        for item in self.settled()?.into_iter().filter(|item| again(item.index)) {
            let from = self.dir.join(SETTLED).join(item.name());
            let to = self.dir.join(ITEMS).join(item.name());
            unless_gone(fs::rename(&from, &to)).map_err(Error::io("rename", &from))?;
        }
        Ok(())
    }

    fn heartbeat_path(&self, worker: &WorkerId) -> PathBuf {
        self.dir.join(WORKERS).join(&worker.0)
    }

    /// Records a heartbeat of `worker`, by the file system's clock if it has one. Error:
    /// [`Error::Io`] if the queue cannot be written.
    pub fn heartbeat(&self, worker: &WorkerId) -> Result<()> {
        let path = self.heartbeat_path(worker);
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let touched = utimensat(
            CWD,
            &path,
            &Timestamps { last_access: now, last_modification: now },
            AtFlags::empty(),
        );
        match touched {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::NOENT) => {
                fs::write(&path, []).map_err(Error::io("write", &path))
            }
            Err(e) => Err(Error::io("touch", &path)(e.into())),
        }
    }

    /// Removes the heartbeat of `worker`, which ends. Error: [`Error::Io`] if the file of the
    /// heartbeat cannot be removed.
    pub fn remove_worker(&self, worker: &WorkerId) -> Result<()> {
        let path = self.heartbeat_path(worker);
        unless_gone(fs::remove_file(&path)).map_err(Error::io("remove", &path)).map(drop)
    }

    /// Returns the workers with a heartbeat, in no order. Error: [`Error::Io`] if the queue cannot
    /// be read.
    pub fn workers(&self) -> Result<Vec<WorkerId>> {
        self.names(WORKERS, |name| Some(WorkerId::new(name)))
    }

    /// Makes the items of stale workers open again: those without a heartbeat, and those whose last
    /// heartbeat is more than `lease` older than that of worker `by`. Does nothing if `by` has no
    /// heartbeat. Returns the number of these items. Error: [`Error::Io`] if the queue cannot be
    /// read or written.
    pub fn return_stale(&self, by: &WorkerId, lease: Duration) -> Result<usize> {
        let time = |worker: &WorkerId| {
            fs::metadata(self.heartbeat_path(worker)).and_then(|m| m.modified()).ok()
        };
        let Some(now) = time(by) else { return Ok(0) };
        // A worker without a heartbeat has ended, or is unknown.
        let is_stale = |worker: &WorkerId| {
            worker != by
                && time(worker)
                    .is_none_or(|then| now.duration_since(then).is_ok_and(|age| age > lease))
        };
        self.return_items(is_stale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::sync::Mutex;
    use std::time::SystemTime;

    fn queue(count: u32) -> (tempfile::TempDir, Queue) {
        let dir = tempfile::tempdir().unwrap();
        let queue = Queue::create(dir.path()).unwrap();
        for index in 0..count {
            queue.add(QueueItem { index, weight: 1 + u64::from(index) }).unwrap();
        }
        (dir, queue)
    }

    #[test]
    fn each_item_is_taken_once_by_many() {
        let (_dir, queue) = queue(200);
        let seen = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for n in 0..8 {
                let (queue, seen) = (&queue, &seen);
                scope.spawn(move || {
                    let worker = WorkerId::new(&format!("w{n}"));
                    let mut last = None;
                    while let Some(item) = queue
                        .take(
                            &worker,
                            Placement::Neighbours,
                            Preference { last, ..Preference::default() },
                        )
                        .unwrap()
                    {
                        last = Some(item.index);
                        seen.lock().unwrap().push(item.index);
                        assert!(queue.settle(&worker, item).unwrap());
                    }
                });
            }
        });
        let seen = seen.into_inner().unwrap();
        assert_eq!(seen.len(), 200);
        assert_eq!(seen.into_iter().collect::<BTreeSet<_>>().len(), 200);
        assert_eq!(queue.settled().unwrap().len(), 200);
        assert!(queue.items().unwrap().is_empty() && queue.taken().unwrap().is_empty());
    }

    #[test]
    fn items_of_a_lost_worker_return_and_the_worker_learns_it() {
        let (_dir, queue) = queue(2);
        let (lost, alive) = (WorkerId::new("lost/1:2"), WorkerId::new("alive"));
        assert_eq!(lost.as_str(), "lost_1_2");
        queue.heartbeat(&lost).unwrap();
        let item =
            queue.take(&lost, Placement::LongestFirst, Preference::default()).unwrap().unwrap();
        assert_eq!(item.index, 1);
        queue.heartbeat(&alive).unwrap();
        assert_eq!(queue.return_stale(&alive, Duration::from_secs(60)).unwrap(), 0);
        let long_ago = SystemTime::now() - Duration::from_secs(600);
        let sign = fs::File::options().write(true).open(queue.heartbeat_path(&lost)).unwrap();
        sign.set_modified(long_ago).unwrap();
        assert_eq!(queue.return_stale(&alive, Duration::from_secs(60)).unwrap(), 1);
        assert_eq!(
            queue.take(&alive, Placement::LongestFirst, Preference::default()).unwrap(),
            Some(item)
        );
        assert!(!queue.settle(&lost, item).unwrap());
        assert!(queue.settle(&alive, item).unwrap());
        // An item that was given up is tried again.
        queue.reopen(|index| index == 1).unwrap();
        assert_eq!(queue.items().unwrap().len(), 2);
        // One that was made elsewhere is open no more, and settled once.
        queue.settle_free(&[1, 7].map(|index| QueueItem { index, weight: 5 })).unwrap();
        let left: Vec<u32> = queue.items().unwrap().iter().map(|item| item.index).collect();
        let settled: Vec<u32> = queue.settled().unwrap().iter().map(|item| item.index).collect();
        assert_eq!((left, settled), (vec![0], vec![1, 7]));
    }

    #[test]
    fn other_file_names_are_not_items() {
        let (dir, queue) = queue(1);
        for name in [
            ".nfs0001",
            "000001",
            "x-1",
            "000002-99999999999999999999",
            "000003-000000000000000001~",
        ] {
            fs::write(dir.path().join(ITEMS).join(name), []).unwrap();
        }
        assert_eq!(queue.items().unwrap(), [QueueItem { index: 0, weight: 1 }]);
        assert!(Queue::open(&dir.path().join("none")).is_err());
    }
}
