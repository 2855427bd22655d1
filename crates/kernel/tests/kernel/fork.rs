//! A snapshot by fork: what it holds, what it leaves of itself (nothing), and what it refuses.

use crate::oracle::Random;
use crate::target::{HUGE, HugePages, PAGE, Target, part, role_arguments, start_role};
use keyframe_kernel::frozen_copy::{ForkPlan, FrozenCopy};
use keyframe_kernel::memory::GuestReader;
use keyframe_kernel::write_tracker::WrittenPages;
use keyframe_kernel::{Error, Process};
use keyframe_units::HostRange;
use std::fs;
use std::time::{Duration, Instant};

const PAGES: u64 = 3 * 512 + 300;
/// Kinds of memory that a fork freezes.
const KINDS: [&str; 4] = ["anon", "thp", "copy", "memcopy"];

fn frozen(snapshot: &FrozenCopy, range: HostRange) -> Vec<u8> {
    let reader = GuestReader::new(snapshot.process(), &[range]).unwrap();
    let mut bytes = vec![0xa5; range.len_bytes as usize];
    reader.read(&[range], &mut bytes).unwrap();
    bytes
}

/// All that can be seen of a process's family, memory layout, files and signals.
fn trace(target: &Target) -> (Vec<String>, Vec<String>, usize, Vec<String>) {
    let pid = target.process.pid();
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let layout = smaps
        .lines()
        .filter(|line| line.starts_with("VmFlags") || line.contains("-p ") || line.contains("-s "));
    // Memory of the C library comes and goes with the commands.
    let layout = layout.map(str::to_owned).collect();
    let fields =
        ["State", "TracerPid", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "Threads"];
    let signals = fields.map(|field| target.status(field)).into_iter().skip(1).collect();
    let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    (children(target), layout, files, signals)
}

/// Everything whose parent the target is, zombies included.
fn children(target: &Target) -> Vec<String> {
    let parent = format!("PPid:\t{}\n", target.process.pid());
    let processes =
        fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path().join("status"));
    processes
        .filter_map(|path| fs::read_to_string(path).ok())
        .filter(|text| text.contains(&parent))
        .collect()
}

#[test]
fn it_holds_the_memory_as_it_was_and_leaves_nothing() {
    for kind in KINDS {
        let mut target = Target::start();
        let ram = target.map(kind, PAGES * PAGE);
        target.write(ram, 3, 700, 1);
        // As QEMU has it, and as it has not.
        target.ok(&format!("advise {} {}", part(ram, 0, 600).start.0, 600 * PAGE));
        let before = target.content(ram);
        let traces = trace(&target);
        for round in 0..3 {
            let snapshot = FrozenCopy::fork(&target.process, &[ram]).unwrap();
            assert!(snapshot.stopped_ns() > 0);
            target.write(ram, 0, PAGES, 2 + round);
            assert!(frozen(&snapshot, ram) == before, "{kind}: the memory at the fork");
            assert_eq!(children(&target).len(), 1);
            drop(snapshot);
            assert_eq!(trace(&target), traces, "{kind}");
            target.write(ram, 0, PAGES, 0);
            target.on("zap", ram, 0, PAGES, "");
            // Private memory of a file shows the file again, as it was before the first write.
            target.write(ram, 3, 700, 1);
            assert!(target.content(ram) == before, "{kind}");
        }
    }
}

