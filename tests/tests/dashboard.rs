//! Tests the dashboard: a real VM in the API, in the metrics and in a real browser; a generated
//! store of 10,000 checkpoints; a recording; refusals. Screenshots of each page are in
//! `target/tmp/dashboard`.

use keyframe_tests::{Boot, Browser, Http, Process, TestEnv, number, wait_until};
use keyframe_web::synthetic::{HOSTILE, STORE, SyntheticSource};
use keyframe_web::{DashboardOptions, DashboardServer};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const TOKEN: &str = "a token of the test's";
const BEARER: &str = "Authorization: Bearer a token of the test's";

/// Starts `keyframe serve ARGS` on free ports. Returns it, its dashboard and its first line.
fn serve(env: &TestEnv, args: &[&str]) -> (Process, Http, Value) {
    let all = [&["serve"], args, &["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--json"]]
        .concat();
    let mut server = Process::start(env.command(&all));
    let said: Value =
        serde_json::from_str(&server.wait_for("\"http\"")).expect("what it says first");
    let http = Http::at(said["http"].as_str().expect("an address"));
    (server, http, said)
}

fn end(mut server: Process) -> String {
    server.signal(Signal::TERM);
    assert!(server.wait().success(), "{}", server.report());
    server.errors()
}

fn pictures() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dashboard");
    std::fs::create_dir_all(&folder).expect("make the folder");
    folder
}

/// The value of a series in the Prometheus text; `None` if it is not there.
fn metric_in(text: &str, series: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok())
}

fn metric(text: &str, series: &str) -> f64 {
    metric_in(text, series).unwrap_or_else(|| panic!("no {series} in {text}"))
}

#[test]
fn a_run_is_seen_in_the_api_the_metrics_and_the_browser() {
    let env = TestEnv::new();
    let token = env.path().join("token");
    std::fs::write(&token, format!("{TOKEN}\n")).expect("write the token");
    std::fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .expect("protect the token");
    let mut vm =
        env.start(&["--interval", "300ms", "--name", "web"], &Boot::new("scribble kf.mib=8"));
    // The store that a VM writes to is shown without being named. The engine may count the newest
    // checkpoint a moment later.
    vm.wait_until(|_| env.path().join("store/checkpoints/0000000006.ckpt").exists().then_some(()));
    let (server, http, said) = serve(&env, &["--token-file", "token", "--log-format", "json"]);
    assert_eq!((said.get("url"), &said["needs_token"]), (None, &Value::Bool(true)));
    let store = in_the_api(&env, &http);
    live(&http, &store);
    actions(&env, &http, &store);
    in_the_browser(&http, &said, &store);
    env.ok(&["stop", "--name", "web"]);
    vm.wait();
    // The VM has ended; its checkpoints are still shown.
    assert_eq!(http.get("/api/v1/vms").json(), serde_json::json!([]));
    compared(&env, &http, &store);
    started(&env);
    let lines = end(server);
    let requests: Vec<Value> =
        lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert!(requests.len() > 20, "{lines}");
    for line in &requests {
        assert!(
            line["path"].is_string() && line["status"].is_u64() && line["duration_ns"].is_u64(),
            "{line}"
        );
    }
    assert!(!lines.contains(TOKEN), "the token is in no log");
}

/// The store's id.
fn in_the_api(env: &TestEnv, http: &Http) -> String {
    // An engine that does not answer soon is shown without its status.
    let mut vms = Value::Null;
    wait_until("the engine answers", || {
        vms = http.get("/api/v1/vms").json();
        !vms[0]["status"].is_null()
    });
    assert_eq!(
        (vms[0]["name"].as_str(), vms[0]["status"]["state"].as_str()),
        (Some("web"), Some("running"))
    );
    let store = vms[0]["store"].as_str().expect("its store").to_owned();
    let mut stores = Value::Null;
    wait_until("the store has its VM", || {
        stores = http.get("/api/v1/stores").json();
        !stores[0]["vms"][0].is_null()
    });
    assert_eq!(
        (stores[0]["id"].as_str(), stores[0]["vms"][0].as_str()),
        (Some(&*store), Some("web"))
    );
    // The store's content is counted a moment later.
    let counted = "keyframe_checkpoints_sealed_total{vm=\"web\"}";
    let mut text = String::new();
    wait_until("the engine has counted what it sealed", || {
        text = http.get("/metrics").body;
        metric_in(&text, counted).is_some_and(|sealed| sealed >= 4.0)
    });
    let status = env.json(&["status", "--json"]);
    assert_eq!(metric(&text, "keyframe_vm_up{vm=\"web\"}").to_string(), "1");
    let sealed = metric(&text, counted) as u64;
    assert!((4..=number(&status[0], "sealed")).contains(&sealed), "{sealed}");
    assert!(metric(&text, "keyframe_last_checkpoint_age_seconds{vm=\"web\"}") < 600.0);
    let phases: f64 = ["stop", "scan", "copy", "device_state", "resume"]
        .map(|phase| {
            metric(
                &text,
                &format!(
                    "keyframe_last_checkpoint_pause_phase_seconds{{vm=\"web\",phase=\"{phase}\"}}"
                ),
            )
        })
        .iter()
        .sum();
    let whole = metric(&text, "keyframe_last_checkpoint_pause_seconds{vm=\"web\"}");
    assert!(phases > 0.0 && phases <= whole * 1.01, "{phases} of {whole}");
    let outside = http.send("GET", "/api/v1/vms", &["Host: evil.example"]);
    assert_eq!(outside.status, 421);
    store
}

