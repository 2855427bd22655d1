//! Firecracker, with the payload that checks its RAM and prints a fixed sequence
//! (`guests/firecracker`).

use crate::{PATIENCE, Process, TestEnv, is_gone, missing_kvm, number, wait_until};
use keyframe_firecracker::api::{Api, InstanceState};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The user of a VM in a jail.
const JAILED_USER: u32 = 65534;

/// What `guests/build firecracker` made.
#[derive(Clone, Debug)]
pub struct FirecrackerGuest {
    directory: PathBuf,
}

impl FirecrackerGuest {
    /// Builds the guest. Error: the reason why it cannot be had or run here.
    pub fn build() -> Result<Self, String> {
        static BUILT: OnceLock<Result<FirecrackerGuest, String>> = OnceLock::new();
        BUILT.get_or_init(Self::build_anew).clone()
    }

    fn build_anew() -> Result<Self, String> {
        if let Some(reason) = missing_kvm() {
            return Err(reason);
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guests/build");
        let built = Command::new(script).arg("firecracker").output().expect("run guests/build");
        let (said, errors) = (
            String::from_utf8_lossy(&built.stdout).trim().to_owned(),
            String::from_utf8_lossy(&built.stderr).trim().to_owned(),
        );
        match built.status.code() {
            Some(0) => Ok(Self { directory: said.lines().last().unwrap_or_default().into() }),
            // This machine's package sources do not offer it.
            Some(3) => Err(format!("Firecracker: {errors}")),
            _ => panic!("guests/build firecracker: {errors}"),
        }
    }

    /// The binary.
    pub fn binary(&self) -> String {
        self.directory.join("bin/firecracker").display().to_string()
    }

    /// The jailer.
    pub fn jailer(&self) -> PathBuf {
        self.directory.join("bin/jailer")
    }

    /// The kernel that the VMs boot.
    pub fn payload(&self) -> PathBuf {
        self.directory.join("payload.elf")
    }

    /// A configuration of a VM with `mem_mib` MiB, and `more` sections of JSON, which begin with a
    /// comma.
    pub fn config(&self, mem_mib: u64, more: &str) -> String {
        self.config_with(mem_mib, "", more)
    }

    /// The same with `options` of the payload.
    pub fn config_with(&self, mem_mib: u64, options: &str, more: &str) -> String {
        // Firecracker insists on the section.
        let drives = if more.contains("\"drives\"") { "" } else { r#", "drives": []"# };
        let kernel = self.payload().display().to_string();
        format!(
            r#"{{ "boot-source": {{ "kernel_image_path": "{kernel}", "boot_args": "{options}" }},
                 "machine-config": {{ "vcpu_count": 1, "mem_size_mib": {mem_mib} }}{drives}{more} }}"#
        )
    }
}

/// The running test's Firecracker; skips the test if it cannot be had.
#[macro_export]
macro_rules! needs_firecracker {
    () => {
        match $crate::FirecrackerGuest::build() {
            Ok(guest) => guest,
            Err(reason) => $crate::skip!("{reason}"),
        }
    };
}

/// A Firecracker that the test itself has started. It ends with the test.
pub struct ExternalFirecracker {
    child: Child,
    /// The process that has taken its place, in a rollback.
    successor: Option<u32>,
    socket: PathBuf,
    output: PathBuf,
}

impl ExternalFirecracker {
    /// Starts a VM by the configuration `config`, in the directory of `env`. Returns once it
    /// prints.
    pub fn start(env: &TestEnv, guest: &FirecrackerGuest, config: &str) -> Self {
        let (socket, output) = (env.path().join("fc.sock"), env.path().join("fc.out"));
        let file = env.path().join("fc.json");
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new(guest.binary());
        command.arg("--api-sock").arg(&socket).arg("--config-file").arg(&file);
        Self::run(command.current_dir(env.path()), socket, output)
    }

    /// Starts a VM in a network namespace of its own, which has the tap `tap` that stays, or vanishes with
    /// its VM.
    pub fn start_in_own_network(
        env: &TestEnv,
        guest: &FirecrackerGuest,
        config: &str,
        tap: &str,
        stays: bool,
    ) -> Self {
        let (socket, output) = (env.path().join("fc.sock"), env.path().join("fc.out"));
        let file = env.path().join("fc.json");
        std::fs::write(&file, config).unwrap();
        let make = if stays { format!("ip tuntap add {tap} mode tap && ") } else { String::new() };
        let line = format!(
            "{make}exec {} --api-sock {} --config-file {}",
            guest.binary(),
            socket.display(),
            file.display()
        );
        let mut command = Command::new("unshare");
        Self::run(command.args(["-n", "sh", "-c", &line]).current_dir(env.path()), socket, output)
    }

