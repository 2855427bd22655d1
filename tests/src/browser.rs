//! Debian's Chromium without a display, driven through its DevTools protocol.
//!
//! ```text
//!   test ──▶ JSON, ended by a NUL ──▶ descriptor 3 ──▶ chromium --remote-debugging-pipe
//!        ◀── answers and events ◀──── descriptor 4 ◀──┘
//! ```
//!
//! The protocol goes over pipes: no port is opened, and no WebSocket needed. Chromium has a process
//! group of its own, which ends with this. Errors of the page (exceptions, refusals by its own
//! policy, files that are missing) are gathered: a test asks that there are none.

use crate::PATIENCE;
use base64::Engine;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// An answer comes in that time.
const ANSWER_MAX: Duration = PATIENCE;
/// It ends by itself in that time, or is ended.
const END_MAX: Duration = Duration::from_secs(5);
/// What it is started with, in a container and as root too.
const OPTIONS: [&str; 12] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
];

/// A browser with one page.
pub struct Browser {
    child: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    asked: u64,
    session: Option<String>,
    errors: Vec<String>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// With an empty page.
    pub fn start() -> Self {
        let profile =
            tempfile::Builder::new().prefix("keyframe-browser-").tempdir().expect("a directory");
        // Its end of the pipes is 3 and 4.
        let script = r#"exec 3<&0 4>&1; exec "$@" </dev/null >"$KEYFRAME_BROWSER_LOG" 2>&1"#;
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]).arg(crate::on_path("chromium")).args(OPTIONS);
        command
            .arg(format!("--user-data-dir={}", profile.path().join("profile").display()))
            .arg("about:blank")
            .env("KEYFRAME_BROWSER_LOG", profile.path().join("log"))
            .env("HOME", profile.path())
            .env_remove("DISPLAY")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("start chromium");
        let input = child.stdin.take().expect("its input");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        let (sender, messages) = channel();
        // It ends with the pipe.
        std::thread::spawn(move || {
            for message in output.split(0).map_while(Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else { continue };
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let (asked, session, errors) = (0, None, Vec::new());
        let mut browser =
            Self { child, input, messages, asked, session, errors, _profile: profile };
        let target = browser.ask("Target.createTarget", &json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session =
            browser.ask("Target.attachToTarget", &attach)["sessionId"].as_str().map(str::to_owned);
        browser.session = Some(session.expect("a session"));
        for domain in ["Page", "Runtime", "Log", "Accessibility"] {
            browser.ask(&format!("{domain}.enable"), &json!({}));
        }
        browser
    }

    /// Asks for something of the protocol; what it answers.
    pub fn ask(&mut self, method: &str, parameters: &Value) -> Value {
        self.asked += 1;
        let id = self.asked;
        let mut message = json!({ "id": id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.input.write_all(format!("{message}\0").as_bytes()).expect("tell chromium");
        let deadline = Instant::now() + ANSWER_MAX;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let message =
                self.messages.recv_timeout(left).unwrap_or_else(|e| panic!("{method}: {e}"));
            if message["id"] == id {
                assert!(message["error"].is_null(), "{method}: {}", message["error"]);
                return message["result"].clone();
            }
            self.hear(&message);
        }
    }

    fn hear(&mut self, event: &Value) {
        let told = &event["params"];
        match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => {
                self.errors.push(told["exceptionDetails"].to_string())
            }
            Some("Log.entryAdded") if told["entry"]["level"] == "error" => {
                self.errors.push(told["entry"].to_string());
            }
            _ => {}
        }
    }

    /// What went wrong in the page since this was asked last.
    pub fn errors(&mut self) -> Vec<String> {
        self.script("0");
        std::mem::take(&mut self.errors)
    }

    /// Opens an address.
    pub fn open(&mut self, url: &str) {
        let opened = self.ask("Page.navigate", &json!({ "url": url }));
        assert!(opened["errorText"].is_null(), "{url}: {opened}");
    }

    /// The value of an expression in the page; a promise is waited for.
    pub fn script(&mut self, expression: &str) -> Value {
        let asked =
            json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let answer = self.ask("Runtime.evaluate", &asked);
        assert!(
            answer["exceptionDetails"].is_null(),
            "{expression}: {}",
            answer["exceptionDetails"]
        );
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub fn until(&mut self, expression: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.script(&format!("!!({expression})")) != true {
            let text = || self.script("document.body.innerText");
            assert!(
                Instant::now() < deadline,
                "not so in {PATIENCE:?}: {expression}; the page says: {}",
                { text }()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Presses a key, as `KeyboardEvent.key` names it.
    pub fn press(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            // A key that is not a letter is known by its code alone.
            self.ask("Input.dispatchKeyEvent", &json!({ "type": kind, "key": key, "code": key }));
        }
    }

    /// How large the window is, in pixels, and whether the user likes it dark.
    pub fn look(&mut self, (width, height): (u32, u32), dark: bool) {
        let size =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.ask("Emulation.setDeviceMetricsOverride", &size);
        let value = if dark { "dark" } else { "light" };
        let scheme = json!({ "features": [{ "name": "prefers-color-scheme", "value": value }] });
        self.ask("Emulation.setEmulatedMedia", &scheme);
    }

    /// Names and roles of all that a screen reader is told.
    pub fn spoken(&mut self) -> Vec<(String, String)> {
        let tree = self.ask("Accessibility.getFullAXTree", &json!({}));
        let nodes = tree["nodes"].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value["value"].as_str().unwrap_or_default().to_owned();
        let told = nodes.iter().filter(|node| node["ignored"] != true);
        told.map(|node| (text(&node["role"]), text(&node["name"]))).collect()
    }

    /// Writes what it shows to a PNG.
    pub fn screenshot(&mut self, path: &Path) {
        let shot = self.ask("Page.captureScreenshot", &json!({ "format": "png" }));
        let data = shot["data"].as_str().expect("a picture");
        let bytes = base64::engine::general_purpose::STANDARD.decode(data).expect("base64");
        std::fs::write(path, bytes).expect("write the picture");
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let close = json!({ "id": u32::MAX, "method": "Browser.close" });
        let _ = self.input.write_all(format!("{close}\0").as_bytes());
        let deadline = Instant::now() + END_MAX;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        // Whoever is left of its group, and nobody else.
        if let Some(group) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}
