//! Where a Firecracker runs, for another one that takes its place: its standard streams, network
//! namespace, control group and priority.

use crate::process::Credentials;
use crate::{Error, Result};
use keyframe_kernel::Process;
use keyframe_kernel::child_setup::{start_in_cgroup, start_in_network, start_with_nice};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdGetfdFlags, getpriority_process, pidfd_getfd};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The names of the standard streams, by their numbers.
const STREAMS: [&str; 3] = ["input", "output", "error"];

/// The place of a process.
#[derive(Debug)]
pub(crate) struct ProcessPlace {
    /// The standard streams; `None` for one that is closed.
    streams: [Option<OwnedFd>; 3],
    /// Its network namespace, if it is not that of this process.
    network: Option<OwnedFd>,
    /// The file of its control group into which the number of a new process is written, if it is not
    /// the group of this process.
    cgroup: Option<OwnedFd>,
    nice: i32,
    /// The content of its `oom_score_adj`. This process may have made itself the kernel's first victim.
    oom_score: String,
}

impl ProcessPlace {
    /// Takes hold of the place of `process`. Errors: it is of another user, root or namespace (a jail);
    /// it may not be inspected; its control group cannot be joined.
    pub fn of(process: &Process) -> Result<Self> {
        let pid = process.pid();
        if !Credentials::of(pid)?.may_be_taken_over_by(&Credentials::of(std::process::id())?) {
            let problem = "it has another user, fewer rights, or another root directory (a jail)";
            return Err(Error::Place { pid, problem: problem.into() });
        }
        let mut streams = [None, None, None];
        for ((number, name), stream) in (0_u32..).zip(STREAMS).zip(&mut streams) {
            match pidfd_getfd(process.pidfd(), number.cast_signed(), PidfdGetfdFlags::empty()) {
                Ok(copy) => *stream = Some(copy),
                Err(Errno::BADF) => {}
                Err(e) => {
                    return Err(Error::io(format!("take standard {name} of process {pid}"))(e));
                }
            }
        }
        let oom_score = std::fs::read_to_string(oom_score_of(pid)).map_err(Error::io(format!(
            "look at the rank of process {pid} when memory is short"
        )))?;
        let nice = getpriority_process(Pid::from_raw(pid.cast_signed()))
            .map_err(Error::io(format!("look at the nice value of process {pid}")))?;
        Ok(Self { streams, network: network_of(pid)?, cgroup: cgroup_of(pid)?, nice, oom_score })
    }

    /// Makes the child of `command` start here. Error: a descriptor cannot be copied.
    pub fn enter(&self, command: &mut Command) -> Result<()> {
        let copy = |file: &OwnedFd| file.try_clone().map_err(Error::io("copy a descriptor"));
        let stream = |stream: &Option<OwnedFd>| {
            let copy = stream.as_ref().map(copy).transpose();
            copy.map(|copy| copy.map_or_else(Stdio::null, Stdio::from))
        };
        let [input, output, error] = &self.streams;
        command.stdin(stream(input)?).stdout(stream(output)?).stderr(stream(error)?);
        start_with_nice(command, self.nice);
        if let Some(cgroup) = &self.cgroup {
            start_in_cgroup(command, copy(cgroup)?);
        }
        if let Some(network) = &self.network {
            start_in_network(command, copy(network)?);
        }
        Ok(())
    }

    /// Gives process `pid`, which was started here, the rank of the former one when memory is short. If
    /// the kernel refuses, the process is a likelier victim.
    pub fn rank(&self, pid: u32) {
        let _ = std::fs::write(oom_score_of(pid), &self.oom_score);
    }
}

fn oom_score_of(pid: u32) -> String {
    format!("/proc/{pid}/oom_score_adj")
}

