//! Random sequences of checkpoints against the naive model.

use super::*;
use crate::{PutOutcome, Writer};
use proptest::prelude::*;

const PAGES: u64 = 300;

#[derive(Clone, Debug)]
enum Op {
    /// Pages set to contents out of a small pool, so that contents repeat; 0 is zero.
    PutOutcome(Vec<(u64, u64)>),
    Seal,
    Abandon,
    NewRun,
    /// Drops everything without finishing and opens again.
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    let puts =
        prop::collection::vec((0..PAGES, prop_oneof![2 => Just(0u64), 8 => 1u64..60]), 0..12);
    prop_oneof![
        10 => puts.prop_map(Op::PutOutcome),
        12 => Just(Op::Seal),
        1 => Just(Op::Abandon),
        1 => Just(Op::NewRun),
        1 => Just(Op::Reopen),
    ]
}

struct Subject {
    medium: FaultyBackend,
    tuning: Tuning,
    writer: Option<Writer>,
    run: Option<Run>,
    /// The run's pages at the last seal, and now.
    sealed: Image,
    now: Image,
    truth: BTreeMap<CheckpointId, Image>,
}

impl Subject {
    fn new(tuning: Tuning) -> Self {
        let medium = FaultyBackend::default();
        init_on(&medium).unwrap();
        let blank = vec![0; PAGES as usize];
        let (sealed, now) = (blank.clone(), blank);
        let mut this =
            Self { medium, tuning, writer: None, run: None, sealed, now, truth: BTreeMap::new() };
        this.reopen();
        this
    }

    fn reopen(&mut self) {
        (self.run, self.writer) = (None, None);
        self.writer =
            Some(on(&self.medium).unwrap().lock_writer_tuned("test", self.tuning).unwrap());
        self.begin();
    }

    fn begin(&mut self) {
        if let Some(run) = self.run.take() {
            run.finish().unwrap();
        }
        self.run = Some(self.writer.as_mut().unwrap().begin_run("vm", &layout(PAGES)).unwrap());
        self.sealed = vec![0; PAGES as usize];
        // A run starts from nothing: the first checkpoint is complete.
        let all = std::mem::replace(&mut self.now, self.sealed.clone());
        self.put(&(0..).zip(all).collect::<Vec<_>>());
    }

    fn put(&mut self, puts: &[(u64, u64)]) {
        for (page, number) in puts {
            let put =
                self.run.as_mut().unwrap().put_page(PageIndex(*page), &content(*number)).unwrap();
            let was = std::mem::replace(&mut self.now[*page as usize], *number);
            match put {
                PutOutcome::Zero => assert_eq!(*number, 0),
                PutOutcome::Unchanged => assert_eq!(was, *number),
                PutOutcome::Dedup | PutOutcome::Stored { .. } => {
                    assert!(*number != 0 && was != *number);
                }
            }
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::PutOutcome(puts) => self.put(puts),
            Op::Seal => {
                let sealed = seal(self.run.as_mut().unwrap(), PAGES).unwrap();
                let c = sealed.meta.counts;
                let sum = c.zero_pages + c.dedup_pages + c.unchanged_pages + c.stored_pages;
                assert_eq!(c.dirty_pages, sum);
                self.truth.insert(sealed.id, self.now.clone());
                self.sealed = self.now.clone();
            }
            Op::Abandon => {
                self.run.as_mut().unwrap().abandon();
                self.now = self.sealed.clone();
            }
            Op::NewRun => self.begin(),
            Op::Reopen => self.reopen(),
        }
    }

