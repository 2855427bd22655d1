//! Tests a store in object storage, on a real S3 server: a run, readers on other machines
//! meanwhile, a server that is killed in the middle, an exact restore.

use keyframe_tests::s3::{BUCKET, KEY, S3Server};
use keyframe_tests::{Boot, TestEnv, assert_restores_exactly, number};
use std::time::{Duration, Instant};

/// A test whose store is in object storage, and the server. `reader` has its own cache, as another
/// machine would.
fn env(server: &S3Server) -> TestEnv {
    let url = format!("s3://{BUCKET}/vms?endpoint={}", server.endpoint());
    let mut env = TestEnv::without_store().with_store_at(&url);
    for (name, value) in [("AWS_ACCESS_KEY_ID", KEY.0), ("AWS_SECRET_ACCESS_KEY", KEY.1)] {
        env.set(name, value);
    }
    for name in ["XDG_CACHE_HOME", "XDG_STATE_HOME"] {
        let dir = env.path().join(name).display().to_string();
        env.set(name, &dir);
    }
    env
}

fn boot() -> Boot {
    Boot::new("scribble kf.mib=8")
}

#[test]
fn a_run_into_object_storage_is_read_elsewhere_outlives_its_server_and_is_restored_exactly() {
    let Some(mut server) = S3Server::start() else { return };
    let env = env(&server);
    let store = env.store();
    env.ok(&["init", &store]);
    env.refused(&["init", &store], 1, &["a store is already here"]);
    let mut run =
        env.start(&["--interval", "700ms", "--name", "guest", "--audit", "audit"], &boot());
    run.wait_for("KF READY");
    let mut more_than = |than: usize| {
        let taken = run.wait_until(|_| Some(env.list().len()).filter(|sealed| *sealed > than));
        taken.unwrap_or_else(|| panic!("{}", run.report()))
    };
    more_than(1);
    // Another machine reads while the run goes on and the pack grows: another cache, the same
    // bytes.
    let mut elsewhere = env.command(&["check", "--read-data", "--store", &store]);
    elsewhere.env("XDG_CACHE_HOME", env.path().join("elsewhere"));
    let checked = TestEnv::run_within(elsewhere, Duration::from_mins(10));
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    let other =
        ["run", "--store", &store, "--name", "other", "--", "qemu-system-x86_64", "-m", "64"];
    env.refused(&other, 11, &["VM guest"]);
    let ids = || env.list().iter().map(|entry| number(entry, "id")).collect::<Vec<_>>();
    let before = ids();
    let outage = Instant::now();
    server.kill();
    std::thread::sleep(Duration::from_millis(1000));
    server.resume();
    let outage = outage.elapsed();
    let sealed = env.list().len();
    more_than(sealed);
    env.ok(&["stop", "--name", "guest"]);
    let exit = run.wait();
    // A server that takes long to return costs a checkpoint, which is reported; the next one has
    // its pages.
    let costs_one = outage > Duration::from_secs(10) && exit.code() == Some(3);
    assert!(exit.success() || costs_one, "{exit} after an outage of {outage:?}: {}", run.report());
    assert!(exit.success() || run.errors().contains("nothing is lost"), "{}", run.report());
    assert!(ids().starts_with(&before), "{before:?} were sealed before the outage");
    env.ok(&["check", "--read-data", "--store", &store]);
    let list = env.list();
    assert_restores_exactly(&env, &number(&list[list.len() - 1], "id").to_string());
}
