//! Tests `keyframe branch`: clones continue from exactly the checkpoint, independently of each
//! other, and share the memory that they have not written.

use keyframe_qemu::Qmp;
use keyframe_tests::disks::{as_strs, copy_running_disk, shell_guest};
use keyframe_tests::journaling::{blank_image, journaling, records_of, wait_for_records};
use keyframe_tests::{
    Boot, JournalImage, PATIENCE, Process, Qemu, Sequence, TestEnv, chosen_qemus,
    distribution_qemu, ended_lines, hash_lines, is_gone, number, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::Path;

fn checkpoint(env: &TestEnv, boot: &Boot) {
    let mut run = env.start(&["--interval", "none", "--name", "guest"], boot);
    run.wait_for("KF READY");
    env.ok(&["take", "--name", "guest", "--tag", "seed"]);
    env.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
}

fn hashing(qemu: &Qemu) -> Boot {
    let mut boot = Boot::new("hash");
    boot.qemu.clone_from(&qemu.path);
    boot.mem_mib = 96;
    boot
}

/// Runs `keyframe branch seed OPTIONS` and returns its report on the clones.
fn branch(env: &TestEnv, options: &[&str]) -> (Process, Vec<Value>) {
    env.branch(&[&["seed"], options].concat())
}

fn text<'a>(clone: &'a Value, key: &str) -> &'a str {
    clone[key].as_str().unwrap()
}

fn console(clone: &Value) -> Vec<String> {
    ended_lines(&Path::new(text(clone, "directory")).join("console.log"))
}

fn grow(clone: &Value, more: usize) {
    let count = || hash_lines(&console(clone)).len();
    let before = count();
    wait_until("the clone prints on", || count() >= before + more);
}

/// The memory of a process that maps the checkpoint's RAM: KiB of its own pages, and KiB that are
/// mapped. (A page of the file that one process alone has mapped counts as private, too, but not as
/// anonymous.)
fn ram_kib(pid: u64) -> (u64, u64) {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut of_ram, mut private, mut rss) = (false, 0, 0);
    for line in smaps.lines() {
        let value =
            || line.split_whitespace().nth(1).and_then(|v| v.parse::<u64>().ok()).unwrap_or(0);
        if line.split_whitespace().next().is_some_and(|first| first.contains('-')) {
            of_ram = line.contains("memfd:keyframe-ram");
        } else if of_ram && line.starts_with("Anonymous:") {
            private += value();
        } else if of_ram && line.starts_with("Rss:") {
            rss += value();
        }
    }
    (private, rss)
}

#[test]
fn clones_go_on_from_the_checkpoint_each_by_itself() {
    let mut sequence = Sequence::new(16);
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        checkpoint(&env, &hashing(&qemu));
        let (mut process, clones) = branch(&env, &["-n", "3", "--name", "c"]);
        assert_eq!(
            clones.iter().map(|c| text(c, "name")).collect::<Vec<_>>(),
            ["c-1", "c-2", "c-3"]
        );
        for clone in &clones {
            grow(clone, 4);
        }
        // A stopped clone does not delay the others, nor does a killed one.
        let mut monitor = Qmp::connect(Path::new(text(&clones[0], "monitor")), PATIENCE).unwrap();
        monitor.stop().unwrap();
        let stood = hash_lines(&console(&clones[0])).len();
        let victim = number(&clones[1], "qemu_pid");
        kill_process(Pid::from_raw(victim as i32).unwrap(), Signal::KILL).unwrap();
        wait_until("the killed one is missed", || process.errors().contains("clone c-2 ended"));
        grow(&clones[2], 8);
        assert!(hash_lines(&console(&clones[0])).len() <= stood + 1);
        monitor.cont().unwrap();
        grow(&clones[0], 4);
        let firsts: Vec<u64> = clones
            .iter()
            .map(|clone| {
                let lines = hash_lines(&console(clone));
                sequence.check(&lines, 3);
                lines[0].n
            })
            .collect();
        assert!(firsts.iter().all(|first| *first == firsts[0]), "{firsts:?}: all from one instant");
        process.signal(Signal::INT);
        // One of the clones did not end well.
        process.wait();
        for clone in &clones {
            wait_until("no clone is left", || is_gone(number(clone, "qemu_pid") as u32));
            assert!(!Path::new(text(clone, "directory")).exists(), "nothing is left behind");
        }
    }
}

