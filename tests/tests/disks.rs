//! Disks in checkpoints, on real QEMUs: each comes back as it was at its checkpoint, whoever fails, and the image beneath
//! is never written.

use keyframe_tests::{Bench, Boot, Orphan, Process, Qemu, a_qemu, number, qemus, restored_pid, until};
use std::path::{Path, PathBuf};
use std::process::Command;

const IMAGE_BYTES: u64 = 24 << 20;

/// A raw image whose blocks all differ.
pub fn image(bench: &Bench) -> PathBuf {
    let path = bench.path().join("disk.raw");
    let mut bytes = vec![0u8; IMAGE_BYTES as usize];
    for (number, block) in bytes.chunks_exact_mut(4096).enumerate() {
        block[..8].copy_from_slice(&number.to_le_bytes());
        block[4000] = 7;
    }
    std::fs::write(&path, bytes).expect("write the image");
    path
}

pub fn qemu_img(args: &[&str]) {
    let output = Command::new("qemu-img").args(args).output().expect("run qemu-img");
    assert!(output.status.success(), "qemu-img {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A shell with a disk of those words.
pub fn shell(qemu: &Qemu, words: &[&str]) -> Boot {
    let mut boot = Boot::new("shell").with(words);
    boot.qemu.clone_from(&qemu.path);
    boot.mem_mib = 96;
    boot
}

pub fn virtio(image: &Path, format: &str) -> Vec<String> {
    vec!["-drive".into(), format!("file={},format={format},if=virtio,id=d", image.display())]
}

pub fn words(owned: &[String]) -> Vec<&str> {
    owned.iter().map(String::as_str).collect()
}

/// Has the guest's shell run `command` and waits for its end.
pub fn does(vm: &mut Process, command: &str, step: &str) {
    let skip = vm.lines().len();
    // The terminal echoes the command: its end is told in two parts.
    vm.say(&format!("{command}; echo KF-\"\"DONE {step}"));
    let end = format!("KF-DONE {step}");
    let done = vm.wait_until(60, |p| p.lines().iter().skip(skip).any(|l| l.trim() == end).then_some(()));
    assert!(done.is_some(), "the guest does not end {command:?}; {}", vm.report());
}

pub fn start(bench: &Bench, options: &[&str], boot: &Boot) -> Process {
    let mut all = vec!["--name", "guest"];
    all.extend(options);
    let mut run = bench.start(&all, boot);
    run.wait_for("KF READY");
    run
}

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

fn restored_disk_of(bench: &Bench, id: &str, options: &[&str], export: &str) -> Vec<u8> {
    let mut restored = bench.restore(id, &[&["--paused"], options].concat());
    restored.wait_for_error("is paused after");
    let socket = socket_of(restored_pid(&restored));
    let disk = copy(&socket, export, &bench.path().join("restored.raw"));
    restored.signal(rustix::process::Signal::TERM);
    assert!(restored.wait().success(), "{}", restored.report());
    assert!(!socket.exists(), "{} is left behind", socket.display());
    disk
}

pub fn assert_same(disk: &[u8], expected: &[u8], what: &str) {
    assert_eq!(disk.len(), expected.len(), "{what}");
    let differing: Vec<usize> = (0..disk.len() / 512)
        .filter(|s| disk[s * 512..(s + 1) * 512] != expected[s * 512..(s + 1) * 512])
        .collect();
    assert!(differing.is_empty(), "{what}: {} sectors differ, first {:?}", differing.len(), &differing[..1]);
}

pub fn sock(bench: &Bench) -> PathBuf {
    bench.path().join("keyframe/guest/disks.sock")
}

/// Places in the store that hold writes to disks.
pub fn places(bench: &Bench) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(PathBuf::from(bench.store()).join("disks")).expect("STORE/disks");
    entries.map(|e| e.expect("an entry").path()).collect()
}

/// The guest writes, scattered and in rows, data and zeros; a copy of the disk is taken beside each checkpoint.
fn each_checkpoint_has_its_disk(qemu: &Qemu, bench: &Bench, boot: &Boot) {
    println!("-- QEMU {}: {}", qemu.label, boot.extra.join(" "));
    let mut run = start(bench, &["--interval", "none"], boot);
    let mut expected = Vec::new();
    let steps = [
        "true",
        "for i in 1 77 500 4000 5; do dd if=/dev/urandom of=/dev/vda bs=3000 seek=$i count=2 conv=notrunc,fsync 2>/dev/null; done",
        "dd if=/dev/zero of=/dev/vda bs=64k seek=3 count=40 conv=notrunc,fsync 2>/dev/null",
        "dd if=/dev/vda of=/dev/vda bs=4k count=300 seek=1000 conv=notrunc,fsync 2>/dev/null",
    ];
    for (step, command) in steps.into_iter().enumerate() {
        does(&mut run, command, &step.to_string());
        let id = take(bench);
        let copied = copy(&sock(bench), "d", &bench.path().join("copy.raw"));
        expected.push((id, copied));
    }
    let shown = bench.json(&["show", "--json", "--store", &bench.store(), &expected[1].0]);
    let written = number(&shown["disks"][0], "written_blocks");
    assert!((8..=40).contains(&written), "{shown}");
    assert!(expected.windows(2).all(|pair| pair[0].1 != pair[1].1), "the guest has written nothing");
    bench.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    assert!(run.errors().contains("has written to its disks"), "{}", run.report());
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    let before = places(bench);
    for (id, copied) in &expected {
        for options in [&[][..], &["--lazy"]] {
            assert_same(&restored_disk(bench, id, options), copied, &format!("checkpoint {id} {options:?}"));
        }
    }
    // What a restored VM writes is seen by nobody else.
    let (id, copied) = &expected[2];
    let mut restored = bench.restore(id, &[]);
    restored.wait_for_error("is running after");
    does(&mut restored, "dd if=/dev/urandom of=/dev/vda bs=64k count=20 conv=notrunc,fsync", "again");
    restored.signal(rustix::process::Signal::TERM);
    assert!(restored.wait().success(), "{}", restored.report());
    assert_same(&restored_disk(bench, id, &[]), copied, "a checkpoint that a VM was restored from");
    assert_eq!(places(bench), before, "restores leave nothing");
}

#[test]
fn a_raw_image() {
    for qemu in a_qemu() {
        let bench = Bench::new();
        let image = image(&bench);
        let before = std::fs::read(&image).expect("the image");
        let drive = virtio(&image, "raw");
        each_checkpoint_has_its_disk(&qemu, &bench, &shell(&qemu, &words(&drive)));
        assert_same(&std::fs::read(&image).expect("the image"), &before, "the image");
    }
}

#[test]
fn a_qcow2_image_on_another_as_a_node() {
    for qemu in a_qemu() {
        let bench = Bench::new();
        let image = image(&bench);
        let before = std::fs::read(&image).expect("the image");
        let overlay = bench.path().join("over.qcow2").display().to_string();
        qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &image.display().to_string(), &overlay]);
        let overlay_before = std::fs::read(&overlay).expect("the image");
        let file = format!("driver=file,node-name=f,filename={overlay}");
        let boot = shell(
            &qemu,
            &[
                "-blockdev",
                &file,
                "-blockdev",
                "driver=qcow2,node-name=d,file=f",
                "-device",
                "virtio-blk-pci,drive=d",
            ],
        );
        each_checkpoint_has_its_disk(&qemu, &bench, &boot);
        assert_same(&std::fs::read(&image).expect("the image"), &before, "the image");
        assert_eq!(std::fs::read(&overlay).expect("the image"), overlay_before, "the qcow2 image");
    }
}

