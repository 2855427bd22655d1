//! A store in object storage, on a real S3 server: a run, readers elsewhere while it goes on, a
//! server that is killed in the middle, an exact restore.

use keyframe_tests::s3::{BUCKET, KEY, S3Server};
use keyframe_tests::{Bench, Boot, assert_restores_exactly, number};
use std::time::{Duration, Instant};

/// A bench whose store is in object storage, and the server. The cache of `reader` is its own, as
/// that of another machine.
fn bench(server: &S3Server) -> Bench {
    let url = format!("s3://{BUCKET}/vms?endpoint={}", server.endpoint());
    let mut bench = Bench::without_store().at(&url);
    for (name, value) in [("AWS_ACCESS_KEY_ID", KEY.0), ("AWS_SECRET_ACCESS_KEY", KEY.1)] {
        bench.set(name, value);
    }
    for name in ["XDG_CACHE_HOME", "XDG_STATE_HOME"] {
        let dir = bench.path().join(name).display().to_string();
        bench.set(name, &dir);
    }
    bench
}

fn boot() -> Boot {
    Boot::new("scribble kf.mib=8")
}

#[test]
fn a_run_into_object_storage_is_read_elsewhere_outlives_its_server_and_is_restored_exactly() {
    let Some(mut server) = S3Server::start() else { return };
    let bench = bench(&server);
    let store = bench.store();
    bench.ok(&["init", &store]);
    bench.refused(&["init", &store], 1, &["a store is already here"]);
    let mut run =
        bench.start(&["--interval", "700ms", "--name", "guest", "--audit", "audit"], &boot());
    run.wait_for("KF READY");
    let mut more_than = |than: usize| {
        let taken = run.wait_until(|_| Some(bench.list().len()).filter(|sealed| *sealed > than));
        taken.unwrap_or_else(|| panic!("{}", run.report()))
    };
    more_than(1);
    // Elsewhere, while the run goes on and the pack grows: another cache, the same bytes.
    let mut elsewhere = bench.command(&["check", "--read-data", "--store", &store]);
    elsewhere.env("XDG_CACHE_HOME", bench.path().join("elsewhere"));
    let checked = Bench::run_within(elsewhere, Duration::from_mins(10));
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    let other =
        ["run", "--store", &store, "--name", "other", "--", "qemu-system-x86_64", "-m", "64"];
    bench.refused(&other, 11, &["VM guest"]);
    let ids = || bench.list().iter().map(|entry| number(entry, "id")).collect::<Vec<_>>();
    let before = ids();
    let outage = Instant::now();
    server.kill();
    std::thread::sleep(Duration::from_millis(1000));
    server.resume();
    let outage = outage.elapsed();
    let sealed = bench.list().len();
    more_than(sealed);
    bench.ok(&["stop", "--name", "guest"]);
    let exit = run.wait();
    // A server that needs long to be back costs a checkpoint, which is told, and whose pages are in
    // the next one.
    let costs_one = outage > Duration::from_secs(10) && exit.code() == Some(3);
    assert!(exit.success() || costs_one, "{exit} after an outage of {outage:?}: {}", run.report());
    assert!(exit.success() || run.errors().contains("nothing is lost"), "{}", run.report());
    assert!(ids().starts_with(&before), "{before:?} were sealed before the outage");
    bench.ok(&["check", "--read-data", "--store", &store]);
    let list = bench.list();
    assert_restores_exactly(&bench, &number(&list[list.len() - 1], "id").to_string());
}
