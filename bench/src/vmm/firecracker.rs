//! Measures Firecracker: checkpoints against its own snapshots, restores against its own load, and
//! clones.

use super::Bench;
use super::costs::{allocated_bytes, push_pause_parts, stored_bytes};
use super::firecracker_vm::{FirecrackerVm, SnapshotFiles, VmShape, Work};
use super::restores::{RESTORED, RESTORED_BARE, RestoreMeasures};
use super::rows::{Rows, Vm};
use crate::Error;
use crate::guest_files::FirecrackerFiles;
use crate::keyframe_json::{KeyframeJson, number};
use crate::running_guest::make_store;
use crate::running_process::{Lines, RunningProcess, collect_lines, time_after, wait_for_line};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The time between two checkpoints, and between two of Firecracker's own snapshots.
const INTERVAL: Duration = Duration::from_secs(1);
/// The RAM that the guest does not write: where it is loaded, and what is before its table.
const UNWRITTEN_MIB: u64 = 32;
/// The largest part of RAM that is written besides the table.
const FILLED_MIB_MAX: u64 = 312;
const CLONES: &str = "20";
/// The time in which clones are idle before their RAM is counted.
const IDLE: Duration = Duration::from_secs(2);
/// Longest time until all clones run, and until a command ends after its checkpoints.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// Measures VMs with `mib` of RAM.
pub fn measure(
    bench: &Bench<'_>,
    files: &FirecrackerFiles,
    mib: u64,
    rows: &mut Rows,
) -> Result<(), Error> {
    let dir = bench.dir.join(format!("firecracker-{mib}"));
    std::fs::create_dir_all(&dir).map_err(Error::io("make a directory"))?;
    let vms = FirecrackerVms { bench, files, vm: ("firecracker", mib), dir };
    rows.push(vms.vm, "raw_bytes", (mib << 20) as f64);
    vms.checkpoints(rows)?;
    vms.own_snapshots(rows)?;
    vms.restores(rows)?;
    vms.bare_restores(rows)?;
    vms.clones(rows)?;
    std::fs::remove_dir_all(&vms.dir).map_err(Error::io("remove the stores"))
}

/// The VMs of one size.
struct FirecrackerVms<'a> {
    bench: &'a Bench<'a>,
    files: &'a FirecrackerFiles,
    vm: Vm,
    dir: PathBuf,
}