/// The child neither runs nor holds anything but memory.
#[test]
fn the_copy_stands_still_and_holds_no_file() {
    let mut target = Target::start();
    let ram = target.map("anon", 64 * PAGE);
    let file = target.map("memfd", 64 * PAGE);
    target.write(file, 0, 64, 1);
    let snapshot = FrozenCopy::fork(&target.process, &[ram]).unwrap();
    let proc = |file: &str| {
        fs::read_to_string(format!("/proc/{}/{file}", snapshot.process().pid())).unwrap()
    };
    assert!(proc("status").contains("State:\tt (tracing stop)"), "{}", proc("status"));
    assert_eq!(fs::read_dir(format!("/proc/{}/fd", snapshot.process().pid())).unwrap().count(), 0);
    // A signal that would end it, a continuation of its group: it stands.
    let own = rustix::process::Pid::from_raw(snapshot.process().pid().cast_signed()).unwrap();
    for signal in [rustix::process::Signal::CONT, rustix::process::Signal::TERM] {
        rustix::process::kill_process(own, signal).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(proc("status").contains("State:\tt (tracing stop)"), "{}", proc("status"));
    // Not one instruction in user mode: the time it has had there is none.
    let stat = proc("stat");
    let user_ticks = stat.rsplit(") ").next().unwrap().split(' ').nth(11).unwrap();
    assert_eq!(user_ticks, "0");
    // The files are the target's alone: what it closes is closed.
    target.ok(&format!("unmap {} {}", file.start.0, file.len_bytes));
    snapshot.end().unwrap();
    target.ok("count");
}

#[test]
fn each_of_several_holds_its_own_time() {
    let mut target = Target::start();
    let ram = target.map("anon", PAGES * PAGE);
    target.on("advise", ram, 100, 900, "");
    let plan = ForkPlan::new(&target.process, &[ram]).unwrap();
    let mut random = Random(7);
    let mut held = Vec::new();
    for round in 0..12_u8 {
        for _ in 0..random.below(6) {
            let first = random.below(PAGES);
            target.write(ram, first, (1 + random.below(90)).min(PAGES - first), round + 1);
        }
        held.push((target.content(ram), plan.fork().unwrap()));
        if held.len() > 4 {
            drop(held.remove(random.below(4) as usize));
        }
        assert_eq!(children(&target).len(), held.len());
        for (memory, snapshot) in &held {
            assert!(frozen(snapshot, ram) == *memory, "round {round}");
        }
    }
    drop(held);
    assert_eq!(children(&target), [] as [&str; 0]);
}

/// What asynchronous write protection finds is as exact as without forks, whether pages are shared
/// with a copy or not.
#[test]
fn writes_are_tracked_across_forks() {
    for kind in KINDS {
        for seed in 1..4 {
            let mut target = Target::start();
            let ram = target.map(kind, PAGES * PAGE);
            target.ok(&format!("advise {} {}", ram.start.0, ram.len_bytes));
            let tracker = target.track(ram);
            let mut random = Random(seed);
            let mut image = vec![0xee; ram.len_bytes as usize];
            let mut snapshots: Vec<(FrozenCopy, Vec<u8>)> = Vec::new();
            for round in 0..30 {
                let context = format!("{kind}, seed {seed}, round {round}");
                for _ in 0..random.below(8) {
                    let first = random.below(PAGES);
                    let pages = (1 + random.below(60)).min(PAGES - first);
                    match random.below(6) {
                        0 => target.on("zap", ram, first, pages, ""),
                        1 => target.on("receive", ram, first, pages.min(3), "77"),
                        _ => target.write(ram, first, pages, 1 + random.below(255) as u8),
                    }
                    if random.below(4) == 0 {
                        snapshots.push((
                            FrozenCopy::fork(&target.process, &[ram]).unwrap(),
                            target.content(ram),
                        ));
                    }
                }
                let mut out: Vec<WrittenPages> = Vec::new();
                tracker.scan_and_protect(ram, &mut out).unwrap();
                // Read from the frozen copy, as a checkpoint would; from the memory itself where
                // there is none.
                let snapshot = FrozenCopy::fork(&target.process, &[ram]).unwrap();
                for written in &out {
                    let at = (written.range.start.0 - ram.start.0) as usize;
                    let bytes = frozen(&snapshot, written.range);
                    image[at..at + bytes.len()].copy_from_slice(&bytes);
                }
                assert!(target.content(ram) == image, "{context}: a page was lost");
                for (snapshot, memory) in &snapshots {
                    assert!(frozen(snapshot, ram) == *memory, "{context}: a copy has changed");
                }
                if snapshots.len() > 2 || round % 7 == 6 {
                    snapshots.clear();
                }
            }
        }
    }
}

/// The process goes on with its system calls, its signals and its stops as if nobody had been
/// there.
#[test]
fn the_process_is_not_disturbed() {
    let mut target = Target::start();
    let ram = target.map("anon", 256 * PAGE);
    target.write(ram, 0, 256, 1);
    let fork = |target: &Target| drop(FrozenCopy::fork(&target.process, &[ram]).unwrap());
    for (call, expected) in [("sleep 300", "0 0"), ("ppoll 300", "0 0"), ("futex 300", "-1 110")] {
        assert_eq!(target.ask(call), "waiting");
        (0..5).for_each(|_| fork(&target));
        assert_eq!(target.answer(), expected, "{call}");
    }
    target.ok("count");
    let pid = target.process.pid().to_string();
    let script = format!(
        "for i in $(seq 60); do kill -STOP {pid}; kill -s 36 {pid}; kill -CONT {pid}; done"
    );
    let sender = std::thread::spawn(move || {
        std::process::Command::new("bash").args(["-c", &script]).status().unwrap()
    });
    while !sender.is_finished() {
        fork(&target);
    }
    assert!(sender.join().unwrap().success());
    target.signal("CONT");
    assert_eq!(target.ask("counted"), "60");
    target.tell("spin 60000000");
    assert_eq!(target.answer(), "waiting");
    (0..20).for_each(|_| fork(&target));
    let disturbed = target.answer();
    target.tell("spin 60000000");
    assert_eq!(target.answer(), "waiting");
    assert_eq!(target.answer(), disturbed);
    assert_eq!(children(&target), [] as [&str; 0]);
}

/// With all threads stopped the copy is one instant, whatever they did and do next.
#[test]
fn a_stopped_process_of_many_threads_is_frozen_whole() {
    let mut target = Target::start();
    let ram = target.map("anon", 4096 * PAGE);
    for _ in 0..4 {
        target.tell(&format!("scribble {} {} 4 300000 0", ram.start.0, ram.len_bytes));
        assert_eq!(target.answer(), "waiting");
        std::thread::sleep(Duration::from_millis(2));
        target.freeze();
        let memory = target.content(ram);
        let snapshot = FrozenCopy::fork(&target.process, &[ram]).unwrap();
        target.thaw();
        assert_eq!(target.answer(), "ok");
        assert!(frozen(&snapshot, ram) == memory);
    }
}

#[test]
fn what_a_fork_does_not_freeze_is_refused_by_name() {
    let mut target = Target::start();
    let refused = |target: &Target, range| {
        let error = FrozenCopy::fork(&target.process, &[range]).unwrap_err();
        assert_eq!(children(target), [] as [&str; 0]);
        error
    };
    let ram = target.map("anon", 64 * PAGE);
    for kind in ["memfd", "sealed", "file"] {
        let shared = target.map(kind, 64 * PAGE);
        let error = FrozenCopy::fork(&target.process, &[ram, shared]).unwrap_err();
        assert!(
            matches!(&error, Error::NotForkable { range, .. } if *range == shared),
            "{error:?}"
        );
        assert!(error.to_string().contains("shared") && error.fix().is_some());
    }
    let odd = HostRange { start: ram.start, len_bytes: PAGE - 1 };
    assert!(matches!(refused(&target, odd), Error::Unaligned { .. }));
    assert!(matches!(refused(&target, part(ram, 0, 0)), Error::Unaligned { .. }));
    let wiped = target.map("anon", 64 * PAGE);
    target.on("wipe", wiped, 8, 8, "");
    let error = refused(&target, wiped);
    assert!(
        matches!(error, Error::NotForkable { range, .. } if range == part(wiped, 8, 8)),
        "{error:?}"
    );
    target.ok(&format!("unmap {} {}", wiped.start.0 + 16 * PAGE, PAGE));
    assert!(
        matches!(refused(&target, wiped), Error::Unmapped { hole, .. } if hole == part(wiped, 16, 1).start)
    );
    if let Some(_pool) = HugePages::reserve(4) {
        let huge = target.map("hugeanon", 2 * HUGE);
        assert!(
            matches!(refused(&target, huge), Error::NotForkable { range, .. } if range == huge)
        );
    }
    let plan = ForkPlan::new(&target.process, &[ram]).unwrap();
    target.ok("filter");
    assert!(matches!(plan.fork(), Err(Error::Seccomp { .. })));
    let error = refused(&target, ram);
    assert!(matches!(error, Error::Seccomp { .. }), "{error:?}");
    assert!(error.fix().unwrap().contains("-sandbox"));
    target.end();
    assert!(FrozenCopy::fork(&target.process, &[ram]).is_err());
}

/// A limit of processes, as the kernel enforces it: the call fails, the process goes on, its memory
/// is kept out of children as before.
#[test]
fn a_fork_that_fails_in_the_process_is_undone() {
    if !rustix::process::geteuid().is_root() {
        keyframe_testing::skip!("only root can limit the processes of another process");
    }
    let mut target = Target::start();
    let ram = target.map("anon", 64 * PAGE);
    target.ok(&format!("advise {} {}", ram.start.0, ram.len_bytes));
    let pid = rustix::process::Pid::from_raw(target.process.pid().cast_signed());
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::prlimit(pid, rustix::process::Resource::Nproc, none).unwrap();
    target.ok("demote");
    let traces = trace(&target);
    let error = FrozenCopy::fork(&target.process, &[ram]).unwrap_err();
    assert!(matches!(&error, Error::Injected { call: "clone", .. }), "{error:?}");
    assert!(error.fix().unwrap().contains("limit"), "{error:?}");
    assert_eq!(trace(&target), traces);
    target.ok("count");
}

/// Takes a snapshot of another test's target, and holds it until killed.
#[test]
#[ignore = "a role of another test"]
fn role_that_holds_a_snapshot() {
    let Some(arguments) = role_arguments() else { return };
    let number = |index: usize| arguments[index].parse::<u64>().unwrap();
    let process = Process::open(number(0) as u32).unwrap();
    let ram = HostRange { start: keyframe_units::HostVirt(number(1)), len_bytes: number(2) };
    let _snapshot = FrozenCopy::fork(&process, &[ram]).unwrap();
    println!("ready");
    std::thread::sleep(Duration::from_mins(1));
}

/// Where the keeper of a snapshot is killed, the copy dies; what is left is a zombie, until the
/// next snapshot.
#[test]
fn the_copy_dies_with_its_keeper() {
    let mut target = Target::start();
    let ram = target.map("anon", 64 * PAGE);
    target.write(ram, 0, 64, 1);
    let arguments = format!("{} {}", ram.start.0, ram.len_bytes);
    let mut role = start_role("fork::role_that_holds_a_snapshot", &target, &arguments);
    assert_eq!(children(&target).len(), 1);
    role.kill();
    let deadline = Instant::now() + Duration::from_mins(2);
    while children(&target).iter().any(|child| !child.contains("State:\tZ (zombie)")) {
        assert!(Instant::now() < deadline, "the copy has died: {:?}", children(&target));
        std::thread::yield_now();
    }
    target.write(ram, 0, 64, 2);
    drop(FrozenCopy::fork(&target.process, &[ram]).unwrap());
    assert_eq!(children(&target), [] as [&str; 0]);
}

/// The process may end first: what was frozen stays readable, and then nothing is left.
#[test]
fn the_copy_outlives_the_process_for_as_long_as_it_is_held() {
    let mut target = Target::start();
    let ram = target.map("anon", 64 * PAGE);
    target.write(ram, 0, 64, 1);
    let snapshot = FrozenCopy::fork(&target.process, &[ram]).unwrap();
    target.end();
    assert_eq!(frozen(&snapshot, ram), vec![1; 64 * PAGE as usize]);
    let pid = snapshot.process().pid();
    snapshot.end().unwrap();
    // Whoever inherited it reaps it; killed it is in any case.
    let status = fs::read_to_string(format!("/proc/{pid}/status"));
    assert!(status.is_err() || status.unwrap().contains("State:\tZ (zombie)"));
}
