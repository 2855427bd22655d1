//! A store in object storage, on a real S3 server: a run, readers elsewhere while it goes on, a server that is killed in the middle,
//! an exact restore.

use keyframe_tests::s3::{BUCKET, KEY, S3Server};
use keyframe_tests::{Bench, Boot, assert_restores_exactly, number};

/// A bench whose store is in object storage, and the server. The cache of `reader` is its own, as that of another machine.
fn bench(server: &S3Server, query: &str) -> Bench {
    let url = format!("s3://{BUCKET}/vms?endpoint={}{query}", server.endpoint());
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
    Boot { mem_mib: 64, ..Boot::new("scribble kf.mib=8") }
}

#[test]
fn a_run_into_object_storage_is_read_elsewhere_and_restored_exactly() {
    let Some(server) = S3Server::start() else { return };
    let bench = bench(&server, "");
    let store = bench.store();
    bench.ok(&["init", &store]);
    bench.refused(&["init", &store], 1, &["a store is already here"]);
    let mut run = bench.start(&["--interval", "700ms", "--name", "guest", "--audit", "audit"], &boot());
    run.wait_for("KF READY");
    let taken = run.wait_until(90, |_| (bench.list().len() >= 3).then_some(()));
    assert!(taken.is_some(), "{}", run.report());
    // Elsewhere, while the run goes on and the pack grows: another cache, the same bytes.
    let mut elsewhere = bench.command(&["check", "--read-data", "--store", &store]);
    elsewhere.env("XDG_CACHE_HOME", bench.path().join("elsewhere"));
    let checked = Bench::run_within(elsewhere, std::time::Duration::from_secs(60));
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    bench.refused(
        &["run", "--store", &store, "--name", "other", "--", "qemu-system-x86_64", "-m", "64"],
        11,
        &["VM guest"],
    );
    bench.ok(&["stop", "--name", "guest"]);
    let exit = run.wait();
    assert!(exit.success(), "{exit}: {}", run.report());
    bench.ok(&["check", "--read-data", "--store", &store]);
    let list = bench.list();
    assert_restores_exactly(&bench, &number(&list[list.len() - 1], "id").to_string());
    assert_restores_exactly(&bench, &number(&list[list.len() - 2], "id").to_string());
}

#[test]
fn a_server_that_is_killed_and_back_costs_no_sealed_checkpoint() {
    let Some(mut server) = S3Server::start() else { return };
    let bench = bench(&server, "");
    let store = bench.store();
    bench.ok(&["init", &store]);
    let mut run = bench.start(&["--interval", "500ms", "--name", "guest"], &boot());
    run.wait_for("KF READY");
    let mut more = |than: usize| {
        let taken = run.wait_until(90, |_| (bench.list().len() > than).then_some(()));
        assert!(taken.is_some(), "{}", run.report());
        bench.list().len()
    };
    let before = more(1);
    server.kill();
    std::thread::sleep(std::time::Duration::from_millis(1500));
    server.resume();
    more(before + 1);
    bench.ok(&["stop", "--name", "guest"]);
    let exit = run.wait();
    assert!(exit.success(), "{exit}: {}", run.report());
    bench.ok(&["check", "--read-data", "--store", &store]);
}
