//! What the end-to-end tests share: the binary under test, guests, consoles, the hash sequence.
//!
//! Every test has a [`Bench`]: a temporary directory with its own run directory and store, so that
//! tests never meet. A failing test prints the commands it ran and keeps the directory.

mod browser;
mod debugger;
pub mod disks;
mod echo;
mod exact;
mod foreign;
mod hash;
mod http;
mod huge;
mod journal;
pub mod journaling;
mod kvm;
mod orphan;
mod payload;
mod process;
pub mod protection;
mod ram;
pub mod relay;
pub mod slurm;
pub mod trial;
mod turn;

/// A libvirt of a test's own, as the monitor client's tests start it.
#[expect(missing_docs, reason = "it is a test's own there")]
#[path = "../../crates/qemu/tests/support/libvirt.rs"]
pub mod libvirt;

/// An S3 server of a test's own, as the store's tests start it.
#[path = "../../crates/store-backend/src/testing/s3_server.rs"]
pub mod s3;

pub use browser::Browser;
pub use debugger::Debugger;
pub use echo::echo;
pub use exact::{
    assert_no_errors, assert_restores_exactly, assert_restores_exactly_with, audited, restored_pid,
};
pub use foreign::{Foreign, PATIENCE, Traces, until};
pub use hash::{HashLine, Sequence, hash_lines};
pub use http::Http;
pub use huge::HugePages;
pub use journal::{JournalImage, journal_counter};
pub use keyframe_testing::{
    NO_QEMU_10, Qemu, Scope, chosen_qemus, distribution_qemu, has_program, qemu_10, qemus,
    record_skip, seed, skip, small_guest, variants,
};
pub use kvm::missing_kvm;
pub use orphan::{Orphan, is_gone};
pub use payload::{PassLine, PassSequence, pass_lines};
pub use process::{Process, children};
pub use ram::{differing_pages, live_ram, stored_ram};
pub use turn::Turn;

use keyframe_testing::build_guest;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The lines that have ended in a console's file. The last one breaks off anywhere while QEMU is
/// writing it.
pub fn ended_lines(path: &Path) -> Vec<String> {
    let text = std::fs::read(path).unwrap_or_default();
    let ended = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    String::from_utf8_lossy(&text[..ended]).lines().map(|line| line.trim_end().to_owned()).collect()
}

/// The binary under test: `KEYFRAME_BIN`, or the one built beside the tests.
pub fn keyframe() -> PathBuf {
    std::env::var_os("KEYFRAME_BIN").map_or_else(|| built_program("keyframe"), PathBuf::from)
}

/// The program `name` that was built with the tests.
fn built_program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of the test program");
    let profile = test.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST");
    let path = profile.join(name);
    assert!(path.is_file(), "no {}: build it first (make test does)", path.display());
    path
}

/// The payload's image: in `KEYFRAME_PAYLOAD`, or where `guests/build payload` says.
fn payload_image() -> PathBuf {
    let dir =
        std::env::var_os("KEYFRAME_PAYLOAD").map_or_else(|| build_guest("payload"), PathBuf::from);
    dir.join("payload.bin")
}

/// Where PATH has a program.
pub fn on_path(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file());
    found.unwrap_or_else(|| panic!("no {program} in PATH"))
}

/// As guests/run-lib.sh has them, with the reasons.
fn microvm_parameters() -> String {
    let measured =
        Command::new(small_guest().join("tsc-khz")).output().expect("run the guest's tsc-khz");
    let khz: u64 =
        String::from_utf8_lossy(&measured.stdout).trim().parse().expect("a number of kHz");
    format!("reboot=t tsc_early_khz={khz} lpj={}", khz * 4)
}

/// How a guest is booted.
#[derive(Clone, Debug)]
pub struct Boot {
    /// The QEMU binary.
    pub qemu: String,
    /// `pc`, `q35`, `microvm`.
    pub machine: String,
    /// RAM in MiB.
    pub mem_mib: u64,
    /// vCPUs.
    pub cpus: u32,
    /// Kernel parameters beyond the console.
    pub append: String,
    /// The firmware payload instead of a kernel, under this accelerator.
    pub payload_under: Option<&'static str>,
    /// Where the console goes.
    pub serial: String,
    /// Further QEMU arguments.
    pub extra: Vec<String>,
}

