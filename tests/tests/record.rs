//! Recordings: every interval replays exactly, tools see in parallel what they see in one replay,
//! and what goes wrong is told.

use keyframe_tests::{
    Bench, Boot, Debugger, Process, children, chosen_qemus, differing_pages, disks, is_gone,
    live_ram, number, small_guest, stored_ram, until,
};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// `keyframe record`, of `boot` into `R`.
fn record(bench: &Bench, options: &[&str], boot: &Boot) -> Process {
    let mut command = bench.command(&["record", "--out", "R"]);
    command.args(options).arg("--").args(boot.command());
    Process::start(command)
}

/// A q35 with that work.
fn guest(qemu: &str, work: &str) -> Boot {
    Boot { qemu: qemu.into(), machine: "q35".into(), mem_mib: 96, ..Boot::new(work) }
}

/// Waits until the recording has so many checkpoints, and ends it.
fn end_after(bench: &Bench, vm: &mut Process, checkpoints: usize) {
    let store = bench.path().join("R/store");
    let enough = vm.wait_until(|_| {
        let there = std::fs::read_dir(store.join("checkpoints")).map_or(0, Iterator::count);
        (there >= checkpoints).then_some(())
    });
    assert!(enough.is_some(), "{}", vm.report());
    vm.signal(Signal::INT);
    assert!(vm.wait().success(), "{}", vm.report());
}

/// Waits until the guest has told so often of its journal: it does once in each second of its own.
fn wait_for_journal(vm: &mut Process, times: usize) {
    let told = vm.wait_until(|vm| {
        let told = vm.lines().iter().filter(|line| line.contains("journal written=")).count();
        (told >= times).then_some(())
    });
    assert!(told.is_some(), "the guest does not write; {}", vm.report());
}

fn verified(bench: &Bench) -> Value {
    let report = bench.json(&["verify", "R", "--json"]);
    assert_eq!(report["exact"], true, "{report:#}");
    report
}

fn intervals(report: &Value) -> &[Value] {
    report["intervals"].as_array().map_or(&[], Vec::as_slice)
}

#[test]
fn each_interval_replays_exactly_and_tools_see_the_same_side_by_side() {
    for qemu in chosen_qemus(0) {
        let bench = Bench::without_store();
        let image = disks::image(&bench);
        let disk = disks::virtio(&image, "raw");
        let before = std::fs::read(&image).expect("read the image");
        let boot = guest(&qemu.path, "journal").with(&disks::words(&disk));
        let mut vm = record(&bench, &["--checkpoint-every", "600ms"], &boot);
        vm.wait_for("journal written=");
        end_after(&bench, &mut vm, 10);
        assert!(std::fs::read(&image).expect("read it again") == before, "the image is as it was");
        let report = verified(&bench);
        let all = intervals(&report);
        assert!(all.len() >= 9, "{report:#}");
        assert_eq!(all[0]["begin"], 0, "it begins before the first instruction");
        let (_, but_last) = all.split_last().expect("intervals");
        assert!(
            but_last.iter().all(|one| !one["compared_with"].is_null()),
            "each ends at a checkpoint: {report:#}"
        );
        assert!(all.windows(2).all(|pair| pair[0]["end"] == pair[1]["begin"]));
        assert_eq!(all.last().map(|one| one["end"].clone()), Some(report["instructions"].clone()));

        let begin = number(&all[all.len() - 3], "begin").to_string();
        let args = [
            "analyze",
            "R",
            "--tool",
            "icount",
            "--from",
            &begin,
            "--out",
            "A",
            "--check-sequential",
            "--json",
        ];
        let found = bench.json(&args);
        assert_eq!(found["equals_sequential"], true, "{found:#}");
        bench.refused(
            &["analyze", "R", "--tool", "hot", "--out", "A"],
            1,
            &["another analysis", "fix:"],
        );
        let plan =
            bench.json(&["plan", "--from", "R", "--analysis", "A", "--nodes", "2", "--json"]);
        assert_eq!(
            number(&plan["measured"], "intervals") as usize,
            intervals(&found).len(),
            "{plan:#}"
        );
        assert!(number(&plan["measured"], "checkpoints") >= 9, "{plan:#}");
        assert!(plan["speed_up"].as_f64().is_some_and(|speed_up| speed_up > 0.0), "{plan:#}");
        let cluster =
            ["--nodes", "1,2", "--simulate", "--network", "1Gbit", "--node-start", "1s", "--json"];
        let plan =
            bench.json(&[&["plan", "--from", "R", "--analysis", "A"], &cluster[..]].concat());
        let simulated = &plan["simulated"];
        assert_eq!(simulated["times"], "measured interval times", "{simulated:#}");
        assert_eq!(
            number(simulated, "intervals") as usize,
            intervals(&found).len(),
            "{simulated:#}"
        );
        for row in simulated["table"].as_array().expect("a table") {
            let outcome = &row["outcome"];
            assert_eq!(
                outcome["intervals"].as_array().map(Vec::len),
                Some(intervals(&found).len()),
                "{row:#}"
            );
            assert!(
                outcome["sent_bytes"].as_f64() > Some(0.0) && row["speed_up"].as_f64() > Some(0.0),
                "{row:#}"
            );
        }

        // Its image is not what the recording began with any more.
        std::fs::write(&image, &before[1..]).expect("change the image");
        let output = bench.run(&["verify", "R", "--json"]);
        assert_eq!(output.status.code(), Some(1));
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert!(intervals(&report).iter().all(|one| one["error"].is_string()), "{report:#}");
    }
}