/// The network namespace of process `pid`, if it is not that of this process.
fn network_of(pid: u32) -> Result<Option<OwnedFd>> {
    let operation = || format!("open the network namespace of process {pid}");
    let path = format!("/proc/{pid}/ns/net");
    let inode = |path: &str| std::fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let (there, here) = (inode(&path), inode("/proc/self/ns/net"));
    if there.map_err(Error::io(operation()))? == here.map_err(Error::io(operation()))? {
        return Ok(None);
    }
    Ok(Some(File::open(path).map_err(Error::io(operation()))?.into()))
}

/// The file `cgroup.procs` of the control group of process `pid`, if it is not the group of this
/// process. Error: it is in a group of cgroups v1, or the group cannot be joined.
fn cgroup_of(pid: u32) -> Result<Option<OwnedFd>> {
    let groups = |path: &str| {
        std::fs::read_to_string(path).map_err(Error::io("look for the control group of a process"))
    };
    let (there, here) = (groups(&format!("/proc/{pid}/cgroup"))?, groups("/proc/self/cgroup")?);
    if there == here {
        return Ok(None);
    }
    let refuse = |problem: String| Error::Place { pid, problem };
    if let Some(service) = service(&there) {
        return Err(refuse(format!(
            "systemd ends what is in {service} with its first process, and may start that again"
        )));
    }
    let path = unified(&there)
        .ok_or_else(|| refuse("it is in another control group, of cgroups v1".into()))?;
    let processes = File::options().write(true).open(path.join("cgroup.procs"));
    let processes = processes.map_err(|e| {
        refuse(format!("its control group {} cannot be joined: {e}", path.display()))
    })?;
    Ok(Some(processes.into()))
}

/// The service of systemd in the text of `/proc/PID/cgroup`; `None` if the process is in none, or in a
/// scope below one, as the terminals of a desktop are.
fn service(text: &str) -> Option<&str> {
    let kind = |name: &str| name.rsplit_once('.').map(|(_, kind)| kind.to_owned());
    let is_unit = |name: &&str| matches!(kind(name).as_deref(), Some("service" | "scope"));
    let mut units = text.lines().filter_map(|line| line.rsplit('/').find(is_unit));
    units.find(|unit| kind(unit).as_deref() == Some("service"))
}

/// The directory of the group in the text of `/proc/PID/cgroup`; `None` if there are groups of cgroups
/// v1.
fn unified(text: &str) -> Option<PathBuf> {
    let mut lines = text.lines();
    let path = lines.next()?.strip_prefix("0::/")?;
    lines.next().is_none().then(|| Path::new("/sys/fs/cgroup").join(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_has_the_place_of_another_process() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let output = || Stdio::from(File::options().append(true).open(file.path()).unwrap());
        let mut first = Command::new("sleep").arg("60").stdout(output()).spawn().unwrap();
        let process = Process::open(first.id()).unwrap();
        let place = ProcessPlace::of(&process);
        first.kill().unwrap();
        first.wait().unwrap();
        let mut command = Command::new("echo");
        place.unwrap().enter(command.arg("from the second")).unwrap();
        assert!(command.status().unwrap().success());
        assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "from the second\n");
    }

    #[test]
    fn a_service_of_systemd_is_known_by_its_group() {
        assert_eq!(service("0::/system.slice/fc@web.service\n"), Some("fc@web.service"));
        assert_eq!(
            service("4:cpu:/x\n1:name=systemd:/system.slice/a.service/vm\n"),
            Some("a.service")
        );
        assert_eq!(service("0::/machine.slice/vm.scope\n"), None);
        assert_eq!(service("0::/user.slice/user@1000.service/app.slice/vte.scope\n"), None);
    }

    #[test]
    fn a_group_of_the_first_version_is_none_that_can_be_joined() {
        let group = unified("0::/vms/web\n").unwrap();
        assert_eq!(group, Path::new("/sys/fs/cgroup/vms/web"));
        for text in ["", "4:cpu:/x\n0::/\n", "0::/\n4:cpu:/x\n"] {
            assert_eq!(unified(text), None, "{text}");
        }
    }
}