    /// Starts a VM by Firecracker's jailer: as another user, with a root directory and mounts of its own,
    /// in `base`. `config` names files below that root, to which `files` are copied. Returns the VM and
    /// the root directory.
    pub fn start_jailed(
        env: &TestEnv,
        base: &Path,
        guest: &FirecrackerGuest,
        config: &str,
        files: &[&Path],
    ) -> (Self, PathBuf) {
        let root = base.join("firecracker/vm/root");
        std::fs::create_dir_all(&root).unwrap();
        for file in files.iter().copied().chain([&*guest.payload()]) {
            let copy = root.join(file.file_name().unwrap());
            std::fs::copy(file, &copy).unwrap();
            std::os::unix::fs::chown(&copy, Some(JAILED_USER), Some(JAILED_USER)).unwrap();
        }
        std::fs::write(root.join("fc.json"), config).unwrap();
        let (socket, output) = (root.join("fc.sock"), env.path().join("fc.out"));
        let user = JAILED_USER.to_string();
        let mut command = Command::new(guest.jailer());
        command.args(["--id", "vm", "--uid", &user, "--gid", &user, "--exec-file"]);
        command.arg(guest.binary()).arg("--chroot-base-dir").arg(base);
        command.args(["--", "--api-sock", "/fc.sock", "--config-file", "/fc.json"]);
        (Self::run(&mut command, socket, output), root)
    }

