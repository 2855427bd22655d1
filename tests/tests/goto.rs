//! `keyframe segment`, `log` and `goto`: a recording's checkpoints, its console, and the way to any of
//! its instructions.

use keyframe_tests::recording::{
    end_after, intervals, qemu_children, record, recordable_guest, verified, wait_for_journal,
};
use keyframe_tests::{
    Debugger, Process, TestEnv, chosen_qemus, differing_pages, disks, is_gone, live_ram, number,
    stored_ram, wait_until,
};
use rustix::process::Signal;
use serde_json::Value;
use std::time::Duration;

/// The vector of the interrupt of Linux' timer on x86.
const TIMER_INTERRUPT: u64 = 0xec;
/// The vector of the exception after an access to a page that is not there.
const PAGE_FAULT: u64 = 14;

/// The recording has no checkpoints; a replay takes them; each interval replays exactly.
#[test]
fn a_replay_takes_the_checkpoints_of_a_recording_without_any() {
    for qemu in chosen_qemus(1) {
        let env = TestEnv::without_store();
        let disk = disks::virtio_disk(&disks::numbered_image(&env), "raw");
        let mut vm = record(
            &env,
            &[],
            &recordable_guest(&qemu.path, "journal").with(&disks::as_strs(&disk)),
        );
        wait_for_journal(&mut vm, 2);
        end_after(&env, &mut vm, 1);

        let count = segments_again(&env);
        let report = env.json(&["verify", "R", "--store", "S", "--json"]);
        assert_eq!(report["exact"], true, "{report:#}");
        let all = intervals(&report);
        assert!(all.len() >= 4 && all.len() == count, "{report:#}");
        assert_eq!(
            (number(&all[0], "begin"), &report["instructions"]),
            (0, &all[all.len() - 1]["end"])
        );
        assert!(all.windows(2).all(|pair| pair[0]["end"] == pair[1]["begin"]));
        // Each checkpoint is at an instruction count at which the VM has one state only. The last end,
        // which has no checkpoint, is compared with another replay.
        let at_checkpoint = |one: &&Value| !one["compared_with"].is_null();
        assert!(
            all.iter().filter(at_checkpoint).all(|one| one["compared_at"].is_null()),
            "{report:#}"
        );
        assert!(all[all.len() - 1]["compared_at"].is_u64(), "{report:#}");

        console_is_the_guests(&env, &vm);
    }
}

/// Takes checkpoints of `R` into the store `S`, again, and again after one is lost. Returns how many
/// there are.
fn segments_again(env: &TestEnv) -> usize {
    env.refused(&["segment", "R"], 2, &["--every"]);
    env.ok(&["init", "S"]);
    let segment = ["segment", "R", "--store", "S", "--every", "1s"];
    env.ok(&segment);
    // A second run has nothing to do; a third one takes a missing checkpoint again.
    let listed = || -> Vec<u64> {
        let all = env.json(&["list", "--store", "S", "--json"]);
        let all = all.as_array().map_or(&[][..], Vec::as_slice);
        all.iter().map(|one| number(one, "id")).collect()
    };
    let first = listed();
    env.ok(&segment);
    assert_eq!(listed(), first);
    env.ok(&["forget", "--store", "S", &first[2].to_string()]);
    env.ok(&segment);
    assert_eq!(listed().len(), first.len());
    first.len()
}

/// The console, concatenated from all intervals, is the one that the guest wrote during the
/// recording; `keyframe goto` finds a line of it.
fn console_is_the_guests(env: &TestEnv, vm: &Process) {
    let recorded: Vec<String> =
        vm.lines().iter().filter(|line| line.contains("journal")).cloned().collect();
    let log = env.json(&["log", "R", "--store", "S", "--marker", "journal", "--json"]);
    let lines = log["lines"].as_array().map_or(&[][..], Vec::as_slice);
    let texts: Vec<&str> = lines.iter().filter_map(|line| line["text"].as_str()).collect();
    assert!(
        !recorded.is_empty()
            && texts == recorded.iter().map(|line| line.trim_end()).collect::<Vec<_>>(),
        "{recorded:?} {log:#}"
    );
    assert!(
        lines.windows(2).all(|pair| number(&pair[0], "last") <= number(&pair[1], "first")),
        "{log:#}"
    );
    assert_eq!(
        env.run(&["log", "R", "--store", "S", "--marker", "nowhere"]).status.code(),
        Some(1)
    );
    let (vm, position) = goto(env, &["--store", "S", "--marker", "journal"]);
    assert!(
        number(&position, "icount") > number(&lines[0], "last"),
        "not after the line: {position:#}"
    );
    end(vm);
    let args = ["goto", "R", "--store", "S", "--marker", "never said"];
    env.refused(&args, 1, &["never said", "keyframe log"]);
}

