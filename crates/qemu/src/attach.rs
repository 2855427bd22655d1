//! Attaches to a QEMU that another program started, by hand or with libvirt, without restarting it.
//!
//! ```text
//!   pid ──▶ descriptor of the process ──▶ its own line (/proc) ──▶ monitor: a socket, or libvirt
//!                                                                     │
//!           Vm ◀── still the same process? ◀── device state file ◀────┤ greets? that process's? a supported processor? not migrating?
//!                                              (QEMU forgets it on detach)
//! ```
//!
//! Invariants:
//! 1. The monitor is that process's: the file passed through it is open there.
//! 2. One engine at a time: the file's set of descriptors carries the engine's name.
//! 3. A VM that an engine left in a pause, because its watchdog died with it, runs again.
//! 4. Nothing else of the VM is changed, and that file is taken back on detach; a watchdog takes it
//!    back for an engine that died, and the next engine for both.
//!
//! Left out: tracking the VM's RAM (the kernel crate). The kernel refuses a second tracker of the
//! same RAM, too.

mod running;

use crate::binary::QemuIdentity;
use crate::lifetime::{Lifetime, Other};
use crate::statefile::StateFile;
use crate::vm::{Origin, Vm, target};
use crate::{Error, Qmp, Result, RunStatus};
use keyframe_machine::{Lineage, MachineSpec, VmmKind};
use keyframe_qemu_cmdline::{lineage_of, options};
use running::Running;
use std::path::PathBuf;
use std::time::Duration;

/// How long a monitor may take to greet. QEMU's main loop can stand still for a second or two when
/// it flushes disks.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// How Keyframe reaches the monitor of a running VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Monitor {
    /// A QMP socket that QEMU listens at (`-qmp unix:PATH,server=on,wait=off`).
    Socket(PathBuf),
    /// Through libvirt, which started it.
    Libvirt {
        /// The domain's name.
        domain: String,
        /// libvirt's URI; `None` for virsh's default.
        uri: Option<String>,
    },
}

/// The options of an attach.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// The monitor.
    pub monitor: Monitor,
}

impl Vm {
    /// Takes hold of the QEMU with process id `pid`, which runs on.
    ///
    /// Errors: [`Error::Attach`] if `pid` is no QEMU, has another monitor, or has an engine
    /// already; [`Error::MonitorBusy`] if another client uses the monitor; [`Error::Libvirt`] if
    /// libvirt refuses its monitor; [`Error::Binary`] if Keyframe does not support the processor
    /// that it emulates; [`Error::Gone`] if it has ended.
    pub fn attach(pid: u32, options: &AttachOptions) -> Result<Self> {
        let lifetime = Lifetime::Other(Other::open(pid)?);
        let running = Running::read(pid)?;
        let mut state = StateFile::new(&[])?;
        let (mut qmp, origin) = connect(pid, &running, &options.monitor, &state)?;
        check_emulator(&mut qmp, pid, &running)?;
        check_status(&mut qmp, pid)?;
        let was_in_pause = state.pass(&mut qmp, pid)?;
        let lines = (running.words.clone(), running.words);
        let mut vm = Self::from_parts(lifetime, qmp, state, lines, origin);
        // What was looked at in /proc was this process, if it is there now.
        if vm.ended()?.is_some() {
            return Err(Error::Gone {
                monitor: format!("of pid {pid}"),
                operation: "attach".into(),
            });
        }
        if was_in_pause {
            let stands = vm.qmp().status()? == RunStatus::Paused;
            if stands {
                vm.qmp().cont()?;
            }
            vm.note_pause(false);
            vm.ended_a_left_pause = stands;
        }
        Ok(vm)
    }

    /// Returns the identity of the running QEMU's binary, even if the file at its path was replaced
    /// since. Error: the binary cannot be read.
    pub fn identity(&mut self) -> Result<QemuIdentity> {
        if let Some(identity) = &self.identity {
            return Ok(identity.clone());
        }
        let pid = self.pid();
        let identity = running::identity(self.qmp(), pid)?;
        Ok(self.identity.insert(identity).clone())
    }

    /// Sets the identity of the QEMU that runs this VM, for a caller that knows it already:
    /// [`Self::identity`] then reads no binary.
    pub fn set_identity(&mut self, identity: QemuIdentity) {
        self.identity = Some(identity);
    }