/// A new checkpoint arrives as an event.
fn live(http: &Http, store: &str) {
    let mut newest = 0;
    let events = http.events("/api/v1/events", |name, data| {
        let is_newer = name == "store" && newest > 0 && number(data, "newest") > newest;
        if name == "store" {
            newest = number(data, "newest");
        }
        is_newer
    });
    assert_eq!(events[0].0, "hello");
    assert!(events.iter().any(|(name, data)| name == "vm" && data["name"] == "web"), "{events:?}");
    assert!(events.iter().all(|(name, data)| name != "store" || data["id"] == store), "{events:?}");
}

fn actions(env: &TestEnv, http: &Http, store: &str) {
    let pin = format!("/api/v1/stores/{store}/checkpoints/2/pin");
    let tag = format!("/api/v1/stores/{store}/checkpoints/2/tags/from-the-page");
    for (method, path) in [("POST", &pin), ("DELETE", &pin), ("POST", &tag)] {
        assert_eq!(http.send(method, path, &[]).status, 401, "{method} {path}");
    }
    let second =
        || env.list().into_iter().find(|one| number(one, "id") == 2).expect("checkpoint 2");
    assert_eq!(second()["pinned"], false);
    assert_eq!(http.send("POST", &pin, &[BEARER]).status, 200);
    assert_eq!(http.send("POST", &tag, &[BEARER]).status, 200);
    assert_eq!(
        (&second()["pinned"], second()["tags"][0].as_str()),
        (&Value::Bool(true), Some("from-the-page"))
    );
    // The page that made the change sees it at once.
    let shown = http.get(&format!("/api/v1/stores/{store}/timeline?vm=web")).json();
    assert_eq!(
        shown["tagged"][0],
        serde_json::json!({ "id": 2, "tags": ["from-the-page"], "pinned": true })
    );
    let hostile = format!("/api/v1/stores/{store}/checkpoints/2/tags/%3Cimg%3E");
    assert_eq!(http.send("POST", &hostile, &[BEARER]).status, 400);
    assert_eq!(http.send("POST", &pin.replace("/2/", "/999999/"), &[BEARER]).status, 404);
    assert_eq!(http.send("DELETE", &pin, &[BEARER]).status, 200);
    assert_eq!(second()["pinned"], false);
    // The VM goes back in the same QEMU. A clone is refused, because the server does not allow it.
    let of = |what: &str| format!("/api/v1/stores/{store}/checkpoints/2/{what}");
    assert_eq!(http.send("POST", &of("rollback"), &[]).status, 401);
    let back = http.send("POST", &of("rollback"), &[BEARER]);
    assert!(back.status == 200 && back.body.contains("is back at checkpoint 2"), "{back:?}");
    assert!(env.list().iter().any(|one| one["reason"] == "rollback"));
    let refused = http.send("POST", &of("branch"), &[BEARER]);
    assert!(refused.status == 400 && refused.body.contains("--allow-start"), "{refused:?}");
}

