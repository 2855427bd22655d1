//! Tests guests of other processors than x86: a payload that checks its memory and its registers on
//! aarch64 and riscv64, and Debian's kernel on aarch64.

use crate::mount::Mounted;
use keyframe_qemu::Qmp;
use keyframe_tests::recording::{end_after, intervals, record, verified};
use keyframe_tests::{
    Boot, Debugger, ExternalVm, PATIENCE, PassSequence, Process, Sequence, TestEnv, VirtGuest,
    assert_no_errors, assert_restores_exactly, assert_restores_exactly_with, differing_pages,
    ended_lines, has_program, hash_lines, live_ram, number, pass_lines, skip, stored_ram,
    take_audited_checkpoints, virt_guest, virt_guests, wait_until,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::Path;

/// The payload's pages, and those that it writes in a pass.
const PAGES: usize = 1024;
const DIRTY: u64 = 300;

fn sequence() -> PassSequence {
    PassSequence::new(PAGES, DIRTY)
}

/// Waits until the console has `more` complete passes after the first `skip` lines.
fn wait_for_passes(vm: &mut Process, skip: usize, more: usize) {
    let grown = vm.wait_until(|p| {
        let lines = p.lines();
        let enough = pass_lines(lines.get(skip..).unwrap_or_default()).len() >= more;
        (enough || lines.iter().any(|l| l.contains("KF ERROR"))).then_some(enough)
    });
    assert_eq!(grown, Some(true), "the payload does not go on; {}", vm.report());
}

/// The restored payload continues at the checkpoint, and a reset begins it anew.
fn goes_on(env: &TestEnv, checkpoint: &str, options: &[&str], sequence: &mut PassSequence) {
    let mut restored = env.restore(checkpoint, options);
    wait_for_passes(&mut restored, 0, 5);
    let first = sequence.check(&pass_lines(&restored.lines()), 5);
    assert!(first.n > 3, "the restored payload began anew: {first:?}");
    restored.type_line("r");
    restored.wait_for("KF READY");
    let at = restored.lines().iter().position(|l| l.contains("KF READY")).expect("that line");
    wait_for_passes(&mut restored, at, 3);
    assert_eq!(sequence.check(&pass_lines(&restored.lines()[at..]), 3).n, 1);
}

#[test]
fn checkpoints_are_exact_and_go_on_in_every_way() {
    let mut sequence = sequence();
    for guest in virt_guests() {
        println!("-- {guest:?}");
        let env = TestEnv::new().with_rehearsals();
        let (run, id) =
            take_audited_checkpoints(&env, &guest.payload(DIRTY), &["--interval", "300ms"], 6);
        sequence.check(&pass_lines(&run.lines()), 4);
        env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
        let shown = env.json(&["show", "--json", "--store", &env.store(), &id]);
        assert_eq!(shown["machine"]["processor"], guest.processor, "{shown:#}");
        assert_restores_exactly(&env, &id);
        assert_restores_exactly_with(&env, &id, &["--lazy"]);
        goes_on(&env, &id, &[], &mut sequence);
        goes_on(&env, &id, &["--lazy"], &mut sequence);
        clones_go_on(&env, &id, &mut sequence);
        what_does_not_fit_is_refused(&env, &id);
    }
}

fn clones_go_on(env: &TestEnv, id: &str, sequence: &mut PassSequence) {
    let (mut process, clones) = env.branch(&[id, "-n", "2"]);
    for clone in &clones {
        let console = Path::new(clone["directory"].as_str().expect("a path")).join("console.log");
        wait_until("the clone goes on", || pass_lines(&ended_lines(&console)).len() >= 4);
        assert!(sequence.check(&pass_lines(&ended_lines(&console)), 4).n > 3);
    }
    process.signal(Signal::INT);
    assert!(process.wait().success(), "{}", process.report());
}

fn what_does_not_fit_is_refused(env: &TestEnv, id: &str) {
    let restore = |options: &[&str], said: &[&str]| {
        let store = env.store();
        env.refused(&[&["restore", "--store", &store, id], options].concat(), 1, said);
    };
    restore(&["--accel", "kvm"], &["KVM of this host does not run", "fix:", "--accel tcg"]);
    restore(&["--qemu", "qemu-system-x86_64"], &["emulates x86_64", "fix:"]);
}

/// QEMU's own dump of the same instant has the same notes and segments.
#[test]
fn memory_and_registers_are_those_of_qemus_own_dump() {
    for guest in virt_guests() {
        println!("-- {guest:?}");
        let env = TestEnv::new();
        let monitor = env.path().join("qemu.sock");
        let boot = guest
            .payload(DIRTY)
            .with(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
        let mut run = env.start(&["--interval", "none", "--name", "guest"], &boot);
        wait_for_passes(&mut run, 0, 3);
        let mut qmp = Qmp::connect(&monitor, PATIENCE).expect("connect to the monitor");
        qmp.stop().expect("stop");
        let file = format!("file:{}", env.path().join("qemu.elf").display());
        qmp.execute("dump-guest-memory", Some(json!({ "paging": false, "protocol": file })))
            .expect("dump");
        env.ok(&["take", "--name", "guest"]);
        env.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        let store = env.store();
        env.ok(&["export", "1", "--store", &store, "--format", "elf", "-o", "ours.elf"]);
        let read = |name: &str| std::fs::read(env.path().join(name)).expect("a core file");
        let (theirs, ours) = (read("qemu.elf"), read("ours.elf"));
        assert_eq!(theirs[18..20], ours[18..20], "the machine");
        let (note, our_note) = (first_note(&theirs), first_note(&ours));
        // The last words of QEMU's note say that notes with vector registers follow.
        let len = note.len() - 8;
        assert!(len > 300 && our_note.len() == note.len());
        assert_eq!(note[..len], our_note[..len], "the registers");
        assert!(main_ram(&theirs).len() == 64 << 20 && main_ram(&theirs) == main_ram(&ours));
        let mounted = Mounted::new(&env);
        assert!(std::fs::read(mounted.path("1/ram.elf")).expect("the mounted core") == ours);
    }
}

fn word(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

/// The contents of a core's program headers of `kind`.
fn parts(bytes: &[u8], kind: u8) -> impl Iterator<Item = &[u8]> {
    let count = usize::from(u16::from_le_bytes([bytes[56], bytes[57]]));
    let headers = (0..count).map(|k| word(bytes, 32) + 56 * k);
    headers.filter(move |header| bytes[*header] == kind).map(|header| {
        let at = word(bytes, header + 8);
        &bytes[at..at + word(bytes, header + 32)]
    })
}

/// The first note of a core, with the registers of its first processor.
fn first_note(bytes: &[u8]) -> &[u8] {
    let notes = parts(bytes, 4).next().expect("notes");
    let len = u32::from_le_bytes(notes[4..8].try_into().unwrap()) as usize;
    &notes[..20 + len]
}

/// The largest segment of a core.
fn main_ram(bytes: &[u8]) -> &[u8] {
    parts(bytes, 1).max_by_key(|part| part.len()).expect("a segment")
}

#[test]
fn a_running_vm_is_attached_to_and_left_as_it_was() {
    let mut sequence = sequence();
    for guest in virt_guests() {
        println!("-- {guest:?}");
        let env = TestEnv::new();
        let mut vm = ExternalVm::start(&env, &guest.payload(DIRTY));
        wait_for_passes(&mut vm.console, 0, 3);
        let before = vm.traces();
        let mut engine =
            env.attach(&vm, &["--interval", "300ms", "--count", "4", "--audit", "audit"]);
        engine.wait();
        assert!(engine.errors().contains("4 checkpoints sealed, 0 failed"), "{}", engine.report());
        vm.assert_unchanged_since(&before);
        assert!(vm.is_running());
        let passes = pass_lines(&vm.console.lines()).len();
        wait_for_passes(&mut vm.console, 0, passes + 3);
        sequence.check(&pass_lines(&vm.console.lines()), passes + 3);
        goes_on(&env, "latest", &[], &mut sequence);
    }
}

#[test]
fn a_rollback_is_exact_and_goes_on() {
    let mut sequence = sequence();
    for guest in virt_guests() {
        println!("-- {guest:?}");
        let env = TestEnv::new();
        let mut run = env.start(&["--interval", "none", "--name", "guest"], &guest.payload(DIRTY));
        wait_for_passes(&mut run, 0, 4);
        let earliest = pass_lines(&run.lines()).len() as u64;
        env.ok(&["take", "--name", "guest", "--tag", "good"]);
        let before = pass_lines(&run.lines()).len();
        wait_for_passes(&mut run, 0, before + 8);
        let done = env.json(&["rollback", "good", "--name", "guest", "--json"]);
        let store = Path::new(&env.store()).to_owned();
        let ram = |key: &str| stored_ram(&store, number(&done, key)).1;
        assert_eq!(differing_pages(&ram("checkpoint"), &ram("now")), [0; 0]);
        let at = pass_lines(&run.lines()).len();
        wait_for_passes(&mut run, 0, at + 4);
        env.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        let lines = pass_lines(&run.lines());
        let back = lines.windows(2).position(|pair| pair[1].n <= pair[0].n).expect("it went back");
        sequence.check(&lines[..=back], before + 8);
        let first = sequence.check(&lines[back + 1..], 4);
        assert!((earliest..before as u64 + 3).contains(&first.n), "{first:?} after {before}");
        assert_no_errors(&run);
    }
}

#[test]
fn recordings_replay_exactly_are_analysed_and_moved_through() {
    for guest in virt_guests() {
        println!("-- {guest:?}");
        let env = TestEnv::without_store();
        let mut vm = record(&env, &["--checkpoint-every", "400ms"], &guest.payload(DIRTY));
        end_after(&env, &mut vm, 5);
        sequence().check(&pass_lines(&vm.lines()), 5);
        let report = verified(&env);
        let all = intervals(&report);
        assert!(all.len() >= 4, "{report:#}");
        for tool in ["icount", "hot", "memtrace", "coverage", "working-set", "cache"] {
            let args = ["analyze", "R", "--tool", tool, "--out", tool, "--check-sequential"];
            let result = env.json(&[&args[..], &["--json"]].concat());
            assert_eq!(result["equals_sequential"], true, "{tool}: {result:#}");
        }
        written_pages_are_traced(&env);
        if guest.processor == "riscv64" {
            let args = ["analyze", "R", "--tool", "syscalls", "--out", "calls"];
            env.refused(&args, 1, &["does not know guests of riscv64", "fix:"]);
        }
        goes_to_a_checkpoint(&env, &all[all.len() - 2]);
        moves_both_ways(&env, &guest, number(&all[1], "begin") + 12_345);
    }
}

/// The tool `hot` counts writes to the payload's pages.
fn written_pages_are_traced(env: &TestEnv) {
    let pages = std::fs::read_to_string(env.path().join("hot/hot-pages.csv")).expect("hot pages");
    let written = pages.lines().filter(|line| {
        let page = line.split(',').next().and_then(|hex| hex.strip_prefix("0x"));
        let page = page.and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or_default();
        page & 0x0fff_ffff >= 0x20_0000
    });
    assert!(written.count() >= 8, "{pages}");
}

/// Starts `keyframe goto` and waits until its VM is paused. Returns it with the position.
fn goto(env: &TestEnv, options: &[&str]) -> (Process, Value) {
    let all = [&["goto", "R", "--json"], options].concat();
    let mut vm = Process::start(env.command(&all));
    let position = vm.wait_until(|vm| serde_json::from_str(&vm.lines().join("\n")).ok());
    let position = position.unwrap_or_else(|| panic!("no position: {}", vm.report()));
    (vm, position)
}

fn goes_to_a_checkpoint(env: &TestEnv, interval: &Value) {
    let qmp = env.path().join("goto.sock");
    let icount = number(interval, "end").to_string();
    let monitor = format!("unix:{},server=on,wait=off", qmp.display());
    let (mut vm, told) = goto(env, &["--icount", &icount, "--", "-qmp", &monitor]);
    let (names, stored) =
        stored_ram(&env.path().join("R/store"), number(interval, "compared_with"));
    let live = live_ram(number(&told, "qemu_pid") as u32, &qmp, &names);
    assert_eq!(differing_pages(&live, &stored), [0; 0]);
    vm.signal(Signal::INT);
    assert!(vm.wait().success(), "{}", vm.report());
}

/// A debugger steps in both directions, and stops at a breakpoint and at writes in both directions.
fn moves_both_ways(env: &TestEnv, guest: &VirtGuest, icount: u64) {
    let (mut vm, position) = goto(env, &["--icount", &icount.to_string(), "--gdb", "0"]);
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
    let pc = gdb.register(guest.pc);
    assert_eq!(gdb.ask(&format!("Z1,{pc:x},1")), "OK");
    let met = |gdb: &mut Debugger, packet: &str| {
        let stop = gdb.ask(packet);
        assert!(stop.starts_with("T05") && !stop.contains("replaylog"), "{packet}: {stop}");
        assert_eq!(gdb.register(guest.pc), pc, "{packet}: {stop}");
        gdb.icount()
    };
    let before = met(&mut gdb, "bc");
    assert!(before < icount);
    assert!(gdb.ask("s").starts_with("T05"));
    assert_eq!(met(&mut gdb, "c"), icount, "no stop is missed");
    assert_eq!(gdb.ask(&format!("z1,{pc:x},1")), "OK");
    stops_at_writes(env, guest, &mut gdb, icount);
    drop(gdb);
    vm.signal(Signal::INT);
    assert!(vm.wait().success(), "{}", vm.report());
}

/// The debugger stops at the writes to a page of the payload that `keyframe find` finds.
fn stops_at_writes(env: &TestEnv, guest: &VirtGuest, gdb: &mut Debugger, icount: u64) {
    let page = if guest.processor == "riscv64" { 0x8020_0000_u64 } else { 0x4020_0000 };
    let (address, from) = (format!("{page:#x}"), icount.to_string());
    let args = ["find", "R", "--writes", &address, "--from", &from, "--json"];
    let found = env.json(&args);
    let writes = found["writes"].as_array().map_or(&[][..], Vec::as_slice);
    let writes: Vec<u64> =
        writes.iter().map(|one| number(one, "icount")).filter(|n| *n >= icount).take(2).collect();
    assert!(!writes.is_empty(), "{found:#}");
    assert_eq!(gdb.ask(&format!("Z2,{page:x},8")), "OK");
    for write in &writes {
        let stop = gdb.ask("c");
        assert!(stop.contains("watch"), "{stop}");
        assert_eq!(gdb.icount(), *write, "before the write, as GDB expects it of these processors");
        assert_eq!(gdb.ask(&format!("z2,{page:x},8")), "OK");
        assert!(gdb.ask("s").starts_with("T05"));
        assert_eq!(gdb.ask(&format!("Z2,{page:x},8")), "OK");
    }
    for write in writes.iter().rev() {
        let stop = gdb.ask("bc");
        assert!(stop.starts_with("T05") && stop.contains("watch"), "{stop}");
        assert_eq!(gdb.icount(), *write, "before the write");
    }
}

/// Debian's kernel, with paging, programs and a virtio device: exact checkpoints, and a recording
/// whose analysis knows its functions and system calls.
#[test]
fn linux_on_aarch64_is_exact() {
    let Some(guest) = virt_guest("aarch64") else { skip!("no QEMU for aarch64") };
    let env = TestEnv::new();
    let boot = guest.linux("hash").with(&["-device", "virtio-rng-pci"]);
    let (run, id) = take_audited_checkpoints(&env, &boot, &["--interval", "400ms"], 3);
    Sequence::new(16).check(&hash_lines(&run.lines()), 1);
    assert_restores_exactly(&env, &id);
    let mut restored = env.restore(&id, &["--lazy"]);
    let grown = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 4).then_some(()));
    assert!(grown.is_some(), "the guest is silent; {}", restored.report());
    Sequence::new(16).check(&hash_lines(&restored.lines()), 4);
    drop(restored);
    linux_is_recorded(&env, &guest.linux("hash kf.mib=2"));
}

fn linux_is_recorded(env: &TestEnv, boot: &Boot) {
    let mut vm = record(env, &["--checkpoint-every", "1s"], boot);
    let said = vm.wait_until(|p| (hash_lines(&p.lines()).len() >= 4).then_some(()));
    assert!(said.is_some(), "{}", vm.report());
    vm.signal(Signal::INT);
    assert!(vm.wait().success(), "{}", vm.report());
    verified(env);
    let symbols = keyframe_testing::build_guest("small-arm64").join("vmlinux.btf");
    let symbols = format!("symbols={}", symbols.display());
    let args = ["analyze", "R", "--tool", "syscalls", "--tool-arg", &symbols, "--out", "calls"];
    env.ok(&args);
    let calls = std::fs::read_to_string(env.path().join("calls/syscalls.csv")).expect("calls");
    // The guest prints each line of its sequence by one call.
    let lines = hash_lines(&vm.lines()).len();
    let writes = calls.lines().filter(|call| {
        let cells: Vec<&str> = call.split(',').collect();
        cells[2..4] == ["64", "write"] && cells.last() == Some(&"kfguest")
    });
    let writes = writes.count();
    assert!((lines..lines + 4).contains(&writes), "{writes} writes of {lines} lines");
    assert!(calls.lines().any(|call| call.contains(",execve,") && call.contains(",1,1,init")));
    let args = ["analyze", "R", "--tool", "hot", "--tool-arg", "symbols=guest", "--out", "hot"];
    env.ok(&args);
    let functions =
        std::fs::read_to_string(env.path().join("hot/hot-functions.csv")).expect("functions");
    for name in ["el0_svc", "do_el0_svc", "schedule"] {
        assert!(functions.lines().any(|line| line.ends_with(&format!(",{name}"))), "{name}");
    }
}

/// QEMU 7.2 and 10.0 save no alarms of a riscv64 machine's timers. The VM is refused, and an
/// attached one runs on.
#[test]
fn a_machine_whose_timers_qemu_does_not_save_is_refused() {
    let qemu = "qemu-system-riscv64";
    if !has_program(qemu) {
        skip!("no {qemu} (Debian package qemu-system-misc)");
    }
    let guest = VirtGuest::new("riscv64", qemu.into());
    let env = TestEnv::new();
    let boot = guest.payload(DIRTY);
    let mut vm = ExternalVm::start(&env, &boot);
    let version = vm.monitor().execute("query-version", None).expect("its version");
    if number(&version["qemu"], "major") > 10 {
        skip!("the installed {qemu} saves its timers");
    }
    for command in [&["run", "--store", "store"][..], &["record", "--out", "R"]] {
        let line = boot.command();
        let words: Vec<&str> = line.iter().map(String::as_str).collect();
        env.refused(&[command, &["--"], &words].concat(), 1, &["alarms", "QEMU 10.2 or later"]);
    }
    wait_for_passes(&mut vm.console, 0, 2);
    let args = env.attach_args(&["--qmp", &vm.socket("a")], vm.console.pid(), &[]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    env.refused(&args, 1, &["alarms", "QEMU 10.2 or later"]);
    let passes = pass_lines(&vm.console.lines()).len();
    wait_for_passes(&mut vm.console, 0, passes + 2);
}