/// A second QEMU follows the recording and takes its checkpoints, all before the recording ends.
/// Then `keyframe goto` moves to any instruction, forwards and backwards.
#[test]
fn a_recording_is_followed_and_moved_through() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::without_store();
        let disk = disks::virtio_disk(&disks::numbered_image(&env), "raw");
        let boot = recordable_guest(&qemu.path, "journal").with(&disks::as_strs(&disk));
        let mut vm = record(&env, &["--follow", "--checkpoint-every", "1s"], &boot);
        wait_for_journal(&mut vm, 3);
        vm.signal(Signal::INT);
        assert!(vm.wait().success(), "{}", vm.report());
        assert!(!env.path().join("R/first").exists(), "one store is left");
        let report = verified(&env);
        let all = intervals(&report);
        assert!(all.len() >= 3, "{report:#}");
        // Each checkpoint is at an instruction count at which the VM has one state only. The last end,
        // which has no checkpoint, is compared with another replay.
        let at_checkpoint = |one: &&Value| !one["compared_with"].is_null();
        assert!(
            all.iter().filter(at_checkpoint).all(|one| one["compared_at"].is_null()),
            "{report:#}"
        );
        assert!(all[all.len() - 1]["compared_at"].is_u64(), "{report:#}");
        env.refused(
            &["segment", "R", "--follow", "--every", "1s"],
            1,
            &["not being recorded", "fix:"],
        );

        goes_to_a_checkpoint(&env, &all[all.len() - 2]);
        let icount = number(&all[all.len() - 2], "begin") + 12_345;
        moves_both_ways(&env, icount);
        stops_at_a_delivery(&env, icount, TIMER_INTERRUPT);
        // By then the kernel has set up its handlers. Its programs start later, and touch new pages.
        stops_at_a_delivery(&env, number(&report, "instructions") / 3, PAGE_FAULT);
    }
}

/// Starts `keyframe goto` and waits until its VM is paused. Returns it with the position that it
/// printed.
fn goto(env: &TestEnv, options: &[&str]) -> (Process, Value) {
    let mut all = vec!["goto", "R", "--json"];
    all.extend(options);
    let mut vm = Process::start(env.command(&all));
    let position = vm.wait_until(|vm| serde_json::from_str(&vm.lines().join("\n")).ok());
    let position = position.unwrap_or_else(|| panic!("no position: {}", vm.report()));
    (vm, position)
}

fn end(mut vm: Process) {
    vm.signal(Signal::INT);
    assert!(vm.wait().success(), "{}", vm.report());
}

/// Moves to the instruction of the checkpoint at the end of `interval`, from the checkpoint before
/// it, and compares RAM.
fn goes_to_a_checkpoint(env: &TestEnv, interval: &Value) {
    let qmp = env.path().join("goto.sock");
    let (icount, monitor) =
        (number(interval, "end").to_string(), format!("unix:{},server=on,wait=off", qmp.display()));
    let (vm, told) = goto(env, &["--icount", &icount, "--", "-qmp", &monitor]);
    assert_eq!((told["icount"].to_string(), &told["is_ambiguous"]), (icount, &Value::Bool(false)));
    assert_eq!(
        told["checkpoint"], interval["checkpoint"],
        "from the checkpoint before it: {told:#}"
    );
    let qemu = number(&told, "qemu_pid") as u32;
    // The list comes after the position.
    wait_until("status lists the VM", || env.json(&["status", "--json"]) != serde_json::json!([]));
    let listed = env.json(&["status", "--json"])[0].clone();
    assert_eq!(
        (&listed["kind"], number(&listed, "qemu_pid"), &listed["instruction"]),
        (&"goto".into(), u64::from(qemu), &told["icount"]),
        "{listed:#}"
    );
    assert!(listed["recording"].as_str().is_some_and(|path| path.ends_with("/R")), "{listed:#}");
    let (names, stored) =
        stored_ram(&env.path().join("R/store"), number(interval, "compared_with"));
    let live = live_ram(qemu, &qmp, &names);
    assert_eq!(differing_pages(&live, &stored), [0; 0]);
    let mapped = std::fs::read_to_string(format!("/proc/{qemu}/maps")).unwrap();
    assert!(
        mapped.contains("/memfd:keyframe-eventfd-coalesce"),
        "QEMU replays without the library that saves wake-ups"
    );
    ends_with_keyframe(vm, qemu);
    env.refused(&["goto", "R", "--icount", "99999999999999"], 1, &["no instruction", "fix:"]);
    let (mut vm, _) = goto(env, &["--icount", &number(interval, "begin").to_string()]);
    wait_until("status lists the VM", || env.json(&["status", "--json"]) != serde_json::json!([]));
    env.ok(&["stop"]);
    assert!(vm.wait().success(), "{}", vm.report());
}

