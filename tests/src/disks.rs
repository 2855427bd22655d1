//! Guests with a disk: how tests boot them, write and read their disks, and restore them.

use crate::{Boot, Process, Qemu, TestEnv, number, restored_pid};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The size of [`numbered_image`] in bytes.
pub const IMAGE_BYTES: u64 = 24 << 20;

/// Makes the raw image `disk.raw`, whose blocks of 4 KiB all differ.
pub fn numbered_image(env: &TestEnv) -> PathBuf {
    numbered_image_in(env.path())
}

/// Makes [`numbered_image`] in the directory `dir`.
pub fn numbered_image_in(dir: &Path) -> PathBuf {
    let path = dir.join("disk.raw");
    let mut bytes = vec![0u8; IMAGE_BYTES as usize];
    for (number, block) in bytes.chunks_exact_mut(4096).enumerate() {
        block[..8].copy_from_slice(&number.to_le_bytes());
        block[4000] = 7;
    }
    std::fs::write(&path, bytes).expect("write the image");
    path
}

/// Runs `qemu-img`, which must succeed.
pub fn qemu_img(args: &[&str]) {
    let output = Command::new("qemu-img").args(args).output().expect("run qemu-img");
    assert!(
        output.status.success(),
        "qemu-img {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A guest that runs a shell, with further QEMU arguments for its disk.
pub fn shell_guest(qemu: &Qemu, words: &[&str]) -> Boot {
    let mut boot = Boot::new("shell").with(words);
    boot.qemu.clone_from(&qemu.path);
    boot.mem_mib = 96;
    boot
}

/// The QEMU arguments of a virtio disk with id `d`.
pub fn virtio_disk(image: &Path, format: &str) -> Vec<String> {
    vec!["-drive".into(), format!("file={},format={format},if=virtio,id=d", image.display())]
}

/// Borrows each string.
pub fn as_strs(owned: &[String]) -> Vec<&str> {
    owned.iter().map(String::as_str).collect()
}

/// Runs `command` in the guest's shell and waits until it ends. `step` is unique in the test.
pub fn run_in_guest(vm: &mut Process, command: &str, step: &str) {
    let skip = vm.lines().len();
    // The terminal echoes the command; the quotes keep the echo from looking like the answer.
    vm.type_line(&format!("{command}; echo KF-\"\"DONE {step}"));
    let end = format!("KF-DONE {step}");
    let done =
        vm.wait_until(|p| p.lines().iter().skip(skip).any(|l| l.trim() == end).then_some(()));
    assert!(done.is_some(), "the guest does not end {command:?}; {}", vm.report());
}

/// Starts `boot` under `keyframe run` as VM `guest` and waits until the guest is ready.
pub fn start_guest(env: &TestEnv, options: &[&str], boot: &Boot) -> Process {
    let mut all = vec!["--name", "guest"];
    all.extend(options);
    let mut run = env.start(&all, boot);
    run.wait_for("KF READY");
    run
}

/// Takes a checkpoint of VM `guest` and returns its id.
pub fn take_checkpoint(env: &TestEnv) -> String {
    env.ok(&["take", "--name", "guest"]);
    number(env.list().last().expect("a checkpoint"), "id").to_string()
}

/// Copies the disk `export` of the NBD server at `socket` to the file `to`; returns its content.
pub fn copy_disk(socket: &Path, export: &str, to: &Path) -> Vec<u8> {
    let url = format!("nbd+unix:///{export}?socket={}", socket.display());
    qemu_img(&["convert", "-f", "raw", "-O", "raw", &url, &to.display().to_string()]);
    std::fs::read(to).expect("read the copy")
}

/// The socket of the NBD server that serves the disks of the QEMU `pid`.
pub fn disk_socket_of(pid: u32) -> PathBuf {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).expect("the command line of QEMU");
    let line = String::from_utf8_lossy(&line).into_owned();
    let (_, rest) = line.split_once("server.path=").expect("a disk that is served");
    rest.split([',', '\0']).next().expect("a path").into()
}

/// Restores checkpoint `id`, paused, and returns the content of its disk `d`.
pub fn restored_disk(env: &TestEnv, id: &str, options: &[&str]) -> Vec<u8> {
    restored_disk_named(env, id, options, "d")
}

/// As [`restored_disk`], of the disk `export`.
pub fn restored_disk_named(env: &TestEnv, id: &str, options: &[&str], export: &str) -> Vec<u8> {
    let mut restored = env.restore(id, &[&["--paused"], options].concat());
    restored.wait_for_error("is paused after");
    let socket = disk_socket_of(restored_pid(&restored));
    let disk = copy_disk(&socket, export, &env.path().join("restored.raw"));
    restored.signal(rustix::process::Signal::TERM);
    assert!(restored.wait().success(), "{}", restored.report());
    assert!(!socket.exists(), "{} is left behind", socket.display());
    disk
}

/// Asserts that a disk has the expected content.
pub fn assert_same(disk: &[u8], expected: &[u8], what: &str) {
    assert_eq!(disk.len(), expected.len(), "{what}");
    let differing: Vec<usize> = (0..disk.len() / 512)
        .filter(|s| disk[s * 512..(s + 1) * 512] != expected[s * 512..(s + 1) * 512])
        .collect();
    assert!(
        differing.is_empty(),
        "{what}: {} sectors differ, first {:?}",
        differing.len(),
        &differing[..1]
    );
}

/// The socket of the server of VM `guest`'s disks.
pub fn disk_socket(env: &TestEnv) -> PathBuf {
    env.path().join("keyframe/guest/disks.sock")
}

/// The directories of the store that hold writes to disks.
pub fn disk_write_dirs(env: &TestEnv) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(PathBuf::from(env.store()).join("disks")).expect("STORE/disks");
    entries.map(|e| e.expect("an entry").path()).collect()
}

