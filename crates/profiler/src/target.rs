//! The VM that is measured: one that Keyframe launches, or one that runs already, with or without
//! its monitor.

use super::console::{self, WatchedOutput};
use super::{StartCondition, ram_discovery};
use crate::error::{Error, Result};
use keyframe_kernel::Process;
use keyframe_qemu::{
    AuditFinding, HostBlock, Invocation, LaunchOptions, Qmp, QmpEvent, RunStatus, Severity, Vm,
    find_ram_blocks,
};
use keyframe_units::{HostRange, PAGE_BYTES};
use keyframe_vmm::{RunState, Vmm};
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The longest wait for a monitor's greeting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A VM whose RAM is known. Dropping it ends a VM that was launched, and leaves another one alone.
pub struct Target {
    /// The process of its QEMU.
    pub process: Process,
    /// The ranges of its guest RAM in the process.
    pub ranges: Vec<HostRange>,
    /// The number of its virtual CPUs, if known.
    pub vcpus: Option<u32>,
    /// True if writes are also counted for RAM that the VM may discard (balloon).
    pub watch_discards: bool,
    /// True if its seccomp filter has to be suspended for the attach.
    pub traps_unknown_calls: bool,
    /// What cannot be counted, and why.
    pub notes: Vec<String>,
    access: Access,
}

/// How commands reach the VMM.
enum Access {
    /// Not at all.
    NoMonitor,
    /// Through the monitor that the user named.
    Monitor(Box<Qmp>),
    /// Through the monitor of a VM that was launched here.
    Launched(Box<Launched>),
}

/// A VM that was launched here, with its sockets in a directory of its own. Dropping it ends it.
struct Launched {
    vm: Vm,
    _dir: TempDir,
}

impl Drop for Launched {
    fn drop(&mut self) {
        // [`Target::end`] has returned the error, or the caller has another one.
        let _ = self.vm.kill();
    }
}

impl Target {
    /// Describes the VM that runs as process `pid`. Uses the monitor at the socket `qmp`, if given.
    /// Errors: no such process; its RAM is not found; the monitor does not answer or is that of
    /// another process.
    pub fn running(pid: u32, qmp: Option<&Path>) -> Result<Self> {
        let process = Process::open(pid)?;
        let Some(path) = qmp else {
            let found = ram_discovery::find(&process)?;
            let without = "not counted without a monitor: name QEMU's with --qmp SOCKET";
            let notes = vec![
                format!("sectors and packets: {without}"),
                "RAM: the guest's main memory alone, without video RAM and ROMs".into(),
            ];
            let (ranges, vcpus) = (found.ranges, found.vcpus);
            return Ok(Self {
                process,
                ranges,
                vcpus,
                watch_discards: true,
                traps_unknown_calls: false,
                notes,
                access: Access::NoMonitor,
            }
            .with_page_sizes_noted());
        };
        let mut qmp = Qmp::connect_running(path, CONNECT_TIMEOUT).map_err(Error::Monitor)?;
        let blocks = find_ram_blocks(&mut qmp, pid).map_err(|e| Error::OtherMonitor {
            pid,
            socket: path.to_owned(),
            source: e,
        })?;
        let answer = qmp.execute("query-cpus-fast", None)?;
        let vcpus = answer.as_array().and_then(|all| u32::try_from(all.len()).ok());
        let access = Access::Monitor(Box::new(qmp));
        let target = Self {
            process,
            ranges: ranges(&blocks),
            vcpus,
            watch_discards: true,
            traps_unknown_calls: false,
            notes: vec![],
            access,
        };
        target.noting_a_pause()
    }

    /// Describes the VM of another VMM, which runs. Errors: its process has ended; its RAM is not
    /// found; the VMM does not answer.
    pub fn of_vm(mut vm: Box<dyn Vmm>) -> Result<Self> {
        let process = Process::open(vm.pid())?;
        let ranges = ranges(&vm.ram_blocks()?);
        let (vcpus, kind) = (vm.spec()?.vcpus, vm.kind());
        let mut notes = vec![format!("sectors and packets: {kind} does not tell them")];
        let state = vm.run_state()?;
        if state != RunState::Running {
            notes.push(not_running(&state));
        }
        let (watch_discards, traps_unknown_calls) = (vm.discards_ram()?, vm.traps_unknown_calls());
        let (vcpus, access) = (Some(vcpus), Access::NoMonitor);
        Ok(Self { process, ranges, vcpus, watch_discards, traps_unknown_calls, notes, access }
            .with_page_sizes_noted())
    }

    /// Launches the VM of the command line `command`, with `vcpus` virtual CPUs if given. The VM
    /// runs when this returns. Errors: the command line cannot be used; QEMU cannot be started or
    /// ends.
    pub fn launch(
        command: Vec<OsString>,
        vcpus: Option<u32>,
        start: &StartCondition,
    ) -> Result<(Self, WatchedOutput)> {
        let invocation = Invocation::parse(command)?;
        let starts_paused = invocation.starts_paused();
        let dir = tempfile::Builder::new()
            .prefix("keyframe-profile-")
            .permissions(std::fs::Permissions::from_mode(0o700))
            .tempdir()
            .map_err(|e| Error::io("make a directory for QEMU's monitors", e))?;
        let options = LaunchOptions { run_dir: dir.path().into() };
        let (mut launched, console) =
            console::around(start.when.as_deref(), start.quiet_stdout, || {
                let vm = Vm::launch_mortal(&invocation, &options)?;
                Ok(Box::new(Launched { vm, _dir: dir }))
            })?;
        let prepared = Self::prepare(&mut launched.vm, vcpus, starts_paused)?;
        let Prepared { process, ranges, vcpus, watch_discards, notes } = prepared;
        let access = Access::Launched(launched);
        let (vcpus, traps_unknown_calls) = (Some(vcpus), false);
        let target =
            Self { process, ranges, vcpus, watch_discards, traps_unknown_calls, notes, access };
        Ok((target.noting_a_pause()?, console))
    }