/// A replay's QEMU ends with Keyframe, even if Keyframe is killed. The end of a terminal would not
/// reach it, because it leads a session.
fn ends_with_keyframe(mut vm: Process, qemu: u32) {
    assert!(!is_gone(qemu));
    vm.signal(Signal::KILL);
    vm.wait();
    wait_until("QEMU ends with keyframe", || is_gone(qemu));
}

/// A debugger steps in both directions, and stops at breakpoints and writes in both directions.
fn moves_both_ways(env: &TestEnv, icount: u64) {
    let (vm, position) = goto(env, &["--icount", &icount.to_string(), "--gdb", "0"]);
    let mut gdb = Debugger::attach(number(&position, "gdb") as u16);
    let mut seen = vec![gdb.registers()];
    for _ in 0..4 {
        assert!(gdb.ask("s").starts_with("T05"));
        seen.push(gdb.registers());
    }
    assert_eq!(gdb.icount(), icount + 4);
    for expected in seen.iter().rev().skip(1) {
        assert!(gdb.ask("bs").starts_with("T05"));
        assert_eq!(gdb.registers(), *expected, "as it was at instruction {}", gdb.icount());
    }
    // The checkpoints of a recording cannot be restored to run freely.
    env.refused(
        &["restore", "--store", "R/store", "latest"],
        1,
        &["of a recording", "keyframe goto REC --icount"],
    );
    env.refused(&["list", "--store", "R"], 10, &["--store R/store"]);
    // A recorded VM cannot be changed.
    assert_eq!(gdb.ask("P10=0000000000000000"), "E01");

    let pc = gdb.register(16);
    stops_at_writes(env, &mut gdb, icount);
    stops_at_breakpoints(&mut gdb, pc);
    ends_while_qemu_is_stopped(vm, gdb);
}

/// The debugger stops at the writes to an address that `keyframe find` finds, in both directions.
fn stops_at_writes(env: &TestEnv, gdb: &mut Debugger, icount: u64) {
    // The next call or interrupt writes to the top of the stack.
    let stack = (gdb.register(7) & !15) - 8;
    let found = env.json(&[
        "find",
        "R",
        "--writes",
        &format!("{stack:#x}"),
        "--from",
        &icount.to_string(),
        "--to",
        &(icount + 1).to_string(),
        "--json",
    ]);
    let writes = found["writes"].as_array().map_or(&[][..], Vec::as_slice);
    let writes: Vec<u64> =
        writes.iter().map(|one| number(one, "icount")).filter(|n| *n >= icount).take(3).collect();
    assert!(!writes.is_empty(), "{found:#}");
    assert_eq!(gdb.ask(&format!("Z2,{stack:x},8")), "OK");
    for write in &writes {
        let stop = gdb.ask("c");
        assert!(stop.contains("watch"), "{stop}");
        assert_eq!(gdb.icount(), write + 1, "after the write");
    }
    for write in writes.iter().rev() {
        let stop = gdb.ask("bc");
        assert!(stop.starts_with("T05") && stop.contains("watch"), "{stop}");
        assert_eq!(gdb.icount(), *write, "before the write");
    }
    assert_eq!(gdb.ask(&format!("z2,{stack:x},8")), "OK");
}

