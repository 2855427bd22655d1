//! Images and CDs that have moved since a checkpoint: `restore`, `branch` and `commit` find them at
//! the paths that `--image` names, and take no other image for them.

use keyframe_tests::disks::{
    as_strs, assert_same, copy_disk, disk_socket, disk_socket_of, disk_write_dirs,
    numbered_image_in, qemu_img, restored_disk, run_in_guest, shell_guest, start_guest,
    take_checkpoint,
};
use keyframe_tests::{Process, TestEnv, chosen_qemus, number};
use rustix::process::Signal;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A checkpoint whose images have moved.
struct Moved {
    env: TestEnv,
    id: String,
    /// The content of the disk at the checkpoint.
    disk: Vec<u8>,
    /// The directory of the images at the checkpoint.
    old: PathBuf,
    /// Their directory now.
    new: PathBuf,
}

/// Makes a qcow2 image over a raw one, which it names by a relative path, and a CD, in `dir`.
fn make_images(dir: &Path) {
    std::fs::create_dir(dir).expect("a directory");
    numbered_image_in(dir);
    let overlay = dir.join("over.qcow2").display().to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "disk.raw", &overlay]);
    std::fs::write(dir.join("cd.iso"), vec![0xcd; 1 << 20]).expect("write the CD");
}

/// Takes a checkpoint of a guest that has written to its disk, and moves its images.
fn moved_after_checkpoint(qemu: &keyframe_tests::Qemu) -> Moved {
    let env = TestEnv::new();
    let (old, new) = (env.path().join("old place"), env.path().join("new,place"));
    make_images(&old);
    let words = [
        "-drive".into(),
        format!("file={}/over.qcow2,format=qcow2,if=virtio,id=d", old.display()),
        "-drive".into(),
        format!("file={}/cd.iso,format=raw,media=cdrom,readonly=on,id=cd", old.display()),
    ];
    let mut run = start_guest(&env, &["--interval", "none"], &shell_guest(qemu, &as_strs(&words)));
    let write =
        "dd if=/dev/urandom of=/dev/vda bs=4k count=300 seek=500 conv=notrunc,fsync 2>/dev/null";
    run_in_guest(&mut run, write, "1");
    let id = take_checkpoint(&env);
    let disk = copy_disk(&disk_socket(&env), "d", &env.path().join("copy.raw"));
    env.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    std::fs::rename(&old, &new).expect("move the images");
    Moved { env, id, disk, old, new }
}

impl Moved {
    fn move_word(&self) -> String {
        format!("{}={}", self.old.display(), self.new.display())
    }

    fn refused(&self, command: &str, options: &[&str], expected: &[&str]) {
        let store = self.env.store();
        let before = disk_write_dirs(&self.env);
        let words = [&[command, "--store", &store, &self.id], options].concat();
        self.env.refused(&words, 1, expected);
        assert_eq!(disk_write_dirs(&self.env), before, "nothing stays");
    }
}

#[test]
fn a_checkpoint_finds_the_images_that_have_moved() {
    for qemu in chosen_qemus(0) {
        let moved = moved_after_checkpoint(&qemu);
        moved.refused("restore", &[], &["cd.iso", "--image OLD=NEW"]);
        moved.refused("restore", &["--changed-as-now"], &["over.qcow2", "--image OLD=NEW"]);
        let word = moved.move_word();
        let disk = restored_disk(&moved.env, &moved.id, &["--image", &word]);
        assert_same(&disk, &moved.disk, "restored");
        let branched = branched_disk(&moved.env, &moved.id, &word);
        assert_same(&branched, &moved.disk, "branched");
        let new = moved.env.path().join("committed.raw").display().to_string();
        let store = moved.env.store();
        moved.env.ok(&["commit", "--store", &store, &moved.id, "--image", &word, "-o", &new]);
        assert_same(&std::fs::read(&new).expect("the image"), &moved.disk, "committed");
        // A commit into the image would break the checkpoint, which names it by its old path.
        let plan = ["commit", "--store", &store, &moved.id, "--image", &word, "--in-place"];
        let plan = moved.env.json(&[&plan[..], &["--dry-run", "--json"]].concat());
        let id: u64 = moved.id.parse().expect("a number");
        assert_eq!(plan["standing"]["checkpoints"], serde_json::json!([id]), "{plan:#}");
    }
}

#[test]
fn no_other_image_is_taken_for_the_one_that_has_moved() {
    for qemu in chosen_qemus(1) {
        let moved = moved_after_checkpoint(&qemu);
        let word = moved.move_word();
        moved.refused(
            "restore",
            &["--image", "/nowhere=/tmp"],
            &["/nowhere", "over.qcow2", "cd.iso"],
        );
        let args = ["restore", "--store", &moved.env.store(), &moved.id, "--image", "/nowhere"];
        moved.env.refused(&args, 2, &["OLD=NEW"]);
        // Only the top image has moved: the file beneath it is missing.
        let over = |dir: &Path| dir.join("over.qcow2").display().to_string();
        let top = format!("{}={}", over(&moved.old), over(&moved.new));
        moved.refused("restore", &["--image", &top], &["disk.raw"]);
        // The file beneath it has other content, and its old time.
        let below = moved.new.join("disk.raw");
        let mut bytes = std::fs::read(&below).expect("the image");
        let time = below.metadata().and_then(|meta| meta.modified()).expect("its time");
        bytes[5] ^= 1;
        let changed = std::fs::write(&below, &bytes)
            .and_then(|()| std::fs::File::options().write(true).open(&below))
            .and_then(|file| file.set_modified(time));
        changed.expect("write the image");
        for command in ["restore", "branch"] {
            moved.refused(command, &["--image", &word], &["disk.raw", "content differs"]);
        }
        moved.refused("commit", &["--image", &word, "-o", "x.raw"], &["content differs"]);
        bytes[5] ^= 1;
        let restored = std::fs::write(&below, &bytes)
            .and_then(|()| std::fs::File::options().write(true).open(&below))
            .and_then(|file| file.set_modified(time));
        restored.expect("write the image");
        std::fs::write(moved.new.join("cd.iso"), vec![0xce; 1 << 20]).expect("write the CD");
        moved.refused("restore", &["--image", &word], &["cd.iso", "content differs"]);
    }
}

/// Branches checkpoint `id` and returns the content of its clone's disk `d`.
fn branched_disk(env: &TestEnv, id: &str, word: &str) -> Vec<u8> {
    let store = env.store();
    let words =
        ["branch", "--store", &store, id, "--json", "--name", "clone", "--paused", "--image", word];
    let mut branch = Process::start(env.command(&words));
    let clones = branch.wait_until(|p| serde_json::from_str(&p.lines().join("\n")).ok());
    let clones: Vec<Value> = clones.unwrap_or_else(|| panic!("no clone: {}", branch.report()));
    let socket = disk_socket_of(number(&clones[0], "qemu_pid") as u32);
    let disk = copy_disk(&socket, "d", &env.path().join("branched.raw"));
    branch.signal(Signal::INT);
    assert!(branch.wait().success(), "{}", branch.report());
    disk
}
