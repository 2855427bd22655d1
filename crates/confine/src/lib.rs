//! Gives up the rights that a process does not use. An attacker who takes the process over through
//! hostile input then gains less.
//!
//! ```text
//!   capabilities   all rights of root except the named ones                (capabilities(7))
//!   programs       starting and tracing programs, mounting, loading code   (seccomp(2))
//!                  into the kernel
//!   writes         changing files outside of the named directories         (landlock(7))
//! ```
//!
//! Invariants: rights that were given up do not come back, neither through a set-user-id program
//! (no_new_privs) nor as root. The functions apply to the calling thread and to threads that it
//! starts later, so they are called before there are other threads.

use landlock::{
    ABI, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, path_beneath_rules,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, set_capabilities,
    set_no_new_privs,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The reason why rights could not be given up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call on this process's own rights failed.
    #[error("{operation}: {source}")]
    Rights {
        /// The operation.
        operation: &'static str,
        /// The kernel's answer.
        source: rustix::io::Errno,
    },
    /// The filter of system calls could not be installed.
    #[error("filter system calls")]
    Filter(#[from] seccompiler::Error),
    /// The rule for files could not be installed.
    #[error("restrict writes to files")]
    Files(#[from] landlock::RulesetError),
    /// The kernel has no Landlock, or it is disabled.
    #[error(
        "restrict writes to files: this kernel has no Landlock, or it is disabled (boot it with \
         lsm=landlock,...)"
    )]
    NoLandlock,
}

/// The rights that a process keeps of those with which it was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptRights {
    /// Only reading and writing files of other users (stores, images), if the process was started
    /// with that right.
    Files,
    /// In addition, sending signals to processes of other users.
    FilesAndSignals,
    /// In addition, tracing other processes and reading their memory, with the priorities and the
    /// locked memory that a short pause needs.
    Tracing,
    /// In addition, opening the taps of other users, as the successor of a VM does.
    TracingAndTaps,
}

impl KeptRights {
    fn capabilities(self) -> CapabilitySet {
        let files = CapabilitySet::DAC_OVERRIDE
            | CapabilitySet::DAC_READ_SEARCH
            | CapabilitySet::FOWNER
            | CapabilitySet::CHOWN;
        match self {
            Self::Files => files,
            Self::FilesAndSignals => files | CapabilitySet::KILL,
            // SYS_ADMIN shows which pages are swapped out (PAGEMAP_SCAN). CHECKPOINT_RESTORE opens
            // memory through map_files. PERFMON counts the guest's instructions.
            Self::Tracing => {
                files
                    | CapabilitySet::KILL
                    | CapabilitySet::SYS_PTRACE
                    | CapabilitySet::SYS_ADMIN
                    | CapabilitySet::CHECKPOINT_RESTORE
                    | CapabilitySet::SYS_NICE
                    | CapabilitySet::SYS_RESOURCE
                    | CapabilitySet::IPC_LOCK
                    | CapabilitySet::PERFMON
            }
            Self::TracingAndTaps => Self::Tracing.capabilities() | CapabilitySet::NET_ADMIN,
        }
    }
}

/// Gives up all capabilities except those that `keep` names.
///
/// A process that must trace but has no `CAP_SYS_PTRACE` (root in most containers) keeps all: the
/// kernel lets it trace a process only while it has all capabilities of that process.
///
/// Error: [`Error::Rights`] if the kernel refuses to read or to change the capabilities.
pub fn capabilities_but(keep: KeptRights) -> Result<(), Error> {
    let failed = |operation| move |source| Error::Rights { operation, source };
    set_no_new_privs(true).map_err(failed("rule out new privileges"))?;
    let kept = keep.capabilities();
    let had = capabilities(None).map_err(failed("read capabilities"))?;
    let traces = matches!(keep, KeptRights::Tracing | KeptRights::TracingAndTaps);
    if traces && !had.permitted.contains(CapabilitySet::SYS_PTRACE) {
        return Ok(());
    }
    clear_ambient_capability_set().map_err(failed("clear ambient capabilities"))?;
    let sets = CapabilitySets {
        effective: had.effective & kept,
        permitted: had.permitted & kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(failed("give up capabilities"))
}

/// System calls that injected code would use next. Keyframe needs none of them.
const PROGRAMS: [libc::c_long; 33] = [
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_kcmp,
    libc::SYS_userfaultfd,
    libc::SYS_perf_event_open,
    libc::SYS_bpf,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_add_key,
    libc::SYS_keyctl,
    libc::SYS_request_key,
    libc::SYS_open_by_handle_at,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_io_uring_setup,
];

/// Forbids starting programs, tracing, mounting, and loading code into the kernel: such system
/// calls fail with EPERM.
///
/// Errors: [`Error::Rights`] if the kernel refuses to rule out new privileges, [`Error::Filter`] if
/// it does not accept the filter of system calls.
pub fn no_programs() -> Result<(), Error> {
    set_no_new_privs(true)
        .map_err(|source| Error::Rights { operation: "rule out new privileges", source })?;
    let rules: BTreeMap<i64, _> = PROGRAMS.iter().map(|call| (*call, Vec::new())).collect();
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, TargetArch::x86_64)
        .map_err(seccompiler::Error::Backend)?;
    let program: BpfProgram = filter.try_into().map_err(seccompiler::Error::Backend)?;
    Ok(apply_filter(&program)?)
}