/// The debugger stops each time that the instruction at `pc` runs, in both directions.
fn stops_at_breakpoints(gdb: &mut Debugger, pc: u64) {
    assert_eq!(gdb.ask(&format!("Z1,{pc:x},1")), "OK");
    let met = |gdb: &mut Debugger, packets: &[&str]| {
        let stops: Vec<String> = packets.iter().map(|packet| gdb.ask(packet)).collect();
        assert!(stops.iter().all(|stop| stop.starts_with("T05")), "{stops:?}");
        let is_met = !stops.iter().any(|stop| stop.contains("replaylog"));
        assert!(!is_met || gdb.register(16) == pc, "{stops:?}");
        is_met.then(|| gdb.icount())
    };
    let first = met(gdb, &["bc"]);
    let second = met(gdb, &["bc"]);
    if let (Some(first), Some(second)) = (first, second) {
        assert!(second < first, "{second} is before {first}");
        assert_eq!(met(gdb, &["s", "c"]), Some(first), "no stop is missed");
        assert_eq!(met(gdb, &["bc"]), Some(second));
    }
    assert_eq!(gdb.ask(&format!("z1,{pc:x},1")), "OK");
    assert!(gdb.ask("c").contains("replaylog:end"));
    assert!(gdb.ask("bc").contains("replaylog:begin"));
}

/// A delivery of an interrupt or exception.
struct Delivery {
    /// The instruction before which the processor takes it.
    icount: u64,
    /// The first instruction of its handler.
    handler: u64,
    /// The address of its frame.
    frame: u64,
    /// An address in its frame, whose eight bytes the delivery changes, with these bytes.
    slot: u64,
    bytes: Vec<u8>,
}

/// Finds a delivery after instruction `icount` that changes the memory at its frame.
fn find_delivery(env: &TestEnv, icount: u64, vector: u64) -> Delivery {
    let (vm, position) = goto(env, &["--icount", &icount.to_string(), "--gdb", "0"]);
    let mut gdb = Debugger::attach(number(&position, "gdb") as u16);
    let handler = gdb.interrupt_handler(vector);
    let breakpoint = format!("1,{handler:x},1");
    for _ in 0..20 {
        assert_eq!(gdb.ask(&format!("Z{breakpoint}")), "OK");
        let stop = gdb.ask("c");
        assert!(stop.starts_with("T05") && gdb.register(16) == handler, "{stop}");
        assert_eq!(gdb.ask(&format!("z{breakpoint}")), "OK");
        let (icount, frame) = (gdb.icount(), gdb.register(7));
        let written = gdb.memory(frame, 40);
        assert!(gdb.ask("bs").starts_with("T05"));
        let before = gdb.memory(frame, 40);
        if let Some(at) =
            (0..40).step_by(8).find(|at| before[*at..*at + 8] != written[*at..*at + 8])
        {
            drop(gdb);
            end(vm);
            let (slot, bytes) = (frame + at as u64, written[at..at + 8].to_vec());
            return Delivery { icount, handler, frame, slot, bytes };
        }
        while gdb.icount() <= icount {
            assert!(gdb.ask("s").starts_with("T05"));
        }
    }
    panic!("vector {vector:#x}: no delivery of 20 changes its frame");
}

/// The debugger stops when an interrupt or exception writes its frame to what is watched, in both
/// directions. QEMU's own replay would diverge.
fn stops_at_a_delivery(env: &TestEnv, icount: u64, vector: u64) {
    let delivery = find_delivery(env, icount, vector);
    let begin = (delivery.icount - 1_000).to_string();
    let (vm, position) = goto(env, &["--icount", &begin, "--gdb", "0"]);
    let mut gdb = Debugger::attach(number(&position, "gdb") as u16);
    assert_eq!(gdb.ask(&format!("Z2,{:x},8", delivery.slot)), "OK");
    // Instructions before it may write there, too.
    let mut last_write = None;
    loop {
        let stop = gdb.ask("c");
        assert!(stop.starts_with("T05") && stop.contains("watch"), "{stop}");
        if gdb.icount() >= delivery.icount {
            break;
        }
        last_write = Some(gdb.icount());
    }
    let is_there = |gdb: &mut Debugger| {
        assert_eq!((gdb.icount(), gdb.register(16)), (delivery.icount, delivery.handler));
        assert_eq!(gdb.memory(delivery.slot, 8), delivery.bytes);
    };
    let is_before = |gdb: &mut Debugger, stop: &str| {
        assert!(stop.starts_with("T05") && stop.contains("watch"), "{stop}");
        // A processor that waits for an interrupt stands before the instruction with which it waits.
        let icount = gdb.icount();
        assert!(icount == delivery.icount || icount + 1 == delivery.icount, "{icount}");
        assert_ne!(gdb.register(16), delivery.handler);
        assert_ne!(gdb.memory(delivery.slot, 8), delivery.bytes);
    };
    is_there(&mut gdb);
    let stop = gdb.ask("bc");
    is_before(&mut gdb, &stop);
    assert!(gdb.ask("c").contains("watch"));
    is_there(&mut gdb);
    // It comes back from the next write, and goes on to the write before.
    assert!(gdb.ask("c").contains("watch"));
    assert!(gdb.icount() > delivery.icount);
    assert!(gdb.ask("bc").contains("watch"));
    assert!(gdb.icount() >= delivery.icount);
    let stop = gdb.ask("bc");
    is_before(&mut gdb, &stop);
    assert!(gdb.ask("bc").starts_with("T05"));
    // A write of the same bytes is a stop on the way back alone.
    for _ in 0..16 {
        if last_write.is_some_and(|after| gdb.icount() > after) {
            assert!(gdb.ask("bc").starts_with("T05"));
        }
    }
    let icount = gdb.icount();
    match last_write {
        // A delivery has the same instruction before and after it.
        Some(after) => assert!(icount == after || icount + 1 == after, "{icount} {after}"),
        None => assert!(icount < delivery.icount - 1_000, "{icount}"),
    }
    drop(gdb);
    end(vm);
}

