//! Drives `testing/target.rs`.

use keyframe_kernel::attach::inject_userfaultfd;
use keyframe_kernel::fault_tracker::FaultTracker;
use keyframe_kernel::memory::GuestReader;
use keyframe_kernel::write_tracker::{WriteTracker, WrittenPages};
use keyframe_kernel::{Process, Result};
use keyframe_locks::IgnorePoison;
use keyframe_testing::{Scope, record_skip};
use keyframe_units::{HostRange, HostVirt};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

pub const PAGE: u64 = 4096;
pub const HUGE: u64 = 2 << 20;
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// A process that does as told; ended on drop.
pub struct Target {
    child: Child,
    stdin: ChildStdin,
    answers: Receiver<String>,
    pub process: Process,
}

impl Target {
    pub fn start() -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_keyframe-kernel-target"))
            .current_dir(env!("CARGO_TARGET_TMPDIR"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (send, answers) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(std::result::Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let process = Process::open(child.id()).unwrap();
        let mut target = Self { stdin: child.stdin.take().unwrap(), child, answers, process };
        assert_eq!(target.answer(), "ready");
        target
    }

    /// Sends a command without waiting for its answer.
    pub fn tell(&mut self, command: &str) {
        writeln!(self.stdin, "{command}").unwrap();
    }

    /// The next answer, without its mark.
    pub fn answer(&mut self) -> String {
        let line = self.answers.recv_timeout(ANSWER_MAX).expect("the target answers");
        line.strip_prefix('@').expect("an answer").to_owned()
    }

    /// The next answer, where it has come.
    pub fn try_answer(&mut self) -> Option<String> {
        self.answers.try_recv().ok()
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer()
    }

    pub fn ok(&mut self, command: &str) {
        assert_eq!(self.ask(command), "ok", "{command}");
    }

    pub fn map(&mut self, kind: &str, len_bytes: u64) -> HostRange {
        let answer = self.ask(&format!("map {kind} {len_bytes}"));
        let start = answer.parse().unwrap_or_else(|_| panic!("map {kind}: {answer}"));
        HostRange { start: HostVirt(start), len_bytes }
    }

    /// `command` on pages `first..first + pages` of `range`.
    pub fn on(&mut self, command: &str, range: HostRange, first: u64, pages: u64, rest: &str) {
        self.ok(&format!("{command} {} {} {rest}", range.start.0 + first * PAGE, pages * PAGE));
    }

    pub fn write(&mut self, range: HostRange, first: u64, pages: u64, byte: u8) {
        self.on("write", range, first, pages, &byte.to_string());
    }

    /// A tracker of `range`.
    pub fn track(&self, range: HostRange) -> WriteTracker {
        let mut tracker = self.tracker();
        tracker.register(range).unwrap();
        tracker
    }

    pub fn tracker(&self) -> WriteTracker {
        let attached = inject_userfaultfd(&self.process).unwrap();
        WriteTracker::new(&self.process, attached.uffd).unwrap()
    }

    /// A tracker of first writes to `range`.
    pub fn watch(&self, range: HostRange) -> FaultTracker {
        let mut tracker = self.watcher();
        tracker.register(range).unwrap();
        tracker
    }

    pub fn watcher(&self) -> FaultTracker {
        let attached = inject_userfaultfd(&self.process).unwrap();
        FaultTracker::new(&self.process, attached.uffd, attached.user_mode_only).unwrap()
    }

    /// All of `range`.
    pub fn content(&self, range: HostRange) -> Vec<u8> {
        let reader = GuestReader::new(&self.process, &[range]).unwrap();
        let mut bytes = vec![0xa5; range.len_bytes as usize];
        reader.read(&[range], &mut bytes).unwrap();
        bytes
    }

    /// The value of `field` of its status.
    pub fn status(&self, field: &str) -> String {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.process.pid())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("{field}")).trim().to_owned()
    }

    /// Stops all of its threads (SIGSTOP), and waits until they are.
    pub fn freeze(&mut self) {
        self.signal("STOP");
        let threads = format!("/proc/{}/task", self.process.pid());
        let deadline = Instant::now() + ANSWER_MAX;
        let stopped = |entry: std::io::Result<std::fs::DirEntry>| {
            let status =
                std::fs::read_to_string(entry.unwrap().path().join("status")).unwrap_or_default();
            status.contains("State:\tT (stopped)")
        };
        while !std::fs::read_dir(&threads).unwrap().all(stopped) {
            assert!(Instant::now() < deadline, "it stops");
            std::thread::yield_now();
        }
    }

    pub fn thaw(&mut self) {
        self.signal("CONT");
    }

    pub fn signal(&mut self, signal: &str) {
        let status = Command::new("kill")
            .args([format!("-{signal}"), self.child.id().to_string()])
            .status()
            .unwrap();
        assert!(status.success());
    }

    /// The status that it exits with by itself.
    pub fn exit_code(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }

