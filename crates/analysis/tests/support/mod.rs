//! A recording made with stock QEMU, without anything of Keyframe: checkpoints of a recorded guest
//! and replays of the intervals between them, each with a plugin.
//!
//! ```text
//!   Recording::make    boot ... KF READY │ checkpoint 0 ── run ── │ checkpoint 1 ── run ── │ checkpoint 2     rr=record
//!   Recording::replay  from a checkpoint to later ones, each stop exact                                    rr=replay
//! ```
//!
//! Intervals begin and end just behind a checkpoint, where the log has nothing: at a checkpoint an
//! interrupt may come before or after a replay that goes on stops there.

#![allow(dead_code, reason = "tests and examples use different parts")]

use keyframe_analysis::plugin::{self, PluginInterface};
use keyframe_analysis::tools::{Tool, ToolRun};
use keyframe_analysis::{
    Icount, IcountInterval, MergeContext, Part, RamFile, RamRange, ReplayRam, RunContext,
    ToolSummary,
};
use keyframe_replay::log::LogIndex;
use keyframe_testing::small_guest;
use keyframe_units::GuestPhys;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const RAM_MIB: u64 = 128;
/// Between two checkpoints.
const INSTRUCTIONS_LEAST: u64 = 10_000_000;
const PATIENCE: Duration = Duration::from_secs(60);

/// A QEMU to test with.
#[derive(Clone, Debug)]
pub struct Qemu {
    pub path: String,
    pub interface: PluginInterface,
}

/// The QEMUs to test with.
pub fn qemus() -> Vec<Qemu> {
    keyframe_testing::qemus().into_iter().map(Qemu::from).collect()
}

impl From<keyframe_testing::Qemu> for Qemu {
    fn from(qemu: keyframe_testing::Qemu) -> Self {
        let interface = match qemu.label {
            "10" => PluginInterface::V4,
            "11" => PluginInterface::V7,
            _ => PluginInterface::V1,
        };
        Self { path: qemu.path, interface }
    }
}

/// A running QEMU with its monitor; killed when dropped.
pub struct Vm {
    child: Child,
    errors: PathBuf,
    monitor: BufReader<UnixStream>,
}