/// The numbers of `keyframe find` are those of `keyframe goto`, also after an instruction that a
/// page fault interrupted and that therefore began twice.
#[test]
fn writes_are_found_at_the_numbers_of_goto() {
    for qemu in chosen_qemus(1) {
        let env = TestEnv::without_store();
        let mut vm = record(
            &env,
            &["--checkpoint-every", "2s"],
            &recordable_guest(&qemu.path, "hash kf.mib=2 kf.pause_ms=5"),
        );
        end_after(&env, &mut vm, 6);
        let report = env.json(&["verify", "R", "--json"]);
        let fault = find_delivery(&env, number(&report, "instructions") / 3, PAGE_FAULT);
        goes_to_writes_after(&env, &fault);
    }
}

/// Goes to writes after `fault` in its interval: the first one and the last ones.
fn goes_to_writes_after(env: &TestEnv, fault: &Delivery) {
    // Handlers push to the address below the frame.
    let (address, from) = (format!("{:#x}", fault.frame - 8), fault.icount.to_string());
    let to = (fault.icount + 1).to_string();
    let args = ["find", "R", "--writes", &address, "--from", &from, "--to", &to, "--json"];
    let found = env.json(&args);
    let writes = found["writes"].as_array().map_or(&[][..], Vec::as_slice);
    let later: Vec<&Value> =
        writes.iter().filter(|one| number(one, "icount") >= fault.icount).collect();
    assert!(!later.is_empty(), "no write after {}: {found:#}", fault.icount);
    let chosen = later.iter().take(1).chain(later.iter().skip(1).rev().take(3));
    let compared = chosen.filter(|write| goes_to_a_write(env, write)).count();
    assert!(compared > 0, "{found:#}");
}

/// `keyframe goto` stands before the instruction of a write that was found. Returns false, without
/// a comparison, if the VM has two states at that number.
fn goes_to_a_write(env: &TestEnv, write: &Value) -> bool {
    let icount = number(write, "icount");
    let (vm, position) = goto(env, &["--icount", &icount.to_string(), "--gdb", "0"]);
    let is_compared = position["is_ambiguous"] == false;
    if is_compared {
        let hex = |name: &str| {
            let digits = write[name].as_str().and_then(|text| text.strip_prefix("0x"));
            u64::from_str_radix(digits.expect("hexadecimal"), 16).expect("hexadecimal")
        };
        let mut gdb = Debugger::attach(number(&position, "gdb") as u16);
        assert_eq!(gdb.register(16), hex("pc"), "{write:#}");
        assert!(gdb.ask("s").starts_with("T05"));
        assert_eq!(gdb.icount(), icount + 1);
        let len = number(write, "bytes") as usize;
        assert_eq!(gdb.memory(hex("vaddr"), len), hex("value").to_le_bytes()[..len], "{write:#}");
    }
    end(vm);
    is_compared
}

/// An end while QEMU has yet to answer is not reported as an error of QEMU.
fn ends_while_qemu_is_stopped(mut vm: Process, gdb: Debugger) {
    let [qemu] = qemu_children(vm.pid())[..] else { panic!("one QEMU: {}", vm.report()) };
    rustix::process::kill_process(qemu, Signal::STOP).expect("stop QEMU");
    drop(gdb);
    std::thread::sleep(Duration::from_millis(500));
    vm.signal(Signal::INT);
    std::thread::sleep(Duration::from_millis(500));
    rustix::process::kill_process(qemu, Signal::CONT).expect("continue QEMU");
    assert!(vm.wait().success(), "{}", vm.report());
}
