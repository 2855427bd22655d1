//! The text of each error and of its fix, in a golden file.

use super::*;
use keyframe_testing::{assert_golden, error_text};

fn denied() -> io::Error {
    io::Error::from(io::ErrorKind::PermissionDenied)
}

fn boxed(text: &str) -> BoxError {
    text.into()
}

/// The answer of a kernel before 6.14.
fn refused_gate() -> keyframe_kernel::Error {
    let operation = "ask the kernel to hold accesses to a file";
    keyframe_kernel::Error::AccessGate { operation, source: io::Error::from_raw_os_error(22) }
}

fn not_reported() -> DiskError {
    DiskError::WritesNotReported { path: "/images/rootfs".into(), source: refused_gate() }
}

#[test]
fn error_texts_are_the_golden_ones() {
    let image = || PathBuf::from("/images/a.qcow2");
    let disk = || "virtio0".to_owned();
    let cloned = |obstacle| DiskError::NotCloneable(obstacle);
    let errors = [
        DiskError::Io { operation: "open", path: image(), source: denied() },
        cloned(CloneObstacle::Temporary(disk())),
        cloned(CloneObstacle::NoFile(disk())),
        cloned(CloneObstacle::Slice(disk())),
        cloned(CloneObstacle::Format(image())),
        cloned(CloneObstacle::NotRegular(image())),
        cloned(CloneObstacle::NotWhole { path: image(), reason: "is marked as corrupt" }),
        cloned(CloneObstacle::NoClones { path: image(), source: denied() }),
        cloned(CloneObstacle::InJail(image())),
        cloned(CloneObstacle::Slow { path: image(), took_ms: 40 }),
        cloned(CloneObstacle::Io { operation: "sync", path: image(), source: denied() }),
        DiskError::DriveNotCloneable {
            name: "rootfs".into(),
            why: CloneObstacle::NoClones { path: image(), source: denied() },
        },
        DiskError::DriveNotCaptured {
            name: "rootfs".into(),
            why: CloneObstacle::NoClones { path: image(), source: denied() },
            other: Box::new(not_reported()),
        },
        not_reported(),
        DiskError::WritesLost(refused_gate()),
        DiskError::UnseenWrite(image()),
        DiskError::OverwrittenTooFast,
        DiskError::SameFile { first: "a".into(), second: "b".into() },
        DiskError::DrivesChanged,
        DiskError::AlreadyOpen,
        DiskError::OtherJob(disk()),
        DiskError::UnknownDisk { name: "vdb".into(), disks: vec![disk(), "virtio1".into()] },
        DiskError::UnknownFormat(disk()),
        DiskError::Changed { disk: disk(), file: "a.qcow2".into() },
        DiskError::OtherSize,
        DiskError::OtherDisks,
        DiskError::Unplugged { disk: disk(), file: "a.qcow2".into() },
        DiskError::NoScratchSpace { folder: "/store/disks".into(), free_bytes: 4096 },
        DiskError::ReadTimeout { seconds: 60 },
        DiskError::CutTwice,
        DiskError::NotCut,
        DiskError::Resized { name: "a".into(), now_bytes: 2, then_bytes: 1 },
        DiskError::ThrottledInIothread(disk()),
        DiskError::NotReplicable,
        DiskError::TooManyClones { folder: "/images".into(), image: image() },
        DiskError::Clone { image: image(), clone: "/images/.a".into(), source: denied() },
        DiskError::Clone {
            image: image(),
            clone: "/images/.a".into(),
            source: io::ErrorKind::Unsupported.into(),
        },
        DiskError::SlotBeyondOverlay,
        DiskError::NoVm,
        DiskError::Server { operation: "cut the disks", source: boxed("it has ended") },
    ];
    let texts: String = errors.iter().map(|e| error_text(e, e.fix())).collect();
    assert_golden("tests/golden/errors.txt", &texts);
}