impl FirecrackerVms<'_> {
    fn say(&self, what: &str) {
        self.bench.options.say(format!("Firecracker, {} MiB: {what}", self.vm.1));
    }

    /// The VM whose RAM is written.
    fn shape(&self) -> VmShape {
        let filled_mib = (self.vm.1 - UNWRITTEN_MIB).min(FILLED_MIB_MAX);
        VmShape { mib: self.vm.1, filled_mib, work: Work::Writing, tracks_dirty_pages: false }
    }

    fn start(&self, name: &str, shape: VmShape) -> Result<FirecrackerVm, Error> {
        FirecrackerVm::start(self.files, &self.dir.join(name), shape, self.bench.interrupt)
    }

    fn store(&self, name: &str) -> PathBuf {
        self.dir.join(format!("store-{name}"))
    }

    /// Takes checkpoints of a new VM, one each second after the first. Returns them as
    /// `keyframe list --json` prints them.
    fn take(&self, name: &str, shape: VmShape, later: usize) -> Result<Vec<Value>, Error> {
        let store = self.store(name);
        make_store(self.bench.options, &store)?;
        let vm = self.start(name, shape)?;
        self.attach(&vm, &store, later + 1)?;
        drop(vm);
        let json = KeyframeJson { options: self.bench.options, interrupt: self.bench.interrupt };
        match json.run(&["list", "--json", "--store"], &store, &[])? {
            Value::Array(taken) if taken.len() > later / 2 + 1 => Ok(taken),
            other => Err(Error::failed("take checkpoints", format!("too few: {other}"))),
        }
    }

    /// Runs `keyframe attach` to its end.
    fn attach(&self, vm: &FirecrackerVm, store: &Path, count: usize) -> Result<(), Error> {
        let mut command = Command::new(&self.bench.options.keyframe);
        command.args(["attach", "--quiet", "--interval", "1s", "--count", &count.to_string()]);
        command.args(["--name", &vm_name()]).arg("--store").arg(store);
        command.arg("--api").arg(vm.socket()).arg(vm.pid().to_string());
        let (mut attached, _, errors) = spawn(command, "attach")?;
        let seconds = count as f64 * INTERVAL.as_secs_f64() * 3.0 + COMMAND_TIMEOUT.as_secs_f64();
        let exit = self.bench.interrupt.wait("keyframe attach ends", seconds, || {
            attached.0.try_wait().map_err(Error::io("wait for keyframe attach"))
        })?;
        // 3: a checkpoint failed, and the run went on.
        if matches!(exit.code(), Some(0 | 3)) {
            return Ok(());
        }
        let said: Vec<String> = errors.into_iter().map(|line| line.text).collect();
        Err(Error::failed("keyframe attach", said.join("; ")))
    }

    fn checkpoints(&self, rows: &mut Rows) -> Result<(), Error> {
        self.say("checkpoints");
        let taken = self.take("checkpoints", self.shape(), self.bench.plan.checkpoints)?;
        for (index, checkpoint) in taken.iter().enumerate() {
            let stored = stored_bytes(checkpoint)?;
            if index == 0 {
                rows.push(self.vm, "first_stored_bytes", stored);
                continue;
            }
            rows.push(self.vm, "later_stored_bytes", stored);
            rows.push(self.vm, "pause_ns", number(checkpoint, "pause_ns")?);
            push_pause_parts(self.vm, checkpoint, rows)?;
            rows.push(self.vm, "dirty_pages", number(checkpoint, "dirty_pages")?);
        }
        Ok(())
    }

    /// Has Firecracker write its own snapshots: Full ones of one VM, and Diff ones of another one.
    fn own_snapshots(&self, rows: &mut Rows) -> Result<(), Error> {
        self.say("its own Full snapshots");
        let full = SnapshotFiles::below(&self.dir);
        let mut vm = self.start("full", self.shape())?;
        for _ in 0..self.bench.plan.saves {
            self.bench.interrupt.sleep(INTERVAL)?;
            rows.push(self.vm, "full_ns", vm.full_snapshot(&full)?);
        }
        rows.push(self.vm, "full_bytes", allocated_bytes(&full.memory)?);
        drop(vm);
        self.say("its own Diff snapshots");
        let shape = VmShape { tracks_dirty_pages: true, ..self.shape() };
        let mut vm = self.start("diff", shape)?;
        let diff = SnapshotFiles::below(&self.dir.join("diff"));
        // The first Diff snapshot of a VM has all that it has written.
        vm.diff_snapshot(&diff)?;
        for _ in 0..self.bench.plan.diffs {
            self.bench.interrupt.sleep(INTERVAL)?;
            rows.push(self.vm, "diff_ns", vm.diff_snapshot(&diff)?);
            rows.push(self.vm, "diff_bytes", allocated_bytes(&diff.memory)?);
        }
        Ok(())
    }

    /// Restores the newest checkpoint, and Firecracker's own snapshot, by turns.
    fn restores(&self, rows: &mut Rows) -> Result<(), Error> {
        self.say("restores");
        let store = self.store("checkpoints");
        let own = SnapshotFiles::below(&self.dir);
        for _ in 0..self.bench.plan.restores {
            self.restore(&store, RESTORED, rows)?;
            let load = own.load(self.files, &self.dir.join("load"))?;
            rows.push(self.vm, "load_command_ns", load.command_ns);
            rows.push(self.vm, "load_ns", load.requests_ns);
        }
        Ok(())
    }

    /// Restores a VM that has written nothing but its table.
    fn bare_restores(&self, rows: &mut Rows) -> Result<(), Error> {
        self.say("restores of a VM that has written 8 MiB");
        self.take("bare", VmShape { filled_mib: 0, ..self.shape() }, 1)?;
        (0..self.bench.plan.restores)
            .try_for_each(|_| self.restore(&self.store("bare"), RESTORED_BARE, rows))
    }

    fn restore(
        &self,
        store: &Path,
        measures: RestoreMeasures,
        rows: &mut Rows,
    ) -> Result<(), Error> {
        self.bench.restore(self.vm, (store, &self.dir), measures, rows)
    }

    /// Starts clones of an idle VM whose RAM is written.
    fn clones(&self, rows: &mut Rows) -> Result<(), Error> {
        self.say("clones");
        self.take("idle", VmShape { work: Work::Idle, ..self.shape() }, 1)?;
        for _ in 0..self.bench.plan.branches {
            self.bench.interrupt.check()?;
            let clones = self.branch()?;
            rows.push(self.vm, "branch_20_ns", clones.reported_ns);
            rows.push(self.vm, "branch_20_command_ns", clones.command_ns);
            rows.push(self.vm, "clone_ram_bytes", clones.largest_ram_bytes);
        }
        Ok(())
    }

    fn branch(&self) -> Result<Clones, Error> {
        let mut command = Command::new(&self.bench.options.keyframe);
        command.args(["branch", "latest", "-n", CLONES, "--json", "--name", &vm_name()]);
        command.arg("--store").arg(self.store("idle"));
        let started = Instant::now();
        let (_clones_run, lines, errors) = spawn(command, "branch")?;
        let running = "are running after";
        let (command_ns, line) = wait_for_line(&errors, started, running, COMMAND_TIMEOUT)?;
        let clones = whole_json(&lines)?;
        self.bench.interrupt.sleep(IDLE)?;
        let mut largest_ram_bytes: f64 = 0.0;
        for clone in &clones {
            let pid = number(clone, "qemu_pid")?;
            let path = format!("/proc/{pid}/smaps");
            let smaps =
                std::fs::read_to_string(&path).map_err(Error::io(format!("read {path}")))?;
            let own = own_ram_bytes(&smaps)
                .ok_or_else(|| Error::failed(&path, "no mapping of the guest's RAM"))?;
            largest_ram_bytes = largest_ram_bytes.max(own);
        }
        Ok(Clones { reported_ns: time_after(&line, running)?, command_ns, largest_ram_bytes })
    }
}

