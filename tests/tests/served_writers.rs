//! Tests several VMs that write their checkpoints into one store, some of them through its server: a
//! writer that is stopped until its lease has ended, and a server that is killed.

use keyframe_tests::{Boot, Process, TestEnv, assert_restores_exactly, number, wait_until};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeSet;

fn boot() -> Boot {
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    boot
}

/// Starts the server of the store in `directory`. Returns it with its first line.
fn serve(env: &TestEnv, directory: &str, listen: &str) -> (Process, Value) {
    let args = [
        "serve",
        directory,
        "--allow-write",
        "--writer-lease",
        "4",
        "--listen",
        listen,
        "--http",
        "none",
        "--token-file",
        "token",
        "--json",
    ];
    let mut server = Process::start(env.command(&args));
    let line = server.wait_for("\"url\"");
    (server, serde_json::from_str(&line).expect("what it says first"))
}

/// Starts VM `name`, which writes to `store`.
fn start(env: &TestEnv, name: &str, store: &str) -> Process {
    let audit = format!("audit-{name}");
    let mut args = vec!["run", "--store", store, "--name", name, "--no-rehearsal"];
    args.extend(["--interval", "300ms", "--audit", &audit, "--"]);
    let line = boot().command();
    args.extend(line.iter().map(String::as_str));
    let mut run = Process::start(env.command(&args));
    run.wait_for("KF READY");
    run
}

/// The checkpoints of VM `name`, oldest first.
fn of<'l>(list: &'l [Value], name: &str) -> Vec<&'l Value> {
    list.iter().filter(|one| one["vm"] == name).collect()
}

fn wait_for_more(env: &TestEnv, names: &[&str], more: usize) {
    let last =
        |list: &[Value], name: &str| of(list, name).last().map_or(0, |one| number(one, "id"));
    let before = env.list();
    wait_until(&format!("{more} checkpoints of each of {names:?}"), || {
        let now = env.list();
        names.iter().all(|name| {
            let last = last(&before, name);
            of(&now, name).iter().filter(|one| number(one, "id") > last).count() >= more
        })
    });
}

/// The audit of the run has copied RAM in the pause; the restored VM has the same. `id` is a
/// checkpoint of VM `name`.
fn assert_exact(env: &TestEnv, name: &str, id: u64) {
    let copy = env.path().join(format!("audit-{name}")).join(format!("{id}.ram"));
    std::fs::create_dir_all(env.path().join("audit")).expect("a directory");
    std::fs::copy(copy, env.path().join("audit").join(format!("{id}.ram"))).expect("a copy");
    assert_restores_exactly(env, &id.to_string());
}

#[test]
fn vms_write_to_one_store_here_and_through_its_server_and_none_holds_up_another() {
    let mut env = TestEnv::new();
    let directory = env.store();
    let token = env.path().join("token");
    std::fs::write(&token, "a token of the test's\n").expect("write the token");
    std::fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .expect("protect the token");
    for (name, value) in [("state", "XDG_STATE_HOME"), ("cache", "KEYFRAME_CACHE")] {
        env.set(value, &env.path().join(name).display().to_string());
    }
    env.refused(&["serve", &directory, "--allow-write"], 1, &["without a token", "--token-file"]);
    let (mut server, said) = serve(&env, &directory, "127.0.0.1:0");
    let url = said["url"].as_str().expect("url").to_owned();
    env.set("KEYFRAME_SERVE_FINGERPRINT", said["fingerprint"].as_str().expect("a fingerprint"));
    env.set("KEYFRAME_TOKEN_FILE", &token.display().to_string());
    let env = env.with_store_at(&url);

    let mut here = start(&env, "here", &directory);
    let mut one = start(&env, "one", &url);
    let mut two = start(&env, "two", &url);
    wait_for_more(&env, &["here", "one", "two"], 2);
    let holders = ["VM here", "VM one", "VM two"];
    env.refused(&["unlock", "--store", &directory], 11, &holders);
    let first = of(&env.list(), "two")[0].clone();
    let shown = env.json(&["show", "--json", "--store", &url, &number(&first, "id").to_string()]);
    let counted = |what: &str| number(&shown, what);
    let (stored, found) = (counted("stored_pages"), counted("dedup_pages"));
    assert!(found > stored, "the third VM of one image: {stored} pages stored, {found} found");
    // A client adds; the host of the store removes.
    for refused in [&["prune", "--store", &url][..], &["forget", "--store", &url, "1"]] {
        env.refused(refused, 1, &["read-only", "where the store is"]);
    }
    let keep = ["run", "--store", &url, "--keep-within", "1m", "--", "qemu-system-x86_64"];
    env.refused(&keep, 1, &["read-only"]);
    env.ok(&["prune", "--store", &directory, "--max-unused", "0"]);

    // Stopped until its lease has ended: the others go on, and nothing waits for it.
    two.signal(Signal::STOP);
    wait_until("the place of the stopped writer is free", || {
        let said = env.run(&["unlock", "--store", &directory]);
        !String::from_utf8_lossy(&said.stderr).contains("VM two")
    });
    let runs = |list: &[Value]| -> BTreeSet<String> {
        of(list, "two").iter().map(|one| one["run"].to_string()).collect()
    };
    assert_eq!(runs(&env.list()).len(), 1);
    wait_for_more(&env, &["here", "one"], 2);
    let before = number(of(&env.list(), "two").last().expect("a checkpoint"), "id");
    env.ok(&["forget", "--store", &directory, &before.to_string()]);
    env.ok(&["prune", "--store", &directory, "--max-unused", "0"]);
    two.signal(Signal::CONT);
    two.wait_for_error("a new run begins");
    wait_for_more(&env, &["here", "one", "two"], 2);
    assert_eq!(runs(&env.list()).len(), 2, "it has sealed in the run that had no place");

    // Killed: what is sealed is there, and the runs go on with the next server.
    server.signal(Signal::KILL);
    server.wait();
    let address = url.strip_prefix("kf://").expect("an address");
    let mut server = serve(&env, &directory, address).0;
    one.wait_for_error("a new run begins");
    wait_for_more(&env, &["here", "one", "two"], 2);
    for (name, run) in [("here", &mut here), ("one", &mut one), ("two", &mut two)] {
        env.ok(&["stop", "--name", name]);
        // The audit compares each checkpoint with its copy: then the run has failed. Checkpoints that
        // were not sealed are a warning.
        let exit = run.wait();
        let expected: &[i32] = if name == "here" { &[0] } else { &[0, 3] };
        let is_expected = exit.code().is_some_and(|code| expected.contains(&code));
        assert!(is_expected, "{name}: {exit}: {}", run.report());
    }
    env.ok(&["check", "--read-data", "--quiet", "--store", &directory]);
    let list = env.list();
    for name in ["here", "one", "two"] {
        let id = number(of(&list, name).last().expect("a checkpoint"), "id");
        assert_exact(&env, name, id);
    }
    server.signal(Signal::TERM);
    assert!(server.wait().success(), "{}", server.report());
}