/// Whatever the way in which a disk is given, QEMU takes our line, and a restore has the disk.
#[test]
fn each_way_to_give_a_disk() {
    for qemu in a_qemu() {
        let bench = Bench::new();
        let image = image(&bench);
        let expected = std::fs::read(&image).expect("the image");
        let path = image.display().to_string();
        let drive = |options: &str| format!("file={path},format=raw,{options}");
        let json = format!(
            r#"{{"driver":"raw","node-name":"d","file":{{"driver":"file","filename":"{path}","aio":"threads"}}}}"#
        );
        let ways: [(&[&str], &str); 7] = [
            (&["-hda", &path], "hd-0"),
            (&["-drive", &drive("if=ide,index=1,cache=writethrough")], "ide-0"),
            (
                &[
                    "-device",
                    "virtio-scsi-pci",
                    "-drive",
                    &drive("if=none,id=d,cache=none,aio=native"),
                    "-device",
                    "scsi-hd,drive=d,serial=abc",
                ],
                "d",
            ),
            (
                &[
                    "-drive",
                    &drive("if=none,id=d,discard=unmap,werror=stop"),
                    "-device",
                    "virtio-blk-pci,drive=d,serial=abc",
                ],
                "d",
            ),
            (&["-drive", &drive("if=virtio,snapshot=on")], "virtio-0"),
            (&["-snapshot", "-drive", &drive("if=virtio,id=d")], "d"),
            (&["-blockdev", &json, "-device", "ide-hd,drive=d"], "d"),
        ];
        for (way, export) in ways {
            println!("-- QEMU {}: {}", qemu.label, way.join(" "));
            let mut boot = Boot::new("hash").with(way);
            boot.qemu.clone_from(&qemu.path);
            boot.mem_mib = 96;
            let mut run = start(&bench, &["--interval", "none"], &boot);
            let id = take(&bench);
            bench.ok(&["stop"]);
            assert!(run.wait().success(), "{}", run.report());
            assert_same(&restored_disk_of(&bench, &id, &[], export), &expected, &way.join(" "));
        }
        assert_same(&std::fs::read(&image).expect("the image"), &expected, "the image");
        assert_eq!(places(&bench), Vec::<PathBuf>::new());
    }
}

