//! Tests reports of a store, and of a recording with an analysis, which the dashboard shows, too.

use keyframe_tests::{Boot, Http, Process, TestEnv, number};
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;

/// Reads the report, which must be one file without references to others.
fn report(env: &TestEnv, args: &[&str]) -> String {
    env.ok(&[&["report", "-o", "report.html"], args].concat());
    let html = std::fs::read_to_string(env.path().join("report.html")).expect("the report");
    let without_namespace = html.replace("http://www.w3.org/2000/svg", "");
    for word in ["<script", "http://", "https://", "src=", "<link"] {
        assert!(!without_namespace.contains(word), "{word} in the report");
    }
    assert_eq!(html.matches("<figure").count(), html.matches("<svg").count());
    assert!(html.trim_end().ends_with("</html>"));
    html
}

#[test]
fn a_store_and_a_recording_are_reported() {
    let env = TestEnv::new();
    let mut vm = env.start(
        &["--interval", "200ms", "--count", "5", "--name", "web"],
        &Boot::new("scribble kf.mib=4"),
    );
    assert!(vm.wait().success(), "{}", vm.report());
    let html = report(&env, &[&env.store()]);
    let stats = env.json(&["stats", "--json", "--store", &env.store()]);
    let longest =
        env.list().iter().map(|one| number(one, "dirty_pages")).max().expect("checkpoints");
    for word in [
        "VM web",
        "Pauses by phase",
        "Growth",
        "Saved by deduplication",
        &longest.to_string(),
        &number(&stats, "stored_pages").to_string(),
    ] {
        assert!(html.contains(word), "no {word:?} in the report");
    }
    env.refused(&["report", "nowhere", "-o", "r.html"], 10, &["nowhere"]);
    assert!(!env.path().join("r.html").exists());
    recorded(&env);
}

fn recorded(env: &TestEnv) {
    let boot = Boot { machine: "q35".into(), mem_mib: 96, ..Boot::new("scribble kf.mib=4") };
    let mut command = env.command(&["record", "--out", "R", "--checkpoint-every", "500ms"]);
    command.arg("--").args(boot.command());
    let mut vm = Process::start(command);
    let there = |path: &Path| std::fs::read_dir(path).map_or(0, Iterator::count);
    let folder = env.path().join("R/store/checkpoints");
    vm.wait_until(|_| (there(&folder) >= 4).then_some(()));
    vm.signal(Signal::INT);
    assert!(vm.wait().success(), "{}", vm.report());
    env.ok(&["analyze", "R", "--tool", "icount", "--out", "O"]);
    let html = report(env, &["R", "--analysis", "O"]);
    for word in
        ["Instructions of each interval", "Analysis icount", "From checkpoint", "Pauses by phase"]
    {
        assert!(html.contains(word), "no {word:?} in the report");
    }
    let args = ["serve", "--recordings", ".", "--analysis", "O", "--http", "127.0.0.1:0", "--json"];
    let mut server = Process::start(env.command(&args));
    let said: Value = serde_json::from_str(&server.wait_for("\"http\"")).expect("JSON");
    let http = Http::at(said["http"].as_str().expect("an address"));
    let all = http.get("/api/v1/recordings").json();
    let shown = &all["recordings"][0];
    let meta =
        std::fs::read_to_string(env.path().join("R/recording.json")).expect("recording.json");
    let meta: Value = serde_json::from_str(&meta).expect("JSON");
    assert_eq!((&shown["id"], &shown["instructions"]), (&meta["id"], &meta["instructions"]));
    let intervals = number(shown, "intervals");
    let instructions: u64 = shown["pieces"]
        .as_array()
        .expect("pieces")
        .iter()
        .map(|one| number(one, "end_icount") - number(one, "from_icount"))
        .sum();
    assert_eq!(
        instructions,
        number(&meta, "instructions"),
        "intervals cover the recording: {shown:#}"
    );
    let analysis = &shown["analyses"][0];
    assert!(intervals >= 3 && number(analysis, "failed") == 0, "{shown:#}");
    assert_eq!(number(analysis, "done"), number(analysis, "intervals"), "{analysis:#}");
    // The recording's checkpoints are shown as any others.
    let store = shown["store"].as_str().expect("its store");
    let timeline = http.get(&format!("/api/v1/stores/{store}/timeline")).json();
    assert_eq!(number(&timeline, "total"), number(shown, "checkpoints"));
    server.signal(Signal::TERM);
    assert!(server.wait().success(), "{}", server.report());
}