/// A clone and a VM that the page has started outlive the server.
fn started(env: &TestEnv) {
    let (server, http, _) = serve(env, &[&env.store(), "--token-file", "token", "--allow-start"]);
    let store = http.get("/api/v1/stores").json()[0]["id"].as_str().expect("the store").to_owned();
    let path = format!("/api/v1/stores/{store}/checkpoints/3/branch");
    assert_eq!(http.send("POST", &path, &[]).status, 401);
    assert_eq!(http.send("POST", &path.replace("/3/", "/999/"), &[BEARER]).status, 500);
    let answer = http.send("POST", &path, &[BEARER]);
    assert!(answer.status == 200 && answer.body.contains("clone web-1 runs"), "{answer:?}");
    let restore = path.replace("branch", "restore");
    assert_eq!(http.send("POST", &restore, &[]).status, 401);
    let unknown = http.send("POST", &restore.replace("/3/", "/999/"), &[BEARER]);
    assert!(unknown.status == 500 && unknown.body.contains("999"), "{unknown:?}");
    let restored = http.send("POST", &restore, &[BEARER]);
    assert!(
        restored.status == 200 && restored.body.contains("runs as it was at checkpoint 3"),
        "{restored:?}"
    );
    let console = restored.body.split("console in ").nth(1).and_then(|rest| rest.split(';').next());
    let console = console.unwrap_or_else(|| panic!("no console in {restored:?}"));
    end(server);
    wait_until("the guest says something", || {
        std::fs::read(console).is_ok_and(|said| !said.is_empty())
    });
    let shown = env.ok(&["status"]);
    assert!(shown.contains("web-1: a clone") && shown.contains("web: restored"), "{shown}");
    env.ok(&["stop", "--name", "web"]);
    wait_until("the restored VM has ended", || !env.ok(&["status"]).contains("web: restored"));
    let pid = answer
        .body
        .rsplit("kill ")
        .next()
        .and_then(|rest| rest.trim_end_matches(['"', '}', '\n']).parse().ok());
    let pid = pid.and_then(Pid::from_raw).unwrap_or_else(|| panic!("no pid in {answer:?}"));
    kill_process(pid, Signal::TERM).expect("end the clone");
    wait_until("the clone has ended", || !env.ok(&["status"]).contains("web-1"));
}

/// Heat and diff are equal to the output of the commands.
fn compared(env: &TestEnv, http: &Http, store: &str) {
    let of = |id: u64| format!("/api/v1/stores/{store}/checkpoints/{id}");
    let shown = http.get(&of(3)).json();
    assert_eq!(
        (number(&shown, "parent"), number(&shown, "previous"), number(&shown, "next")),
        (2, 2, 4)
    );
    let commands = shown["commands"].as_array().expect("commands");
    let restore = commands.iter().find(|one| one["name"] == "restore").expect("restore");
    assert_eq!(restore["command"], format!("keyframe restore --store {} 3", env.store()));
    let diff = http.get(&format!("{}/diff", of(3))).json();
    assert_eq!(diff, env.json(&["diff", "--json", "--quiet", "--store", &env.store(), "2", "3"]));
    let heat = http.get(&format!("{}/heat?pieces=100", of(3))).json();
    for (region, differs) in heat["regions"]
        .as_array()
        .expect("regions")
        .iter()
        .zip(diff["ram"].as_array().expect("RAM"))
    {
        let sum: u64 =
            region["changed"].as_array().expect("pieces").iter().filter_map(Value::as_u64).sum();
        assert_eq!((sum, &region["name"]), (number(differs, "changed_pages"), &differs["name"]));
    }
    assert_eq!(
        http.send("GET", &format!("{}/diff", of(1)), &[]).status,
        404,
        "the first has no parent"
    );
    let growth = || http.get(&format!("/api/v1/stores/{store}/growth")).json();
    let stats = env.json(&["stats", "--json", "--store", &env.store()]);
    // The size on disk is updated every few seconds, and the last checkpoint is soon listed.
    wait_until("all is seen", || {
        let sizes = &growth()["sizes"];
        ["total_bytes", "raw_bytes"].iter().all(|field| sizes[field] == stats[field])
    });
    let growth = growth();
    for field in ["raw_bytes", "dirty_bytes", "stored_pages", "total_bytes", "dedup_ratio"] {
        assert_eq!(growth["sizes"][field], stats[field], "{field}");
    }
    let listed = env.list().len() as u64;
    let timeline = http.get(&format!("/api/v1/stores/{store}/timeline?vm=web")).json();
    assert_eq!((number(&timeline, "total"), number(&timeline, "shown")), (listed, listed));
}

