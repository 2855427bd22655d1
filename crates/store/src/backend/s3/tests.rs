//! Object storage as a server really does it: conformance, requests that get lost, a server that is
//! killed, leases that end.

use super::*;
use crate::backend::conformance::{pattern, suite, suite_encrypted};
use crate::{CheckOptions, Store, Tuning};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use ureq::Body;
use ureq::http::Response;

#[path = "../../../tests/support/s3.rs"]
mod server;

/// Requests that fail on purpose.
#[derive(Debug, Default)]
pub struct Faults {
    sent: AtomicU64,
    /// From this request on all fail; 0: none does.
    from: AtomicU64,
    /// They are done, and only their answers are lost.
    is_answer_lost: AtomicBool,
    /// Of each request the first attempt fails, by turns before and after it is done.
    every_other: AtomicBool,
}

impl Faults {
    pub fn send(
        &self,
        send: &dyn Fn() -> Result<Response<Body>, ureq::Error>,
    ) -> Result<Response<Body>, ureq::Error> {
        let number = self.sent.fetch_add(1, Ordering::Relaxed) + 1;
        let from = self.from.load(Ordering::Relaxed);
        let fails = from > 0 && number >= from;
        if fails && !self.is_answer_lost.load(Ordering::Relaxed) {
            return Err(ureq::Error::ConnectionFailed);
        }
        let by_turns = self.every_other.load(Ordering::Relaxed);
        match number % 4 {
            1 if by_turns => return Err(ureq::Error::ConnectionFailed),
            3 if by_turns => {
                drop(send());
                return Err(ureq::Error::ConnectionFailed);
            }
            _ => {}
        }
        let answer = send();
        // Only the first of them got through before the line was cut.
        if fails {
            self.is_answer_lost.store(false, Ordering::Relaxed);
            return Err(ureq::Error::ConnectionFailed);
        }
        answer
    }
}

/// One server for the tests that run at a time; the last one that has it ends it.
fn running() -> Option<Arc<server::S3Server>> {
    static RUNNING: Mutex<Weak<server::S3Server>> = Mutex::new(Weak::new());
    let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(server) = running.upgrade() {
        return Some(server);
    }
    let server = Arc::new(server::S3Server::start()?);
    *running = Arc::downgrade(&server);
    Some(server)
}

fn place(endpoint: &str, prefix: &str, lease_s: u64) -> Place {
    let url = format!("s3://{}/{prefix}?endpoint={endpoint}&lease={lease_s}", server::BUCKET);
    let variables =
        [("AWS_ACCESS_KEY_ID", server::KEY.0), ("AWS_SECRET_ACCESS_KEY", server::KEY.1)];
    let of = |name: &str| {
        variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned())
    };
    Place::parse(Path::new(&url), &of).unwrap()
}

fn at(endpoint: &str, prefix: &str, lease_s: u64) -> S3 {
    S3::at(place(endpoint, prefix, lease_s), None)
}

/// One that gives up at once, and lists three at a time.
fn hasty(endpoint: &str, prefix: &str) -> S3 {
    let mut client = Client::new(place(endpoint, prefix, 60));
    client.hasten(1, 3);
    S3::over(client, Cache::new(None, prefix))
}

fn faults(s3: &S3) -> &Faults {
    &s3.shared.client.faults
}

/// Waits until it is so, for two minutes at most.
fn eventually(mut is_so: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(120), "not so in two minutes");
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn object_storage_conforms() {
    let Some(server) = running() else { return };
    let endpoint = server.endpoint();
    let cache = tempfile::tempdir().unwrap();
    let open = |prefix: &'static str| {
        let (endpoint, cache) = (endpoint.clone(), cache.path().to_owned());
        move || -> Arc<dyn Backend> {
            let mut client = Client::new(place(&endpoint, prefix, 60));
            client.hasten(3, 3);
            S3::over(client, Cache::new(Some(cache.clone()), prefix)).into()
        }
    };
    suite(&open("conforms"));
    suite_encrypted(&open("conforms/encrypted"));
}

impl From<S3> for Arc<dyn Backend> {
    fn from(s3: S3) -> Self {
        Arc::new(s3)
    }
}

#[test]
fn every_request_may_fail_once() {
    let Some(server) = running() else { return };
    let endpoint = server.endpoint();
    suite(&|| {
        let mut client = Client::new(place(&endpoint, "fails-once", 60));
        client.hasten(8, 1000);
        let s3 = S3::over(client, Cache::new(None, ""));
        faults(&s3).every_other.store(true, Ordering::Relaxed);
        Arc::new(s3)
    });
}

