//! Runs the guide as a reader types it: each page in one bash, in an empty directory.
//!
//! ```text
//!   ```sh          run, one after the other, under `set -eu`
//!   ```text        after it: lines of its output, in this order
//!   ```sh,notest   not run; a comment above it says why
//! ```
//!
//! In a shown line a word with a digit stands for any such word, a unit for any unit, and `...` for
//! any words. A page that leaves a process behind fails. The text between the commands is not
//! tested.

use keyframe_test_hosts::{Host, Rate, SlurmCluster};
use keyframe_tests::s3::{BUCKET, KEY, S3Server};
use keyframe_tests::{TestEnv, keyframe, small_guest};
use rustix::process::{Pid, Signal, kill_process};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a page's processes may take to end after its last command.
const PATIENCE: Duration = Duration::from_mins(2);
const UNITS: [&str; 8] = ["ns", "us", "ms", "s", "B", "KiB", "MiB", "GiB"];

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the source").to_owned()
}

/// A page's block, with the number of its first line.
#[derive(Debug)]
struct Block {
    kind: String,
    line: usize,
    text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let mut all = Vec::new();
    let mut open: Option<Block> = None;
    for (number, line) in page.lines().enumerate() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(kind)) => {
                open = Some(Block { kind: kind.into(), line: number + 1, text: String::new() });
            }
            (Some(_), Some("")) => all.extend(open.take()),
            (Some(block), _) => writeln!(block.text, "{line}").expect("write to a string"),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block without an end: {open:?}");
    all
}

/// True if an output line matches the line that the page shows; both are split into words.
fn matches_shown_line(shown: &[&str], said: &[&str]) -> bool {
    match (shown, said) {
        ([], said) => said.is_empty(),
        (["...", rest @ ..], said) => {
            (0..=said.len()).any(|skipped| matches_shown_line(rest, &said[skipped..]))
        }
        (_, []) => false,
        ([one, rest @ ..], [other, others @ ..]) => {
            let has_digit = |word: &str| word.contains(|c: char| c.is_ascii_digit());
            let is_unit =
                |word: &str| UNITS.contains(&word.trim_matches([',', ';', ':', '(', ')']));
            let is_same = one == other
                || (has_digit(one) && has_digit(other))
                || (is_unit(one) && is_unit(other));
            is_same && matches_shown_line(rest, others)
        }
    }
}

/// The first line that the page shows and the output lacks.
fn missing<'t>(shown: &'t str, said: &str) -> Option<&'t str> {
    let mut said = said.lines();
    let words = |line| str::split_whitespace(line).collect::<Vec<_>>();
    let shown = shown.lines().filter(|line| !line.trim().is_empty());
    shown
        .into_iter()
        .find(|line| !said.any(|other| matches_shown_line(&words(line), &words(other))))
}

/// A page that runs in a test's directory.
struct Page<'b> {
    name: &'static str,
    env: &'b TestEnv,
    blocks: Vec<Block>,
}