/// Main RAM of two backends, the CPU at the second: tools find pages and what stands in them in
/// both.
#[test]
#[ignore = "make soak"]
fn soak_tools_see_a_machine_of_two_nodes() {
    const NODE_BYTES: u64 = 48 << 20;
    for qemu in chosen_qemus(1) {
        let bench = Bench::without_store();
        let nodes = [
            "-object",
            "memory-backend-ram,id=n0,size=48M",
            "-object",
            "memory-backend-memfd,id=n1,size=80M",
            "-numa",
            "node,nodeid=0,memdev=n0",
            "-numa",
            "node,nodeid=1,memdev=n1,cpus=0",
        ];
        let boot = Boot { mem_mib: 128, ..guest(&qemu.path, "hash+dirty kf.mib=4") }.with(&nodes);
        let mut vm = record(&bench, &["--checkpoint-every", "400ms"], &boot);
        vm.wait_for("KF READY");
        end_after(&bench, &mut vm, 8);
        let report = verified(&bench);
        let all = intervals(&report);
        let begin = number(&all[all.len() - 3], "begin").to_string();
        let analyzed = |tool: &str, argument: &str| {
            let out = format!("A-{tool}");
            let args = [
                "analyze",
                "R",
                "--tool",
                tool,
                "--tool-arg",
                argument,
                "--from",
                &begin,
                "--out",
                &out,
            ];
            let found = bench.json(&[&args[..], &["--check-sequential", "--json"]].concat());
            assert_eq!(found["equals_sequential"], true, "{found:#}");
            (found, bench.path().join(out))
        };
        let (_, out) = analyzed("hot", "top=1000000");
        let pages = std::fs::read_to_string(out.join("hot-pages.csv")).expect("read hot-pages.csv");
        let pages: Vec<u64> = pages
            .lines()
            .skip(1)
            .map(|line| {
                let digits = line.split(',').next().unwrap_or_default().trim_start_matches("0x");
                u64::from_str_radix(digits, 16).expect("an address")
            })
            .collect();
        let in_node =
            |node: std::ops::Range<u64>| pages.iter().filter(|page| node.contains(page)).count();
        let (first, second) = (in_node(0..NODE_BYTES), in_node(NODE_BYTES..128 << 20));
        println!("{first} pages of node 0, {second} of node 1, of {}", pages.len());
        // What is no RAM (ROMs, the card's) lies above.
        assert!(first > 0 && second > 100, "{first} and {second} of {}", pages.len());
        assert!(first + second + 16 > pages.len(), "{first} and {second} of {}", pages.len());

        let kernel = format!("symbols={}", small_guest().join("vmlinux").display());
        let (found, out) = analyzed("syscalls", &kernel);
        let calls = std::fs::read_to_string(out.join("syscalls.csv")).expect("read syscalls.csv");
        // Stacks and tasks are in the CPU's node.
        assert!(calls.lines().filter(|line| line.ends_with(",kfguest")).count() > 20, "{found:#}");
        assert!(calls.lines().all(|line| !line.ends_with(',')), "{found:#}");
    }
}