#[test]
fn a_large_file_is_put_in_pieces_and_read_by_ranges() {
    let Some(server) = running() else { return };
    let s3 = at(&server.endpoint(), "large", 60);
    let bytes = pattern(35 << 20, 3);
    s3.put("maps/0000000001.map", &bytes).unwrap();
    assert!(s3.read("maps/0000000001.map", 1 << 30).unwrap() == bytes);
    let file = s3.open("maps/0000000001.map").unwrap();
    assert_eq!(file.len_bytes().unwrap(), bytes.len() as u64);
    let mut part = vec![0; 1000];
    file.read_at(33 << 20, &mut part).unwrap();
    assert!(part == bytes[33 << 20..(33 << 20) + 1000]);
}

#[test]
fn a_store_is_made_only_where_nothing_is() {
    let Some(server) = running() else { return };
    let endpoint = server.endpoint();
    let make = |prefix: &str| -> Result<Store> {
        let s3 = at(&endpoint, prefix, 60);
        s3.require_empty()?;
        s3.require_conditions()?;
        Store::init_on(Arc::new(s3), Path::new("x"))
    };
    make("made").unwrap();
    assert!(matches!(make("made"), Err(Error::Exists { .. })));
    at(&endpoint, "other", 60).put("notes.txt", b"mine").unwrap();
    assert!(matches!(make("other"), Err(Error::Exists { .. })));
    let s3 = at(&endpoint, "made", 60);
    assert!(matches!(Store::init_on(Arc::new(s3), Path::new("x")), Err(Error::Exists { .. })));
    let error = Store::open_on(Arc::new(at(&endpoint, "none", 60)), Path::new("none")).unwrap_err();
    assert!(matches!(error, Error::NoStore { .. }), "{error}");
}

#[test]
fn errors_say_what_is_wrong_and_what_to_do() {
    let Some(server) = running() else { return };
    let mut strange = place(&server.endpoint(), "p", 60);
    strange.credentials = rusty_s3::Credentials::new("test-key", "wrong");
    let error = S3::at(strange, None).read("store.json", 100).unwrap_err();
    let fix = error.fix().unwrap_or_default();
    assert!(
        error.to_string().contains("403") && fix.contains("AWS_SECRET_ACCESS_KEY"),
        "{error}; {fix}"
    );
    assert!(!error.to_string().contains("wrong"), "{error}");
    let mut client = Client::new(place("http://127.0.0.1:1", "p", 60));
    client.hasten(2, 3);
    let error = S3::over(client, Cache::new(None, "")).put("tags/a", b"x").unwrap_err();
    let text = format!("{error}; {}", error.fix().unwrap_or_default());
    assert!(
        text.contains(server::BUCKET)
            && text.contains("p/tags/a")
            && text.contains("AWS_ENDPOINT_URL"),
        "{text}"
    );
}

#[test]
fn a_lock_whose_holder_is_gone_ends_and_one_that_is_renewed_does_not() {
    let Some(server) = running() else { return };
    let endpoint = server.endpoint();
    // Two thirds of a lease are what the holder may be late by, on a machine that has much else to
    // do.
    let (one, other) = (at(&endpoint, "lease", 12), at(&endpoint, "lease", 60));
    // A process that was killed: nobody renews what it put.
    let text = r#"{"holder":"the dead","token":"0","lease_s":1,"renewed":3}"#;
    one.shared.client.put(LOCK, text.as_bytes(), If::Always).unwrap();
    assert!(matches!(other.lock("x"), Err(Error::Locked { holder }) if holder == "the dead"));
    eventually(|| other.holder().unwrap().is_none());
    let held = one.lock("the living").unwrap();
    let twice = |text: &[u8]| {
        serde_json::from_slice::<serde_json::Value>(text).unwrap()["renewed"].as_u64() >= Some(2)
    };
    eventually(|| twice(&one.shared.client.get_if_there(LOCK).unwrap().unwrap().bytes));
    assert!(matches!(other.lock("x"), Err(Error::Locked { holder }) if holder == "the living"));
    one.put("tags/a", b"x").unwrap();
    // Taken away: it writes nothing more, whatever it tries, and removes nothing of its
    // successor's.
    let mut growing = one.create("packs/00000001.pack").unwrap();
    growing.append(b"records").unwrap();
    assert_eq!(other.break_lock().unwrap().as_deref(), Some("the living"));
    let successor = other.lock("the successor").unwrap();
    eventually(|| one.put("tags/b", b"until it knows").is_err());
    assert!(
        matches!(one.put("tags/a", b"y"), Err(Error::Locked { holder }) if holder == "the successor")
    );
    assert!(matches!(growing.sync(), Err(Error::Locked { .. })));
    assert!(matches!(one.remove("tags/a"), Err(Error::Locked { .. })));
    drop((growing, held));
    assert_eq!(one.holder().unwrap().as_deref(), Some("the successor"));
    assert_eq!(other.read("tags/a", 9).unwrap(), b"x");
    drop(successor);
    assert_eq!(other.break_lock().unwrap(), None);
}