impl Boot {
    /// A `pc` with 128 MiB, one vCPU and workload `work` (with its parameters).
    pub fn new(work: &str) -> Self {
        Self {
            qemu: "qemu-system-x86_64".into(),
            machine: "pc".into(),
            mem_mib: 128,
            cpus: 1,
            append: format!("kf.work={work}"),
            payload_under: None,
            serial: "stdio".into(),
            extra: Vec::new(),
        }
    }

    /// A `pc` with 64 MiB and the firmware payload, which takes `dirty` of its 1024 pages in a
    /// pass, under `accelerator`.
    pub fn payload(accelerator: &'static str, dirty: u64) -> Self {
        let parameter = format!("name=opt/keyframe/dirty,string={dirty}");
        let payload = Self { mem_mib: 64, payload_under: Some(accelerator), ..Self::new("") };
        payload.with(&["-fw_cfg", &parameter])
    }

    /// Adds QEMU arguments.
    #[must_use]
    pub fn with(mut self, args: &[&str]) -> Self {
        self.extra.extend(args.iter().map(|a| (*a).to_owned()));
        self
    }

    /// QEMU's command line.
    pub fn command(&self) -> Vec<String> {
        let mut line: Vec<String> = vec![
            self.qemu.clone(),
            "-machine".into(),
            self.machine.clone(),
            "-m".into(),
            format!("{}M", self.mem_mib),
            "-smp".into(),
            self.cpus.to_string(),
        ];
        line.extend(
            ["-nodefaults", "-no-user-config", "-display", "none", "-serial", &self.serial]
                .map(str::to_owned),
        );
        match self.payload_under {
            Some(accelerator) => {
                let image = payload_image().display().to_string();
                line.extend(["-accel".into(), accelerator.into(), "-bios".into(), image]);
            }
            None => line.extend(self.kernel()),
        }
        line.extend(self.extra.iter().cloned());
        line
    }

    fn kernel(&self) -> Vec<String> {
        let dir = small_guest();
        let file = |name: &str| dir.join(name).display().to_string();
        // As guests/small/run.sh has them, with the reasons.
        let machine = if self.machine.starts_with("microvm") {
            microvm_parameters()
        } else {
            "tsc=unstable".into()
        };
        let parameters =
            format!("console=ttyS0 quiet panic=-1 {machine} {SHORT_BOOT} {}", self.append);
        let [kernel, initrd, append] = ["-kernel", "-initrd", "-append"].map(String::from);
        vec![kernel, file("vmlinux"), initrd, file("initramfs.cpio.gz"), append, parameters]
    }
}

/// Leaves out of the kernel's start what no workload needs: an eighth of it.
const SHORT_BOOT: &str = "mitigations=off cryptomgr.notests initcall_blacklist=load_system_certificate_list,\
crypto_kdf108_init,init_encrypted,cubictcp_register,init_kprobe_trace";

/// No command takes that long, however busy the machine is.
const COMMAND_MAX: Duration = Duration::from_mins(10);

/// How long a pause may last where `options` do not say it: a machine of tests stalls for seconds.
fn pause_limit(options: &[&str]) -> &'static [&'static str] {
    if options.contains(&"--pause-limit") { &[] } else { &["--pause-limit", "1m"] }
}

/// A place for one test: run directory, store, artefacts.
pub struct Bench {
    dir: Option<tempfile::TempDir>,
    path: PathBuf,
    /// Where the store is, if not in the directory.
    url: Option<String>,
    /// Variables of the commands.
    variables: Vec<(String, String)>,
    _turn: Turn,
}

impl Bench {
    /// With an empty store.
    pub fn new() -> Self {
        Self::in_turn(Turn::shared()).with_store()
    }

    /// With an empty store, for a test that needs the machine for itself.
    pub fn alone() -> Self {
        Self::in_turn(Turn::alone()).with_store()
    }

    /// Without a store.
    pub fn without_store() -> Self {
        Self::in_turn(Turn::shared())
    }

    fn with_store(self) -> Self {
        self.ok(&["init", &self.store()]);
        self
    }