/// Media that the guest can only read are served as its disks are; the guest sees what it would see
/// without, and each interval replays exactly.
#[test]
fn read_only_media_are_served_and_replay_exactly() {
    for qemu in chosen_qemus(0) {
        let bench = Bench::without_store();
        // It ends within a sector.
        let content: Vec<u8> =
            (0..3_000_100u32).flat_map(|n| (n / 7).to_le_bytes()).take(3_000_100).collect();
        std::fs::write(bench.path().join("raw.img"), &content).expect("write an image");
        let image = |name: &str| bench.path().join(name).display().to_string();
        disks::qemu_img(&[
            "convert",
            "-c",
            "-f",
            "raw",
            "-O",
            "qcow2",
            &image("raw.img"),
            &image("packed.img"),
        ]);
        let raw = format!("file={},format=raw,readonly=on,if=virtio", image("raw.img"));
        let packed = format!("file={},read-only=on,if=virtio", image("packed.img"));
        let boot = guest(&qemu.path, "shell").with(&["-drive", &raw, "-drive", &packed]);
        let mut vm = record(&bench, &["--checkpoint-every", "500ms"], &boot);
        vm.wait_for("KF READY");
        let line =
            |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let served =
            children(vm.pid()).into_iter().filter(|pid| line(*pid).contains("media.sock")).count();
        assert_eq!(served, 1, "QEMU's line names the server; {}", vm.report());
        // Whole sectors, as QEMU shows it.
        let mut padded = content.clone();
        padded.resize(content.len().next_multiple_of(512), 0);
        std::fs::write(image("padded"), &padded).expect("write a file");
        let summed = Command::new("md5sum").arg(image("padded")).output().expect("run md5sum");
        let sum = String::from_utf8_lossy(&summed.stdout).chars().take(32).collect::<String>();
        // A recorded serial port takes 16 characters at a time.
        for (line, told) in [
            ("cd /dev", "cd /dev"),
            ("md5sum vda vdb", "  vdb"),
            ("cd /sys/block", "cd /sys"),
            ("cat vd?/ro", "1"),
        ] {
            vm.say(line);
            vm.wait_for(told);
        }
        let console = vm.lines();
        for disk in ["vda", "vdb"] {
            assert!(
                console.iter().any(|line| line.contains(&format!("{sum}  {disk}"))),
                "{}",
                vm.report()
            );
        }
        end_after(&bench, &mut vm, 4);
        let report = verified(&bench);
        assert!(intervals(&report).len() >= 3, "{report:#}");
        assert!(std::fs::read(bench.path().join("raw.img")).expect("read it again") == content);
        let found = bench.json(&[
            "analyze",
            "R",
            "--tool",
            "icount",
            "--out",
            "A",
            "--check-sequential",
            "--json",
        ]);
        assert_eq!(found["equals_sequential"], true, "{found:#}");
        std::fs::rename(image("packed.img"), image("away")).expect("move an image away");
        bench.refused(&["verify", "R"], 1, &["packed.img"]);
        std::fs::rename(image("away"), image("packed.img")).expect("put it back");
        // Another image in its place would be read as if it were that one.
        std::fs::write(image("raw.img"), &padded).expect("change an image");
        bench.refused(&["verify", "R"], 1, &["raw.img", "has changed", "touch -d"]);
    }
}

