//! Firecracker, with the payload that checks its RAM and prints a fixed sequence
//! (`guests/firecracker`).

use crate::{PATIENCE, TestEnv, missing_kvm};
use keyframe_firecracker::api::{Api, InstanceState};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Instant;

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

    /// A configuration of a VM with `mem_mib` MiB, and `more` sections of JSON, which begin with a
    /// comma.
    pub fn config(&self, mem_mib: u64, more: &str) -> String {
        // Firecracker insists on the section.
        let drives = if more.contains("\"drives\"") { "" } else { r#", "drives": []"# };
        let kernel = self.directory.join("payload.elf").display().to_string();
        format!(
            r#"{{ "boot-source": {{ "kernel_image_path": "{kernel}", "boot_args": "" }},
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
        let child = Command::new(guest.binary())
            .arg("--api-sock")
            .arg(&socket)
            .arg("--config-file")
            .arg(&file)
            .current_dir(env.path())
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(&output).unwrap())
            .stderr(Stdio::null())
            .spawn()
            .expect("start Firecracker");
        let vm = Self { child, socket, output };
        vm.grows(2);
        vm
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
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
            let is_alive = !crate::is_gone(self.pid());
            assert!(is_alive && Instant::now() < until, "it prints nothing: {:?}", self.lines());
            std::thread::sleep(std::time::Duration::from_millis(20));
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