    /// Returns the machine as it is now, with the memory that was plugged in since its command line
    /// was written. Error: QEMU does not answer.
    pub fn spec(&mut self) -> Result<MachineSpec> {
        let identity = self.identity()?;
        let plugged = self.plugged_memory()?;
        let with_plugged = |line: &[String]| line.iter().chain(&plugged).cloned().collect();
        Ok(MachineSpec {
            vmm: VmmKind::Qemu,
            vmm_config: None,
            binary_path: identity.path.to_string_lossy().into_owned(),
            vmm_version: identity.version,
            binary_blake3: identity.blake3,
            processor: self.processor()?,
            machine_type: self.machine_type()?,
            vcpus: self.cpus()?,
            working_directory: self.working_directory()?.to_string_lossy().into_owned(),
            user_command: with_plugged(self.user_command()),
            full_command: with_plugged(self.full_command()),
            missing_cpu_features: Some(self.cpu_lacks()?),
            guest_map: Some(self.guest_map()?),
            recorded: None,
            counted_instructions: None,
            read_files: None,
        })
    }

    /// Returns the checkpoint that the VM was restored from, as its command line tells; `None` if
    /// it was not restored.
    pub fn lineage(&self) -> Option<Lineage> {
        lineage_of(self.full_command())
    }

    /// Returns the directory from which relative paths of the VM's command line start. Error: the
    /// process has ended, or this user may not inspect it.
    pub fn working_directory(&self) -> Result<PathBuf> {
        running::directory(self.pid(), self.full_command())
    }

    /// Returns the VM's name from `-name`; `None` if the command line has none.
    pub fn vm_name(&self) -> Option<String> {
        let arguments = options::parse(self.user_command().get(1..).unwrap_or_default()).ok()?;
        keyframe_qemu_cmdline::vm_name(&arguments)
    }
}

fn connect(
    pid: u32,
    running: &Running,
    monitor: &Monitor,
    state: &StateFile,
) -> Result<(Qmp, Origin)> {
    match monitor {
        Monitor::Socket(path) => {
            let qmp = Qmp::connect_running(path, GREETING_TIMEOUT)?;
            check_peer(&qmp, pid)?;
            Ok((qmp, Origin::Attached { monitor: path.clone() }))
        }
        Monitor::Libvirt { domain, uri } => {
            running.check_domain(pid, domain)?;
            let qmp = Qmp::connect_libvirt(domain, uri.as_deref(), &state.write_ends())?;
            Ok((qmp, Origin::Libvirt { domain: domain.clone(), uri: uri.clone() }))
        }
    }
}

/// Refuses a monitor socket that another QEMU made. A socket that a program other than a QEMU made
/// is accepted, because QEMU may have inherited it; the files passed through the monitor later show
/// whether it is QEMU's.
fn check_peer(qmp: &Qmp, pid: u32) -> Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(qmp)
        .map_err(Error::io("ask which process answers QEMU's monitor"))?;
    let peer = peer.pid.as_raw_nonzero().get();
    let is_qemu = u32::try_from(peer).is_ok_and(running::is_qemu);
    if peer.cast_unsigned() == pid || !is_qemu {
        return Ok(());
    }
    Err(Error::Attach {
        pid,
        problem: format!("the monitor belongs to process {peer}"),
        fix: format!(
            "name the pid and the monitor of the same QEMU: pid {peer}, or another socket"
        ),
    })
}

fn check_emulator(qmp: &mut Qmp, pid: u32, running: &Running) -> Result<()> {
    target(qmp, &running.binary).map(drop).map_err(|e| match e {
        Error::Refused { .. } => Error::Attach {
            pid,
            problem: "its monitor is not one of QEMU's system emulator".into(),
            fix: crate::lifetime::FIND.into(),
        },
        other => other,
    })
}

/// Checks that the VM's state is complete in this QEMU: it is not migrating, and no migration is
/// awaited.
fn check_status(qmp: &mut Qmp, pid: u32) -> Result<()> {
    let status = qmp.status()?;
    let problem = match &status {
        RunStatus::InMigrate => "it is still reading its state (-incoming)",
        RunStatus::Other(word) if word == "preconfig" => {
            "its machine does not exist yet (--preconfig)"
        }
        RunStatus::Other(word) if word.contains("migrate") => "it migrates, or has migrated away",
        _ => return Ok(()),
    };
    Err(Error::Attach { pid, problem: problem.into(), fix: "attach when that is over".into() })
}