/// Three stages: the recording knows nothing of the checkpoints, a replay takes them, and each
/// interval replays exactly.
#[test]
fn a_recording_without_checkpoints_is_cut_by_a_replay() {
    for qemu in chosen_qemus(1) {
        let bench = Bench::without_store();
        let disk = disks::virtio(&disks::image(&bench), "raw");
        let mut vm = record(&bench, &[], &guest(&qemu.path, "journal").with(&disks::words(&disk)));
        wait_for_journal(&mut vm, 2);
        end_after(&bench, &mut vm, 1);

        bench.refused(&["segment", "R"], 2, &["--every"]);
        bench.ok(&["init", "S"]);
        let segment = ["segment", "R", "--store", "S", "--every", "1s"];
        bench.ok(&segment);
        // Once more there is nothing to do; and one that is missing is taken again.
        let listed = || -> Vec<u64> {
            let all = bench.json(&["list", "--store", "S", "--json"]);
            let all = all.as_array().map_or(&[][..], Vec::as_slice);
            all.iter().map(|one| number(one, "id")).collect()
        };
        let there = listed();
        bench.ok(&segment);
        assert_eq!(listed(), there);
        bench.ok(&["forget", "--store", "S", &there[2].to_string()]);
        bench.ok(&segment);
        assert_eq!(listed().len(), there.len());

        let report = bench.json(&["verify", "R", "--store", "S", "--json"]);
        assert_eq!(report["exact"], true, "{report:#}");
        let all = intervals(&report);
        assert!(all.len() >= 4 && all.len() == there.len(), "{report:#}");
        assert_eq!(
            (number(&all[0], "begin"), &report["instructions"]),
            (0, &all[all.len() - 1]["end"])
        );
        assert!(all.windows(2).all(|pair| pair[0]["end"] == pair[1]["begin"]));
        // Each lies where a replay can go on: there a VM has one state only.
        assert!(all.iter().all(|one| one["compared_at"].is_null()), "{report:#}");

        // The console, put together from all intervals, is what the guest wrote while it was
        // recorded.
        let said: Vec<String> =
            vm.lines().iter().filter(|line| line.contains("journal")).cloned().collect();
        let log = bench.json(&["log", "R", "--store", "S", "--marker", "journal", "--json"]);
        let lines = log["lines"].as_array().map_or(&[][..], Vec::as_slice);
        let texts: Vec<&str> = lines.iter().filter_map(|line| line["text"].as_str()).collect();
        assert!(
            !said.is_empty()
                && texts == said.iter().map(|line| line.trim_end()).collect::<Vec<_>>(),
            "{said:?} {log:#}"
        );
        assert!(
            lines.windows(2).all(|pair| number(&pair[0], "last") <= number(&pair[1], "first")),
            "{log:#}"
        );
        assert_eq!(
            bench.run(&["log", "R", "--store", "S", "--marker", "nowhere"]).status.code(),
            Some(1)
        );
        // One goes to a line of it.
        let (vm, told) = goto(&bench, &["--store", "S", "--marker", "journal"]);
        assert!(number(&told, "icount") > number(&lines[0], "last"), "behind it: {told:#}");
        ended(vm);
        let args = ["goto", "R", "--store", "S", "--marker", "never said"];
        bench.refused(&args, 1, &["never said", "keyframe log"]);
    }
}

/// Three stages live: a second QEMU follows, and all checkpoints are there when the recording ends.
/// Then one goes to any instruction, on from there, and back.
#[test]
fn a_recording_is_followed_and_travelled_through() {
    for qemu in chosen_qemus(0) {
        let bench = Bench::without_store();
        let disk = disks::virtio(&disks::image(&bench), "raw");
        let boot = guest(&qemu.path, "journal").with(&disks::words(&disk));
        let mut vm = record(&bench, &["--follow", "--checkpoint-every", "1s"], &boot);
        wait_for_journal(&mut vm, 3);
        vm.signal(Signal::INT);
        assert!(vm.wait().success(), "{}", vm.report());
        assert!(!bench.path().join("R/first").exists(), "one store is left");
        let report = verified(&bench);
        let all = intervals(&report);
        assert!(all.len() >= 3, "{report:#}");
        // Each lies where a VM has one state only.
        assert!(all.iter().all(|one| one["compared_at"].is_null()), "{report:#}");
        bench.refused(
            &["segment", "R", "--follow", "--every", "1s"],
            1,
            &["not being recorded", "fix:"],
        );

        goes_to_a_checkpoint(&bench, &all[all.len() - 2]);
        moves_both_ways(&bench, number(&all[all.len() - 2], "begin") + 12_345);
    }
}

