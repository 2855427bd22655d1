//! A store that is read through its server, as on another node: exact lazy restores, what they
//! transfer, who may not read, a server that is killed.

use keyframe_tests::{Bench, Boot, Process, assert_restores_exactly_with, audited, number};
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;

const TOKEN: &str = "a token of the test's";
const MEM_MIB: u64 = 128;

/// A server of the bench's own store, and what it said first.
fn serve(bench: &Bench, store: &str, listen: &str) -> (Process, Value) {
    let args = ["serve", store, "--listen", listen, "--token-file", "token", "--json"];
    let mut server = Process::start(bench.command(&args));
    let line = server.wait_for("\"url\"");
    (server, serde_json::from_str(&line).expect("what it says first"))
}

/// Ends it; what it said last.
fn end(mut server: Process) -> Value {
    server.signal(Signal::TERM);
    assert!(server.wait().success(), "{}", server.report());
    let line = server.wait_for("bytes_sent");
    serde_json::from_str(&line).expect("its report")
}

fn pieces(cache: &Path) -> usize {
    std::fs::read_dir(cache.join("served")).map_or(0, Iterator::count)
}

#[test]
fn nodes_restore_from_a_server_exactly_and_transfer_what_they_lack() {
    let mut bench = Bench::new();
    let state = bench.path().join("state").display().to_string();
    bench.set("XDG_STATE_HOME", &state);
    std::fs::write(bench.path().join("token"), format!("{TOKEN}\n")).expect("write the token");
    let boot = Boot { mem_mib: MEM_MIB, ..Boot::new("scribble kf.mib=8") };
    let (_, last) = audited(&bench, &boot, &["--interval", "500ms"], 4);
    let before = (last.parse::<u64>().expect("a number") - 1).to_string();
    let store = bench.store();
    let listed = bench.list().len();
    let open = ["serve", &store, "--listen", "0.0.0.0:0"];
    bench.refused(&open, 1, &["can be reached from other machines", "--token-file"]);

    let (server, said) = serve(&bench, &store, "127.0.0.1:0");
    let (url, fingerprint) =
        (said["url"].as_str().expect("url"), said["fingerprint"].as_str().expect("print"));
    let address = url.strip_prefix("kf://").expect("an address");
    let mut node = bench.at(url);
    let cache = node.path().join("cache");
    let list = ["list", "--store", url];
    node.refused(&list, 1, &["KEYFRAME_SERVE_FINGERPRINT"]);
    node.set("KEYFRAME_SERVE_FINGERPRINT", fingerprint);
    node.set("KEYFRAME_TOKEN", "guessed");
    node.refused(&list, 1, &["the token is not the one", "KEYFRAME_TOKEN"]);
    node.set("KEYFRAME_TOKEN", TOKEN);
    node.set("KEYFRAME_CACHE", &cache.display().to_string());
    assert_eq!(node.list().len(), listed);
    node.refused(
        &["tag", "--store", url, "latest", "mine"],
        1,
        &["read-only", "where the store is"],
    );

    // A node with nothing, then the same with the checkpoint before.
    assert_restores_exactly_with(&node, &before, &["--lazy"]);
    let first = number(&end(server), "bytes_sent");
    // Known again: its certificate is kept.
    let (server, again) = serve(&node, &store, address);
    assert_eq!(again["fingerprint"], said["fingerprint"]);
    assert_restores_exactly_with(&node, &last, &["--lazy"]);
    let report = end(server);
    let second = number(&report, "bytes_sent");
    println!("{first} bytes sent for the first restore, {second} for the second, of {MEM_MIB} MiB");
    assert!(second * 100 <= MEM_MIB * 1024 * 1024 * 15, "{report}");
    assert!(first > second, "{first} bytes sent, then {second}");

    killed(&mut node, &store, address);
}

/// A server that goes while it is read, and one that comes in its place.
fn killed(node: &mut Bench, store: &str, address: &str) {
    let url = node.store();
    let whole =
        ["export", "latest", "--store", &url, "--format", "raw", "-o", "out.raw", "--quiet"];
    let (mut server, mut caught) = (serve(node, store, address).0, None);
    for round in 0..30 {
        let cache = node.path().join(format!("cache-{round}"));
        node.set("KEYFRAME_CACHE", &cache.display().to_string());
        let _ = std::fs::remove_file(node.path().join("out.raw"));
        let mut reader = Process::start(node.command(&whole));
        reader.wait_until(|_| (pieces(&cache) > 8).then_some(()));
        server.signal(Signal::KILL);
        server.wait();
        let exit = reader.wait();
        server = serve(node, store, address).0;
        // It had all already, now and then.
        if !exit.success() {
            caught = Some(reader.errors());
            break;
        }
    }
    let said = caught.expect("a reader that was not done when its server was killed");
    for word in ["no answer from the checkpoint server", "fix:"] {
        assert!(said.contains(word), "no {word:?} in {said}");
    }
    let told = node.path().join("fetched");
    node.set("KEYFRAME_FETCHED", &told.display().to_string());
    let _ = std::fs::remove_file(node.path().join("out.raw"));
    node.ok(&whole);
    let fetched: Value =
        serde_json::from_str(&std::fs::read_to_string(told).expect("what was fetched"))
            .expect("JSON");
    assert!(number(&fetched, "cache_hits") > 8, "what had come was fetched again: {fetched}");
    let copy = node.path().join("copy").display().to_string();
    node.ok(&["init", &copy]);
    node.ok(&["copy", "--store", &url, "--all", "--to", &copy, "--quiet"]);
    node.ok(&["check", "--read-data", "--quiet", "--store", &copy]);
    let report = end(server);
    assert_eq!(number(&report, "refused"), 0);
    assert!(number(&report, "bytes_sent") >= number(&fetched, "bytes_fetched"));
}