/// A loop that writes record after record, each durable before the next; and reads the one before from the disk.
const RECORDS: &str = "i=0; while :; do i=$((i+1)); echo \"record $i \" | dd of=/dev/vda bs=4096 seek=$i conv=notrunc,fsync,sync 2>/dev/null; \
echo 3 >/proc/sys/vm/drop_caches; w=$(dd if=/dev/vda bs=4096 skip=$i count=1 2>/dev/null | head -n1); \
l=$(dd if=/dev/vda bs=4096 skip=$((i-1)) count=1 2>/dev/null | head -n1 | tr -d '\\0'); \
[ \"$w\" = \"record $i \" ] && { [ $i = 1 ] || [ \"$l\" = \"record $((i-1)) \" ]; } && echo KF-\"\"OK $i || echo KF-\"\"BAD $i; done";

/// The records that the guest says are on its disk.
fn records(vm: &Process) -> Vec<u64> {
    let bad: Vec<_> = vm.lines().into_iter().filter(|l| l.contains("KF-BAD")).collect();
    assert!(bad.is_empty(), "the guest's disk is not what its RAM says: {bad:?}; {}", vm.report());
    vm.lines().iter().filter_map(|l| l.trim().strip_prefix("KF-OK ")?.parse().ok()).collect()
}

fn wait_for_records(vm: &mut Process, more: usize) -> u64 {
    let before = records(vm).len();
    let grown = vm.wait_until(60, |p| (records(p).len() >= before + more).then_some(()));
    assert!(grown.is_some(), "the guest writes no more; {}", vm.report());
    *records(vm).last().expect("a record")
}

/// That a VM restored from `id` goes on with its next record, and finds those before on its disk.
fn assert_goes_on(bench: &Bench, id: &str) {
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
        assert_eq!(&disk[at..at + record.len()], record.as_bytes(), "checkpoint {id}, which is at {first}");
    }
}

#[test]
fn ram_and_disk_are_of_one_instant() {
    for qemu in a_qemu() {
        println!("-- QEMU {}", qemu.label);
        let bench = Bench::new();
        let image = image(&bench);
        let drive = virtio(&image, "raw");
        let mut run = start(&bench, &["--interval", "300ms"], &shell(&qemu, &words(&drive)));
        run.say(RECORDS);
        wait_for_records(&mut run, 20);
        let mark = bench.list().len();
        until("checkpoints are sealed", || bench.list().len() >= mark + 6);
        bench.ok(&["stop"]);
        assert!(run.wait().success(), "{}", run.report());
        assert!(run.errors().contains(", 0 failed"), "{}", run.report());
        let list = bench.list();
        for entry in &list[mark..mark + 6] {
            assert_goes_on(&bench, &number(entry, "id").to_string());
        }
    }
}

