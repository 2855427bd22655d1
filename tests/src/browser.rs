//! Chromium without a display, driven through its DevTools protocol.
//!
//! ```text
//!   test ──▶ JSON, ended by a NUL ──▶ descriptor 3 ──▶ chromium --remote-debugging-pipe
//!        ◀── answers and events ◀──── descriptor 4 ◀──┘
//! ```
//!
//! The protocol uses pipes, so that no port and no WebSocket is needed. Chromium has its own process
//! group, which ends with [`Browser`]. Errors of the page (exceptions, violations of its content
//! policy, missing files) are collected; a test asserts that there are none.

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

/// How long an answer may take.
const ANSWER_MAX: Duration = PATIENCE;
/// How long Chromium has to end before it is killed.
const END_MAX: Duration = Duration::from_secs(5);
/// Options that also work in a container and as root.
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
    last_id: u64,
    session: Option<String>,
    errors: Vec<String>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts a browser with an empty page.
    pub fn start() -> Self {
        let profile =
            tempfile::Builder::new().prefix("keyframe-browser-").tempdir().expect("a directory");
        // Chromium's ends of the pipes are descriptors 3 and 4.
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
        // The thread ends with the pipe.
        std::thread::spawn(move || {
            for message in output.split(0).map_while(Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else { continue };
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let (last_id, session, errors) = (0, None, Vec::new());
        let mut browser =
            Self { child, input, messages, last_id, session, errors, _profile: profile };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session =
            browser.call("Target.attachToTarget", &attach)["sessionId"].as_str().map(str::to_owned);
        browser.session = Some(session.expect("a session"));
        for domain in ["Page", "Runtime", "Log", "Accessibility"] {
            browser.call(&format!("{domain}.enable"), &json!({}));
        }
        browser
    }

    /// Calls a method of the protocol and returns its result.
    pub fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.last_id += 1;
        let id = self.last_id;
        let mut message = json!({ "id": id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.input.write_all(format!("{message}\0").as_bytes()).expect("write to chromium");
        let deadline = Instant::now() + ANSWER_MAX;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let message =
                self.messages.recv_timeout(left).unwrap_or_else(|e| panic!("{method}: {e}"));
            if message["id"] == id {
                assert!(message["error"].is_null(), "{method}: {}", message["error"]);
                return message["result"].clone();
            }
            self.collect_error(&message);
        }
    }

    fn collect_error(&mut self, event: &Value) {
        let parameters = &event["params"];
        match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => {
                self.errors.push(parameters["exceptionDetails"].to_string());
            }
            Some("Log.entryAdded") if parameters["entry"]["level"] == "error" => {
                self.errors.push(parameters["entry"].to_string());
            }
            _ => {}
        }
    }

    /// Takes the errors of the page since the last call.
    pub fn take_errors(&mut self) -> Vec<String> {
        self.evaluate("0");
        std::mem::take(&mut self.errors)
    }

    /// Opens an address.
    pub fn open(&mut self, url: &str) {
        let opened = self.call("Page.navigate", &json!({ "url": url }));
        assert!(opened["errorText"].is_null(), "{url}: {opened}");
    }

    /// Evaluates an expression in the page and returns its value; waits for a promise.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let parameters =
            json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let answer = self.call("Runtime.evaluate", &parameters);
        assert!(
            answer["exceptionDetails"].is_null(),
            "{expression}: {}",
            answer["exceptionDetails"]
        );
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub fn wait_until(&mut self, expression: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.evaluate(&format!("!!({expression})")) != true {
            let text = || self.evaluate("document.body.innerText");
            assert!(
                Instant::now() < deadline,
                "not within {PATIENCE:?}: {expression}; the page says: {}",
                { text }()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Presses a key, named as in `KeyboardEvent.key`.
    pub fn press(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            // The page knows a key that is not a letter by its code.
            self.call("Input.dispatchKeyEvent", &json!({ "type": kind, "key": key, "code": key }));
        }
    }

    /// Sets the size of the window in pixels, and whether the user prefers dark colours.
    pub fn set_appearance(&mut self, (width, height): (u32, u32), dark: bool) {
        let size =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", &size);
        let value = if dark { "dark" } else { "light" };
        let scheme = json!({ "features": [{ "name": "prefers-color-scheme", "value": value }] });
        self.call("Emulation.setEmulatedMedia", &scheme);
    }

    /// Role and name of each node that a screen reader announces.
    pub fn accessibility_nodes(&mut self) -> Vec<(String, String)> {
        let tree = self.call("Accessibility.getFullAXTree", &json!({}));
        let nodes = tree["nodes"].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value["value"].as_str().unwrap_or_default().to_owned();
        let announced = nodes.iter().filter(|node| node["ignored"] != true);
        announced.map(|node| (text(&node["role"]), text(&node["name"]))).collect()
    }

    /// Writes the visible page to a PNG file.
    pub fn screenshot(&mut self, path: &Path) {
        let shot = self.call("Page.captureScreenshot", &json!({ "format": "png" }));
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
        // The processes of its group that are left, and no others.
        if let Some(group) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}