fn in_the_browser(http: &Http, said: &Value, store: &str) {
    let (mut browser, pictures, url) =
        (Browser::start(), pictures(), said["http"].as_str().expect("an address"));
    browser.set_appearance((1280, 1000), false);
    browser.open(url);
    browser.wait_until("document.querySelector('tr[data-vm=web] .state-running')");
    browser.wait_until("document.getElementById('live').dataset.state === 'live'");
    browser.screenshot(&pictures.join("overview.png"));
    browser.evaluate("document.querySelector('tr[data-vm=web] a').click()");
    browser.wait_until("document.querySelector('#timeline')?.dataset.checkpoints >= 4");
    // The timeline grows while the page is open.
    let before =
        browser.evaluate("Number(document.querySelector('#timeline').dataset.checkpoints)");
    browser
        .wait_until(&format!("document.querySelector('#timeline').dataset.checkpoints > {before}"));
    let total =
        number(&http.get(&format!("/api/v1/stores/{store}/timeline?vm=web")).json(), "total");
    let shown = browser.evaluate("Number(document.querySelector('#timeline').dataset.checkpoints)");
    assert!(shown.as_u64().is_some_and(|shown| shown <= total), "{shown} of {total}");
    browser.screenshot(&pictures.join("vm.png"));
    // The keyboard alone moves along the timeline and opens a checkpoint.
    browser.evaluate("document.querySelector('#timeline').focus()");
    for key in ["Home", "ArrowRight", "ArrowRight", "ArrowLeft"] {
        browser.press(key);
    }
    browser
        .wait_until("document.querySelector('#readout').textContent.startsWith('Checkpoint 2,')");
    browser.press("Enter");
    browser.wait_until("document.querySelector('h2').textContent === 'Checkpoint 2 of web'");
    browser.wait_until("document.querySelectorAll('.heat rect').length > 100");
    let commands = browser.evaluate(
        "[...document.querySelectorAll('[data-command] code')].map(one => one.textContent).join('\\n')",
    );
    for command in [
        "keyframe restore --store",
        "keyframe branch --store",
        "keyframe pin --store",
        "keyframe rollback 2 --name web",
    ] {
        assert!(
            commands.as_str().is_some_and(|all| all.contains(command)),
            "no {command} in {commands}"
        );
    }
    browser.screenshot(&pictures.join("checkpoint.png"));
    browser.set_appearance((420, 900), true);
    browser.screenshot(&pictures.join("checkpoint-dark-narrow.png"));
    browser.evaluate(&format!("location.hash = '#/store/{store}'"));
    browser.set_appearance((1280, 1000), true);
    browser.wait_until("document.querySelectorAll('polyline').length === 2");
    browser.screenshot(&pictures.join("store-dark.png"));
    let errors = browser.take_errors();
    assert!(errors.is_empty(), "{errors:#?}");
}

/// Waits until a page has drawn `count` updates, and prints how long each took until it was
/// visible.
fn updates(browser: &mut Browser, page: &str, count: usize) {
    browser.evaluate("performance.clearMeasures('update')");
    browser.wait_until(&format!("performance.getEntriesByName('update').length >= {count}"));
    let took = browser.evaluate("performance.getEntriesByName('update').map((entry) => Math.round(entry.duration)).sort((a, b) => a - b).join(' ')");
    println!("20 VMs, 10,000 checkpoints, {page}: updates on the screen after {took} ms");
}

#[test]
fn ten_thousand_checkpoints_with_hostile_names_stay_small_and_harmless() {
    let listen = "127.0.0.1:0".parse().expect("an address");
    let server = DashboardServer::bind(DashboardOptions {
        listen,
        token: None,
        connections_max: 64,
        log: None,
    })
    .expect("listen");
    let url = format!("http://{}/", server.address());
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let serving = std::thread::spawn(move || {
        server.run(Arc::new(SyntheticSource::new(20, 10_000).living()), &stopped)
    });
    let mut browser = Browser::start();
    browser.set_appearance((1280, 1000), false);
    browser.open(&url);
    browser.wait_until("document.querySelectorAll('tr[data-vm] svg.spark path').length === 20");
    let paint =
        browser.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime");
    println!("20 VMs, 10,000 checkpoints: first contentful paint after {paint} ms");
    browser.screenshot(&pictures().join("many.png"));
    updates(&mut browser, "all VMs", 4);
    the_timeline_zooms_in(&mut browser);
    no_page_runs_a_hostile_name(&mut browser);
    a_screen_reader_finds_each_part(&mut browser);
    let errors = browser.take_errors();
    assert!(errors.is_empty(), "{errors:#?}");
    drop(browser);
    stop.store(true, Ordering::Relaxed);
    serving.join().expect("the server").expect("its end");
}