/// As [`copy_disk`], of a running VM. QEMU is stopped during the copy, because a block in the middle
/// of a write is neither old nor new.
pub fn copy_running_disk(qemu_pid: u32, socket: &Path, export: &str, to: &Path) -> Vec<u8> {
    let pid = rustix::process::Pid::from_raw(qemu_pid.cast_signed()).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("stop QEMU");
    // The server has time to finish QEMU's requests before the copy.
    std::thread::sleep(std::time::Duration::from_millis(500));
    let disk = copy_disk(socket, export, to);
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("continue QEMU");
    disk
}

/// A shell loop that writes numbered records, syncs each, and reads it and the one before it back
/// from the disk.
pub const RECORDS: &str = "i=0; while :; do i=$((i+1)); echo \"record $i \" | dd of=/dev/vda bs=4096 seek=$i conv=notrunc,fsync,sync 2>/dev/null; \
echo 3 >/proc/sys/vm/drop_caches; w=$(dd if=/dev/vda bs=4096 skip=$i count=1 2>/dev/null | head -n1); \
l=$(dd if=/dev/vda bs=4096 skip=$((i-1)) count=1 2>/dev/null | head -n1 | tr -d '\\0'); \
[ \"$w\" = \"record $i \" ] && { [ $i = 1 ] || [ \"$l\" = \"record $((i-1)) \" ]; } && echo KF-\"\"OK $i || echo KF-\"\"BAD $i; done";

/// The numbers of the records that the guest has reported as written.
pub fn records(vm: &Process) -> Vec<u64> {
    let bad: Vec<_> = vm.lines().into_iter().filter(|l| l.contains("KF-BAD")).collect();
    assert!(bad.is_empty(), "the guest's disk is not what its RAM says: {bad:?}; {}", vm.report());
    vm.lines().iter().filter_map(|l| l.trim().strip_prefix("KF-OK ")?.parse().ok()).collect()
}

/// Waits until the guest has written `more` further records; returns the last number.
pub fn wait_for_records(vm: &mut Process, more: usize) -> u64 {
    let before = records(vm).len();
    let grown = vm.wait_until(|p| (records(p).len() >= before + more).then_some(()));
    assert!(grown.is_some(), "the guest writes no more; {}", vm.report());
    *records(vm).last().expect("a record")
}

/// Restores checkpoint `id` and asserts that the guest continues with its next record and that its
/// disk holds all earlier ones.
pub fn assert_goes_on(env: &TestEnv, id: &str) {
    let mut restored = env.restore(id, &[]);
    wait_for_records(&mut restored, 5);
    let all = records(&restored);
    assert!(all.windows(2).all(|pair| pair[1] == pair[0] + 1), "{all:?}");
    let first = all[0];
    let socket = disk_socket_of(restored_pid(&restored));
    let disk = copy_disk(&socket, "d", &env.path().join("restored.raw"));
    for number in 1..first {
        let record = format!("record {number} \n");
        let at = number as usize * 4096;
        assert_eq!(
            &disk[at..at + record.len()],
            record.as_bytes(),
            "checkpoint {id}, which is at {first}"
        );
    }
}