    fn prepare(vm: &mut Vm, asked: Option<u32>, starts_paused: bool) -> Result<Prepared> {
        let vcpus = vm.cpus()?;
        if let Some(asked) = asked.filter(|n| *n != vcpus) {
            return Err(Error::OtherVcpus { started: vcpus, asked });
        }
        let notes = vm.audit()?.iter().filter_map(note).collect();
        let watch_discards = vm.discards_ram()?;
        let blocks = vm.ram_blocks()?;
        let process = Process::open(vm.pid())?;
        if !starts_paused {
            vm.qmp().cont()?;
        }
        Ok(Prepared { process, ranges: ranges(&blocks), vcpus, watch_discards, notes })
    }

    /// Ends a VM that [`Self::launch`] started. Does nothing to another VM. Error: QEMU cannot be
    /// ended.
    pub fn end(mut self) -> Result<()> {
        match &mut self.access {
            Access::Launched(launched) => Ok(launched.vm.kill()?),
            Access::NoMonitor | Access::Monitor(_) => Ok(()),
        }
    }

    /// Returns QEMU's monitor; `None` if there is none.
    pub fn qmp(&mut self) -> Option<&mut Qmp> {
        match &mut self.access {
            Access::NoMonitor => None,
            Access::Monitor(qmp) => Some(qmp),
            Access::Launched(launched) => Some(launched.vm.qmp()),
        }
    }

    /// Returns the size of the watched RAM in bytes.
    pub fn ram_bytes(&self) -> u64 {
        self.ranges.iter().map(|r| r.len_bytes).sum()
    }

    /// Returns true if the VM has ended or shuts down. Adds a note to the profile if another
    /// program has paused it. Error: the monitor does not answer.
    pub fn has_ended(&mut self) -> Result<bool> {
        if !self.process.is_alive() {
            return Ok(true);
        }
        let Some(qmp) = self.qmp() else { return Ok(false) };
        let events = match qmp.drain_events() {
            Ok(events) => events,
            Err(_) if self.ends_within(Duration::from_millis(500)) => return Ok(true),
            Err(e) => return Err(e.into()),
        };
        let paused = "another program paused the VM for part of the time: counts are too low";
        if events.contains(&QmpEvent::Stop) && !self.notes.iter().any(|n| n == paused) {
            self.notes.push(paused.into());
        }
        Ok(events.iter().any(|e| matches!(e, QmpEvent::Shutdown { .. })))
    }

    /// Waits until QEMU ends. Returns false if it still runs after `timeout`.
    pub fn ends_within(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        while self.process.is_alive() {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    fn noting_a_pause(mut self) -> Result<Self> {
        let status = match self.qmp() {
            Some(qmp) => qmp.status()?,
            None => RunStatus::Running,
        };
        if !status.is_running() {
            self.notes.push(not_running(&status));
        }
        Ok(self.with_page_sizes_noted())
    }

    /// Adds a note if RAM lies in large pages: the kernel tracks writes in units of these pages.
    fn with_page_sizes_noted(mut self) -> Self {
        let maps = self.process.maps().unwrap_or_default();
        let is_large = |m: &&keyframe_kernel::Mapping| {
            m.page_bytes > PAGE_BYTES as u64
                && self.ranges.iter().any(|r| m.range.start < r.end() && r.start < m.range.end())
        };
        if let Some(large) = maps.iter().find(is_large) {
            let kib = large.page_bytes / 1024;
            self.notes.push(format!(
                "RAM lies in pages of {kib} KiB: one write counts as all 4 KiB pages of these"
            ));
        }
        self
    }
}

/// Returns the note about a VM in another state than running.
fn not_running(state: &impl std::fmt::Debug) -> String {
    format!("the VM was not running when the measuring began ({state:?})")
}

/// A launched VM before its first instruction.
struct Prepared {
    process: Process,
    ranges: Vec<HostRange>,
    vcpus: u32,
    watch_discards: bool,
    notes: Vec<String>,
}

fn ranges(blocks: &[HostBlock]) -> Vec<HostRange> {
    blocks.iter().map(|b| HostRange { start: b.host, len_bytes: b.block.total_bytes }).collect()
}

/// Returns the note for an audit finding. A finding means that some writes to RAM are not counted;
/// `None` for a finding about disks, which does not affect RAM.
fn note(finding: &AuditFinding) -> Option<String> {
    let about_ram = finding.severity != Severity::Warning
        && !finding.reason.starts_with("disks that the guest can write");
    about_ram
        .then(|| format!("pages may be counted too low: {}: {}", finding.subject, finding.reason))
}
