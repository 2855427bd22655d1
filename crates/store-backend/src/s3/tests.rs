//! Object storage on a real server: conformance, lost requests, a killed server, expiring leases.

use super::faults::{BUCKET, S3TestOptions, running_server, test_backend, test_location};
use super::*;
use crate::testing::conformance::{check_backend, check_encrypted_backend, pattern};
use std::cell::Cell;
use std::time::Duration;

fn at(endpoint: &str, prefix: &str, lease_s: u64) -> S3Backend {
    test_backend(endpoint, prefix, S3TestOptions { lease_s, ..S3TestOptions::default() })
}

/// Allows a request to be sent `times` times. After that, the lock is lost.
fn allow(times: u32) -> impl Fn() -> Result<()> {
    let asked = Cell::new(0);
    move || {
        asked.set(asked.get() + 1);
        if asked.get() <= times {
            Ok(())
        } else {
            Err(Error::Locked { holder: "the successor".into() })
        }
    }
}

/// Waits until `is_so` returns true, at most two minutes.
fn eventually(mut is_so: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(120), "not so in two minutes");
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn object_storage_conforms() {
    let Some(server) = running_server() else { return };
    let endpoint = server.endpoint();
    let cache = tempfile::tempdir().unwrap();
    let open = |prefix: &'static str| {
        let endpoint = endpoint.clone();
        let cache = Some(cache.path().to_owned());
        let options = S3TestOptions { haste: Some((3, 3)), cache, ..S3TestOptions::default() };
        move || -> Arc<dyn Backend> { Arc::new(test_backend(&endpoint, prefix, options.clone())) }
    };
    check_backend(&open("conforms"));
    check_encrypted_backend(&open("conforms/encrypted"));
}

#[test]
fn every_request_may_fail_once() {
    let Some(server) = running_server() else { return };
    let endpoint = server.endpoint();
    check_backend(&|| {
        let options = S3TestOptions { haste: Some((8, 1000)), ..S3TestOptions::default() };
        let s3 = test_backend(&endpoint, "fails-once", options);
        s3.faults().fail_every_other();
        Arc::new(s3)
    });
}

#[test]
fn a_large_file_is_put_in_pieces_and_read_by_ranges() {
    let Some(server) = running_server() else { return };
    let s3 = at(&server.endpoint(), "large", 60);
    let bytes = pattern(35 << 20, 3);
    s3.put("maps/0000000001.map", &bytes).unwrap();
    assert!(s3.read("maps/0000000001.map", 1 << 30).unwrap() == bytes);
    let file = s3.open("maps/0000000001.map").unwrap();
    assert_eq!(file.len_bytes().unwrap(), bytes.len() as u64);
    let mut part = vec![0; 1000];
    file.read_at(33 << 20, &mut part).unwrap();
    assert!(part == bytes[33 << 20..(33 << 20) + 1000]);
    // A writer that loses its lock between two pieces does not complete the upload.
    let name = "maps/0000000002.map";
    let lost = s3.shared.client.put_while(&allow(3), name, &bytes, Precondition::Always);
    assert!(matches!(lost, Err(Error::Locked { .. })), "{lost:?}");
    assert!(s3.open(name).unwrap_err().is_not_found());
}

#[test]
fn a_pack_that_is_put_whole_keeps_its_parts_and_readers_see_it() {
    let Some(server) = running_server() else { return };
    let s3 = at(&server.endpoint(), "rewritten", 60);
    let name = "packs/00000001.pack";
    let mut bytes = pattern(9 << 20, 1);
    let mut growing = s3.create(name).unwrap();
    growing.append(&bytes).unwrap();
    growing.sync().unwrap();
    drop(growing);
    let objects = || s3.shared.client.list(&format!("{name}/"), ListDepth::Here, None).unwrap();
    let before = objects();
    let assert_read = |expected: &[u8]| {
        let reader = at(&server.endpoint(), "rewritten", 60);
        assert!(reader.read(name, 1 << 30).unwrap() == expected);
        assert_eq!(reader.list("packs").unwrap(), ["00000001.pack"]);
    };
    bytes[5 << 20] ^= 1;
    s3.put(name, &bytes).unwrap();
    assert_read(&bytes);
    let after = objects();
    assert_eq!(before.len(), after.len(), "{before:?} {after:?}");
    let changed = before.iter().zip(&after).filter(|(before, after)| before != after).count();
    assert_eq!(changed, 1, "{before:?} {after:?}");
    bytes.truncate(6 << 20);
    s3.put(name, &bytes).unwrap();
    assert_read(&bytes);
    bytes.extend(pattern(70 << 20, 2));
    s3.put(name, &bytes).unwrap();
    assert_read(&bytes);
    s3.remove(name).unwrap();
    assert!(s3.open(name).unwrap_err().is_not_found());
    assert!(s3.list("packs").unwrap().is_empty());
}