    fn in_turn(turn: Turn) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("keyframe-test-")
            .tempdir()
            .expect("a temporary directory");
        let path = dir.path().to_owned();
        Self { dir: Some(dir), path, url: None, variables: Vec::new(), _turn: turn }
    }

    /// With its store at `url`, which is not made yet.
    #[must_use]
    pub fn at(mut self, url: &str) -> Self {
        self.url = Some(url.into());
        self
    }

    /// Sets a variable for the commands from now on.
    pub fn set(&mut self, name: &str, value: &str) {
        self.variables.retain(|(known, _)| known != name);
        self.variables.push((name.into(), value.into()));
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The store's path, or URL.
    pub fn store(&self) -> String {
        self.url.clone().unwrap_or_else(|| self.path.join("store").display().to_string())
    }

    /// `keyframe ARGS`, ready to be started, with this bench's run directory.
    pub fn command(&self, args: &[&str]) -> Command {
        self.command_of(&keyframe(), args)
    }

    /// `keyframe-bench ARGS`, ready to be started, as [`Self::command`]. It measures the binary
    /// under test.
    pub fn benchmark(&self, args: &[&str]) -> Command {
        let mut command = self.command_of(&built_program("keyframe-bench"), args);
        command.env("KEYFRAME_BIN", keyframe());
        command
    }

    fn command_of(&self, program: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(args)
            .env("XDG_RUNTIME_DIR", &self.path)
            // One that is killed leaves its temporary files.
            .env("TMPDIR", &self.path)
            .env_remove("KEYFRAME_STORE")
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .current_dir(&self.path);
        command
    }

    /// Runs `keyframe ARGS` to its end.
    pub fn run(&self, args: &[&str]) -> Output {
        println!("$ XDG_RUNTIME_DIR={} keyframe {}", self.path.display(), args.join(" "));
        Self::run_within(self.command(args), COMMAND_MAX)
    }

    /// Runs a command of [`Self::command`] to its end.
    pub fn run_within(mut command: Command, limit: Duration) -> Output {
        // Files, not pipes: whoever it may leave behind does not keep the test waiting.
        let (stdout, stderr) =
            (tempfile::tempfile().expect("a file"), tempfile::tempfile().expect("a file"));
        let copy = |file: &std::fs::File| file.try_clone().expect("a file again");
        command.stdin(Stdio::null()).stdout(copy(&stdout)).stderr(copy(&stderr));
        let mut child = command.spawn().expect("run keyframe");
        // A command that should have ended is ended, and its test fails by its exit code.
        let pid = rustix::process::Pid::from_raw(child.id() as i32).expect("a pid");
        let began = Instant::now();
        let mut told = false;
        let status = loop {
            if let Some(status) = child.try_wait().expect("look at keyframe") {
                break status;
            }
            if began.elapsed() > limit && !std::mem::replace(&mut told, true) {
                println!("still running after {} s: ended", limit.as_secs());
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
            std::io::Read::read_to_end(&mut file, &mut bytes).expect("read what it said");
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

    /// As [`Self::ok`], parsed as JSON.
    pub fn json(&self, args: &[&str]) -> Value {
        let text = self.ok(args);
        serde_json::from_str(&text)
            .unwrap_or_else(|e| panic!("keyframe {}: {e} in {text}", args.join(" ")))
    }

    /// Runs `keyframe ARGS`, which must fail with `code` and say every one of `words`.
    pub fn refused(&self, args: &[&str], code: i32, words: &[&str]) -> String {
        let output = self.run(args);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "keyframe {}: {text}", args.join(" "));
        for word in words {
            assert!(text.contains(word), "keyframe {}: no {word:?} in: {text}", args.join(" "));
        }
        text
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
        args.extend(pause_limit(options));
        args.push("--");
        let line = boot.command();
        args.extend(line.iter().map(String::as_str));
        Process::start(self.command(&args))
    }

    /// `keyframe attach` with `options` to process `pid`, whose monitor is `monitor` (`--qmp
    /// SOCKET`).
    pub fn attach_args(&self, monitor: &[&str], pid: u32, options: &[&str]) -> Vec<String> {
        let (store, pid) = (self.store(), pid.to_string());
        let words =
            [&["attach", "--store", &store], monitor, options, pause_limit(options), &[&pid]]
                .concat();
        words.into_iter().map(str::to_owned).collect()
    }

    /// Starts `keyframe restore CHECKPOINT OPTIONS` in the background.
    pub fn restore(&self, checkpoint: &str, options: &[&str]) -> Process {
        let store = self.store();
        let mut args = vec!["restore", "--store", &store, checkpoint];
        args.extend(options);
        Process::start(self.command(&args))
    }
}

impl Default for Bench {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(dir) = self.dir.take()
        {
            println!("kept for a look: {}", dir.keep().display());
        }
    }
}

/// A number of a JSON object.
pub fn number(value: &Value, key: &str) -> u64 {
    value.get(key).and_then(Value::as_u64).unwrap_or_else(|| panic!("no number {key} in {value}"))
}