mod store {
    use super::*;
    use crate::tests::crash::{Known, play_on, script};
    use crate::tests::recompress::{assert_ticked, dense_packs, recompress_tuned, ticks};
    use crate::tests::{TINY, assert_image, deltas::ROOMY, layout, put_changes, run_beside, seal};

    fn open(s3: S3) -> Result<Store> {
        Store::open_on(Arc::new(s3), Path::new("s3"))
    }

    fn assert_known(endpoint: &str, prefix: &str, known: &Known, context: &str) {
        let store = open(at(endpoint, prefix, 60)).unwrap();
        for (id, image) in &known.sealed {
            assert_image(&store, *id, image);
        }
        let strangers = store
            .ids()
            .unwrap()
            .into_iter()
            .filter(|id| !known.sealed.contains_key(id))
            .collect::<Vec<_>>();
        assert!(
            strangers.len() <= usize::from(known.in_progress.is_some()),
            "{context}: {strangers:?}"
        );
        for id in strangers {
            assert_image(&store, id, known.in_progress.as_ref().unwrap());
        }
        let report = store.check(&CheckOptions { read_data: true }, &mut |_| {}).unwrap();
        assert!(report.is_clean(), "{context}: {report:#?}");
    }

    /// The process dies, or its network does, at one request after the other: before it is sent, or
    /// before its answer.
    #[test]
    fn a_crash_at_a_request_loses_at_most_the_checkpoint_in_progress() {
        let Some(server) = running() else { return };
        let endpoint = server.endpoint();
        let sessions = &script(7)[..1];
        let (mut request, mut crashes) = (3, 0);
        loop {
            let prefix = format!("crash-{request}");
            Store::init_on(Arc::new(at(&endpoint, &prefix, 60)), Path::new("s3")).unwrap();
            let s3 = hasty(&endpoint, &prefix);
            faults(&s3).from.store(request, Ordering::Relaxed);
            faults(&s3).is_answer_lost.store(crashes % 2 == 1, Ordering::Relaxed);
            let mut known = Known::default();
            let played =
                open(s3).and_then(|store| play_on(&store, sessions, &mut known, &mut |_, _| false));
            let context = format!("request {request}");
            // The lock of the dead ends with its lease; nobody waits for that here.
            at(&endpoint, &prefix, 60).break_lock().unwrap();
            assert_known(&endpoint, &prefix, &known, &context);
            if played.is_ok() {
                break;
            }
            crashes += 1;
            let mut after = Known::default();
            let store = open(at(&endpoint, &prefix, 60)).unwrap();
            play_on(&store, sessions, &mut after, &mut |_, _| false).unwrap();
            known.in_progress.take();
            for id in store.ids().unwrap() {
                assert!(store.load(id).is_ok(), "{context}: {id}");
            }
            for (id, image) in known.sealed.iter().chain(&after.sealed) {
                assert_image(&store, *id, image);
            }
            request += 3;
        }
        assert!(crashes > 5, "{crashes}");
    }