#[test]
fn a_request_is_not_sent_again_after_the_lock_is_lost() {
    let mut client = S3Client::new(test_location("http://127.0.0.1:1", "p", 60));
    client.hasten(5, 3);
    let large = pattern(9 << 20, 1);
    let put = |bytes: &[u8], condition| client.put_while(&allow(2), "tags/a", bytes, condition);
    for lost in [
        put(b"x", Precondition::Always).map(drop),
        put(b"x", Precondition::Absent).map(drop),
        put(&large, Precondition::Always).map(drop),
        client.delete_while(&allow(2), "tags/a"),
    ] {
        assert!(matches!(lost, Err(Error::Locked { .. })), "{lost:?}");
    }
    // A reader needs no lock.
    assert!(matches!(client.get("tags/a", None, 9), Err(Error::Io { .. })));
}

#[test]
fn a_lock_is_freed_only_if_it_is_the_one_that_was_meant() {
    let Some(server) = running_server() else { return };
    let endpoint = server.endpoint();
    let (one, other) = (at(&endpoint, "freed", 600), at(&endpoint, "freed", 600));
    let held = one.lock("the first").unwrap();
    assert_eq!(other.unlock(&|_| false).unwrap(), UnlockOutcome::Held("the first".into()));
    assert_eq!(other.unlock(&|_| true).unwrap(), UnlockOutcome::Removed("the first".into()));
    assert_eq!(other.unlock(&|_| true).unwrap(), UnlockOutcome::Nothing);
    let successor = other.lock("the successor").unwrap();
    // The first holder does not know yet that its lock was broken.
    drop(held);
    assert_eq!(one.lock_holder().unwrap().as_deref(), Some("the successor"));
    assert_eq!(one.unlock(&|_| false).unwrap(), UnlockOutcome::Held("the successor".into()));
    // A caller who means the first holder frees no other's lock.
    let first = |holder: &str| holder == "the first";
    assert_eq!(one.unlock(&first).unwrap(), UnlockOutcome::Held("the successor".into()));
    assert_eq!(other.lock_holder().unwrap().as_deref(), Some("the successor"));
    drop(successor);
    assert_eq!(one.lock_holder().unwrap(), None);
    drop(one.lock("the third").unwrap());
}

#[test]
fn errors_say_what_is_wrong_and_what_to_do() {
    let Some(server) = running_server() else { return };
    let mut strange = test_location(&server.endpoint(), "p", 60);
    strange.credentials = rusty_s3::Credentials::new("test-key", "wrong");
    let error = S3Backend::at(strange, None).read("store.json", 100).unwrap_err();
    let fix = error.fix().unwrap_or_default();
    assert!(
        error.to_string().contains("403") && fix.contains("AWS_SECRET_ACCESS_KEY"),
        "{error}; {fix}"
    );
    assert!(!error.to_string().contains("wrong"), "{error}");
    let mut client = S3Client::new(test_location("http://127.0.0.1:1", "p", 60));
    client.hasten(2, 3);
    let error = S3Backend::over(client, PartCache::new(None, "")).put("tags/a", b"x").unwrap_err();
    let text = format!("{error}; {}", error.fix().unwrap_or_default());
    assert!(
        text.contains(BUCKET) && text.contains("p/tags/a") && text.contains("AWS_ENDPOINT_URL"),
        "{text}"
    );
}

#[test]
fn a_lock_whose_holder_is_gone_ends_and_one_that_is_renewed_does_not() {
    let Some(server) = running_server() else { return };
    let endpoint = server.endpoint();
    // The holder may be late by two thirds of its lease, on a machine that is busy.
    let (one, other) = (at(&endpoint, "lease", 12), at(&endpoint, "lease", 60));
    // The lock of a killed process is not renewed.
    let text = r#"{"holder":"the dead","token":"0","lease_s":1,"renewed":3}"#;
    one.shared.client.put(LOCK, text.as_bytes(), Precondition::Always).unwrap();
    assert!(matches!(other.lock("x"), Err(Error::Locked { holder }) if holder == "the dead"));
    eventually(|| other.lock_holder().unwrap().is_none());
    let held = one.lock("the living").unwrap();
    let twice = |text: &[u8]| {
        serde_json::from_slice::<serde_json::Value>(text).unwrap()["renewed"].as_u64() >= Some(2)
    };
    eventually(|| twice(&one.shared.client.get_if_there(LOCK).unwrap().unwrap().bytes));
    assert!(matches!(other.lock("x"), Err(Error::Locked { holder }) if holder == "the living"));
    one.put("tags/a", b"x").unwrap();
    // After its lock was broken, it writes nothing more and removes nothing of its successor's.
    let mut growing = one.create("packs/00000001.pack").unwrap();
    growing.append(b"records").unwrap();
    assert_eq!(other.unlock(&|_| true).unwrap(), UnlockOutcome::Removed("the living".into()));
    let successor = other.lock("the successor").unwrap();
    eventually(|| one.put("tags/b", b"until it knows").is_err());
    assert!(
        matches!(one.put("tags/a", b"y"), Err(Error::Locked { holder }) if holder == "the successor")
    );
    assert!(matches!(growing.sync(), Err(Error::Locked { .. })));
    assert!(matches!(one.remove("tags/a"), Err(Error::Locked { .. })));
    drop((growing, held));
    assert_eq!(one.lock_holder().unwrap().as_deref(), Some("the successor"));
    assert_eq!(other.read("tags/a", 9).unwrap(), b"x");
    drop(successor);
    assert_eq!(other.unlock(&|_| true).unwrap(), UnlockOutcome::Nothing);
}