impl<'b> Page<'b> {
    fn new(name: &'static str, env: &'b TestEnv) -> Self {
        let path = source().join("docs/guide/src").join(format!("{name}.md"));
        let text =
            fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()));
        let blocks = blocks(&text);
        for part in ["bin", "work"] {
            fs::create_dir_all(env.path().join(part)).expect("make a directory");
        }
        let program = env.path().join("bin/keyframe");
        std::os::unix::fs::symlink(keyframe(), program).expect("put keyframe on the path");
        Self { name, env, blocks }
    }

    fn output_file(&self, at: usize) -> PathBuf {
        self.env.path().join(format!("output-{at}"))
    }

    /// The command that runs all its blocks.
    fn bash(&self) -> Command {
        let mut script = String::from("set -eu\n");
        for (at, block) in self.blocks.iter().enumerate().filter(|(_, block)| block.kind == "sh") {
            let text = &block.text;
            write!(script, "exec >'{}' 2>&1\n{text}", self.output_file(at).display())
                .expect("write to a string");
        }
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("bash");
        command
            .args(["-c", &script])
            .current_dir(self.env.path().join("work"))
            .env("PATH", format!("{}:{path}", self.env.path().join("bin").display()))
            .env("XDG_RUNTIME_DIR", self.env.path())
            .env("XDG_STATE_HOME", self.env.path().join("state"))
            .env("GUEST", small_guest())
            .env("KEYFRAME_SOURCE", source())
            .env_remove("KEYFRAME_STORE");
        command
    }

    /// The output, block by block.
    fn report(&self) -> String {
        let mut report = String::new();
        for (at, block) in self.blocks.iter().enumerate() {
            if let Ok(said) = fs::read(self.output_file(at)) {
                let said = String::from_utf8_lossy(&said).into_owned();
                writeln!(report, "-- {}.md, line {}:\n{said}", self.name, block.line)
                    .expect("write to a string");
            }
        }
        report
    }

    /// Runs `bash` until it ends, and checks its output and that no process is left.
    fn run_within(&self, mut bash: Command, limit: Duration) {
        let began = Instant::now();
        let mut child = bash.stdin(Stdio::null()).spawn().expect("start bash");
        let exit = ended_within(&mut child, limit);
        let took = began.elapsed();
        let is_done = exit.is_some_and(|exit| exit.success());
        let left = self.end_processes(if is_done { PATIENCE } else { Duration::ZERO });
        let _ = child.wait();
        let Some(exit) = exit else { panic!("still running after {took:?}\n{}", self.report()) };
        assert!(exit.success(), "{exit}\n{}", self.report());
        assert!(left.is_empty(), "left behind: {left:?}\n{}", self.report());
        for (at, block) in self.blocks.iter().enumerate().filter(|(_, block)| block.kind == "text")
        {
            let before =
                self.blocks[..at].iter().rposition(|b| b.kind == "sh").expect("a command above");
            let said = fs::read(self.output_file(before)).expect("the output");
            let gone = missing(&block.text, &String::from_utf8_lossy(&said));
            assert_eq!(gone, None, "{}.md, line {}\n{}", self.name, block.line, self.report());
        }
        println!("{}: {took:.1?}", self.name);
    }

    /// The page's processes, which have its run directory in their environment.
    fn processes(&self) -> Vec<u32> {
        let mark = format!("XDG_RUNTIME_DIR={}", self.env.path().display()).into_bytes();
        let entries = fs::read_dir("/proc").expect("list the processes").flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let is_ours = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|one| one == mark)
        };
        pids.filter(is_ours).collect()
    }

    /// Waits for the page's processes to end, at most for `patience`. Ends the others and returns
    /// their command lines.
    fn end_processes(&self, patience: Duration) -> Vec<String> {
        let deadline = Instant::now() + patience;
        while !self.processes().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
        let line =
            |pid: &u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let left = self.processes().iter().map(|pid| line(pid).replace('\0', " ")).collect();
        // SIGTERM first, so that they remove their files.
        for (signal, patience) in [(Signal::TERM, Duration::from_secs(5)), (Signal::KILL, PATIENCE)]
        {
            let deadline = Instant::now() + patience;
            for pid in self.processes() {
                let _ = Pid::from_raw(pid as i32).map(|pid| kill_process(pid, signal));
            }
            while !self.processes().is_empty() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        left
    }
}

