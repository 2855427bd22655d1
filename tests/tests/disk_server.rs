//! Tests the NBD server under real QEMUs and guests: each bus, kills, pauses and discards. The
//! guest's `journal` checks the disk against its RAM; the test checks the image on the host against
//! the guest's reports.

use keyframe_disk::{
    Base, Disk, DiskSpec, Disks, ImageFormat, Overlay, ServerEvent, Slot, SlotFile, commit,
};
use keyframe_tests::{
    Boot, ExternalVm, JournalImage, Process, Qemu, TestEnv, assert_no_errors, chosen_qemus,
    distribution_qemu, journal_counter, wait_until,
};
use rustix::process::Signal;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 8;
const DISK_BYTES: u64 = (MIB + 4) << 20;
const BLOCK: u64 = 4096;

/// How a guest reaches its disk.
struct Bus {
    name: &'static str,
    device: &'static [&'static str],
    guest: &'static str,
}

const BUSES: [Bus; 4] = [
    Bus {
        name: "virtio-blk",
        device: &["-device", "virtio-blk-pci,drive=d"],
        guest: "kf.dev=/dev/vda",
    },
    Bus {
        name: "virtio-scsi",
        device: &["-device", "virtio-scsi-pci", "-device", "scsi-hd,drive=d"],
        guest: "kf.dev=/dev/sda kf.bus=scsi",
    },
    Bus {
        name: "ide",
        device: &["-device", "ide-hd,drive=d"],
        guest: "kf.dev=/dev/sda kf.bus=ide",
    },
    Bus {
        name: "nvme",
        device: &["-device", "nvme,drive=d,serial=kf"],
        guest: "kf.dev=/dev/nvme0n1 kf.bus=nvme",
    },
];

/// The disk of one test: a base of zeros, an overlay and a server.
struct Bed {
    env: TestEnv,
}

impl Bed {
    fn new() -> Self {
        let env = TestEnv::without_store();
        let base = File::create(env.path().join("base.raw")).expect("a base");
        base.set_len(DISK_BYTES).expect("its length");
        Self { env }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.env.path().join(name)
    }

    fn spec(&self) -> DiskSpec {
        DiskSpec {
            export: "d".into(),
            base: self.path("base.raw"),
            format: ImageFormat::Raw,
            overlay: self.path("overlay"),
            blank_bytes: None,
            layer: None,
            temporary: false,
        }
    }

    fn serve(&self) -> Disks {
        // A killed server leaves its socket.
        let _ = std::fs::remove_file(self.path("nbd"));
        let spec = [self.spec()];
        Disks::spawn(self.env.command(&["__disks"]), &self.path("nbd"), &spec)
            .expect("serve the disk")
    }

    /// Boots a guest with `kernel` parameters for its journal, and `options` of the block node.
    fn boot(&self, qemu: &Qemu, bus: &Bus, kernel: &str, options: &str) -> ExternalVm {
        let mut boot = Boot::new(&format!("journal kf.mib={MIB} {} {kernel}", bus.guest));
        boot.qemu.clone_from(&qemu.path);
        let socket = self.path("nbd");
        let node = format!(
            "driver=nbd,node-name=d,server.type=unix,server.path={},export=d,discard=unmap{options}",
            socket.display()
        );
        ExternalVm::start(&self.env, &boot.with(&["-blockdev", &node]).with(bus.device))
    }

    /// The content of the disk, from an overlay without a server.
    fn image(&self) -> PathBuf {
        let path = self.path("now.raw");
        let _ = std::fs::remove_file(&path);
        let base = Base::open(&self.path("base.raw"), ImageFormat::Raw).expect("open the base");
        let overlay = Overlay::open(&self.path("overlay")).expect("open the overlay");
        commit::to_new_raw(&Disk::new(overlay, base, None), &path).expect("write the image");
        path
    }

    fn assert_base_untouched(&self) {
        let base = std::fs::read(self.path("base.raw")).expect("read the base");
        assert!(base.iter().all(|byte| *byte == 0), "the base was written");
    }
}

/// Kills a process, which may have ended with its VM.
fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).expect("a pid");
    let _ = rustix::process::kill_process(pid, Signal::KILL);
}

/// Lets the engine of a server end, and returns the server's process.
fn abandoned(disks: Disks) -> u32 {
    let pid = disks.pid();
    drop(disks);
    pid
}