/// Clones that were started at once.
struct Clones {
    /// The time until all of them ran, as the command tells it.
    reported_ns: f64,
    /// The same from the start of the command.
    command_ns: f64,
    /// The guest RAM that the clone with the most of it does not share.
    largest_ram_bytes: f64,
}

/// The name of the benchmark's VMs.
fn vm_name() -> String {
    format!("bench-{}", std::process::id())
}

/// Starts a command of `keyframe`, and collects the lines of its standard output and error.
fn spawn(mut command: Command, name: &str) -> Result<(RunningProcess, Lines, Lines), Error> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(Error::io(format!("start keyframe {name}")))?;
    let (output, errors) = (child.stdout.take(), child.stderr.take());
    let process = RunningProcess(child);
    let (Some(output), Some(errors)) = (output, errors) else {
        return Err(Error::failed(format!("start keyframe {name}"), "no pipes"));
    };
    Ok((process, collect_lines(output), collect_lines(errors)))
}

/// Reads lines until they are an array.
fn whole_json(lines: &Lines) -> Result<Vec<Value>, Error> {
    let mut text = String::new();
    loop {
        let line = lines.recv_timeout(COMMAND_TIMEOUT);
        let line = line.map_err(|e| Error::failed("read the clones", format!("{e}: {text}")))?;
        text.push_str(&line.text);
        if let Ok(values) = serde_json::from_str(&text) {
            return Ok(values);
        }
    }
}

/// Returns the private and written bytes of the mapping of guest RAM; `None` if there is none.
fn own_ram_bytes(smaps: &str) -> Option<f64> {
    let mut is_ram = false;
    let mut bytes = None;
    for line in smaps.lines() {
        let first = line.split_whitespace().next()?;
        if first.contains('-') {
            is_ram = line.contains("memfd:keyframe-ram");
        } else if is_ram && first == "Private_Dirty:" {
            let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
            bytes = Some(bytes.unwrap_or(0.0) + kib * 1024.0);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_ram_is_that_of_its_mapping() {
        let smaps = "7f00-7f10 rw-p 00000000 00:01 852 /memfd:keyframe-ram (deleted)\n\
            Rss:                 900 kB\nPrivate_Dirty:         4 kB\n\
            7f20-7f30 rw-p 00000000 00:00 0 [heap]\nPrivate_Dirty:       700 kB\n";
        assert_eq!(own_ram_bytes(smaps), Some(4096.0));
        assert_eq!(own_ram_bytes("7f20-7f30 rw-p 0 00:00 0\nPrivate_Dirty: 7 kB\n"), None);
    }
}
