//! A queue of items in a directory that all workers see, each on its own host.
//!
//! ```text
//!   items/000007-000000001200000000             open; the second number is how long it probably takes, in whatever unit
//!      │ rename: of several that try, one succeeds                        ▲ put back: its worker is lost
//!      ▼                                                                  │
//!   taken/000007-000000001200000000@WORKER ───────────────────────────────┘
//!      │ rename
//!      ▼
//!   settled/000007-000000001200000000           done, or given up: what came of it lies elsewhere
//!
//!   workers/WORKER      its last sign of life is the file's time      closed      no item comes any more
//! ```
//!
//! A state is a name, a change of state one rename, which file systems do as a whole, NFS among
//! them. No lock is held by anybody, so none is left behind. A worker that was taken for lost and
//! still lives learns it when it settles: the name has gone.
//!
//! Times are compared with each other as the file system has them, never with a host's clock.

use crate::{Error, Placement, Result};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

const ITEMS: &str = "items";
const TAKEN: &str = "taken";
const SETTLED: &str = "settled";
const WORKERS: &str = "workers";
const CLOSED: &str = "closed";
/// No directory of a queue has more.
const NAMES_MAX: usize = 1 << 22;

/// One of what there is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Item {
    /// Its number.
    pub index: u32,
    /// How long it probably takes, in a unit that all of a queue have in common.
    pub weight: u64,
}

impl Item {
    fn name(self) -> String {
        format!("{:06}-{:018}", self.index, self.weight)
    }

    fn parse(name: &str) -> Option<Self> {
        let (index, weight) = name.split_once('-')?;
        Some(Self { index: index.parse().ok()?, weight: weight.parse().ok()? })
    }
}

/// A worker's name: letters, digits, `.`, `_`, `-` and `+` only, as it is part of files' names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WorkerId(String);

impl WorkerId {
    /// `text` with whatever else it has replaced.
    pub fn new(text: &str) -> Self {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-+".contains(c);
        Self(text.chars().take(120).map(|c| if is_plain(c) { c } else { '_' }).collect())
    }

    /// That of this process.
    pub fn local() -> Self {
        Self::new(&format!("local.{}", std::process::id()))
    }

    /// Whether it is that of a process that was not started by a cluster.
    pub fn is_local(&self) -> bool {
        self.0.starts_with("local.")
    }

    /// As it is written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// An item that a worker has.
#[derive(Clone, Debug)]
pub struct Taken {
    /// The item.
    pub item: Item,
    /// Who has it.
    pub worker: WorkerId,
}

impl Taken {
    fn name(&self) -> String {
        format!("{}@{}", self.item.name(), self.worker.0)
    }