    fn verify(&self) {
        let store = on(&self.medium).unwrap();
        let found: Vec<_> = store.checkpoints().unwrap().sealed.iter().map(|s| s.id).collect();
        assert_eq!(found, self.truth.keys().copied().collect::<Vec<_>>());
        for (id, image) in &self.truth {
            assert_image(&store, *id, image);
        }
        assert_clean(&store);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn every_checkpoint_is_what_was_put(ops in prop::collection::vec(op(), 1..140), base in 2u64..5) {
        let mut subject = Subject::new(Tuning { chain_base: base, ..TINY });
        for op in &ops {
            subject.apply(op);
        }
        subject.verify();
    }
}

#[test]
fn a_long_run_crosses_the_levels_of_the_default_chain() {
    let mut subject = Subject::new(Tuning::default());
    subject.put(&(0..PAGES).map(|p| (p, 1000 + p)).collect::<Vec<_>>());
    for epoch in 0..300u64 {
        subject.apply(&Op::PutOutcome(vec![
            (epoch % PAGES, 2 * epoch),
            (epoch * 7 % 50, epoch % 3),
            (5, epoch),
        ]));
        subject.apply(&Op::Seal);
    }
    subject.verify();
    let chains: Vec<_> = on(&subject.medium)
        .unwrap()
        .checkpoints()
        .unwrap()
        .sealed
        .iter()
        .map(|s| s.meta.map_chain.len())
        .collect();
    // 255 = 15 * 16 + 15: the longest there is below 256; at 256 a third level begins.
    assert_eq!((chains[15], chains[16], chains[255], chains[256]), (16, 2, 31, 2));
}

#[test]
fn the_last_put_wins_and_the_counts_show_its_outcome() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer("test").unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    let mut put = |page, number| run.put_page(PageIndex(page), &content(number)).unwrap();
    assert!(matches!(put(0, 2), PutOutcome::Stored { bytes } if bytes < 200));
    assert_eq!(put(0, 1), PutOutcome::Stored { bytes: 28 + 4096 });
    assert_eq!(put(0, 1), PutOutcome::Unchanged);
    assert_eq!(put(1, 1), PutOutcome::Dedup);
    assert_eq!(put(2, 0), PutOutcome::Zero);
    assert_eq!((put(3, 3), put(3, 0)), (PutOutcome::Stored { bytes: 28 + 4096 }, PutOutcome::Zero));
    let first = seal(&mut run, PAGES).unwrap();
    let c = first.meta.counts;
    assert_eq!(
        (c.dirty_pages, c.stored_pages, c.dedup_pages, c.zero_pages, c.unchanged_pages),
        (4, 1, 1, 2, 0)
    );
    assert!(c.stored_bytes > 2 * 4124 && c.stored_bytes < 2 * 4124 + 200, "{}", c.stored_bytes);
    assert_eq!(run.put_page(PageIndex(1), &content(1)).unwrap(), PutOutcome::Unchanged);
    let second = seal(&mut run, PAGES).unwrap();
    assert_eq!((second.meta.counts.dirty_pages, second.meta.counts.unchanged_pages), (1, 1));
    assert!(
        second.meta.counts.map_bytes < 200,
        "nothing changed: {} bytes",
        second.meta.counts.map_bytes
    );
    assert_image(&store, first.id, &[1, 1]);
    assert_image(&store, second.id, &[1, 1]);
    assert!(matches!(
        run.put_zero(PageIndex(PAGES)),
        Err(Error::PageOutside { space_pages: PAGES, .. })
    ));
    assert!(matches!(seal(&mut run, PAGES + 1), Err(Error::LayoutChanged { epoch: 2, .. })));
    run.finish().unwrap();
    let stats = store.stats().unwrap();
    assert_eq!((stats.checkpoints, stats.runs, stats.raw_bytes), (2, 1, 2 * PAGES * 4096));
    assert_eq!(
        stats.total_bytes,
        medium
            .files()
            .iter()
            .filter(|(n, _)| n.contains('/'))
            .map(|(_, b)| b.len() as u64)
            .sum::<u64>()
    );
}

#[test]
fn pages_of_another_run_are_not_stored_again() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let image: Image = (0..PAGES).map(|p| p + 10).collect();
    for session in 0..3 {
        let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
        let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
        put_changes(&mut run, &vec![0; PAGES as usize], &image).unwrap();
        let counts = seal(&mut run, PAGES).unwrap().meta.counts;
        let expected = if session == 0 { (PAGES, 0) } else { (0, PAGES) };
        assert_eq!((counts.stored_pages, counts.dedup_pages), expected, "session {session}");
        // The second one ends like a crash: its successor finds an unfinished pack.
        if session != 1 {
            run.finish().unwrap();
        }
    }
}

#[test]
fn a_run_is_alone_and_moves_to_another_thread_while_tags_are_set() {
    let store = init_on(&FaultyBackend::default()).unwrap();
    let mut writer = store.lock_writer("test").unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    assert!(matches!(writer.begin_run("vm", &layout(PAGES)), Err(Error::RunOpen)));
    let first = seal(&mut run, PAGES).unwrap().id;
    let thread = std::thread::spawn(move || {
        run.put_page(PageIndex(0), &content(5)).unwrap();
        let tagged =
            run.seal(SealRequest { tag: Some("late"), ..request(&layout(PAGES)) }).unwrap();
        run.finish().unwrap();
        tagged
    });
    writer.set_tag("early", first).unwrap();
    let tagged = thread.join().unwrap();
    assert_eq!(tagged.tags, ["late"]);
    assert_eq!(
        (store.resolve("early").unwrap(), store.resolve("late").unwrap()),
        (first, tagged.id)
    );
    assert_eq!(
        (store.resolve("latest").unwrap(), store.resolve("0001").unwrap()),
        (tagged.id, first)
    );
    writer.set_tag("early", tagged.id).unwrap();
    let listed = store.checkpoints().unwrap().sealed;
    assert_eq!(listed.iter().map(|s| s.tags.len()).collect::<Vec<_>>(), [0, 2]);
    for name in ["3", "nobody", "", "a/../b", "99999999999999999999999"] {
        let error = store.resolve(name).unwrap_err();
        assert!(
            matches!(error, Error::UnknownCheckpoint { newest: Some(n), .. } if n == tagged.id),
            "{error}"
        );
    }
    assert!(matches!(writer.set_tag("latest", first), Err(Error::InvalidTag { .. })));
    assert!(matches!(writer.set_tag("x", CheckpointId(9)), Err(Error::UnknownCheckpoint { .. })));
    assert!(writer.begin_run("vm", &layout(PAGES)).is_ok());
}