impl Vm {
    pub fn start(line: &[String], dir: &Path) -> Self {
        let socket = dir.join("qmp");
        let _ = std::fs::remove_file(&socket);
        let errors = std::fs::File::create(dir.join("stderr")).unwrap();
        let child = Command::new(&line[0])
            .args(&line[1..])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .expect("start QEMU");
        let mut child = Some(child);
        let until = Instant::now() + PATIENCE;
        let stream = loop {
            if let Ok(stream) = UnixStream::connect(&socket) {
                break stream;
            }
            let running = child.as_mut().unwrap();
            let ended = running.try_wait().unwrap();
            if ended.is_some() || Instant::now() > until {
                let _ = running.kill();
                let _ = running.wait();
                let told = std::fs::read_to_string(dir.join("stderr")).unwrap_or_default();
                panic!("no monitor ({ended:?}): {told}\n{}", line.join(" "));
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut vm = Self {
            child: child.take().unwrap(),
            errors: dir.join("stderr"),
            monitor: BufReader::new(stream),
        };
        vm.line();
        vm.ask("qmp_capabilities", json!({}));
        vm
    }

    fn told(&mut self) -> String {
        std::thread::sleep(Duration::from_millis(200));
        let told = std::fs::read_to_string(&self.errors).unwrap_or_default();
        format!("{:?} {told}", self.child.try_wait())
    }

    #[track_caller]
    fn send(&mut self, message: &Value) {
        // In one piece: QEMU obeys once the braces are closed, and may have ended before a line
        // feed behind them.
        let sent = self.monitor.get_mut().write_all(format!("{message}\n").as_bytes());
        if let Err(error) = sent {
            panic!("QEMU ended: {error}: {}", self.told());
        }
    }

    #[track_caller]
    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.monitor.read_line(&mut line).expect("a line from the monitor in time");
        let told = if line.is_empty() { self.told() } else { String::new() };
        assert!(!line.is_empty(), "QEMU ended: {told}");
        serde_json::from_str(&line).expect("JSON")
    }

    #[track_caller]
    #[expect(clippy::needless_pass_by_value, reason = "json! makes a value")]
    pub fn ask(&mut self, command: &str, arguments: Value) -> Value {
        self.send(&json!({ "execute": command, "arguments": arguments }));
        loop {
            let answer = self.line();
            assert!(answer.get("error").is_none(), "{command}: {answer}");
            if let Some(result) = answer.get("return") {
                return result.clone();
            }
        }
    }

    /// Runs until the VM stands still.
    #[track_caller]
    pub fn run_to_stop(&mut self) {
        self.send(&json!({ "execute": "cont" }));
        while self.line().get("event").and_then(Value::as_str) != Some("STOP") {}
    }

    #[track_caller]
    pub fn icount(&mut self) -> Icount {
        Icount(self.ask("query-replay", json!({}))["icount"].as_u64().expect("a count"))
    }

    /// CPU time that it has used.
    pub fn cpu(&self) -> Duration {
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("it runs");
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        Duration::from_millis(ticks * 10)
    }

    /// Quits and waits.
    #[track_caller]
    pub fn quit(mut self) {
        self.ask("quit", json!({}));
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(status.success(), "QEMU: {status}");
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("QEMU does not quit");
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A recorded guest with checkpoints.
pub struct Recording {
    pub dir: tempfile::TempDir,
    pub qemu: Qemu,
    pub checkpoints: Vec<Icount>,
    /// Behind each checkpoint, where its interval begins.
    pub starts: Vec<Icount>,
}

impl Recording {
    /// Boots the small guest with `work` and takes `count` checkpoints, `apart` from each other,
    /// once it is ready.
    pub fn make(qemu: &Qemu, work: &str, count: usize, apart: Duration) -> Self {
        let dir = tempfile::Builder::new().prefix("keyframe-analysis-").tempdir().unwrap();
        let mut recording =
            Self { dir, qemu: qemu.clone(), checkpoints: Vec::new(), starts: Vec::new() };
        let line = recording.line(work, "record", &recording.file("ram"), &[]);
        let mut vm = Vm::start(&line, recording.dir.path());
        let until = Instant::now() + PATIENCE;
        while !recording.console().contains("KF READY") {
            assert!(Instant::now() < until, "the guest does not boot: {}", recording.console());
            std::thread::sleep(Duration::from_millis(20));
        }
        for number in 0..count {
            let at = recording.stopped_behind_some_work(&mut vm, apart);
            let device = recording.file(&format!("device-{number}"));
            vm.ask("xen-save-devices-state", json!({ "filename": device, "live": false }));
            std::fs::copy(recording.file("ram"), recording.file(&format!("ram-{number}"))).unwrap();
            recording.checkpoints.push(at);
            vm.ask("cont", json!({}));
        }
        // Events behind the last checkpoint, so that a replay reaches it.
        std::thread::sleep(Duration::from_millis(300));
        vm.ask("stop", json!({}));
        println!("checkpoints {:?}, end {:?}", recording.checkpoints, vm.icount());
        vm.quit();
        std::fs::write(recording.file("work"), work).unwrap();
        let boundaries = LogIndex::read(&recording.file("log")).unwrap();
        let behind =
            |at: &Icount| Icount(boundaries.next_unambiguous(at.0).expect("the log goes on"));
        recording.starts = recording.checkpoints.iter().map(behind).collect();
        recording
    }

    /// Stops the VM `apart` from now, or as much later as it needs to do some work since the last
    /// checkpoint: on a busy machine a guest may stand for long.
    fn stopped_behind_some_work(&self, vm: &mut Vm, apart: Duration) -> Icount {
        let least = self.checkpoints.last().map_or(0, |last| last.0 + INSTRUCTIONS_LEAST);
        let until = Instant::now() + PATIENCE;
        loop {
            std::thread::sleep(apart);
            vm.ask("stop", json!({}));
            let at = vm.icount();
            if at.0 >= least {
                return at;
            }
            assert!(Instant::now() < until, "the guest does not run");
            vm.ask("cont", json!({}));
        }
    }

    pub fn console(&self) -> String {
        std::fs::read_to_string(self.file("console")).unwrap_or_default()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn intervals(&self) -> Vec<IcountInterval> {
        let pairs = self.starts.windows(2).enumerate();
        pairs
            .map(|(index, pair)| IcountInterval {
                index: index as u32,
                start: pair[0],
                end: pair[1],
            })
            .collect()
    }

    fn line(&self, work: &str, mode: &str, ram: &Path, extra: &[String]) -> Vec<String> {
        let guest = small_guest();
        let suppress = if mode == "replay" { ",suppress-vmdesc=on" } else { "" };
        let console = self.file(if mode == "replay" { "replayed" } else { "console" });
        let mut line: Vec<String> = [
            &self.qemu.path,
            "-accel",
            "tcg",
            "-icount",
            &format!("shift=3,rr={mode},rrfile={}", self.file("log").display()),
            "-machine",
            &format!("q35,hpet=off,memory-backend=ram{suppress}"),
            "-m",
            &format!("{RAM_MIB}M"),
            "-object",
            &format!("memory-backend-file,id=ram,size={RAM_MIB}M,mem-path={},share=on", ram.display()),
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-net",
            "none",
            "-serial",
            &format!("file:{}", console.display()),
            "-kernel",
            &guest.join("vmlinux").display().to_string(),
            "-initrd",
            &guest.join("initramfs.cpio.gz").display().to_string(),
            "-append",
            &format!("console=ttyS0 quiet panic=-1 tsc=unstable mitigations=off cryptomgr.notests initcall_blacklist=load_system_certificate_list,crypto_kdf108_init,init_encrypted kf.work={work}"),
        ]
        .map(str::to_owned)
        .into();
        line.extend_from_slice(extra);
        line
    }

    /// A QEMU that stands at checkpoint `from`, in a directory of its own, with a plugin.
    pub fn restored(&self, from: usize, dir: &Path, plugin: Option<String>) -> Vm {
        let ram = dir.join("ram");
        std::fs::copy(self.file(&format!("ram-{from}")), &ram).unwrap();
        let work = std::fs::read_to_string(self.file("work")).unwrap();
        let incoming = format!("exec:cat {}", self.file(&format!("device-{from}")).display());
        let mut extra: Vec<String> = [
            "-S",
            "-global",
            "migration.send-configuration=off",
            "-global",
            "migration.announce-rounds=0",
            "-incoming",
            &incoming,
        ]
        .map(str::to_owned)
        .into();
        extra.extend(plugin.into_iter().flat_map(|option| ["-plugin".to_owned(), option]));
        let mut vm = Vm::start(&self.line(&work, "replay", &ram, &extra), dir);
        let until = Instant::now() + PATIENCE;
        while vm.ask("query-status", json!({}))["status"] == "inmigrate" {
            assert!(Instant::now() < until, "the device state does not load");
            std::thread::sleep(Duration::from_millis(5));
        }
        vm
    }

    /// Returns the inputs of a tool's run in the directory `dir`. The run begins at checkpoint `from`,
    /// with the interval `first`.
    pub fn context(&self, dir: &Path, from: usize, first: IcountInterval) -> RunContext {
        std::fs::create_dir_all(dir).unwrap();
        let warm_up =
            IcountInterval { index: from as u32, start: self.checkpoints[from], end: first.start };
        let range = RamRange { guest: GuestPhys(0), number: 0, len_bytes: RAM_MIB << 20 };
        let file = RamFile { number: 0, path: dir.join("ram") };
        RunContext {
            interface: self.qemu.interface,
            plugin: plugin::install(self.dir.path(), self.qemu.interface).unwrap(),
            ram: ReplayRam { files: vec![file], ranges: vec![range] },
            dir: dir.to_owned(),
            warm_up: Some(warm_up),
            first,
            may_continue: true,
        }
    }

    /// Replays `intervals` under `running`, of which `context` tells; returns the parts and QEMU's
    /// CPU time from the start of the first interval.
    pub fn replay(
        &self,
        context: &RunContext,
        intervals: &[IcountInterval],
        mut running: Box<dyn ToolRun>,
    ) -> (Vec<Part>, Duration) {
        let warm_up = context.warm_up.unwrap();
        let mut vm = self.restored(warm_up.index as usize, &context.dir, Some(running.option()));
        let before = vm.cpu();
        let mut following = intervals.iter().copied();
        let (mut end, mut parts) = (warm_up.end, Vec::new());
        loop {
            self.run_to(&mut vm, end);
            let next = following.next();
            running.cut(next).unwrap();
            parts.extend(running.completed().unwrap());
            let Some(next) = next else { break };
            end = next.end;
        }
        let cpu = vm.cpu().saturating_sub(before);
        vm.quit();
        parts.extend(running.finish().unwrap());
        (parts, cpu)
    }

    /// Replays up to `end`, exactly.
    #[expect(clippy::unused_self, reason = "a recording's own")]
    pub fn run_to(&self, vm: &mut Vm, end: Icount) {
        vm.ask("replay-break", json!({ "icount": end.0 }));
        vm.run_to_stop();
        assert_eq!(vm.icount(), end, "a replay stops where it is told to");
    }

    /// A QEMU for each interval.
    pub fn side_by_side(&self, tool: &dyn Tool, name: &str) -> Vec<Part> {
        let all = self.intervals();
        let each = (0..all.len()).map(|index| {
            let dir = self.file(&format!("{name}-{index}"));
            let from = index.saturating_sub(tool.warm_up_intervals());
            let context = self.context(&dir, from, all[from]);
            let running = tool.begin(&context).unwrap();
            let mut parts = self.replay(&context, &all[from..=index], running).0;
            parts.split_off(index - from)
        });
        each.flatten().collect()
    }

    /// One QEMU for all.
    pub fn in_sequence(&self, tool: &dyn Tool, name: &str) -> Vec<Part> {
        let all = self.intervals();
        let context = self.context(&self.file(name), 0, all[0]);
        self.replay(&context, &all, tool.begin(&context).unwrap()).0
    }

    /// The results of parts, in a directory of their own.
    pub fn merged(&self, tool: &dyn Tool, name: &str, parts: Vec<Part>) -> ToolSummary {
        let out = self.file(name);
        std::fs::create_dir_all(&out).unwrap();
        tool.merge(&MergeContext { parts, out, guest_symbols: std::sync::Arc::default() }).unwrap()
    }
}
