//! Guests with a disk, as tests of disks boot, write, read and restore them.

use crate::{Bench, Boot, Process, Qemu, number, restored_pid};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of the images of [`image`].
pub const IMAGE_BYTES: u64 = 24 << 20;

/// A raw image whose blocks all differ, `disk.raw`.
pub fn image(bench: &Bench) -> PathBuf {
    image_in(bench.path())
}

/// The same in the directory `dir`.
pub fn image_in(dir: &Path) -> PathBuf {
    let path = dir.join("disk.raw");
    let mut bytes = vec![0u8; IMAGE_BYTES as usize];
    for (number, block) in bytes.chunks_exact_mut(4096).enumerate() {
        block[..8].copy_from_slice(&number.to_le_bytes());
        block[4000] = 7;
    }
    std::fs::write(&path, bytes).expect("write the image");
    path
}

/// `qemu-img`, which must succeed.
pub fn qemu_img(args: &[&str]) {
    let output = Command::new("qemu-img").args(args).output().expect("run qemu-img");
    assert!(
        output.status.success(),
        "qemu-img {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A shell with a disk of those words.
pub fn shell(qemu: &Qemu, words: &[&str]) -> Boot {
    let mut boot = Boot::new("shell").with(words);
    boot.qemu.clone_from(&qemu.path);
    boot.mem_mib = 96;
    boot
}

/// The words of a virtio disk `d`.
pub fn virtio(image: &Path, format: &str) -> Vec<String> {
    vec!["-drive".into(), format!("file={},format={format},if=virtio,id=d", image.display())]
}

/// Words as they are borrowed.
pub fn words(owned: &[String]) -> Vec<&str> {
    owned.iter().map(String::as_str).collect()
}

/// Has the guest's shell run `command` and waits for its end.
pub fn does(vm: &mut Process, command: &str, step: &str) {
    let skip = vm.lines().len();
    // The terminal echoes the command: its end is told in two parts.
    vm.say(&format!("{command}; echo KF-\"\"DONE {step}"));
    let end = format!("KF-DONE {step}");
    let done =
        vm.wait_until(|p| p.lines().iter().skip(skip).any(|l| l.trim() == end).then_some(()));
    assert!(done.is_some(), "the guest does not end {command:?}; {}", vm.report());
}

/// `keyframe run` of `boot` as VM `guest`, once its guest is ready.
pub fn start(bench: &Bench, options: &[&str], boot: &Boot) -> Process {
    let mut all = vec!["--name", "guest"];
    all.extend(options);
    let mut run = bench.start(&all, boot);
    run.wait_for("KF READY");
    run
}

/// Takes a checkpoint of VM `guest`; its number.
pub fn take(bench: &Bench) -> String {
    bench.ok(&["take", "--name", "guest"]);
    number(bench.list().last().expect("a checkpoint"), "id").to_string()
}

/// The disk `export` as the server at `socket` shows it now.
pub fn copy(socket: &Path, export: &str, to: &Path) -> Vec<u8> {
    let url = format!("nbd+unix:///{export}?socket={}", socket.display());
    qemu_img(&["convert", "-f", "raw", "-O", "raw", &url, &to.display().to_string()]);
    std::fs::read(to).expect("read the copy")
}

/// The socket that the QEMU with this pid has its disks from.
pub fn socket_of(pid: u32) -> PathBuf {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).expect("the command line of QEMU");
    let line = String::from_utf8_lossy(&line).into_owned();
    let (_, rest) = line.split_once("server.path=").expect("a disk that is served");
    rest.split([',', '\0']).next().expect("a path").into()
}

/// Restores checkpoint `id`, paused, and returns its disk.
pub fn restored_disk(bench: &Bench, id: &str, options: &[&str]) -> Vec<u8> {
    restored_disk_of(bench, id, options, "d")
}

/// The same of the disk `export`.
pub fn restored_disk_of(bench: &Bench, id: &str, options: &[&str], export: &str) -> Vec<u8> {
    let mut restored = bench.restore(id, &[&["--paused"], options].concat());
    restored.wait_for_error("is paused after");
    let socket = socket_of(restored_pid(&restored));
    let disk = copy(&socket, export, &bench.path().join("restored.raw"));
    restored.signal(rustix::process::Signal::TERM);
    assert!(restored.wait().success(), "{}", restored.report());
    assert!(!socket.exists(), "{} is left behind", socket.display());
    disk
}

/// That a disk has the content expected.
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

/// The socket of the disks of VM `guest`.
pub fn sock(bench: &Bench) -> PathBuf {
    bench.path().join("keyframe/guest/disks.sock")
}

/// Places in the store that hold writes to disks.
pub fn places(bench: &Bench) -> Vec<PathBuf> {
    let entries =
        std::fs::read_dir(PathBuf::from(bench.store()).join("disks")).expect("STORE/disks");
    entries.map(|e| e.expect("an entry").path()).collect()
}

/// As [`copy`], of a VM that runs, whose QEMU stands still meanwhile: a block that is being written
/// is neither old nor new.
pub fn copy_of_running(qemu_pid: u32, socket: &Path, export: &str, to: &Path) -> Vec<u8> {
    let pid = rustix::process::Pid::from_raw(qemu_pid.cast_signed()).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("stop QEMU");
    // The copy's requests come behind those that are under way, or nearly so.
    std::thread::sleep(std::time::Duration::from_millis(500));
    let disk = copy(socket, export, to);
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("continue QEMU");
    disk
}

/// A loop that writes record after record, each durable before the next; and reads the one before
/// from the disk.
pub const RECORDS: &str = "i=0; while :; do i=$((i+1)); echo \"record $i \" | dd of=/dev/vda bs=4096 seek=$i conv=notrunc,fsync,sync 2>/dev/null; \
echo 3 >/proc/sys/vm/drop_caches; w=$(dd if=/dev/vda bs=4096 skip=$i count=1 2>/dev/null | head -n1); \
l=$(dd if=/dev/vda bs=4096 skip=$((i-1)) count=1 2>/dev/null | head -n1 | tr -d '\\0'); \
[ \"$w\" = \"record $i \" ] && { [ $i = 1 ] || [ \"$l\" = \"record $((i-1)) \" ]; } && echo KF-\"\"OK $i || echo KF-\"\"BAD $i; done";

/// The records that the guest says are on its disk.
pub fn records(vm: &Process) -> Vec<u64> {
    let bad: Vec<_> = vm.lines().into_iter().filter(|l| l.contains("KF-BAD")).collect();
    assert!(bad.is_empty(), "the guest's disk is not what its RAM says: {bad:?}; {}", vm.report());
    vm.lines().iter().filter_map(|l| l.trim().strip_prefix("KF-OK ")?.parse().ok()).collect()
}

/// Waits for so many more of them; the last one.
pub fn wait_for_records(vm: &mut Process, more: usize) -> u64 {
    let before = records(vm).len();
    let grown = vm.wait_until(|p| (records(p).len() >= before + more).then_some(()));
    assert!(grown.is_some(), "the guest writes no more; {}", vm.report());
    *records(vm).last().expect("a record")
}

/// That a VM restored from `id` goes on with its next record, and finds those before on its disk.
pub fn assert_goes_on(bench: &Bench, id: &str) {
    let mut restored = bench.restore(id, &[]);
    wait_for_records(&mut restored, 5);
    let all = records(&restored);
    assert!(all.windows(2).all(|pair| pair[1] == pair[0] + 1), "{all:?}");
    let first = all[0];
    let socket = socket_of(restored_pid(&restored));
    let disk = copy(&socket, "d", &bench.path().join("restored.raw"));
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
