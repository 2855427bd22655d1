use super::*;
use keyframe_store_backend::layout::MAPS;
use keyframe_store_backend::testing::FaultyBackend;

const LEASE: Duration = Duration::from_millis(1000);

struct Bench {
    medium: FaultyBackend,
    writers: Arc<RemoteWriters>,
    clock: Arc<AtomicU64>,
}

impl Bench {
    fn new() -> Self {
        let (medium, clock) = (FaultyBackend::default(), Arc::new(AtomicU64::new(0)));
        let (opened, now) = (medium.clone(), Arc::clone(&clock));
        let options = RemoteWriterOptions {
            lease: LEASE,
            open: Box::new(move || Ok(Arc::new(opened.process()))),
            settle: Box::new(|_, _| Ok(Vec::new())),
            clock: Box::new(move || now.load(Ordering::Relaxed)),
        };
        Self { medium, writers: Arc::new(RemoteWriters::new(options)), clock }
    }

    fn join(&self, id: u8) -> u32 {
        let granted = RemoteWriters::join(&self.writers, [id; 16], "one").unwrap();
        self.act(id, 1, &WriteAct::Started).unwrap();
        granted.slot
    }

    fn act(&self, id: u8, sequence: u64, act: &WriteAct) -> Result<(), Refusal> {
        self.writers.write(&[id; 16], sequence, act)
    }

    fn refused(&self, id: u8, sequence: u64, act: &WriteAct, code: RefusalCode) {
        let Refusal(found, said) = self.act(id, sequence, act).unwrap_err();
        assert_eq!(found, code, "{act:?}: {said}");
    }

    fn pass(&self, ms: u64) {
        self.clock.fetch_add(ms, Ordering::Relaxed);
        self.writers.expire();
    }

    fn living(&self) -> usize {
        self.medium.writers().unwrap().iter().filter(|writer| writer.lives).count()
    }
}

fn put(name: &str, bytes: &[u8]) -> WriteAct {
    WriteAct::Put { name: name.into(), is_new: true, staged: 0, bytes: bytes.to_vec() }
}

#[test]
fn an_act_is_carried_out_once_and_none_after_a_later_one() {
    let bench = Bench::new();
    bench.join(1);
    let map = "maps/0000000001.map";
    bench.act(1, 2, &put(map, b"a")).unwrap();
    // Sent again, because the answer did not come.
    bench.act(1, 2, &put(map, b"a")).unwrap();
    bench.refused(1, 3, &put(map, b"b"), RefusalCode::Exists);
    bench.refused(1, 3, &put(map, b"b"), RefusalCode::Exists);
    bench.act(1, 5, &WriteAct::Remove { name: map.into() }).unwrap();
    // It was under way for long.
    bench.refused(1, 4, &put(map, b"late"), RefusalCode::Strange);
    assert!(bench.medium.open(map).unwrap_err().is_not_found());
}

#[test]
fn a_lease_that_ends_gives_the_place_back_and_one_that_is_renewed_does_not() {
    let bench = Bench::new();
    let slots = [bench.join(1), bench.join(2)];
    assert_eq!((slots, bench.living()), ([0, 1], 2));
    bench.pass(900);
    bench.writers.renew(&[1; 16], true).unwrap();
    bench.pass(200);
    assert_eq!(bench.living(), 1);
    bench.refused(2, 2, &put("maps/0000000001.map", b"x"), RefusalCode::Ended);
    assert!(bench.writers.renew(&[2; 16], true).is_err());
    // It is over also before anybody has looked.
    bench.clock.fetch_add(1001, Ordering::Relaxed);
    bench.refused(1, 2, &put("maps/0000000001.map", b"x"), RefusalCode::Ended);
    assert_eq!(bench.living(), 0);
    assert!(bench.medium.files().is_empty());
    assert_eq!(bench.join(3), 0);
    bench.act(3, 2, &WriteAct::Leave).unwrap();
    assert_eq!(bench.living(), 0);
    bench.refused(3, 3, &WriteAct::Started, RefusalCode::Ended);
}

#[test]
fn a_writer_that_starts_for_too_long_is_ended_even_if_it_renews_its_lease() {
    let bench = Bench::new();
    RemoteWriters::join(&bench.writers, [1; 16], "stuck").unwrap();
    // Another writer gets the answer that it has to wait. The first one asks again and gets the same
    // place.
    for _ in 0..60 {
        bench.pass(900);
        let _ = bench.writers.renew(&[1; 16], false);
    }
    assert_eq!(bench.living(), 0);
    bench.join(2);
    // A renewal says that it has started, where that act was lost.
    RemoteWriters::join(&bench.writers, [3; 16], "three").unwrap();
    bench.writers.renew(&[3; 16], true).unwrap();
    bench.join(4);
    assert_eq!(bench.living(), 3);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let bench = Bench::new();
    bench.join(1);
    let pack = || "packs/00000001.pack".to_owned();
    let append =
        |offset, bytes: &[u8]| WriteAct::Append { name: pack(), offset, bytes: bytes.to_vec() };
    bench.refused(1, 2, &append(0, b"x"), RefusalCode::Denied);
    bench.act(1, 3, &WriteAct::Create { name: pack() }).unwrap();
    bench.refused(1, 4, &append(1, b"x"), RefusalCode::Strange);
    bench.act(1, 5, &append(0, b"abc")).unwrap();
    bench.act(1, 6, &WriteAct::Truncate { name: pack(), len_bytes: 2 }).unwrap();
    bench.refused(1, 7, &WriteAct::Truncate { name: pack(), len_bytes: 9 }, RefusalCode::Ends);
    bench.refused(1, 8, &WriteAct::Create { name: "packs/../x".into() }, RefusalCode::Denied);
    bench.refused(1, 9, &WriteAct::Sync { name: "store.json".into() }, RefusalCode::Denied);
    let stage = |offset| WriteAct::Stage { offset, bytes: vec![7; 10] };
    bench.act(1, 10, &stage(0)).unwrap();
    bench.refused(1, 11, &stage(5), RefusalCode::Strange);
    bench.refused(1, 12, &put("maps/0000000001.map", b"x"), RefusalCode::Strange);
    // Numbers do not run out because one client is wrong.
    bench.refused(1, 13, &put("maps/18446744073709551615.map", b"x"), RefusalCode::Denied);
    let tell = |state: &str| WriteAct::Tell { state: state.into() };
    bench.refused(1, 14, &tell("{\"number\":18446744073709551615}"), RefusalCode::Denied);
    bench.refused(1, 15, &tell("no JSON"), RefusalCode::Strange);
    bench.act(1, 16, &tell("{\"number\":7,\"pack\":1}")).unwrap();
    bench.act(1, 17, &put("maps/0000000007.map", b"x")).unwrap();
    assert!(bench.medium.list(MAPS).unwrap() == ["0000000007.map"]);
    assert!(RemoteWriters::join(&bench.writers, [9; 16], "a\u{1b}[2J").is_err());
}
