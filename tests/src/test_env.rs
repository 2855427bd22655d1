//! The surroundings of one test: a temporary directory with a store, and the commands in it.

use crate::{Boot, ExternalVm, Process, Slot, built_program, keyframe};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How long a command may take on a busy machine.
const COMMAND_MAX: Duration = Duration::from_mins(10);

/// The option `--pause-limit`, unless `options` have it. The limit is long: a machine that runs many
/// tests stalls for seconds.
fn pause_limit(options: &[&str]) -> &'static [&'static str] {
    if options.contains(&"--pause-limit") { &[] } else { &["--pause-limit", "1m"] }
}

/// A temporary directory for one test: its run directory, its store and its files.
///
/// If the test fails, the directory stays and its path is printed.
pub struct TestEnv {
    dir: Option<tempfile::TempDir>,
    path: PathBuf,
    /// The store's URL; `None` if the store is in the directory.
    url: Option<String>,
    /// Whether runs rehearse a restore of their first checkpoint, which takes a start of QEMU.
    rehearses: bool,
    /// Environment variables of the commands.
    variables: Vec<(String, String)>,
    _slot: Slot,
}

impl TestEnv {
    /// An environment with an empty store.
    pub fn new() -> Self {
        Self::in_slot(Slot::shared()).with_store()
    }

    /// An environment with an empty store, for a test during which no other test may run.
    pub fn exclusive() -> Self {
        Self::in_slot(Slot::exclusive()).with_store()
    }

    /// An environment without a store.
    pub fn without_store() -> Self {
        Self::in_slot(Slot::shared())
    }

    fn with_store(self) -> Self {
        self.ok(&["init", &self.store()]);
        self
    }

