//! Tests random cycles of checkpoints, kills and restores. RAM and disk of each checkpoint must be
//! of one instant, and no record may be lost that the guest has synced.
//!
//! ```text
//!   boot ─▶ records, checkpoints ─▶ at a random moment:  kill -9 of  engine │ QEMU │ disk server │ all at once,  or a rollback
//!     └─▶ the overlay holds every record that was synced       (a killed engine: the guest writes on; then QEMU, too)
//!     └─▶ a random checkpoint: its disk is whole ─▶ it runs on, and compares each block with its RAM ─▶ killed in turn
//! ```
//!
//! The guest's `journal` checks the disk: its RAM knows the content of each block.
//! `KEYFRAME_CYCLES` (2) is the number of cycles, and `KEYFRAME_TEST_SEED` draws them; the test
//! prints both.

use keyframe_disk::{Base, Disk, ImageFormat, Overlay, commit};
use keyframe_tests::disks::{copy_running_disk, disk_socket_of};
use keyframe_tests::journaling::{RING_MIB, blank_image, journaling, records_of, wait_for_records};
use keyframe_tests::{
    JournalImage, Orphan, Process, Qemu, TestEnv, journal_counter, number, qemus, seed, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::time::Duration;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn moment(&mut self, least_ms: u64, most_ms: u64) -> Duration {
        Duration::from_millis(least_ms + self.below(most_ms - least_ms))
    }
}

fn from_environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name)
        .map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

#[test]
fn random_cycles_of_checkpoints_kills_and_restores() {
    let cycles = from_environment("KEYFRAME_CYCLES", 2);
    let seed = seed();
    println!("KEYFRAME_CYCLES={cycles} KEYFRAME_TEST_SEED={seed}");
    let qemus = qemus();
    let mut random = Random(seed);
    for number in 0..cycles {
        let qemu = &qemus[number as usize % qemus.len()];
        cycle(number, qemu, &mut random);
    }
}

/// The process that serves the disks of the engine's QEMU.
fn server_of(engine: u32) -> Option<u32> {
    let children =
        std::fs::read_to_string(format!("/proc/{engine}/task/{engine}/children")).ok()?;
    let is_server = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|b| *b == 0).any(|word| word == b"__disks")
    };
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(is_server)
}

fn kill(pid: u32) {
    // The process may have ended with another one.
    let _ = kill_process(Pid::from_raw(pid.cast_signed()).expect("a pid"), Signal::KILL);
}

fn cycle(number_of: u64, qemu: &Qemu, random: &mut Random) {
    let env = TestEnv::new();
    let image = blank_image(&env, "disk");
    let boot = journaling(qemu, &image);
    let mut run = env.start(&["--interval", "150ms", "--name", "guest"], &boot);
    run.wait_for("KF READY");
    let orphan = Orphan::of(&env, &mut run, "guest");
    let server = server_of(run.pid()).expect("the process that serves the disk");
    wait_for_records(&mut run, 0, 1);
    // Each cycle needs at least one checkpoint to restore.
    wait_until("the first checkpoint is sealed", || !env.list().is_empty());
    std::thread::sleep(random.moment(0, 1500));
    let what = ["engine", "qemu", "server", "all", "rollback"][random.below(5) as usize];
    println!("-- cycle {number_of}: QEMU {}, {what}", qemu.label);
    match what {
        "engine" => {
            kill(run.pid());
            std::thread::sleep(random.moment(0, 1200));
            assert!(orphan.is_running(), "QEMU has ended with its engine; {}", run.report());
        }
        "qemu" => orphan.kill(),
        "server" => kill(server),
        "all" => [run.pid(), orphan.pid(), server].into_iter().for_each(kill),
        _ => {
            let list = env.list();
            let target = number(&list[random.below(list.len() as u64) as usize], "id");
            env.ok(&["rollback", &target.to_string(), "--name", "guest"]);
            std::thread::sleep(random.moment(0, 1200));
            [run.pid(), orphan.pid(), server].into_iter().for_each(kill);
        }
    }
    // Kill the rest. The overlay holds the records that the guest had synced when the server was
    // killed.
    let synced = (what == "all" || what == "qemu" || what == "engine").then(|| {
        orphan.kill();
        run.wait();
        journal_counter(&run.lines(), "synced=")
    });
    orphan.kill();
    kill(run.pid());
    run.wait();
    if what != "server" {
        // A failed disk is an I/O error in the guest, which reports it.
        records_of(&run.lines());
    }
    assert_overlay_holds(&env, &image, synced, what);
    assert!(
        std::fs::read(&image).expect("the image").iter().all(|byte| *byte == 0),
        "the image was written"
    );
    a_checkpoint_goes_on(&env, random);
}

/// Asserts that the overlay has every record up to `synced`, and no torn one.
fn assert_overlay_holds(env: &TestEnv, image: &Path, synced: Option<u64>, context: &str) {
    let places = std::fs::read_dir(PathBuf::from(env.store()).join("disks")).expect("STORE/disks");
    let Some(place) = places.flatten().map(|place| place.path()).next() else {
        // There is none if the engine ended normally and the guest had written nothing.
        assert_eq!(synced.unwrap_or(0), 0, "{context}: nothing is left");
        return;
    };
    let overlays = std::fs::read_dir(place).expect("a place").flatten().map(|entry| entry.path());
    let overlays: Vec<PathBuf> = overlays.filter(|path| path.is_dir()).collect();
    // After a rollback the overlay lies on a checkpoint's blocks.
    let [overlay] = &overlays[..] else { return };
    if synced.is_none() {
        return;
    }
    let mut opened = None;
    wait_until("the server has ended", || {
        opened = Overlay::open(overlay).ok();
        opened.is_some()
    });
    let base = Base::open(image, ImageFormat::Raw).expect("the image");
    let now = env.path().join("now.raw");
    commit::to_new_raw(&Disk::new(opened.expect("an overlay"), base, None), &now)
        .expect("write the disk");
    JournalImage::read(&now, RING_MIB).assert_whole_to(synced.unwrap_or(0), context);
}

/// Restores a random checkpoint: its disk is whole, and the restored guest finds each block equal
/// to its RAM.
fn a_checkpoint_goes_on(env: &TestEnv, random: &mut Random) {
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    let list = env.list();
    assert!(!list.is_empty(), "no checkpoint");
    // Most often the newest one, where a kill would show.
    let at = if random.below(3) == 0 {
        random.below(list.len() as u64) as usize
    } else {
        list.len() - 1
    };
    let id = number(&list[at], "id").to_string();
    let options: &[&str] = if random.below(2) == 0 { &["--lazy"] } else { &[] };
    let mut restored = env.restore(&id, options);
    let pid = restored_pid_of(&mut restored);
    // The guest compares the whole ring before it overwrites it. A checkpoint of the boot boots
    // first.
    let last = wait_for_records(&mut restored, 0, 300);
    let copied = env.path().join("restored.raw");
    copy_running_disk(pid, &disk_socket_of(pid), "d", &copied);
    let found = JournalImage::read(&copied, RING_MIB);
    assert!(
        found.torn.is_empty() && found.newest >= last,
        "checkpoint {id}: {found:?}, written {last}"
    );
    // The restored VM may be killed too.
    if random.below(2) == 0 {
        kill(pid);
        assert!(!restored.wait().success());
    }
}

fn restored_pid_of(restored: &mut Process) -> u32 {
    restored.wait_for_error("is running after");
    keyframe_tests::restored_pid(restored)
}