/// VMs without an engine are listed too.
#[test]
fn vms_without_an_engine_are_shown_and_ended_by_their_names() {
    let qemu = chosen_qemus(1).remove(0);
    let env = TestEnv::new();
    checkpoint(&env, &hashing(&qemu));
    let (mut clones, told) = branch(&env, &["-n", "2", "--name", "c"]);
    let mut first = env.restore("seed", &["--paused"]);
    first.wait_for_error("is paused");
    let mut second = env.restore("seed", &["--paused"]);
    second.wait_for_error("is paused");
    let names = |status: &Value| -> Vec<String> {
        status.as_array().unwrap().iter().map(|vm| text(vm, "vm").to_owned()).collect()
    };
    let status = env.json(&["status", "--json"]);
    assert_eq!(names(&status), ["c-1", "c-2", "guest", "guest-2"]);
    assert_eq!((text(&status[0], "kind"), text(&status[3], "kind")), ("clone", "restored"));
    assert_eq!(number(&status[1], "qemu_pid"), number(&told[1], "qemu_pid"));
    assert_eq!(names(&env.json(&["status", "--json", "--name", "guest-2"])), ["guest-2"]);
    let shown = env.ok(&["status"]);
    assert!(
        shown.contains("c-1: a clone of checkpoint") && shown.contains("guest: restored from"),
        "{shown}"
    );

    env.refused(&["stop"], 1, &["several VMs run", "c-1, c-2, guest, guest-2"]);
    env.refused(&["stop", "--name", "guest-3"], 1, &["no VM named guest-3"]);
    env.refused(&["stop", "--name", "guest", "--on-exit", "keep"], 1, &["guest has no engine"]);
    env.ok(&["stop", "--name", "c-1"]);
    wait_until("the first clone is gone", || is_gone(number(&told[0], "qemu_pid") as u32));
    grow(&told[1], 2);
    for (name, process) in [("guest-2", &mut second), ("guest", &mut first)] {
        env.ok(&["stop", "--name", name]);
        assert!(process.wait().success(), "{}", process.report());
    }
    assert_eq!(names(&env.json(&["status", "--json"])), ["c-2"]);
    env.ok(&["stop"]);
    assert!(clones.wait().success(), "{}", clones.report());
    assert_eq!(env.json(&["status", "--json"]), serde_json::json!([]));
}

#[test]
fn pages_that_nobody_wrote_are_shared() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let mut boot = Boot::new("hash kf.mib=64");
        boot.qemu.clone_from(&qemu.path);
        boot.mem_mib = 192;
        checkpoint(&env, &boot);
        let (mut process, clones) = branch(&env, &["-n", "4", "--paused"]);
        for clone in &clones {
            let (private, _) = ram_kib(number(clone, "qemu_pid"));
            // Loading the devices writes a few pages; the guest uses some 100 MiB.
            assert!(private < 2048, "{private} KiB of a clone's RAM are its own before it ran");
        }
        // After a read of all RAM, the memory is still shared with the checkpoint.
        let pid = number(&clones[0], "qemu_pid");
        let mut monitor = Qmp::connect(Path::new(text(&clones[0], "monitor")), PATIENCE).unwrap();
        let main = keyframe_qemu::find_ram_blocks(&mut monitor, pid as u32).unwrap().remove(0);
        let target = keyframe_kernel::Process::open(pid as u32).unwrap();
        let mut all = vec![0; main.block.total_bytes as usize];
        keyframe_kernel::read_memory(&target, main.host, &mut all).unwrap();
        let (private, rss) = ram_kib(pid);
        assert!(rss > 64 << 10, "{rss} KiB were mapped: it was read");
        assert!(private < 2048, "{private} KiB of {rss} are its own after it was read");
        // No clone sees the writes of another.
        clones[1..].iter().for_each(|clone| {
            let mut monitor = Qmp::connect(Path::new(text(clone, "monitor")), PATIENCE).unwrap();
            monitor.cont().unwrap();
        });
        for clone in &clones[1..] {
            grow(clone, 3);
        }
        let mut again = vec![0; all.len()];
        keyframe_kernel::read_memory(&target, main.host, &mut again).unwrap();
        assert!(all == again, "the clone that stands saw what another wrote");
        assert!(
            ram_kib(number(&clones[1], "qemu_pid")).0 > 2048,
            "a clone that writes has pages of its own"
        );
        process.signal(Signal::INT);
        assert!(process.wait().success(), "{}", process.report());
    }
}