    fn run(command: &mut Command, socket: PathBuf, output: PathBuf) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(&output).unwrap())
            .stderr(Stdio::null())
            .spawn()
            .expect("start Firecracker");
        let vm = Self { child, successor: None, socket, output };
        vm.grows(2);
        vm
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.successor.unwrap_or(self.child.id())
    }

    /// The process `pid` has taken its place.
    pub fn is_succeeded_by(&mut self, pid: u32) {
        self.successor = Some(pid);
    }

    /// The socket of its API.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// A client of its API.
    pub fn api(&self) -> Api {
        Api::connect(&self.socket).unwrap()
    }

    /// What the guest has printed.
    pub fn lines(&self) -> Vec<String> {
        payload_lines(&self.output())
    }

    /// All that the guest and Firecracker have printed.
    pub fn output(&self) -> String {
        std::fs::read_to_string(&self.output).unwrap_or_default()
    }

    /// Waits until the guest has printed `more` lines more.
    pub fn grows(&self, more: usize) {
        let (before, until) = (self.lines().len(), Instant::now() + PATIENCE);
        while self.lines().len() < before + more {
            let is_alive = !is_gone(self.pid());
            assert!(is_alive && Instant::now() < until, "it prints nothing: {:?}", self.lines());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The other Firecrackers whose sockets are below `directory`.
    pub fn others_below(&self, directory: &Path) -> Vec<u32> {
        let entries = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let is_other = |pid: &u32| {
            let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = words.split(|byte| *byte == 0).map(String::from_utf8_lossy);
            let is_firecracker = words.next().is_some_and(|word| word.ends_with("/firecracker"));
            *pid != self.pid()
                && is_firecracker
                && words.any(|w| Path::new(&*w).starts_with(directory))
        };
        pids.filter(is_other).collect()
    }

    /// Whether it is paused.
    pub fn is_paused(&self) -> bool {
        self.api().instance().unwrap().state == InstanceState::Paused
    }
}

impl Drop for ExternalFirecracker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(pid) = self.successor {
            let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// The whole lines of the payload in an output, without those of Firecracker. Fails if the payload
/// has found an error.
pub fn payload_lines(output: &str) -> Vec<String> {
    let whole = output.rfind('\n').map_or("", |end| &output[..end]);
    assert!(!whole.contains("kf ERROR"), "the guest's RAM is damaged: {whole}");
    // A message of Firecracker may begin in the middle of a line of the guest, or end in one.
    let is_line = |line: &&str| line.len() == 36 && line.starts_with("kf ");
    whole.lines().filter(is_line).map(str::to_owned).collect()
}

/// Asserts that `later` are lines of the same sequence as `first`: a line of a number is the same in
/// both. Returns how many numbers both have.
pub fn assert_same_sequence(first: &[String], later: &[String]) -> usize {
    let number = |line: &String| line[3..19].to_owned();
    let known: std::collections::HashMap<_, _> =
        first.iter().map(|line| (number(line), line)).collect();
    let mut common = 0;
    for line in later {
        if let Some(known) = known.get(&number(line)) {
            assert_eq!(*known, line, "another sequence");
            common += 1;
        }
    }
    common
}

/// Starts `keyframe attach OPTIONS` to `vm`.
pub fn attach(env: &TestEnv, vm: &ExternalFirecracker, options: &[&str]) -> Process {
    Process::start(
        env.command(&attach_words(env, vm, options).iter().map(|w| &**w).collect::<Vec<_>>()),
    )
}

/// The words of that command.
pub fn attach_words(env: &TestEnv, vm: &ExternalFirecracker, options: &[&str]) -> Vec<String> {
    let (store, socket, pid) =
        (env.store(), vm.socket().display().to_string(), vm.pid().to_string());
    let own = ["attach", "--store", &store, "--name", "fc", "--api", &socket];
    // A busy host must not be taken for an engine that stalls.
    let limit = ["--pause-limit", "1m"];
    let limit = if options.contains(&limit[0]) { &[][..] } else { &limit };
    let words = own.iter().chain(limit).chain(options).map(|word| (*word).to_owned());
    words.chain([pid]).collect()
}

/// Waits for the end of `run`. On a busy host a pause may not be exact, and its checkpoint fails.
pub fn assert_ends_well(run: &mut Process) {
    assert!(matches!(run.wait().code(), Some(0 | 3)), "{}", run.report());
}

/// Takes `count` audited checkpoints of `vm`.
pub fn take_audited(env: &TestEnv, vm: &ExternalFirecracker, count: &str) {
    let options = ["--interval", "300ms", "--count", count, "--audit", "audit"];
    let mut run = attach(env, vm, &options);
    assert_ends_well(&mut run);
    assert!(run.errors().contains("a checkpoint every 300ms"), "{}", run.report());
    assert_eq!(env.list().len().to_string(), count);
}

/// Restores `latest` with `options`, and compares what it prints with `printed`, what a VM that it
/// comes from has printed until now.
pub fn assert_goes_on(env: &TestEnv, printed: impl Fn() -> Vec<String>, options: &[&str]) {
    let store = env.store();
    let words = [&["restore", "--store", &store, "latest"], options].concat();
    let mut restored = Process::start(env.command(&words));
    let lines = |process: &Process| payload_lines(&(process.lines().join("\n") + "\n"));
    let enough = restored.wait_until(|process| (lines(process).len() > 40).then_some(()));
    assert!(enough.is_some(), "{}", restored.report());
    let (later, until) = (lines(&restored), Instant::now() + PATIENCE);
    // A VM that runs on may not have come as far yet.
    while assert_same_sequence(&printed(), &later) <= 5 {
        let report = restored.report();
        assert!(Instant::now() < until, "it does not go on from the checkpoint: {report}");
        std::thread::sleep(Duration::from_millis(50));
    }
    restored.signal(rustix::process::Signal::INT);
    assert!(restored.wait().success(), "{}", restored.report());
}

/// A run after all the others is exact, too.
pub fn take_audited_after(env: &TestEnv, vm: &ExternalFirecracker) {
    let before = env.list().len();
    let mut run = attach(env, vm, &["--interval", "200ms", "--count", "3", "--audit", "audit"]);
    assert_ends_well(&mut run);
    assert_eq!(env.list().len(), before + 3, "{}", run.report());
}

/// `keyframe attach OPTIONS` to `vm` must fail with exit code 1 and an error text that contains each
/// of `words`.
pub fn refuse_attach(env: &TestEnv, vm: &ExternalFirecracker, options: &[&str], words: &[&str]) {
    let all = attach_words(env, vm, options);
    env.refused(&all.iter().map(|word| &**word).collect::<Vec<_>>(), 1, words);
}

/// Ends `branch`, the command that started `clones`, and waits until these are gone.
pub fn end_clones(branch: &mut Process, clones: &[Value]) {
    branch.signal(rustix::process::Signal::INT);
    assert!(branch.wait().success(), "{}", branch.report());
    for clone in clones {
        let pid = number(clone, "qemu_pid") as u32;
        wait_until("the clone is gone", || is_gone(pid));
    }
}