/// Forbids changing files outside of the directories `folders`. Files that are open stay writable.
/// Directories that do not exist are ignored.
///
/// Errors: [`Error::Files`] if the kernel does not accept the rule, [`Error::NoLandlock`] if it has
/// no Landlock, or Landlock is disabled.
pub fn writes_beneath(folders: &[PathBuf]) -> Result<(), Error> {
    // The access rights of Linux 6.7, the oldest supported kernel. Later versions handle more.
    let abi = ABI::V4;
    let folders = folders.iter().filter(|folder| folder.is_dir());
    let status = Ruleset::default()
        .handle_access(AccessFs::from_write(abi))?
        .create()?
        .add_rules(path_beneath_rules(folders, AccessFs::from_write(abi)))?
        .restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced { Err(Error::NoLandlock) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;
    use std::process::Command;

    #[test]
    fn error_texts_are_golden() {
        let errors = [
            Error::Rights { operation: "give up capabilities", source: rustix::io::Errno::PERM },
            Error::Filter(seccompiler::Error::EmptyFilter),
            Error::NoLandlock,
        ];
        let texts: Vec<_> =
            errors.iter().map(|error| keyframe_testing::error_text(error, None)).collect();
        keyframe_testing::assert_golden("tests/golden/errors.txt", &texts.concat());
    }

    /// Rights belong to a thread, so the other tests keep theirs.
    fn confined<T: Send>(test: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| scope.spawn(test).join().expect("the test"))
    }

    #[test]
    fn capabilities_that_are_not_kept_are_gone() {
        confined(|| {
            let had = capabilities(None).unwrap();
            capabilities_but(KeptRights::Files).unwrap();
            let has = capabilities(None).unwrap();
            assert_eq!(has.permitted, had.permitted & KeptRights::Files.capabilities());
            assert!(!has.effective.contains(CapabilitySet::SYS_PTRACE));
            // They do not come back by raising them, ...
            assert!(set_capabilities(None, had).is_err() || had == has);
            // ... nor through a program that root starts.
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let output = Command::new("cat").arg("/proc/self/status").output().unwrap();
            let started = String::from_utf8(output.stdout).unwrap();
            let effective = |text: &str| {
                text.lines().find(|line| line.starts_with("CapPrm")).map(str::to_owned)
            };
            assert_eq!(effective(&started), effective(&status));
        });
    }

    /// See ptrace(2), "Ptrace access mode checking".
    #[test]
    fn a_tracer_without_the_capability_keeps_its_rights() {
        confined(|| {
            let had = capabilities(None).unwrap();
            let permitted = had.permitted - CapabilitySet::SYS_PTRACE;
            let lacks = CapabilitySets { permitted, effective: had.effective & permitted, ..had };
            set_capabilities(None, lacks).unwrap();
            capabilities_but(KeptRights::Tracing).unwrap();
            assert_eq!(capabilities(None).unwrap().permitted, permitted);
            capabilities_but(KeptRights::Files).unwrap();
            assert_eq!(
                capabilities(None).unwrap().permitted,
                permitted & KeptRights::Files.capabilities()
            );
        });
    }

    #[test]
    fn no_program_can_be_started() {
        confined(|| {
            assert!(Command::new("true").status().is_ok());
            no_programs().unwrap();
            assert_eq!(
                Command::new("true").status().unwrap_err().kind(),
                ErrorKind::PermissionDenied
            );
            assert!(std::fs::read("/proc/self/status").is_ok());
        });
        assert!(Command::new("true").status().is_ok(), "another thread");
    }

    #[test]
    fn files_elsewhere_can_be_read_and_not_written() {
        let ours = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir().unwrap();
        std::fs::write(other.path().join("there"), b"x").unwrap();
        confined(|| {
            let missing = ours.path().join("missing");
            writes_beneath(&[ours.path().to_owned(), missing]).unwrap();
            std::fs::write(ours.path().join("a"), b"x").unwrap();
            std::fs::rename(ours.path().join("a"), ours.path().join("b")).unwrap();
            assert_eq!(std::fs::read(other.path().join("there")).unwrap(), b"x");
            for refused in [
                std::fs::write(other.path().join("there"), b"y"),
                std::fs::write(other.path().join("new"), b"y"),
                std::fs::remove_file(other.path().join("there")),
                std::fs::rename(ours.path().join("b"), other.path().join("b")),
            ] {
                assert!(refused.is_err());
            }
        });
        std::fs::write(other.path().join("there"), b"z").unwrap();
    }
}