#[test]
fn a_failed_checkpoint_gives_its_blocks_to_the_next() {
    let bench = Bench::new();
    let image = image(&bench);
    let drive = virtio(&image, "raw");
    // The first, complete checkpoint has fewer pages than that, and each further one some hundred blocks and pages.
    let options = ["--interval", "none", "--fault", "disk-full:28000"];
    let mut run = start(&bench, &options, &shell(&qemus()[0], &words(&drive)));
    let mut failed = false;
    for step in 0..60 {
        let seek = step % 10 * 600;
        let count = if failed { 3 } else { 600 };
        let write = format!(
            "dd if=/dev/urandom of=/dev/vda bs=4k seek={seek} count={count} conv=notrunc,fsync 2>/dev/null"
        );
        does(&mut run, &write, &step.to_string());
        if failed {
            break;
        }
        failed = !bench.run(&["take", "--name", "guest"]).status.success();
    }
    assert!(failed && run.errors().contains("checkpoint failed"), "{}", run.report());
    let id = take(&bench);
    let copied = copy(&sock(&bench), "d", &bench.path().join("copy.raw"));
    let shown = bench.json(&["show", "--json", "--store", &bench.store(), &id]);
    assert!(number(&shown["disks"][0], "written_blocks") >= 603, "{shown}");
    bench.ok(&["stop"]);
    assert_eq!(run.wait().code(), Some(3), "{}", run.report());
    assert_same(&restored_disk(&bench, &id, &[]), &copied, "the checkpoint behind the failed one");
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
}

/// That nobody has the overlay open any more.
fn is_free(overlay: &Path) -> bool {
    let dir = std::fs::File::open(overlay).expect("the overlay");
    rustix::fs::flock(&dir, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
}

#[test]
fn a_killed_engine_leaves_the_guest_its_disk() {
    for phase in ["paused", "device-state", "sealing"] {
        let bench = Bench::new();
        let image = image(&bench);
        let before = std::fs::read(&image).expect("the image");
        let drive = virtio(&image, "raw");
        let fault = format!("kill:{phase}:3");
        let boot = shell(&qemus()[0], &words(&drive));
        let mut run = start(&bench, &["--interval", "none", "--fault", &fault], &boot);
        let qemu = Orphan::of(&bench, &mut run, "guest");
        run.say(RECORDS);
        for _ in 0..2 {
            wait_for_records(&mut run, 3);
            take(&bench);
        }
        let killed = bench.run(&["take", "--name", "guest"]);
        assert!(!killed.status.success(), "the fault did not strike in {phase}");
        run.wait();
        let before_end = records(&run).len();
        until("the guest writes on without its engine", || records(&run).len() >= before_end + 5);
        let last = *records(&run).last().expect("a record");
        qemu.kill();
        // The server goes with its last client, and everything that was flushed is in the overlay.
        let place = places(&bench).remove(0);
        let overlay = place.join("0-d");
        until("the server has ended", || is_free(&overlay));
        let record = format!("record {last} \n");
        let bytes = std::fs::read(overlay.join("data")).expect("the overlay");
        assert!(
            bytes.chunks_exact(4096).any(|b| b.starts_with(record.as_bytes())),
            "no {record:?} in {overlay:?}"
        );
        assert_same(&std::fs::read(&image).expect("the image"), &before, "the image");
        let newest = number(bench.list().last().expect("a checkpoint"), "id");
        assert_goes_on(&bench, &newest.to_string());
        // Whoever starts the VM anew is told.
        let mut anew = bench.start(&["--name", "anew", "--interval", "none"], &boot);
        anew.wait_for_error(&place.display().to_string());
        anew.wait_for("KF READY");
        bench.ok(&["stop", "--name", "anew"]);
        anew.wait();
    }
}

#[test]
fn an_image_that_has_changed_is_refused() {
    let bench = Bench::new();
    let image = image(&bench);
    let drive = virtio(&image, "raw");
    let mut run = start(&bench, &["--interval", "none"], &shell(&qemus()[0], &words(&drive)));
    let id = take(&bench);
    bench.ok(&["stop"]);
    run.wait();
    assert_eq!(places(&bench), Vec::<PathBuf>::new(), "nothing was written, nothing stays");
    let mut bytes = std::fs::read(&image).expect("the image");
    bytes[5] ^= 1;
    std::fs::write(&image, bytes).expect("write the image");
    let words = ["changed since the checkpoint", "disk.raw", "fix:"];
    bench.refused(&["restore", "--store", &bench.store(), &id], 1, &words);
}