    /// A server that is killed between two checkpoints and is back soon costs a wait; one that
    /// stays away costs the checkpoint.
    #[test]
    fn a_killed_server_harms_nothing_that_is_sealed() {
        let Some(server) = server::S3Server::start() else { return };
        let endpoint = server.endpoint();
        let server = Mutex::new(server);
        let prefix = "killed";
        Store::init_on(Arc::new(at(&endpoint, prefix, 600)), Path::new("s3")).unwrap();
        let store = open(at(&endpoint, prefix, 600)).unwrap();
        let images = &script(9)[0];
        let pages = images[0].len();
        let mut known = Known::default();
        let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
        let mut run = writer.begin_run("vm", &layout(pages as u64)).unwrap();
        let mut old = vec![0; pages];
        for (number, image) in images.iter().enumerate() {
            let mut put =
                || put_changes(&mut run, &old, image).and_then(|()| seal(&mut run, pages as u64));
            if number == 1 || number == 3 {
                server.lock().unwrap().kill();
            }
            let sealed = if number == 1 {
                std::thread::scope(|scope| {
                    // Back while the writer tries.
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(500));
                        server.lock().unwrap().resume();
                    });
                    put()
                })
            } else {
                put()
            };
            assert_eq!(sealed.is_err(), number == 3, "checkpoint {number}: {sealed:?}");
            if let Ok(sealed) = sealed {
                known.sealed.insert(sealed.id, image.clone());
                old.clone_from(image);
            } else {
                run.abandon();
                server.lock().unwrap().resume();
            }
        }
        run.finish().unwrap();
        drop(writer);
        assert_known(&endpoint, prefix, &known, "killed twice");
    }

    /// The network of the one that recompresses goes at one request after the other: before it is
    /// sent, or before its answer.
    #[test]
    fn recompression_cut_off_at_a_request_costs_nothing_and_is_gone_on_with() {
        let Some(server) = running() else { return };
        let endpoint = server.endpoint();
        let (mut request, mut crashes) = (2, 0);
        loop {
            let prefix = format!("dense-{request}");
            let store =
                Store::init_on(Arc::new(at(&endpoint, &prefix, 60)), Path::new("s3")).unwrap();
            let mut known = Vec::new();
            ticks(&store, 0..3, &mut known);
            let s3 = hasty(&endpoint, &prefix);
            faults(&s3).from.store(request, Ordering::Relaxed);
            faults(&s3).is_answer_lost.store(crashes % 2 == 1, Ordering::Relaxed);
            let cut = open(s3).and_then(|store| recompress_tuned(&store, ROOMY));
            // Nobody waits for the lease of the dead.
            let elsewhere = at(&endpoint, &prefix, 60);
            lease::break_it(&elsewhere.shared.client, PRUNE_LOCK).unwrap();
            let store = open(elsewhere).unwrap();
            assert_ticked(&store, &known);
            let again = recompress_tuned(&store, ROOMY).unwrap();
            assert!(again.postponed_packs == 0 && again.damaged.is_empty(), "{again:?}");
            assert!(dense_packs(&store) > 0);
            // Who has read it before, and who has not.
            assert_ticked(&store, &known);
            assert_ticked(&open(at(&endpoint, &prefix, 60)).unwrap(), &known);
            ticks(&store, 3..4, &mut known);
            assert_ticked(&store, &known);
            if cut.is_ok() {
                break;
            }
            crashes += 1;
            request += 5;
        }
        assert!(crashes > 5, "{crashes}");
    }

    #[test]
    fn a_durability_that_is_not_known_here_is_the_safe_one() {
        let Some(server) = running() else { return };
        let store =
            Store::init_on(Arc::new(at(&server.endpoint(), "durable", 60)), Path::new("s3"))
                .unwrap();
        let tuning = Tuning { durability: crate::Durability::Never, ..TINY };
        let writer = store.lock_writer_tuned("test", tuning).unwrap();
        assert_eq!(writer.durability(), crate::Durability::Checkpoint);
    }

    /// Readers on other machines, while a run goes on; then a prune.
    #[test]
    fn readers_elsewhere_follow_a_run() {
        let Some(server) = running() else { return };
        let endpoint = server.endpoint();
        Store::init_on(Arc::new(at(&endpoint, "followed", 60)), Path::new("s3")).unwrap();
        let store = open(at(&endpoint, "followed", 60)).unwrap();
        let reader = open(at(&endpoint, "followed", 60)).unwrap();
        let images = &script(12)[0];
        let ids = run_beside(&store, &reader, images);
        reader.forget(&ids[..3].iter().copied().collect()).unwrap();
        let options = crate::PruneOptions { max_unused: 0.0, ..crate::PruneOptions::default() };
        reader.prune(&options, &mut |_| {}).unwrap();
        let fresh = open(at(&endpoint, "followed", 60)).unwrap();
        for (id, image) in ids.iter().zip(images).skip(3) {
            assert_image(&fresh, *id, image);
        }
        let report = fresh.check(&CheckOptions { read_data: true }, &mut |_| {}).unwrap();
        assert!(report.is_clean(), "{report:#?}");
    }
}