/// Takes three audited checkpoints of a clone, whose name is `c-1` without being told.
fn checkpoint_clone(env: &TestEnv, clone: &Value) -> Vec<Value> {
    let pid = number(clone, "qemu_pid") as u32;
    let options = ["--interval", "300ms", "--count", "3", "--audit", "audit"];
    let args = env.attach_args(&["--qmp", text(clone, "monitor")], pid, &options);
    env.ok(&as_strs(&args));
    let own: Vec<Value> = env.list().into_iter().filter(|e| e["vm"] == "c-1").collect();
    assert_eq!(own.len(), 3);
    own
}

#[test]
fn a_clone_can_be_checkpointed_and_its_checkpoints_know_where_they_grew() {
    let mut sequence = Sequence::new(16);
    for qemu in chosen_qemus(1) {
        let env = TestEnv::new();
        checkpoint(&env, &hashing(&qemu));
        let seed = number(&env.list()[0], "id");
        let (mut process, clones) = branch(&env, &["-n", "2", "--name", "c"]);
        grow(&clones[0], 2);
        let own = checkpoint_clone(&env, &clones[0]);
        assert_eq!(number(&own[0], "parent"), seed);
        assert_eq!(number(&own[1], "parent"), number(&own[0], "id"));
        assert!(own[1].get("restored_from").is_none());
        let tree = env.ok(&["list", "--tree", "--store", &env.store()]);
        assert!(tree.contains("└─") && tree.contains("c-1"), "{tree}");
        grow(&clones[0], 3);
        sequence.check(&hash_lines(&console(&clones[0])), 5);
        // The checkpoint restores while both clones run.
        let (mut again, grand) = branch_of(&env, &number(&own[2], "id").to_string());
        grow(&grand, 3);
        sequence.check(&hash_lines(&console(&grand)), 3);
        for process in [&mut again, &mut process] {
            process.signal(Signal::INT);
            assert!(process.wait().success(), "{}", process.report());
        }
    }
}

/// Makes one clone of checkpoint `id`.
fn branch_of(env: &TestEnv, id: &str) -> (Process, Value) {
    let (process, mut clones) = env.branch(&[id, "--name", "grand"]);
    (process, clones.remove(0))
}

#[test]
fn identity_is_fresh_unless_it_is_to_be_exact_and_names_are_had_once() {
    let env = TestEnv::new();
    let guid = "324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87";
    let boot = hashing(&distribution_qemu()).with(&["-device", &format!("vmgenid,guid={guid}")]);
    checkpoint(&env, &boot);
    let ids = |clones: &[Value]| -> Vec<String> {
        let id = |clone: &Value| {
            let mut monitor = Qmp::connect(Path::new(text(clone, "monitor")), PATIENCE).unwrap();
            let answer = monitor.execute("query-vm-generation-id", None).unwrap();
            answer["guid"].as_str().unwrap().to_owned()
        };
        clones.iter().map(id).collect()
    };
    let (mut process, clones) = branch(&env, &["-n", "2"]);
    let fresh = ids(&clones);
    assert!(fresh[0] != fresh[1] && !fresh.contains(&guid.to_owned()), "{fresh:?}");
    let store = env.store();
    let taken = ["branch", "--store", &store, "seed", "--name", "guest"];
    env.refused(&taken, 1, &["guest-1", "--name"]);
    let (mut exact, clones) = branch(&env, &["-n", "2", "--exact", "--name", "exact"]);
    assert_eq!(ids(&clones), [guid, guid]);
    for process in [&mut exact, &mut process] {
        process.signal(Signal::INT);
        assert!(process.wait().success(), "{}", process.report());
    }
}