fn ended_within(child: &mut Child, limit: Duration) -> Option<std::process::ExitStatus> {
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        if let Some(exit) = child.try_wait().expect("wait for bash") {
            return Some(exit);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    None
}

/// A page that needs nothing but keyframe and the guest.
fn page(name: &'static str) {
    let env = TestEnv::without_store();
    let page = Page::new(name, &env);
    page.run_within(page.bash(), Duration::from_mins(4));
}

#[test]
fn install() {
    page("install");
}

#[test]
fn a_first_checkpoint() {
    page("first-checkpoint");
}

#[test]
fn restore_and_branch() {
    page("restore-and-branch");
}

#[test]
fn disks_of_a_vm() {
    page("disks");
}

#[test]
fn is_my_vm_safe() {
    page("is-my-vm-safe");
}

#[test]
fn attach_to_a_vm_that_runs() {
    page("attach");
}

#[test]
fn a_flight_recorder() {
    page("flight-recorder");
}

#[test]
fn upgrade_qemu() {
    page("upgrade-qemu");
}

#[test]
fn recover_a_crashed_vm() {
    page("crashed-vm");
}

#[test]
fn one_store_for_several_hosts() {
    page("one-store");
}

#[test]
fn record_and_debug() {
    page("record-and-debug");
}

#[test]
fn the_dashboard() {
    page("dashboard");
}

/// With an S3 server. It sets the variables that the page tells the reader to set.
#[test]
fn encryption_and_s3() {
    let Some(server) = S3Server::start() else { return };
    let env = TestEnv::without_store();
    let page = Page::new("encryption-and-s3", &env);
    let mut bash = page.bash();
    bash.env("BUCKET", BUCKET)
        .env("ENDPOINT", server.endpoint())
        .env("AWS_ACCESS_KEY_ID", KEY.0)
        .env("AWS_SECRET_ACCESS_KEY", KEY.1)
        .env("XDG_CACHE_HOME", env.path().join("cache"));
    page.run_within(bash, Duration::from_mins(4));
}

/// With the real guest, which may have to be built, on a network of its own.
#[test]
#[ignore = "make soak"]
fn soak_protect_a_redis_vm() {
    let env = TestEnv::without_store();
    let page = Page::new("protect-redis", &env);
    let host = Host::new().expect("make a network namespace");
    host.ok("ip link set lo up").expect("set a network up");
    let bash = page.bash();
    let mut there = host.command("bash");
    there.args(bash.get_args()).current_dir(env.path().join("work")).env_remove("KEYFRAME_STORE");
    there.envs(bash.get_envs().filter_map(|(name, value)| Some((name, value?))));
    page.run_within(there, Duration::from_mins(15));
}

#[test]
#[ignore = "make soak"]
fn soak_analyse_a_boot_on_slurm() {
    let env = TestEnv::without_store();
    let page = Page::new("analyse-on-slurm", &env);
    let cluster =
        SlurmCluster::start(&env.path().join("cluster"), 2, Rate::GIGABIT).expect("a cluster");
    page.run_within(cluster.on_server(&page.bash()), Duration::from_mins(10));
}

/// Fetches DuckDB from the Python package index.
#[test]
#[ignore = "make soak"]
fn soak_read_a_memory_trace() {
    page("memory-trace");
}

#[test]
#[ignore = "make soak"]
fn soak_write_a_tool() {
    page("write-a-tool");
}

/// The summary lists each page, a test runs its commands, and a page shows each picture.
#[test]
fn every_page_is_listed_and_run() {
    let folder = source().join("docs/guide/src");
    let summary = fs::read_to_string(folder.join("SUMMARY.md")).expect("the summary");
    let mut pictures: Vec<_> =
        fs::read_dir(folder.join("pictures")).expect("list the pictures").flatten().collect();
    for entry in fs::read_dir(&folder).expect("list the pages").flatten() {
        let name = entry.path().file_stem().expect("a name").to_string_lossy().into_owned();
        if name == "SUMMARY" || name == "pictures" {
            continue;
        }
        assert!(summary.contains(&format!("({name}.md)")), "SUMMARY.md does not list {name}.md");
        let text = fs::read_to_string(entry.path()).expect("a page");
        let is_run = include_str!("guide.rs").contains(&format!("(\"{name}\""));
        assert!(
            is_run || !blocks(&text).iter().any(|block| block.kind == "sh"),
            "{name}.md is not run"
        );
        for link in text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            let is_outside = link.is_empty() || link.starts_with("https://");
            assert!(is_outside || folder.join(link).is_file(), "{name}.md: a link to {link}");
            pictures.retain(|picture| picture.path() != folder.join(link));
        }
    }
    assert!(pictures.is_empty(), "no page shows {pictures:?}");
}

#[test]
fn what_was_said_is_compared_by_words() {
    let said = "pause 1.2 ms, 3 pages\nVM web runs\n";
    assert_eq!(missing("pause 950 us, 7 pages\n\nVM ...", said), None);
    assert_eq!(missing("VM web runs\npause 1.2 ms, 3 pages", said), Some("pause 1.2 ms, 3 pages"));
    assert_eq!(missing("VM web stands", said), Some("VM web stands"));
    assert_eq!(missing("... pages", said), None);
    assert_eq!(missing("pause 1.2 ms, 3", said), Some("pause 1.2 ms, 3"));
}