    /// Ends it and waits until it is gone.
    pub fn end(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

/// Starts this test program again as a process of its own that does only `role`, an ignored test,
/// on `target`; gives it back when it has said `ready`. It is the caller's to end.
pub fn start_role(role: &str, target: &Target, arguments: &str) -> Role {
    start_role_under(&[], role, &target.process, arguments)
}

/// The same, started by another program, which is given the command line behind its own arguments.
pub fn start_role_under(wrapper: &[&str], role: &str, process: &Process, arguments: &str) -> Role {
    let own = std::env::current_exe().unwrap();
    let mut words =
        wrapper.iter().map(|word| (*word).to_owned()).chain([own.to_str().unwrap().to_owned()]);
    let mut child = Command::new(words.next().unwrap())
        .args(words)
        .args([role, "--exact", "--ignored", "--nocapture"])
        .env(ROLE_VARIABLE, format!("{} {arguments}", process.pid()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (send, lines) = channel();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    std::thread::spawn(move || {
        stdout.lines().map_while(std::result::Result::ok).try_for_each(|line| send.send(line))
    });
    let role = Role { child };
    while lines.recv_timeout(ANSWER_MAX).expect("the other process is ready") != "ready" {}
    role
}

/// What a role was started for; `None` if it runs as an ordinary test, and has nothing to do.
pub fn role_arguments() -> Option<Vec<String>> {
    let text = std::env::var(ROLE_VARIABLE).ok()?;
    Some(text.split_whitespace().map(str::to_owned).collect())
}

const ROLE_VARIABLE: &str = "KEYFRAME_KERNEL_TEST_ROLE";

/// Another process of this test program; killed on drop.
pub struct Role {
    child: Child,
}

impl Role {
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Waits for its end; true if it did what it was to do.
    pub fn wait(&mut self) -> bool {
        let deadline = Instant::now() + ANSWER_MAX;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.success();
            }
            assert!(Instant::now() < deadline, "the other process ends");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `pages` pages of `range`, from `first` on.
pub fn part(range: HostRange, first: u64, pages: u64) -> HostRange {
    HostRange { start: HostVirt(range.start.0 + first * PAGE), len_bytes: pages * PAGE }
}

/// What a scan reports, as pages of `range`: `(page, present)`.
pub fn scan(tracker: &WriteTracker, range: HostRange) -> Vec<(u64, bool)> {
    try_scan(tracker, range).unwrap()
}

pub fn try_scan(tracker: &WriteTracker, range: HostRange) -> Result<Vec<(u64, bool)>> {
    let mut out = Vec::new();
    let stats = tracker.scan_and_protect(range, &mut out)?;
    let pages = pages(range, &out);
    assert_eq!(stats.written_pages, pages.len() as u64);
    assert_eq!(stats.absent_pages, pages.iter().filter(|(_, present)| !present).count() as u64);
    assert_eq!(stats.runs, out.len() as u64);
    Ok(pages)
}

pub fn pages(range: HostRange, written: &[WrittenPages]) -> Vec<(u64, bool)> {
    assert!(
        written.windows(2).all(|w| w[0].range.end() <= w[1].range.start),
        "rising: {written:?}"
    );
    assert!(written.iter().all(|w| range.contains(w.range)), "inside {range:?}: {written:?}");
    let page = |address: u64| (address - range.start.0) / PAGE;
    written
        .iter()
        .flat_map(|w| (page(w.range.start.0)..page(w.range.end().0)).map(move |p| (p, w.present)))
        .collect()
}

/// What a drain reports, as pages of `range`: `(page, present)`.
pub fn drain(tracker: &FaultTracker, range: HostRange) -> Vec<(u64, bool)> {
    try_drain(tracker, range).unwrap()
}

pub fn try_drain(tracker: &FaultTracker, range: HostRange) -> Result<Vec<(u64, bool)>> {
    let mut out = Vec::new();
    let stats = tracker.drain(range, &mut out)?;
    let pages = pages(range, &out);
    assert_eq!(stats.written_pages, pages.len() as u64);
    assert_eq!(stats.absent_pages, pages.iter().filter(|(_, present)| !present).count() as u64);
    assert_eq!(stats.runs, out.len() as u64);
    Ok(pages)
}

/// The reason why a test of exact reports is skipped.
pub const SEES_NO_MARKERS: &str =
    "without CAP_SYS_ADMIN the kernel reports more pages than were written";

/// True if this process may see swap entries, which tell a marker from a page on swap.
pub fn sees_markers() -> bool {
    const CAP_SYS_ADMIN: u64 = 1 << 21;
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let bits = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim();
    u64::from_str_radix(bits, 16).unwrap() & CAP_SYS_ADMIN != 0
}

/// Reserves huge pages for one test, and gives them back.
pub struct HugePages {
    before: String,
    _one_at_a_time: MutexGuard<'static, ()>,
}

const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
static POOL_USER: Mutex<()> = Mutex::new(());

impl HugePages {
    /// Adds `count` pages to the pool. If the host refuses, counts the running test as skipped and
    /// returns `None`.
    pub fn reserve(count: u64) -> Option<Self> {
        let pool = Self::enlarge_pool(count);
        if pool.is_none() {
            record_skip(Scope::Test, "the host has too few huge pages");
        }
        pool
    }

    fn enlarge_pool(count: u64) -> Option<Self> {
        let one_at_a_time = POOL_USER.lock().ignore_poison();
        let before = std::fs::read_to_string(POOL).ok()?;
        let pool = Self { before, _one_at_a_time: one_at_a_time };
        let wanted = pool.before.trim().parse::<u64>().ok()? + count;
        let raised = std::fs::write(POOL, wanted.to_string()).is_ok();
        let now = std::fs::read_to_string(POOL).ok()?.trim().parse::<u64>().ok()?;
        (raised && now >= wanted).then_some(pool)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(POOL, self.before.trim());
    }
}
