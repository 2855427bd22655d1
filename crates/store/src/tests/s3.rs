//! A store in object storage, on a server of this host: crashes at requests, a server that is
//! killed, readers on other hosts.

use super::crash::{Known, play_on, script};
use super::recompress::{assert_ticked, dense_packs, recompress_tuned, ticks};
use super::{TINY, assert_image, deltas::ROOMY, layout, put_changes, run_beside, seal};
use crate::{CheckOptions, Durability, Error, PruneOptions, Result, Store, Tuning};
use keyframe_store_backend::testing::s3_server::S3Server;
use keyframe_store_backend::testing::{S3TestOptions, running_server, test_backend};
use keyframe_store_backend::{Backend, S3Backend};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn at(endpoint: &str, prefix: &str, lease_s: u64) -> S3Backend {
    test_backend(endpoint, prefix, S3TestOptions { lease_s, ..S3TestOptions::default() })
}

/// A backend that gives up at once, and lists three keys at a time.
fn hasty(endpoint: &str, prefix: &str) -> S3Backend {
    test_backend(
        endpoint,
        prefix,
        S3TestOptions { haste: Some((1, 3)), ..S3TestOptions::default() },
    )
}

#[test]
fn a_store_is_made_only_where_nothing_is() {
    let Some(server) = running_server() else { return };
    let endpoint = server.endpoint();
    let make = |prefix: &str| -> Result<Store> {
        let s3 = at(&endpoint, prefix, 60);
        s3.check_new()?;
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

fn open(s3: S3Backend) -> Result<Store> {
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
    let Some(server) = running_server() else { return };
    let endpoint = server.endpoint();
    let sessions = &script(7)[..1];
    let (mut request, mut crashes) = (3, 0);
    loop {
        let prefix = format!("crash-{request}");
        Store::init_on(Arc::new(at(&endpoint, &prefix, 60)), Path::new("s3")).unwrap();
        let s3 = hasty(&endpoint, &prefix);
        s3.faults().fail_from(request, crashes % 2 == 1);
        let mut known = Known::default();
        let played =
            open(s3).and_then(|store| play_on(&store, sessions, &mut known, &mut |_, _| false));
        let context = format!("request {request}");
        // The lock of a dead process ends with its lease. The test does not wait for that.
        at(&endpoint, &prefix, 60).break_locks().unwrap();
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
    let Some(server) = S3Server::start() else { return };
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
fn a_recompression_interrupted_at_a_request_costs_nothing_and_continues() {
    let Some(server) = running_server() else { return };
    let endpoint = server.endpoint();
    let (mut request, mut crashes) = (2, 0);
    loop {
        let prefix = format!("dense-{request}");
        let store = Store::init_on(Arc::new(at(&endpoint, &prefix, 60)), Path::new("s3")).unwrap();
        let mut known = Vec::new();
        ticks(&store, 0..3, &mut known);
        let s3 = hasty(&endpoint, &prefix);
        s3.faults().fail_from(request, crashes % 2 == 1);
        let cut = open(s3).and_then(|store| recompress_tuned(&store, ROOMY));
        // The test does not wait for the lease of the dead process.
        let elsewhere = at(&endpoint, &prefix, 60);
        elsewhere.break_locks().unwrap();
        let store = open(elsewhere).unwrap();
        assert_ticked(&store, &known);
        let again = recompress_tuned(&store, ROOMY).unwrap();
        assert!(again.postponed_packs == 0 && again.damaged.is_empty(), "{again:?}");
        assert!(dense_packs(&store) > 0);
        // A reader that has read it before, and one that has not.
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
    let Some(server) = running_server() else { return };
    let store =
        Store::init_on(Arc::new(at(&server.endpoint(), "durable", 60)), Path::new("s3")).unwrap();
    let tuning = Tuning { durability: Durability::Never, ..TINY };
    let writer = store.lock_writer_tuned("test", tuning).unwrap();
    assert_eq!(writer.durability(), Durability::Checkpoint);
}

/// Readers on other machines, while a run goes on; then a prune.
#[test]
fn readers_elsewhere_follow_a_run() {
    let Some(server) = running_server() else { return };
    let endpoint = server.endpoint();
    Store::init_on(Arc::new(at(&endpoint, "followed", 60)), Path::new("s3")).unwrap();
    let store = open(at(&endpoint, "followed", 60)).unwrap();
    let reader = open(at(&endpoint, "followed", 60)).unwrap();
    let images = &script(12)[0];
    let ids = run_beside(&store, &reader, images);
    reader.forget(&ids[..3].iter().copied().collect()).unwrap();
    let options = PruneOptions { max_unused: 0.0, ..PruneOptions::default() };
    reader.prune(&options, &mut |_| {}).unwrap();
    let fresh = open(at(&endpoint, "followed", 60)).unwrap();
    for (id, image) in ids.iter().zip(images).skip(3) {
        assert_image(&fresh, *id, image);
    }
    let report = fresh.check(&CheckOptions { read_data: true }, &mut |_| {}).unwrap();
    assert!(report.is_clean(), "{report:#?}");
}