/// A disk server whose process is killed is started again, and QEMU sends the guest's requests to
/// it: no write that the guest was told of is lost, whether it was flushed or not.
#[test]
fn a_killed_server_is_started_again_under_each_bus() {
    for qemu in chosen_qemus(1) {
        for (bus, how) in BUSES.iter().zip(["direct", "fsync", "dsync", "fsync"]) {
            let context = format!("{} on QEMU {}, {how}", bus.name, qemu.label);
            let bed = Bed::new();
            let mut disks = bed.serve();
            let (tell, restarted) = std::sync::mpsc::channel();
            disks.observe(Arc::new(move |event| drop(tell.send(event))));
            let kernel = format!("kf.rate=0 kf.trim=1 kf.how={how}");
            let mut guest = bed.boot(&qemu, bus, &kernel, ",reconnect-delay=600");
            for round in 0..3 {
                written(&mut guest.console, 0, 300);
                // A cut makes the next writes go to new slots.
                let cut = disks.cut().expect("cut the disk");
                disks.release(&cut).expect("release the cut");
                kill(disks.pid());
                let next = || restarted.recv_timeout(Duration::from_mins(1)).expect("an event");
                let mut event = next();
                // One that is killed soon after its start is started again after a wait.
                if let ServerEvent::NotRestarted {
                    error: keyframe_disk::Error::ServerEnded, ..
                } = event
                {
                    event = next();
                }
                assert!(matches!(event, ServerEvent::Restarted { .. }), "{context}: {event:?}");
                println!("{context}: round {round}");
            }
            written(&mut guest.console, 0, 300);
            guest.console.type_line("poweroff");
            guest.console.wait();
            assert_no_errors(&guest.console);
            let synced = synced(&guest.console);
            disks.end().expect("end the server");
            JournalImage::read(&bed.image(), MIB).assert_whole_to(synced, &context);
        }
    }
}

/// Waits until the guest has written `records` records since line `from` of the console.
fn written(guest: &mut Process, from: usize, records: u64) {
    guest.wait_for_after(from, "KF READY");
    let before = journal_counter(&guest.lines(), "written=");
    let enough = |p: &Process| {
        (journal_counter(&p.lines()[from..], "synced=") >= before + records).then_some(())
    };
    let done = guest.wait_until(enough);
    assert!(done.is_some(), "the guest does not write; {}", guest.report());
}

/// The newest record that the guest has synced.
fn synced(guest: &Process) -> u64 {
    journal_counter(&guest.lines(), "synced=")
}

#[test]
fn every_bus_writes_discards_and_zeroes() {
    for qemu in chosen_qemus(0) {
        for (bus, how) in BUSES.iter().zip(["direct", "fsync", "dsync", "fsync"]) {
            let context = format!("{} on QEMU {}, {how}", bus.name, qemu.label);
            println!("-- {context}");
            let bed = Bed::new();
            let mut disks = bed.serve();
            let mut guest = bed.boot(&qemu, bus, &format!("kf.rate=0 kf.trim=1 kf.how={how}"), "");
            written(&mut guest.console, 0, 1000);
            let stats = disks.stats().expect("statistics");
            assert!(stats.flushes > 0, "{context}: the guest's flushes do not come: {stats:?}");
            assert!(stats.discarded_bytes > 0, "{context}: its discards do not come: {stats:?}");
            // IDE has no such command: the kernel writes zeros.
            assert!(bus.name == "ide" || stats.zeroed_bytes > 0, "{context}: {stats:?}");
            guest.console.type_line("poweroff");
            guest.console.wait();
            assert_no_errors(&guest.console);
            let synced = synced(&guest.console);
            disks.end().expect("end the server");
            JournalImage::read(&bed.image(), MIB).assert_whole_to(synced, &context);
            bed.assert_base_untouched();
        }
    }
}

#[test]
fn what_was_flushed_survives_the_end_of_everything() {
    for qemu in chosen_qemus(1) {
        let bed = Bed::new();
        let mut before = 0;
        for round in 0..4 {
            let context = format!("kill {round} on QEMU {}", qemu.label);
            println!("-- {context}");
            let disks = bed.serve();
            let how = ["direct", "fsync", "dsync"][round % 3];
            let kernel = format!("kf.rate=0 kf.how={how} kf.sync={}", [1, 16, 64][round % 3]);
            let mut guest = bed.boot(&qemu, &BUSES[round % BUSES.len()], &kernel, "");
            let found = guest.console.wait_for("journal found");
            assert!(found.ends_with(" torn=0"), "{context}: {found}");
            let whole = found.split(['=', ' ']).nth(3).and_then(|n| n.parse::<u64>().ok());
            assert!(
                whole.is_some_and(|whole| whole >= before),
                "{context}: {found}, {before} were synced"
            );
            written(&mut guest.console, 0, 800);
            // The engine is this test: it ends first, so that no server is started again.
            let pids = [abandoned(disks), guest.console.pid()];
            match round % 2 {
                0 => pids.into_iter().for_each(kill),
                _ => pids.into_iter().rev().for_each(kill),
            }
            guest.console.wait();
            before = synced(&guest.console);
            assert_no_errors(&guest.console);
            // The lock ends with the last thread of the killed process.
            wait_until("the overlay is free", || Overlay::open(&bed.path("overlay")).is_ok());
            JournalImage::read(&bed.image(), MIB).assert_whole_to(before, &context);
        }
        bed.assert_base_untouched();
    }
}

