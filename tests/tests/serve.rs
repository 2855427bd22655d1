//! Tests a store that is read through its server, as on another node: exact lazy restores, the
//! amount that they transfer, refused readers, a server that is killed.

use keyframe_tests::{
    Boot, Process, TestEnv, assert_restores_exactly_with, number, take_audited_checkpoints,
};
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;

const TOKEN: &str = "a token of the test's";
const MEM_MIB: u64 = 128;

/// Starts a server of the test's store. Returns it with its first line.
fn serve(env: &TestEnv, store: &str, listen: &str) -> (Process, Value) {
    let args = ["serve", store, "--listen", listen, "--token-file", "token", "--json"];
    let mut server = Process::start(env.command(&args));
    let line = server.wait_for("\"url\"");
    (server, serde_json::from_str(&line).expect("what it says first"))
}

/// Ends the server; returns its last line.
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
    let mut env = TestEnv::new();
    let state = env.path().join("state").display().to_string();
    env.set("XDG_STATE_HOME", &state);
    let token = env.path().join("token");
    std::fs::write(&token, format!("{TOKEN}\n")).expect("write the token");
    std::fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .expect("protect the token");
    let boot = Boot { mem_mib: MEM_MIB, ..Boot::new("scribble kf.mib=8") };
    let (_, last) = take_audited_checkpoints(&env, &boot, &["--interval", "500ms"], 4);
    let before = (last.parse::<u64>().expect("a number") - 1).to_string();
    let store = env.store();
    let listed = env.list().len();
    let open = ["serve", &store, "--listen", "0.0.0.0:0"];
    env.refused(&open, 1, &["can be reached from other machines", "--token-file"]);

    let (server, said) = serve(&env, &store, "127.0.0.1:0");
    let (url, fingerprint) =
        (said["url"].as_str().expect("url"), said["fingerprint"].as_str().expect("print"));
    let address = url.strip_prefix("kf://").expect("an address");
    let mut node = env.with_store_at(url);
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

    // A node with an empty cache, then the same node with the checkpoint before.
    assert_restores_exactly_with(&node, &before, &["--lazy"]);
    let first = number(&end(server), "bytes_sent");
    // The server's certificate is kept, so that the node knows it again.
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

/// A server that ends while it is read, and another one in its place.
fn killed(node: &mut TestEnv, store: &str, address: &str) {
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
        // Sometimes it has read all before.
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
