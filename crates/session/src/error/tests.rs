//! The text of each error and of its fix, in a golden file.

use super::*;
use keyframe_capture::CaptureError;
use keyframe_qemu::{AuditFinding, LineDifference, Severity};
use keyframe_store::CheckpointId;
use keyframe_testing::{assert_golden, error_text};
use keyframe_vmm::{ForeignOperation, VmmError, VmmErrorKind};
use std::path::PathBuf;
use std::sync::Arc;

#[test]
fn error_texts_are_the_golden_ones() {
    let texts = [session(), checkpoint(), rollback(), run_dir(), control()];
    assert_golden("tests/golden/errors.txt", &texts.concat().concat());
}

fn denied() -> io::Error {
    io::Error::from(io::ErrorKind::PermissionDenied)
}

fn boxed(text: &str) -> BoxError {
    text.into()
}

fn finding(subject: &str, fix: &str) -> AuditFinding {
    AuditFinding {
        severity: Severity::Refused,
        subject: subject.into(),
        reason: "it writes to RAM unseen".into(),
        fix: fix.into(),
    }
}

fn session() -> Vec<String> {
    let vmm = VmmError::new(VmmErrorKind::Timeout, "no answer to stop", Some("wait".into()));
    let (name, detail) = ("userfaultfd".to_owned(), "not permitted".to_owned());
    let other = ("PAGEMAP_SCAN".to_owned(), "Linux 6.7 has it".to_owned());
    let errors = [
        Error::Vmm(vmm),
        Error::Vm(crate::session_vm::SessionVmError::DiscardsRam),
        Error::Vm(crate::session_vm::SessionVmError::NotQemu),
        Error::Vm(crate::session_vm::SessionVmError::Busy {
            operation: ForeignOperation::Migration,
        }),
        Error::Vm(crate::session_vm::SessionVmError::Busy { operation: ForeignOperation::Dump }),
        Error::file("make", Path::new("/run/keyframe"), denied()),
        Error::EncoderEnded.of_member("web"),
        Error::Several(vec![Error::EncoderPanicked, Error::DisksNotServed, Error::Interrupted]),
        Error::NoVm,
        Error::CopyThreads(boxed("out of threads")),
        Error::CopyOnWriteTracker,
        Error::NoCopyOnWrite,
        Error::ScansInPauses { option: "--strategy" },
        Error::BudgetWithoutInterval,
        Error::MissingFeatures { missing: vec![(name, detail), other], fix: None },
        Error::NotCheckpointable(vec![finding("vfio-pci", "remove it")]),
        Error::NotCheckpointable(vec![finding("vfio-pci", "remove it"), finding("ivshmem", "too")]),
        Error::MemberNamedTwice("web".into()),
        Error::GroupRecorded,
        Error::OtherStream {
            what: "RAM block".into(),
            stream: "4096".into(),
            here: "absent".into(),
        },
        Error::NotCounted(CountObstacle::Emulated),
        Error::NotCounted(CountObstacle::OtherNamespace),
        Error::NotCounted(CountObstacle::Group),
        Error::NotConnected { port: "port 3".into() },
        Error::MembersContradict(CheckpointId(7)),
        Error::InFlightPackets { checkpoint: CheckpointId(7), source: keyframe_net::Error::Busy },
        Error::AnswerOnCore(boxed("no such core")),
        Error::ReadyDescriptor { number: 3, source: denied() },
        Error::Interrupted,
        Error::Machine { operation: "ask for requests", source: boxed("no answer") },
    ];
    errors.iter().map(|e| error_text(e, e.fix())).collect()
}

fn checkpoint() -> Vec<String> {
    let finding = || AuditFinding {
        subject: "device b1 (virtio-blk-pci)".into(),
        reason: "it was plugged in".into(),
        fix: "unplug it".into(),
        severity: Severity::Refused,
    };
    let strategy = || CheckpointError::Strategy(Box::new(Error::NoCopyOnWrite));
    let restart = Box::new(Error::NoVm);
    let errors = [
        CheckpointError::Disks(boxed("no space")),
        strategy(),
        CheckpointError::Capture(CaptureError::Torn),
        CheckpointError::VmEnded(CaptureError::Torn),
        CheckpointError::NoNewRun { capture: CaptureError::OtherRam, restart },
        CheckpointError::MonitorLost { pid: 4711 },
        CheckpointError::NoWatchdog(CaptureError::Torn),
        CheckpointError::NoNetwork(CaptureError::Torn),
        CheckpointError::MachineChanged(vec![finding()]),
        CheckpointError::KeepsChanging,
        CheckpointError::LookAtMachine(boxed("no answer")),
        CheckpointError::GivenUp,
        CheckpointError::LogLost,
        CheckpointError::Ending,
    ];
    let failure = |lost, is_final| {
        CheckpointFailure { error: Arc::new(strategy()), lost, is_final }.to_string() + "\n"
    };
    let failures = [failure(1, false), failure(3, false), failure(1, true)];
    errors.iter().map(|e| error_text(e, e.fix())).chain(failures).collect()
}