/// The VM with the hostile name has its page, and so have its checkpoints.
fn the_timeline_zooms_in(browser: &mut Browser) {
    browser.evaluate("document.querySelector('tr[data-vm] a').click()");
    browser.wait_until("document.querySelector('#timeline')?.dataset.checkpoints === '500'");
    updates(browser, "one VM", 2);
    let name = browser.evaluate("document.querySelector('h2').textContent");
    assert_eq!(name.as_str(), Some(HOSTILE));
    assert!(
        browser.evaluate("Number(document.querySelector('#timeline').dataset.buckets)").as_u64()
            <= Some(300)
    );
    // Enter zooms into a place that several checkpoints share, and opens a single one.
    browser.evaluate("document.querySelector('#timeline').focus()");
    for _ in 0..2 {
        browser.press("End");
        browser.press("Enter");
        browser.wait_until("document.querySelector('h2').textContent.startsWith('Checkpoint ') || document.querySelector('#timeline').dataset.checkpoints < 500");
    }
    browser
        .wait_until("document.querySelector('h2').textContent.startsWith('Checkpoint 10000 of')");
}

fn no_page_runs_a_hostile_name(browser: &mut Browser) {
    let pages =
        [format!("#/store/{STORE}"), "#/recordings".into(), format!("#/checkpoint/{STORE}/7")];
    for page in pages.into_iter().chain(["#/replication/protected".into()]) {
        browser.evaluate(&format!("location.hash = '{page}'"));
        browser.wait_until(&format!("document.getElementById('main').dataset.shown === '{page}'"));
    }
    let text = browser.evaluate("document.body.innerText");
    for word in ["protected", "1 epochs, 9.00 ms", "3 (300 B)", "Why they were taken"] {
        assert!(text.as_str().is_some_and(|text| text.contains(word)), "{word}: {text}");
    }
    browser.screenshot(&pictures().join("replication.png"));
    assert_eq!(browser.evaluate("window.hacked"), Value::Null);
    assert_eq!(browser.evaluate("document.images.length"), 0);
    // A checkpoint of a VM with a display shows its screen.
    browser.evaluate(&format!("location.hash = '#/checkpoint/{STORE}/8'"));
    browser.wait_until("document.querySelector('img.screen')?.naturalWidth === 1");
    let words = browser.evaluate("document.querySelector('img.screen').alt");
    assert_eq!(words.as_str(), Some("what the display of vm-8 showed at checkpoint 8"));
}

fn a_screen_reader_finds_each_part(browser: &mut Browser) {
    browser.evaluate("location.hash = '#/'");
    browser.wait_until("document.querySelectorAll('tr[data-vm]').length === 22");
    let nodes = browser.accessibility_nodes();
    for (role, word) in [
        ("main", ""),
        ("navigation", "Pages"),
        ("table", ""),
        ("image", "Pauses of"),
        ("status", ""),
    ] {
        assert!(
            nodes.iter().any(|(r, name)| r == role && name.contains(word)),
            "no {role} {word:?} in {nodes:#?}"
        );
    }
}

#[test]
fn what_would_show_vms_to_the_network_or_nothing_at_all_is_refused() {
    let env = TestEnv::new();
    env.refused(
        &["serve", "--http", "0.0.0.0:0"],
        1,
        &["other machines can reach", "--token-file"],
    );
    env.refused(&["serve", "--http", "none"], 2, &["nothing to serve", "name a store"]);
    env.refused(&["serve", "--http", "nowhere"], 1, &["nowhere", "--http 127.0.0.1:7421"]);
    let (server, http, _) = serve(&env, &[]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().expect("its address").to_string();
    env.refused(&["serve", "--http", &taken], 1, &["listen", "another process uses this address"]);
    assert_eq!(http.get("/api/v1/stores").json(), serde_json::json!([]));
    assert!(http.get("/").body.contains("<title>Keyframe</title>"));
    let changed = http.send("POST", "/api/v1/stores/x/checkpoints/1/pin", &[]);
    assert!(changed.status == 403 && changed.body.contains("read-only"), "{changed:?}");
    assert_eq!(end(server), "", "quiet, unless it is asked to tell");
    // Without the dashboard, the server still serves the store.
    let mut plain = Process::start(env.command(&[
        "serve",
        &env.store(),
        "--listen",
        "127.0.0.1:0",
        "--http",
        "none",
        "--json",
    ]));
    let said: Value = serde_json::from_str(&plain.wait_for("\"url\"")).expect("JSON");
    assert!(said.get("http").is_none() && said["fingerprint"].is_string(), "{said}");
    end(plain);
}