    fn in_slot(slot: Slot) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("keyframe-test-")
            .tempdir()
            .expect("a temporary directory");
        let path = dir.path().to_owned();
        Self {
            dir: Some(dir),
            path,
            url: None,
            rehearses: false,
            variables: Vec::new(),
            _slot: slot,
        }
    }

    /// Names `url` as the store, which does not exist yet.
    #[must_use]
    pub fn with_store_at(mut self, url: &str) -> Self {
        self.url = Some(url.into());
        self
    }

    /// Lets runs rehearse a restore, as they do by default. In other tests they do not, to save
    /// time.
    #[must_use]
    pub fn with_rehearsals(mut self) -> Self {
        self.rehearses = true;
        self
    }

    fn rehearsal(&self) -> &'static [&'static str] {
        if self.rehearses { &[] } else { &["--no-rehearsal"] }
    }

    /// Sets an environment variable of the commands that start from now on.
    pub fn set(&mut self, name: &str, value: &str) {
        self.variables.retain(|(known, _)| known != name);
        self.variables.push((name.into(), value.into()));
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The store's path or URL.
    pub fn store(&self) -> String {
        self.url.clone().unwrap_or_else(|| self.path.join("store").display().to_string())
    }

    /// The command `keyframe ARGS`, with this test's run directory. The caller starts it.
    pub fn command(&self, args: &[&str]) -> Command {
        self.command_of(&keyframe(), args)
    }

    /// The command `keyframe-bench ARGS`, as [`Self::command`]. It measures the program under test.
    pub fn benchmark(&self, args: &[&str]) -> Command {
        let mut command = self.command_of(&built_program("keyframe-bench"), args);
        command.env("KEYFRAME_BIN", keyframe());
        command
    }

    /// The command of the example `name` of the workspace, as [`Self::command`].
    pub fn example(&self, name: &str, args: &[&str]) -> Command {
        self.command_of(&built_program(&format!("examples/{name}")), args)
    }

    fn command_of(&self, program: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(args)
            .env("XDG_RUNTIME_DIR", &self.path)
            // A killed command leaves its temporary files; here they end with the test.
            .env("TMPDIR", &self.path)
            .env_remove("KEYFRAME_STORE")
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .current_dir(&self.path);
        command
    }

    /// Runs `keyframe ARGS` until it ends.
    pub fn run(&self, args: &[&str]) -> Output {
        println!("$ XDG_RUNTIME_DIR={} keyframe {}", self.path.display(), args.join(" "));
        Self::run_within(self.command(args), COMMAND_MAX)
    }

    /// Runs a command of [`Self::command`] until it ends. After `limit` it gets SIGTERM, a minute
    /// later SIGKILL; its exit code then fails the test.
    pub fn run_within(mut command: Command, limit: Duration) -> Output {
        // Files, not pipes: a process that the command leaves cannot keep the test waiting.
        let (stdout, stderr) =
            (tempfile::tempfile().expect("a file"), tempfile::tempfile().expect("a file"));
        let copy = |file: &std::fs::File| file.try_clone().expect("a file again");
        command.stdin(Stdio::null()).stdout(copy(&stdout)).stderr(copy(&stderr));
        let mut child = command.spawn().expect("run keyframe");
        let pid = rustix::process::Pid::from_raw(child.id() as i32).expect("a pid");
        let began = Instant::now();
        let mut is_terminated = false;
        let status = loop {
            if let Some(status) = child.try_wait().expect("wait for keyframe") {
                break status;
            }
            if began.elapsed() > limit && !std::mem::replace(&mut is_terminated, true) {
                println!("still running after {} s: SIGTERM", limit.as_secs());
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
            if began.elapsed() > limit + Duration::from_secs(60) {
                let _ = child.kill();
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let read = |mut file: std::fs::File| {
            let mut bytes = Vec::new();
            std::io::Seek::rewind(&mut file).expect("rewind");
            std::io::Read::read_to_end(&mut file, &mut bytes).expect("read the output");
            bytes
        };
        Output { status, stdout: read(stdout), stderr: read(stderr) }
    }

    /// Runs `keyframe ARGS`, which must succeed; returns its standard output.
    pub fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(
            output.status.success(),
            "keyframe {}: {}\n{}{}",
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs `keyframe ARGS`, which must succeed; returns its standard output, parsed as JSON.
    pub fn json(&self, args: &[&str]) -> Value {
        let text = self.ok(args);
        serde_json::from_str(&text)
            .unwrap_or_else(|e| panic!("keyframe {}: {e} in {text}", args.join(" ")))
    }

    /// Runs `keyframe ARGS`, which must fail with exit code `code` and an error text that contains
    /// each of `words`. Returns the error text.
    pub fn refused(&self, args: &[&str], code: i32, words: &[&str]) -> String {
        let output = self.run(args);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "keyframe {}: {text}", args.join(" "));
        for word in words {
            assert!(text.contains(word), "keyframe {}: no {word:?} in: {text}", args.join(" "));
        }
        text
    }

    /// Starts clones by `keyframe branch --store STORE WORDS --json`, and returns its report on them.
    pub fn branch(&self, words: &[&str]) -> (Process, Vec<Value>) {
        let store = self.store();
        let all = [&["branch", "--store", &store], words, &["--json"]].concat();
        let mut process = Process::start(self.command(&all));
        let whole = process.wait_until(|p| serde_json::from_str(&p.lines().join("\n")).ok());
        let clones = whole.unwrap_or_else(|| panic!("no clones; {}", process.report()));
        (process, clones)
    }

    /// The entries of `list --json`.
    pub fn list(&self) -> Vec<Value> {
        let list = self.json(&["list", "--json", "--store", &self.store()]);
        list.as_array().expect("an array").clone()
    }

    /// Starts `keyframe run OPTIONS -- BOOT` in the background.
    pub fn start(&self, options: &[&str], boot: &Boot) -> Process {
        let store = self.store();
        let mut args = vec!["run", "--store", &store];
        args.extend(options);
        args.extend(self.rehearsal());
        args.extend(pause_limit(options));
        args.push("--");
        let line = boot.command();
        args.extend(line.iter().map(String::as_str));
        Process::start(self.command(&args))
    }

    /// The arguments of `keyframe attach` to QEMU process `pid`. `monitor` is `--qmp SOCKET`.
    pub fn attach_args(&self, monitor: &[&str], pid: u32, options: &[&str]) -> Vec<String> {
        let (store, pid) = (self.store(), pid.to_string());
        let words = [
            &["attach", "--store", &store],
            monitor,
            options,
            self.rehearsal(),
            pause_limit(options),
            &[&pid],
        ]
        .concat();
        words.into_iter().map(str::to_owned).collect()
    }

    /// Starts `keyframe attach` to `vm` through monitor `a` in the background, as VM `guest`.
    pub fn attach(&self, vm: &ExternalVm, options: &[&str]) -> Process {
        let options = [&["--name", "guest"], options].concat();
        let words = self.attach_args(&["--qmp", &vm.socket("a")], vm.console.pid(), &options);
        Process::start(self.command(&words.iter().map(String::as_str).collect::<Vec<_>>()))
    }

    /// Starts `keyframe restore CHECKPOINT OPTIONS` in the background.
    pub fn restore(&self, checkpoint: &str, options: &[&str]) -> Process {
        let store = self.store();
        let mut args = vec!["restore", "--store", &store, checkpoint];
        args.extend(options);
        Process::start(self.command(&args))
    }
}

impl Default for TestEnv {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for TestEnv {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(dir) = self.dir.take()
        {
            println!("the test's directory stays: {}", dir.keep().display());
        }
    }
}