/// `keyframe goto`, with the VM standing, and what it said of it.
fn goto(bench: &Bench, options: &[&str]) -> (Process, Value) {
    let mut all = vec!["goto", "R", "--json"];
    all.extend(options);
    let mut vm = Process::start(bench.command(&all));
    let told = vm.wait_until(|vm| serde_json::from_str(&vm.lines().join("\n")).ok());
    let told = told.unwrap_or_else(|| panic!("it does not stand: {}", vm.report()));
    (vm, told)
}

fn ended(mut vm: Process) {
    vm.signal(Signal::INT);
    assert!(vm.wait().success(), "{}", vm.report());
}

/// From the checkpoint before it, to the instruction of the one at the end of `interval`: its RAM.
fn goes_to_a_checkpoint(bench: &Bench, interval: &Value) {
    let qmp = bench.path().join("goto.sock");
    let (icount, monitor) =
        (number(interval, "end").to_string(), format!("unix:{},server=on,wait=off", qmp.display()));
    let (vm, told) = goto(bench, &["--icount", &icount, "--", "-qmp", &monitor]);
    assert_eq!((told["icount"].to_string(), &told["is_ambiguous"]), (icount, &Value::Bool(false)));
    assert_eq!(told["checkpoint"], interval["checkpoint"], "from the one before it: {told:#}");
    let qemu = number(&told, "qemu_pid") as u32;
    let (names, stored) =
        stored_ram(&bench.path().join("R/store"), number(interval, "compared_with"));
    let live = live_ram(qemu, &qmp, &names);
    assert_eq!(differing_pages(&live, &stored), [0; 0]);
    let mapped = std::fs::read_to_string(format!("/proc/{qemu}/maps")).unwrap();
    assert!(
        mapped.contains("/memfd:keyframe-wakeups"),
        "QEMU replays without what leaves out its wake-ups"
    );
    ends_with_its_maker(vm, qemu);
    bench.refused(&["goto", "R", "--icount", "99999999999999"], 1, &["no instruction", "fix:"]);
}

/// A replay's QEMU is gone with Keyframe, even where that is killed: no terminal's end reaches one
/// that leads a session.
fn ends_with_its_maker(mut vm: Process, qemu: u32) {
    assert!(!is_gone(qemu));
    vm.signal(Signal::KILL);
    vm.wait();
    until("QEMU ends with its maker", || is_gone(qemu));
}