    fn parse(name: &str) -> Option<Self> {
        let (item, worker) = name.split_once('@')?;
        Some(Self { item: Item::parse(item)?, worker: WorkerId::new(worker) })
    }
}

/// It.
#[derive(Clone, Debug)]
pub struct Queue {
    dir: PathBuf,
}

/// What another one may have moved meanwhile.
fn unless_gone(result: io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

impl Queue {
    /// The one in `dir`, which is made where there is none. Items may come, also where it was
    /// closed before.
    pub fn create(dir: &Path) -> Result<Self> {
        for part in [ITEMS, TAKEN, SETTLED, WORKERS] {
            let path = dir.join(part);
            fs::create_dir_all(&path).map_err(Error::io("make", &path))?;
        }
        let closed = dir.join(CLOSED);
        unless_gone(fs::remove_file(&closed)).map_err(Error::io("remove", &closed))?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// The one in `dir`.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(ITEMS);
        fs::metadata(&path).map_err(Error::io("look at", &path))?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// Its directory.
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

    /// Those that nobody has, ascending.
    pub fn items(&self) -> Result<Vec<Item>> {
        let mut all = self.names(ITEMS, Item::parse)?;
        all.sort_unstable();
        all.dedup_by_key(|item| item.index);
        Ok(all)
    }

    /// Those that a worker has.
    pub fn taken(&self) -> Result<Vec<Taken>> {
        self.names(TAKEN, Taken::parse)
    }

    /// Those that are settled, ascending.
    pub fn settled(&self) -> Result<Vec<Item>> {
        let mut all = self.names(SETTLED, Item::parse)?;
        all.sort_unstable();
        Ok(all)
    }

    /// Adds one.
    pub fn put(&self, item: Item) -> Result<()> {
        let path = self.dir.join(ITEMS).join(item.name());
        fs::write(&path, []).map_err(Error::io("write", &path))
    }

    /// Adds one that is settled already.
    pub fn put_settled(&self, item: Item) -> Result<()> {
        let path = self.dir.join(SETTLED).join(item.name());
        fs::write(&path, []).map_err(Error::io("write", &path))
    }

    /// No item comes any more: workers that find none end.
    pub fn close(&self) -> Result<()> {
        let path = self.dir.join(CLOSED);
        fs::write(&path, []).map_err(Error::io("write", &path))
    }

    /// Whether no item comes any more.
    pub fn is_closed(&self) -> bool {
        self.dir.join(CLOSED).exists()
    }

    /// Gives `worker`, whose last item was `last`, the next one by `placement`; none where all are
    /// taken or settled.
    pub fn take(
        &self,
        worker: &WorkerId,
        placement: Placement,
        last: Option<u32>,
    ) -> Result<Option<Item>> {
        let mut open = self.items()?;
        while let Some(item) = placement.choose(&open, last) {
            let from = self.dir.join(ITEMS).join(item.name());
            let to = self.dir.join(TAKEN).join(Taken { item, worker: worker.clone() }.name());
            if unless_gone(fs::rename(&from, &to)).map_err(Error::io("rename", &from))? {
                return Ok(Some(item));
            }
            // Somebody was faster.
            open.retain(|other| other.index != item.index);
        }
        Ok(None)
    }

    /// `worker` is through with `item`. False where it was taken for lost meanwhile.
    pub fn settle(&self, worker: &WorkerId, item: Item) -> Result<bool> {
        let from = self.dir.join(TAKEN).join(Taken { item, worker: worker.clone() }.name());
        let to = self.dir.join(SETTLED).join(item.name());
        unless_gone(fs::rename(&from, &to)).map_err(Error::io("rename", &from))
    }

    /// Puts back what the workers have of whom `is_lost` says so; how many items.
    pub fn put_back(&self, is_lost: impl Fn(&WorkerId) -> bool) -> Result<usize> {
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

    /// Opens those that are settled again for which `again` holds: they were given up, and are
    /// tried once more.
    pub fn reopen(&self, again: impl Fn(u32) -> bool) -> Result<()> {
        for item in self.settled()?.into_iter().filter(|item| again(item.index)) {
            let from = self.dir.join(SETTLED).join(item.name());
            let to = self.dir.join(ITEMS).join(item.name());
            unless_gone(fs::rename(&from, &to)).map_err(Error::io("rename", &from))?;
        }
        Ok(())
    }

    fn sign(&self, worker: &WorkerId) -> PathBuf {
        self.dir.join(WORKERS).join(&worker.0)
    }

    /// `worker` lives. By the file system's clock, where that has one.
    pub fn show_life(&self, worker: &WorkerId) -> Result<()> {
        let path = self.sign(worker);
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

    /// `worker` ends.
    pub fn leave(&self, worker: &WorkerId) -> Result<()> {
        let path = self.sign(worker);
        unless_gone(fs::remove_file(&path)).map_err(Error::io("remove", &path)).map(drop)
    }

    /// Those that have shown themselves and not left.
    pub fn workers(&self) -> Result<Vec<WorkerId>> {
        self.names(WORKERS, |name| Some(WorkerId::new(name)))
    }

    /// Puts back what workers have that showed no life for longer than `lease` before `by` did.
    pub fn put_back_stale(&self, by: &WorkerId, lease: Duration) -> Result<usize> {
        let time =
            |worker: &WorkerId| fs::metadata(self.sign(worker)).and_then(|m| m.modified()).ok();
        let Some(now) = time(by) else { return Ok(0) };
        // One without a sign has left, or was never heard of.
        let is_stale = |worker: &WorkerId| {
            worker != by
                && time(worker)
                    .is_none_or(|then| now.duration_since(then).is_ok_and(|age| age > lease))
        };
        self.put_back(is_stale)
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
            queue.put(Item { index, weight: 1 + u64::from(index) }).unwrap();
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
                    while let Some(item) = queue.take(&worker, Placement::Neighbours, last).unwrap()
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
    fn what_a_lost_worker_had_goes_back_and_it_learns_that() {
        let (_dir, queue) = queue(2);
        let (lost, alive) = (WorkerId::new("lost/1:2"), WorkerId::new("alive"));
        assert_eq!(lost.as_str(), "lost_1_2");
        queue.show_life(&lost).unwrap();
        let item = queue.take(&lost, Placement::LongestFirst, None).unwrap().unwrap();
        assert_eq!(item.index, 1);
        queue.show_life(&alive).unwrap();
        assert_eq!(queue.put_back_stale(&alive, Duration::from_secs(60)).unwrap(), 0);
        let long_ago = SystemTime::now() - Duration::from_secs(600);
        let sign = fs::File::options().write(true).open(queue.sign(&lost)).unwrap();
        sign.set_modified(long_ago).unwrap();
        assert_eq!(queue.put_back_stale(&alive, Duration::from_secs(60)).unwrap(), 1);
        assert_eq!(queue.take(&alive, Placement::LongestFirst, None).unwrap(), Some(item));
        assert!(!queue.settle(&lost, item).unwrap());
        assert!(queue.settle(&alive, item).unwrap());
        // One that was given up is tried again.
        queue.reopen(|index| index == 1).unwrap();
        assert_eq!(queue.items().unwrap().len(), 2);
    }

    #[test]
    fn names_that_are_none_of_ours_are_no_items() {
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
        assert_eq!(queue.items().unwrap(), [Item { index: 0, weight: 1 }]);
        assert!(Queue::open(&dir.path().join("none")).is_err());
    }
}