#[test]
fn half_a_set_of_clones_is_none() {
    let env = TestEnv::new();
    checkpoint(&env, &hashing(&distribution_qemu()));
    // The second clone's directory for a device does not exist.
    let store = env.store();
    std::fs::create_dir(env.path().join("out-1")).unwrap();
    let words = [
        "branch",
        "--store",
        &store,
        "seed",
        "-n",
        "2",
        "--",
        "-chardev",
        "file,id=x,path=out-{n}/log",
    ];
    let said = env.refused(&words, 1, &["guest-2"]);
    assert!(!said.contains("running"), "{said}");
    let left = env.path().join("keyframe/.clones");
    assert_eq!(std::fs::read_dir(left).unwrap().count(), 0, "nothing is left behind");
}

/// The number of records that a clone's guest has written, from its console.
fn written(clone: &Value) -> u64 {
    records_of(&console(clone))
}

#[test]
fn clones_have_disks_of_their_own() {
    for qemu in chosen_qemus(0) {
        println!("-- QEMU {}", qemu.label);
        let env = TestEnv::new();
        let image = blank_image(&env, "disk");
        let mut run =
            env.start(&["--interval", "none", "--name", "guest"], &journaling(&qemu, &image));
        run.wait_for("KF READY");
        wait_for_records(&mut run, 0, 300);
        env.ok(&["take", "--name", "guest", "--tag", "seed"]);
        env.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        let places = || {
            std::fs::read_dir(Path::new(&env.store()).join("disks")).expect("STORE/disks").count()
        };
        let before = places();

        let (mut process, clones) = branch(&env, &["-n", "3", "--name", "c"]);
        assert_eq!(places(), before + 3);
        // The end of a clone removes its writes and no others.
        wait_until("a clone writes", || written(&clones[1]) > 0);
        kill_process(Pid::from_raw(number(&clones[1], "qemu_pid") as i32).unwrap(), Signal::KILL)
            .unwrap();
        wait_until("its disk has gone", || places() == before + 2);
        // The guest compares each block of the ring with RAM before it overwrites it.
        for clone in [&clones[0], &clones[2]] {
            wait_until("the clone writes", || written(clone) > 0);
            let first = written(clone);
            wait_until("the clone writes on", || written(clone) >= first + 400);
            let copied = env.path().join(format!("{}.raw", text(clone, "name")));
            let socket = Path::new(text(clone, "directory")).join("disks.sock");
            copy_running_disk(number(clone, "qemu_pid") as u32, &socket, "d", &copied);
            let found = JournalImage::read(&copied, 1);
            assert!(found.torn.is_empty() && found.newest > first, "{found:?}");
        }
        assert!(
            std::fs::read(&image).unwrap().iter().all(|byte| *byte == 0),
            "the image was written"
        );
        process.signal(Signal::INT);
        process.wait();
        assert_eq!(places(), before, "what clones wrote is thrown away");
        for clone in &clones {
            wait_until("no clone is left", || is_gone(number(clone, "qemu_pid") as u32));
            assert!(!Path::new(text(clone, "directory")).exists(), "nothing is left behind");
        }

        let (mut process, clones) = branch(&env, &["-n", "2", "--name", "k", "--keep-disks"]);
        for clone in &clones {
            wait_until("the clone says what it wrote before", || written(clone) > 0);
            let first = written(clone);
            wait_until("the clone writes", || written(clone) > first);
        }
        process.signal(Signal::INT);
        assert!(process.wait().success(), "{}", process.report());
        assert_eq!(places(), before + 2);
        assert_eq!(
            process.errors().matches("has written to its disks is in").count(),
            2,
            "{}",
            process.report()
        );
    }
}