fn rollback() -> Vec<String> {
    let checkpoint = CheckpointId(7);
    let step = || RollbackError::Step { operation: "pause the VM", source: boxed("no answer") };
    let difference = |difference| RollbackError::OtherMachine { checkpoint, difference };
    let (here, there) = ("pc-q35-9.2".to_owned(), "pc-i440fx-9.2".to_owned());
    let differ = || RollbackError::PagesDiffer { pages: 3, checkpoint };
    let errors = [
        RollbackError::Group,
        RollbackError::GivenUp,
        RollbackError::Unsupported(keyframe_vmm::Unsupported {
            vmm: keyframe_vmm::VmmKind::Qemu,
            ability: keyframe_vmm::Ability::Rollback,
            reason: "libvirt manages it".into(),
            fix: "restore the checkpoint".into(),
        }),
        RollbackError::OwnDisks,
        RollbackError::DiskLeftOut("d".into()),
        difference(MachineDifference::Property { property: "machine type", here, there }),
        difference(MachineDifference::RamBlocks),
        difference(MachineDifference::Disks),
        difference(MachineDifference::Hardware(LineDifference::OnlyFirst("medium a.iso".into()))),
        difference(MachineDifference::Hardware(LineDifference::OnlySecond("device r1 (x)".into()))),
        RollbackError::SealTimeout,
        RollbackError::Before(CheckpointError::Ending.into()),
        step(),
        RollbackError::Resumed,
        differ(),
        RollbackError::FirmwareWrote,
        RollbackError::Unharmed(Box::new(step())),
        RollbackError::CanRun { why: Box::new(step()), state: crate::control::VmState::Shutdown },
        RollbackError::Lost {
            why: Box::new(step()),
            again: Box::new(differ()),
            checkpoint: "monday".into(),
        },
        RollbackError::DrivesExchanged,
        RollbackError::NoMemory { needed_bytes: 3 << 30, left_bytes: 1 << 30, checkpoint },
        RollbackError::Restored { vm: "web".into(), checkpoint },
        RollbackError::Ended { why: Box::new(step()), again: Box::new(step()), checkpoint },
        RollbackError::Session(Box::new(Error::BudgetWithoutInterval)),
    ];
    errors.iter().map(|e| error_text(e, e.fix())).collect()
}

fn run_dir() -> Vec<String> {
    let path = || PathBuf::from("/run/keyframe/web");
    let running = || vec!["web".to_owned(), "db".to_owned()];
    let errors = [
        RunDirError::Io { operation: "make", path: path(), source: denied() },
        RunDirError::BadName("a/b".into()),
        RunDirError::NameRuns("web".into()),
        RunDirError::NameLeft("web".into()),
        RunDirError::NotPrivate(path()),
        RunDirError::End { vm: "web".into(), source: denied() },
        RunDirError::Gone("web".into()),
        RunDirError::Unknown { name: "x".into(), running: Vec::new() },
        RunDirError::Unknown { name: "x".into(), running: running() },
        RunDirError::Several { running: running() },
        RunDirError::NotOfStore { store: path() },
        RunDirError::NothingRuns,
    ];
    errors.iter().map(|e| error_text(e, e.fix())).collect()
}

fn control() -> Vec<String> {
    let socket = || PathBuf::from("/run/keyframe/web/control.sock");
    let errors = [
        ControlError::Io { operation: "connect to", socket: socket(), source: denied() },
        ControlError::NoAnswer(socket()),
        ControlError::Refused("no more checkpoints are taken".into()),
        ControlError::Panicked,
    ];
    errors.iter().map(|e| error_text(e, e.fix())).collect()
}