#[test]
fn a_killed_qemu_leaves_the_disk_to_the_next_one() {
    let qemu = &distribution_qemu();
    let bed = Bed::new();
    let mut disks = bed.serve();
    for round in 0..3 {
        let mut guest = bed.boot(qemu, &BUSES[0], "kf.rate=0", "");
        written(&mut guest.console, 0, 500);
        kill(guest.console.pid());
        guest.console.wait();
        assert_no_errors(&guest.console);
        wait_until("its connection is gone", || disks.stats().expect("statistics").clients == 0);
        println!("killed {round}: synced to {}", synced(&guest.console));
        if round == 2 {
            let synced = synced(&guest.console);
            disks.end().expect("end the server");
            JournalImage::read(&bed.image(), MIB).assert_whole_to(synced, "after the last");
            return;
        }
    }
}

/// The blocks that the checkpoints of a run have added up to.
struct Copy {
    file: File,
    slots: SlotFile,
}

impl Copy {
    fn new(bed: &Bed, disks: &Disks) -> Self {
        let options = File::options().read(true).write(true).create(true).truncate(true).clone();
        let file = options.open(bed.path("copy.raw")).expect("a copy");
        file.set_len(DISK_BYTES).expect("its length");
        Self { file, slots: disks.slot_file(0).expect("the slots") }
    }

    /// Takes one epoch and releases it, or gives it back as a failed one.
    fn add(&self, disks: &mut Disks, epoch: keyframe_disk::DiskEpoch) -> u64 {
        let extents: Vec<_> = disks.pages(0, epoch).collect::<Result<_, _>>().expect("the epoch");
        let mut block = [0u8; BLOCK as usize];
        for extent in &extents {
            for i in 0..extent.blocks {
                block.fill(0);
                if let Some(slot) = extent.slot {
                    self.slots.read(Slot(slot.0 + i as u32), &mut block).expect("read a slot");
                }
                self.file
                    .write_all_at(&block, (extent.block.0 + i) * BLOCK)
                    .expect("write the copy");
            }
        }
        extents.iter().map(|extent| extent.blocks).sum()
    }
}

fn read_over_nbd(bed: &Bed, to: &Path) -> Vec<u8> {
    let url = format!("nbd+unix:///d?socket={}", bed.path("nbd").display());
    let output = std::process::Command::new("timeout")
        .args(["120", "qemu-img", "convert", "-f", "raw", "-O", "raw", &url])
        .arg(to)
        .output()
        .expect("run qemu-img");
    assert!(output.status.success(), "qemu-img: {}", String::from_utf8_lossy(&output.stderr));
    std::fs::read(to).expect("read what it wrote")
}

#[test]
fn epochs_cut_in_a_pause_add_up_to_the_disk_of_that_instant() {
    for qemu in chosen_qemus(0) {
        for bus in [&BUSES[0], &BUSES[3]] {
            println!("-- {} on QEMU {}", bus.name, qemu.label);
            let bed = Bed::new();
            let mut disks = bed.serve();
            let mut guest = bed.boot(&qemu, bus, "kf.rate=0 kf.trim=1 kf.how=fsync", "");
            written(&mut guest.console, 0, 300);
            let copy = Copy::new(&bed, &disks);
            let mut qmp = guest.monitor();
            for round in 0..8 {
                let context = format!("round {round}, {} on QEMU {}", bus.name, qemu.label);
                disks.prepare().expect("prepare");
                disks.pause(Duration::from_mins(2)).expect("pause");
                qmp.stop().expect("stop");
                let epochs = disks.cut().expect("cut");
                disks.settled().expect("settle");
                let now = read_over_nbd(&bed, &bed.path("stopped.raw"));
                let synced = synced(&guest.console);
                qmp.cont().expect("cont");
                // The guest writes meanwhile.
                let blocks = copy.add(&mut disks, epochs[0]);
                assert!(blocks > 0 || round > 0, "{context}: nothing was written");
                let copied = std::fs::read(bed.path("copy.raw")).expect("read the copy");
                let differing = (0..DISK_BYTES / BLOCK).find(|block| {
                    let range = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
                    now[range.clone()] != copied[range]
                });
                assert_eq!(differing, None, "{context}: this block is not as it was in the pause");
                JournalImage::read(&bed.path("copy.raw"), MIB).assert_whole_to(synced, &context);
                match round % 4 {
                    // A failed checkpoint: the next one has its blocks again.
                    3 => disks.give_back(&epochs).expect("give back"),
                    _ => disks.release(&epochs).expect("release"),
                }
                let before = journal_counter(&guest.console.lines(), "written=");
                let goes_on = guest.console.wait_until(|p| {
                    (journal_counter(&p.lines(), "written=") > before).then_some(())
                });
                assert!(goes_on.is_some(), "{context}: {}", guest.console.report());
            }
            guest.console.type_line("poweroff");
            guest.console.wait();
            assert_no_errors(&guest.console);
            disks.end().expect("end the server");
        }
    }
}