/// A debugger steps on and back, and meets breakpoints and writes in both directions where they
/// are.
fn moves_both_ways(bench: &Bench, icount: u64) {
    let (mut vm, told) = goto(bench, &["--icount", &icount.to_string(), "--gdb", "0"]);
    let mut gdb = Debugger::attach(number(&told, "gdb") as u16);
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
    // Its checkpoints go on in replays alone.
    bench.refused(
        &["restore", "--store", "R/store", "latest"],
        1,
        &["of a recording", "keyframe goto REC --icount"],
    );
    bench.refused(&["list", "--store", "R"], 10, &["--store R/store"]);
    // What is recorded cannot be changed.
    assert_eq!(gdb.ask("P10=0000000000000000"), "E01");

    // The writes to the top of the stack, as a replay of their own finds them: where a call or an
    // interrupt writes to next.
    let (pc, stack) = (gdb.register(16), (gdb.register(7) & !15) - 8);
    let found = bench.json(&[
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
    let behind = found["writes"].as_array().map_or(&[][..], Vec::as_slice);
    let behind: Vec<u64> =
        behind.iter().map(|one| number(one, "icount")).filter(|n| *n >= icount).take(3).collect();
    assert!(!behind.is_empty(), "{found:#}");
    assert_eq!(gdb.ask(&format!("Z2,{stack:x},8")), "OK");
    for write in &behind {
        let stop = gdb.ask("c");
        assert!(stop.contains("watch"), "{stop}");
        assert_eq!(gdb.icount(), write + 1, "behind the write");
    }
    for write in behind.iter().rev() {
        let stop = gdb.ask("bc");
        assert!(stop.starts_with("T05") && stop.contains("watch"), "{stop}");
        assert_eq!(gdb.icount(), *write, "before it");
    }
    assert_eq!(gdb.ask(&format!("z2,{stack:x},8")), "OK");

    // Where an instruction was met: forward as back.
    assert_eq!(gdb.ask(&format!("Z1,{pc:x},1")), "OK");
    let met = |gdb: &mut Debugger, packets: &[&str]| {
        let stops: Vec<String> = packets.iter().map(|packet| gdb.ask(packet)).collect();
        assert!(stops.iter().all(|stop| stop.starts_with("T05")), "{stops:?}");
        let is_met = !stops.iter().any(|stop| stop.contains("replaylog"));
        assert!(!is_met || gdb.register(16) == pc, "{stops:?}");
        is_met.then(|| gdb.icount())
    };
    let first = met(&mut gdb, &["bc"]);
    let second = met(&mut gdb, &["bc"]);
    if let (Some(first), Some(second)) = (first, second) {
        assert!(second < first, "{second} is before {first}");
        assert_eq!(met(&mut gdb, &["s", "c"]), Some(first), "none is left out");
        assert_eq!(met(&mut gdb, &["bc"]), Some(second));
    }
    assert_eq!(gdb.ask(&format!("z1,{pc:x},1")), "OK");
    assert!(gdb.ask("c").contains("replaylog:end"));
    assert!(gdb.ask("bc").contains("replaylog:begin"));

    // Whoever ends it while QEMU has yet to answer has not met a fault of QEMU's.
    let [qemu] = qemus(vm.pid())[..] else { panic!("one QEMU: {}", vm.report()) };
    rustix::process::kill_process(qemu, Signal::STOP).expect("stop QEMU");
    drop(gdb);
    std::thread::sleep(Duration::from_millis(500));
    vm.signal(Signal::INT);
    std::thread::sleep(Duration::from_millis(500));
    rustix::process::kill_process(qemu, Signal::CONT).expect("continue QEMU");
    assert!(vm.wait().success(), "{}", vm.report());
}

#[test]
fn a_recording_ends_with_its_guest_and_one_that_was_cut_is_closed() {
    for qemu in chosen_qemus(1) {
        let bench = Bench::without_store();
        let mut vm = record(&bench, &[], &guest(&qemu.path, "compute"));
        vm.wait_for("compute t=");
        vm.say("poweroff");
        assert!(vm.wait().success(), "{}", vm.report());
        let report = verified(&bench);
        let [only] = intervals(&report) else { panic!("one interval: {report:#}") };
        let end = number(only, "end");
        assert!(only["compared_with"].is_null() && end > 1_000_000, "{report:#}");
        // Until QEMU ended, the guest ran some 12,000 more: no replay is sure to run them, so that
        // none does. A tool sees all up to where nothing happened last. Instructions that an
        // exception interrupts are counted twice.
        let analysis = bench.json(&["analyze", "R", "--tool", "icount", "--out", "A", "--json"]);
        let end = number(&analysis, "instructions");
        assert!(
            (number(only, "end") - 10..number(only, "end")).contains(&end),
            "{analysis:#} of {report:#}"
        );
        let table = std::fs::read_to_string(bench.path().join("A/icount.csv")).expect("its table");
        let ran: u64 = table
            .lines()
            .last()
            .and_then(|row| row.split(',').nth(2)?.parse().ok())
            .expect("a count");
        assert!((end..end + 6000).contains(&ran), "{ran} of {end} instructions");

        // The engine is killed, and then QEMU: the log lacks its head and its end.
        std::fs::rename(bench.path().join("R"), bench.path().join("R1")).expect("put it aside");
        let mut vm =
            record(&bench, &["--checkpoint-every", "500ms"], &guest(&qemu.path, "compute"));
        vm.wait_for("compute t=");
        let started = qemus(vm.pid());
        vm.signal(Signal::KILL);
        vm.wait();
        bench.refused(&["verify", "R"], 1, &["still being recorded", "fix:"]);
        for pid in started {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        // Its files are closed a moment after it has been killed.
        let segment = ["segment", "R", "--every-instructions", "999999999999"];
        until("the recording is closed", || bench.run(&segment).status.success());
        let report = verified(&bench);
        assert!(
            intervals(&report).iter().filter(|one| !one["compared_with"].is_null()).count() >= 2,
            "{report:#}"
        );
    }
}

/// `isa-debug-exit` has QEMU end within the guest's instruction, in the recording and in each
/// replay of it.
#[test]
fn a_recording_ends_before_the_instruction_within_which_its_qemu_ended() {
    // mov ecx, 0x2000000; again: mov [0x8000], ecx; dec ecx; jnz again; mov al, 16; out 0xf4, al
    const COUNTS_AND_ENDS: &[u8] =
        b"\x66\xb9\0\0\0\x02\x66\x89\x0e\0\x80\x66\x49\x75\xf7\xb0\x10\xe6\xf4";
    for qemu in chosen_qemus(0) {
        let bench = Bench::without_store();
        let mut image = COUNTS_AND_ENDS.to_vec();
        image.resize(1 << 20, 0);
        image[510..512].copy_from_slice(&[0x55, 0xaa]);
        std::fs::write(bench.path().join("boot.img"), image).expect("write an image");
        let mut command =
            bench.command(&["record", "--out", "R", "--checkpoint-every", "200ms", "--"]);
        command.args([&qemu.path, "-machine", "pc", "-m", "16M", "-nodefaults", "-no-user-config"]);
        command.args(["-display", "none", "-device", "isa-debug-exit,iobase=0xf4,iosize=1"]);
        command.args(["-drive", "file=boot.img,format=raw,readonly=on,if=virtio"]);
        let mut vm = Process::start(command);
        assert_eq!(vm.wait().code(), Some(1), "{}", vm.report());
        assert!(vm.errors().contains("QEMU ended with exit status: 33"), "{}", vm.report());
        let report = verified(&bench);
        assert!(number(&report, "instructions") > 3 << 25, "{report:#}");
        let found = bench.json(&[
            "analyze",
            "R",
            "--tool",
            "icount",
            "--out",
            "A",
            "--check-sequential",
            "--json",
        ]);
        assert_eq!(found["equals_sequential"], true, "{found:#}");
    }
}

/// The QEMUs that process `pid` has started.
fn qemus(pid: u32) -> Vec<Pid> {
    let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let qemus = children(pid).into_iter().filter(|pid| name(*pid).starts_with("qemu"));
    qemus.filter_map(|pid| Pid::from_raw(pid.cast_signed())).collect()
}

#[test]
fn what_cannot_be_recorded_or_replayed_is_refused() {
    let bench = Bench::without_store();
    let line = |extra: &[&str]| -> Vec<String> {
        let mut line: Vec<String> =
            ["record", "--out", "R", "--", "qemu-system-x86_64", "-m", "64"]
                .map(str::to_owned)
                .into();
        line.extend(extra.iter().map(|word| (*word).to_owned()));
        line
    };
    for (extra, words) in [
        (&["-smp", "2"][..], &["one virtual CPU", "-smp 1"][..]),
        (&["-device", "nvme,drive=d,serial=1"], &["NVMe", "virtio-blk"]),
        (&["-device", "virtio-net-pci"], &["virtio-net", "e1000"]),
        (&["-nic", "user"], &["-netdev user"]),
        (&["-hda", "x.img"], &["if=virtio"]),
        (&["-incoming", "tcp:0:1"], &["-incoming"]),
    ] {
        let line = line(extra);
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        bench.refused(&line, 1, words);
        assert!(!bench.path().join("R").exists(), "{extra:?} left something");
    }
    // What a script adds is in no word that was given.
    let script = bench.path().join("vm.sh");
    std::fs::write(
        &script,
        "#!/bin/sh\nexec qemu-system-x86_64 -nodefaults -m 64 -display none \"$@\"\n",
    )
    .expect("write a script");
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("make it one");
    let words = ["vm.sh adds -nodefaults", "QEMU's own line"];
    bench.refused(
        &["record", "--out", "R", "--quiet", "--", &script.display().to_string()],
        1,
        &words,
    );
    assert!(!bench.path().join("R").exists(), "something is left");
    bench.refused(&["verify", "R"], 1, &["no recording", "keyframe record"]);
    bench.refused(&["analyze", "R", "--tool", "nope", "--out", "A"], 1, &["nope", "icount"]);
    assert!(!Path::new("A").exists());
    let tools = bench.ok(&["analyze", "--list-tools"]);
    assert!(
        ["icount", "memtrace", "hot", "syscalls", "cache"].iter().all(|tool| tools.contains(tool)),
        "{tools}"
    );
}
