//! File systems of a kind, for tests of disks.

use crate::{Scope, TestEnv, record_skip};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system in a file, mounted. Dropping this removes both.
pub struct Mounted {
    /// Where it is mounted.
    pub dir: PathBuf,
}

impl Mounted {
    /// Makes and mounts a file system of `kind`. If this machine cannot, counts the running test as
    /// skipped and returns `None`.
    pub fn new(env: &TestEnv, kind: &str) -> Option<Self> {
        let (file, dir) = (env.path().join(format!("{kind}.fs")), env.path().join(kind));
        // The least size of XFS and btrfs.
        std::fs::File::create(&file).and_then(|f| f.set_len(400 << 20)).expect("make a file");
        std::fs::create_dir(&dir).expect("make a directory");
        let words = [file.display().to_string(), dir.display().to_string()];
        let mut make = Command::new(format!("mkfs.{kind}"));
        make.args(["-q", &words[0]]);
        let mut mount = Command::new("mount");
        mount.args(["-o", "loop", &words[0], &words[1]]);
        for mut step in [make, mount] {
            let done = step.output();
            if !done.as_ref().is_ok_and(|output| output.status.success()) {
                let reason = format!("{kind} needs root, loop devices and mkfs.{kind}");
                println!("{step:?}: {done:?}");
                record_skip(Scope::Test, reason);
                return None;
            }
        }
        Some(Self { dir })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The processes that have it open may be about to end.
        let unmount =
            || Command::new("umount").arg(&self.dir).output().is_ok_and(|o| o.status.success());
        for _ in 0..100 {
            if unmount() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        let _ = Command::new("umount").arg("-l").arg(&self.dir).output();
    }
}

/// The number of clones in `dir` that checkpoints have.
pub fn clones(dir: &Path) -> usize {
    let names = std::fs::read_dir(dir).expect("list the directory");
    names.flatten().filter(|e| e.file_name().to_string_lossy().contains(".keyframe-")).count()
}