/// With its engine gone, no server is started again. A QEMU without `reconnect-delay` stops the VM.
#[test]
fn a_server_that_is_killed_after_its_engine_tells_the_guest_nothing_wrong() {
    for qemu in chosen_qemus(1) {
        let bed = Bed::new();
        let disks = bed.serve();
        let stopping = Bus {
            device: &["-device", "virtio-blk-pci,drive=d,werror=stop,rerror=stop"],
            ..BUSES[0]
        };
        let mut guest = bed.boot(&qemu, &stopping, "kf.rate=0", "");
        written(&mut guest.console, 0, 300);
        let mut qmp = guest.monitor();
        kill(abandoned(disks));
        wait_until("QEMU stops the VM", || {
            let status = qmp.execute("query-status", None).expect("query-status");
            status["status"] == "io-error"
        });
        assert_no_errors(&guest.console);
        // The guest has seen no more than the image has.
        let synced = synced(&guest.console);
        kill(guest.console.pid());
        guest.console.wait();
        JournalImage::read(&bed.image(), MIB).assert_whole_to(synced, qemu.label);
    }
}

#[test]
fn what_a_killed_vm_wrote_is_committed_and_never_by_surprise() {
    let qemu = &distribution_qemu();
    let bed = Bed::new();
    let disks = bed.serve();
    let mut guest = bed.boot(qemu, &BUSES[0], "kf.rate=0", "");
    written(&mut guest.console, 0, 400);
    let (overlay, base) =
        (bed.path("overlay").display().to_string(), bed.path("base.raw").display().to_string());
    let from = ["commit", "--overlay", &overlay, "--base", &base];
    bed.env.refused(&more(&from, &["--in-place", "--yes"]), 1, &["in use"]);
    [abandoned(disks), guest.console.pid()].into_iter().for_each(kill);
    guest.console.wait();
    let synced = synced(&guest.console);
    wait_until("the overlay is free", || Overlay::open(&bed.path("overlay")).is_ok());
    // No server answers.
    bed.env.refused(
        &more(&from, &["--in-place"]),
        1,
        &["not agreed", "--yes", "nothing was changed"],
    );
    let told = bed.env.ok(&more(&from, &["--in-place", "--dry-run"]));
    assert!(told.contains("would write") && told.contains("MiB"), "{told}");
    bed.assert_base_untouched();
    let (raw, qcow2) = (bed.path("new.raw"), bed.path("new.qcow2"));
    bed.env.ok(&more(&from, &["-o", &raw.display().to_string()]));
    JournalImage::read(&raw, MIB).assert_whole_to(synced, "a new raw image");
    bed.env.ok(&more(&from, &["-o", &qcow2.display().to_string(), "--format", "qcow2"]));
    let images = [raw.as_os_str(), qcow2.as_os_str()];
    let same = std::process::Command::new("qemu-img")
        .args(["compare", "-f", "raw", "-F", "qcow2"])
        .args(images)
        .output();
    assert!(same.expect("run qemu-img").status.success(), "raw and qcow2 differ");
    bed.env.refused(&more(&from, &["-o", &raw.display().to_string()]), 1, &["it exists"]);
    bed.env.ok(&more(&from, &["--in-place", "--yes"]));
    JournalImage::read(&bed.path("base.raw"), MIB).assert_whole_to(synced, "the base");
    assert!(
        std::fs::read(&raw).expect("read") == std::fs::read(&base).expect("read"),
        "in place and new differ"
    );
    // The VM continues from there, on an empty overlay.
    let disks = bed.serve();
    let mut guest = bed.boot(qemu, &BUSES[0], "kf.rate=0", "");
    written(&mut guest.console, 0, 200);
    assert_no_errors(&guest.console);
    drop(guest);
    disks.end().expect("end the server");
}

fn more<'a>(words: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [words, more].concat()
}
