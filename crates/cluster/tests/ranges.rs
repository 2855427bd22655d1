//! Ranges on a fake replayer: workers go on from item to item, take over the rest of each other's
//! ranges, die, and come back when others have their items. Each item is published once, and
//! settled once.

use keyframe_cluster::{Placement, Preference, Queue, QueueItem, Share, WorkerId};
use std::collections::BTreeMap;

const SEEDS: u64 = 500;

/// Pseudo-random numbers, the same in each run (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % end
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Working,
    /// It does nothing. Others may take it for lost; it may go on where it was.
    Silent,
    /// Its process is gone.
    Dead,
}

struct FakeWorker {
    id: WorkerId,
    share: Share,
    state: State,
    /// The item that it replays.
    item: Option<QueueItem>,
    last: Option<u32>,
}

struct Schedule {
    _dir: tempfile::TempDir,
    queue: Queue,
    random: Random,
    workers: Vec<FakeWorker>,
    /// The worker of each published part.
    published: BTreeMap<u32, usize>,
    settled: usize,
    ranges: usize,
    losses: usize,
}

impl Schedule {
    fn new(seed: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let queue = Queue::create(dir.path()).unwrap();
        let mut random = Random(seed);
        for index in 0..=random.below(32) as u32 {
            queue.add(QueueItem { index, weight: 1 + random.below(100) }).unwrap();
        }
        queue.close().unwrap();
        let mut this = Self {
            _dir: dir,
            queue,
            random,
            workers: Vec::new(),
            published: BTreeMap::new(),
            settled: 0,
            ranges: 0,
            losses: 0,
        };
        let count = 1 + this.random.below(5) as u32;
        (0..count).for_each(|number| this.start(Share { number, count }));
        this
    }

    fn start(&mut self, share: Share) {
        let id = WorkerId::new(&format!("w{}", self.workers.len()));
        let state = State::Working;
        self.workers.push(FakeWorker { id, share, state, item: None, last: None });
    }

    /// One step of a worker that was chosen at random.
    fn step(&mut self) {
        let at = self.random.below(self.workers.len() as u64) as usize;
        let event = self.random.below(40);
        let worker = &mut self.workers[at];
        match (worker.state, event) {
            (State::Silent, 0..10) => worker.state = State::Working,
            (State::Silent | State::Dead, _) => {}
            (State::Working, 0) => {
                worker.state = State::Silent;
                self.lose(at);
            }
            (State::Working, 1) => {
                worker.state = State::Dead;
                let share = worker.share;
                self.lose(at);
                // A new worker, as of a new round of pilots.
                self.start(share);
            }
            (State::Working, _) => self.work(at),
        }
    }

    /// The others take the worker for lost.
    fn lose(&mut self, at: usize) {
        let id = self.workers[at].id.clone();
        self.losses += 1;
        self.queue.return_items(|worker| *worker == id).unwrap();
    }

    fn work(&mut self, at: usize) {
        let worker = &mut self.workers[at];
        let Some(item) = worker.item else {
            let preference =
                Preference { last: worker.last, share: Some(worker.share), live: None };
            let taken = self.queue.take(&worker.id, Placement::Neighbours, preference).unwrap();
            self.ranges += usize::from(taken.is_some());
            worker.item = taken;
            return;
        };
        // A part is renamed to its place, which fails if it is there.
        self.published.entry(item.index).or_insert(at);
        self.settled += usize::from(self.queue.settle(&worker.id, item).unwrap());
        worker.last = Some(item.index);
        worker.item = self.queue.take_number(&worker.id, item.index + 1).unwrap();
    }

    fn is_done(&self) -> bool {
        self.queue.items().unwrap().is_empty() && self.queue.taken().unwrap().is_empty()
    }
}

#[test]
fn each_item_is_published_and_settled_once_in_any_schedule() {
    for seed in 0..SEEDS {
        let mut schedule = Schedule::new(seed);
        let count = schedule.queue.items().unwrap().len();
        let mut steps = 0;
        while !schedule.is_done() {
            schedule.step();
            steps += 1;
            assert!(steps < 100_000, "seed {seed} does not end");
        }
        let Schedule { queue, workers, published, settled, ranges, losses, .. } = schedule;
        let all: Vec<u32> = (0..count as u32).collect();
        assert_eq!(published.keys().copied().collect::<Vec<_>>(), all, "seed {seed}");
        assert_eq!(queue.settled().unwrap().len(), count, "seed {seed}");
        assert_eq!(settled, count, "seed {seed}: an item is settled once");
        let allowed = workers.len() * (count.ilog2() as usize + 2) + 2 * losses;
        assert!(ranges <= allowed, "seed {seed}: {ranges} ranges of {count} items");
    }
}