#[test]
fn a_clone_with_a_disk_can_be_checkpointed() {
    let env = TestEnv::new();
    let image = blank_image(&env, "disk");
    let qemu = chosen_qemus(1).remove(0);
    let mut run = env.start(&["--interval", "none", "--name", "guest"], &journaling(&qemu, &image));
    run.wait_for("KF READY");
    wait_for_records(&mut run, 0, 300);
    env.ok(&["take", "--name", "guest", "--tag", "seed"]);
    env.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
    let seed = number(&env.list()[0], "id");
    let (mut process, clones) = branch(&env, &["-n", "1", "--name", "c"]);
    wait_until("the clone writes", || written(&clones[0]) > 0);
    let own = checkpoint_clone(&env, &clones[0]);
    assert_eq!(number(&own[0], "parent"), seed);
    let then = written(&clones[0]);
    wait_until("the clone writes on", || written(&clones[0]) >= then + 100);
    process.signal(Signal::INT);
    assert!(process.wait().success(), "{}", process.report());
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    // The restore needs neither the clone's disk nor its server: the guest compares the whole ring
    // with RAM before it overwrites it.
    let mut restored = env.restore(&number(&own[2], "id").to_string(), &[]);
    wait_for_records(&mut restored, 0, 600);
    restored.signal(Signal::TERM);
    assert!(restored.wait().success(), "{}", restored.report());
    assert!(std::fs::read(&image).unwrap().iter().all(|byte| *byte == 0), "the image was written");
}

/// If one clone cannot start, no clone's disks stay.
#[test]
fn half_a_set_of_clones_with_disks_leaves_nothing() {
    let env = TestEnv::new();
    let image = blank_image(&env, "disk");
    let mut run = env.start(
        &["--interval", "none", "--name", "guest"],
        &journaling(&distribution_qemu(), &image),
    );
    run.wait_for("KF READY");
    env.ok(&["take", "--name", "guest", "--tag", "seed"]);
    env.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
    let places =
        || std::fs::read_dir(Path::new(&env.store()).join("disks")).map_or(0, Iterator::count);
    let before = places();
    std::fs::create_dir(env.path().join("out-1")).unwrap();
    let store = env.store();
    let words = [
        "branch",
        "--store",
        &store,
        "seed",
        "-n",
        "2",
        "--",
        "-chardev",
        "file,id=x,path=out-{n}/log",
    ];
    env.refused(&words, 1, &["guest-2"]);
    assert_eq!(places(), before);
    assert_eq!(std::fs::read_dir(env.path().join("keyframe/.clones")).unwrap().count(), 0);
}

/// A console is found by the clone's name, and connections end without harm.
#[test]
fn a_clone_is_typed_to_by_its_name() {
    let qemu = chosen_qemus(1).remove(0);
    let env = TestEnv::new();
    checkpoint(&env, &shell_guest(&qemu, &[]));
    env.refused(&["console"], 1, &["no clone runs", "keyframe branch"]);
    let (mut clones, told) = branch(&env, &["-n", "2", "--name", "c"]);
    env.refused(&["console"], 1, &["several clones", "c-1, c-2"]);
    env.refused(&["console", "c-3"], 1, &["no clone is named c-3", "c-1, c-2"]);
    env.refused(&["console", "c-1", "--port", "agent"], 1, &["no console agent", "serial"]);
    for number in [41, 42] {
        let mut typed = Process::start(env.command(&["console", "c-2"]));
        typed.type_line(&format!("echo KF-$(({number}+0))"));
        typed.wait_for(&format!("KF-{number}"));
        typed.signal(Signal::INT);
        assert!(typed.wait().success(), "{}", typed.report());
    }
    assert!(!console(&told[0]).iter().any(|line| line.contains("KF-42")), "another clone");
    clones.signal(Signal::INT);
    assert!(clones.wait().success(), "{}", clones.report());
}
