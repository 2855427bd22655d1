//! What is written for other tools: the same memory and registers as QEMU's own dump of the same
//! instant, streams that stock QEMU loads, and QEMU's own streams as checkpoints.

use crate::commit::{of_qcow2, three};
use crate::group;
use keyframe_qemu::Qmp;
use keyframe_tests::disks::{assert_same, image, shell, virtio, words};
use keyframe_tests::{
    Bench, Boot, Foreign, Process, Qemu, Sequence, chosen_qemus, distribution_qemu, hash_lines,
    skip, until,
};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const WAIT: Duration = Duration::from_mins(2);

fn boot(qemu: &Qemu, machine: &str) -> Boot {
    let mut boot = Boot::new("hash");
    boot.qemu.clone_from(&qemu.path);
    boot.machine = machine.into();
    boot.mem_mib = 96;
    boot.cpus = 2;
    boot
}

/// The guest of `vm` says `least` more lines of its sequence, all right.
fn goes_on(vm: &mut Process, least: usize) {
    let grown = vm.wait_until(|p| (hash_lines(&p.lines()).len() >= least).then_some(()));
    assert!(grown.is_some(), "the guest is silent; {}", vm.report());
    Sequence::new(16).check(&hash_lines(&vm.lines()), least);
}

/// `boot` with a monitor for the user, `NAME.sock`.
fn with_monitor(bench: &Bench, boot: &Boot, name: &str) -> Boot {
    let monitor = bench.path().join(format!("{name}.sock"));
    boot.clone().with(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())])
}

/// Stops the VM with monitor `NAME.sock`; QEMU's own dump of it goes to `NAME.elf`.
fn stop_and_dump(bench: &Bench, name: &str) {
    let mut qmp = Qmp::connect(&bench.path().join(format!("{name}.sock")), WAIT)
        .expect("connect to the monitor");
    qmp.stop().expect("stop");
    let file = format!("file:{}", bench.path().join(format!("{name}.elf")).display());
    qmp.execute("dump-guest-memory", Some(json!({ "paging": false, "protocol": file })))
        .expect("dump");
}

/// Takes a checkpoint of the run `name` and ends it.
fn take_and_stop(bench: &Bench, run: &mut Process, name: &str) {
    bench.ok(&["take", "--name", name]);
    bench.ok(&["stop", "--name", name]);
    assert!(run.wait().success(), "{}", run.report());
}

/// Runs `boot` under Keyframe; in one pause takes checkpoint 1, and QEMU's own dump into
/// `qemu.elf`.
fn checkpoint_and_dump(bench: &Bench, boot: &Boot) {
    let boot = with_monitor(bench, boot, "qemu");
    let mut run = bench.start(&["--interval", "none", "--name", "guest"], &boot);
    let speaks = run.wait_until(|p| (!hash_lines(&p.lines()).is_empty()).then_some(()));
    assert!(speaks.is_some(), "the guest is silent; {}", run.report());
    stop_and_dump(bench, "qemu");
    take_and_stop(bench, &mut run, "guest");
}

fn export(bench: &Bench, format: &str, name: &str) -> Vec<u8> {
    export_with(bench, &[], format, name)
}

fn export_with(bench: &Bench, options: &[&str], format: &str, name: &str) -> Vec<u8> {
    let store = bench.store();
    let args = ["export", "latest", "--store", &store, "--format", format, "-o", name];
    bench.ok(&[&args[..], options].concat());
    std::fs::read(bench.path().join(name)).expect("the exported file")
}

/// A core's notes, and its segments by physical address.
fn core(bytes: &[u8]) -> (&[u8], BTreeMap<u64, &[u8]>) {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let (mut notes, mut segments) = (&[][..], BTreeMap::new());
    for k in 0..usize::from(u16::from_le_bytes([bytes[56], bytes[57]])) {
        let header = word(32) + 56 * k;
        let contents = &bytes[word(header + 8)..word(header + 8) + word(header + 32)];
        match bytes[header] {
            4 => notes = contents,
            1 => drop(segments.insert(word(header + 24) as u64, contents)),
            other => panic!("a program header of type {other}"),
        }
    }
    (notes, segments)
}

#[test]
fn memory_and_registers_are_those_of_qemus_own_dump() {
    for qemu in chosen_qemus(0) {
        for machine in ["pc", "q35", "microvm"] {
            let bench = Bench::new();
            checkpoint_and_dump(&bench, &boot(&qemu, machine));
            let theirs = std::fs::read(bench.path().join("qemu.elf")).unwrap();
            let ours = export(&bench, "elf", "ours.elf");
            let raw = export(&bench, "raw", "ours.raw");
            let ((notes, segments), (our_notes, our_segments)) = (core(&theirs), core(&ours));
            let what = format!("QEMU {}, {machine}", qemu.label);
            assert!(notes.len() > 1000 && notes == our_notes, "{what}: the notes differ");
            assert_eq!(
                segments.keys().collect::<Vec<_>>(),
                our_segments.keys().collect::<Vec<_>>(),
                "{what}: other segments"
            );
            for (address, contents) in &segments {
                assert!(
                    our_segments[address] == *contents,
                    "{what}: the segment at {address:#x} differs"
                );
                if let Some(part) = raw.get(*address as usize..).filter(|part| !part.is_empty()) {
                    assert!(
                        part[..contents.len()] == **contents,
                        "{what}: raw differs at {address:#x}"
                    );
                }
            }
            assert_eq!(raw.len(), 96 << 20, "{what}");
            // What goes through a pipe is the same.
            let piped = bench.run(&[
                "export",
                "1",
                "--store",
                &bench.store(),
                "--format",
                "elf",
                "-o",
                "-",
            ]);
            assert!(piped.stdout == ours, "{what}: the pipe has other bytes");
        }
    }
}

#[test]
fn each_member_of_a_group_is_exported_by_its_name() {
    let bench = Bench::new();
    let members: Vec<Boot> = group::hashing(&bench)
        .iter()
        .zip(["a", "b"])
        .map(|(boot, n)| with_monitor(&bench, boot, n))
        .collect();
    let mut run = group::start(&bench, &["--interval", "none"], &members);
    group::wait_until_ready(&bench, &mut run);
    for name in ["a", "b"] {
        stop_and_dump(&bench, name);
    }
    take_and_stop(&bench, &mut run, "pair");
    for name in ["a", "b"] {
        let theirs = std::fs::read(bench.path().join(format!("{name}.elf"))).unwrap();
        let ours = export_with(&bench, &["--member", name], "elf", &format!("our-{name}.elf"));
        assert!(
            core(&theirs).0.len() > 400 && core(&theirs) == core(&ours),
            "{name}: the cores differ"
        );
    }
    export_with(&bench, &["--member", "b"], "migration", "b.mig");
    let mut line = members[1].clone();
    line.serial = "stdio".into();
    let line = line.with(&["-incoming", "exec:cat b.mig"]).command();
    let mut command = Command::new(&line[0]);
    command.args(&line[1..]).current_dir(bench.path());
    goes_on(&mut Process::start(command), 3);
    let store = bench.store();
    let args = ["export", "latest", "--store", &store, "--format", "raw", "-o", "x"];
    bench.refused(&args, 1, &["group, pair", "a, b", "--member"]);
    bench.refused(&[&args[..], &["--member", "c"]].concat(), 1, &["no member c", "a, b"]);
    assert!(!bench.path().join("x").exists());
}

#[test]
fn a_debugger_opens_the_core() {
    let Ok(version) = Command::new("gdb").arg("--version").output() else {
        skip!("no gdb (Debian package gdb)");
    };
    assert!(version.status.success());
    let bench = Bench::new();
    checkpoint_and_dump(&bench, &boot(&distribution_qemu(), "pc"));
    export(&bench, "elf", "ours.elf");
    let asked = |core: &str, commands: &[&str]| {
        let mut gdb = Command::new("gdb");
        gdb.current_dir(bench.path()).args(["-nx", "-batch", "-core", core]);
        gdb.args(commands.iter().flat_map(|c| ["-ex", c]));
        let output = gdb.output().expect("run gdb");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let registers = ["info threads", "info registers"];
    let (ours, theirs) = (asked("ours.elf", &registers), asked("qemu.elf", &registers));
    assert!(ours.contains("rip") && ours == theirs, "{ours}\n{theirs}");
    // Physical addresses can be read too: the reset vector is a far jump.
    assert!(asked("ours.elf", &["x/bx 0xfffffff0"]).contains("0xea"));
}

#[test]
fn a_file_is_replaced_only_when_asked_to() {
    let bench = Bench::new();
    checkpoint_and_dump(&bench, &boot(&distribution_qemu(), "pc"));
    export(&bench, "raw", "there");
    let store = bench.store();
    let args = ["export", "latest", "--store", &store, "--format", "raw", "-o", "there"];
    bench.refused(&args, 1, &["exists", "--force"]);
    bench.ok(&[&args[..], &["--force"]].concat());
    bench.refused(
        &["export", "9", "--store", &store, "--format", "raw", "-o", "x"],
        1,
        &["9", "list"],
    );
    let member = ["--force", "--member", "a"];
    bench.refused(&[&args[..], &member].concat(), 1, &["no member a", "leave --member out"]);
    let names: Vec<_> =
        std::fs::read_dir(bench.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(
        !names.iter().any(|n| n.to_string_lossy().starts_with(".keyframe-export")),
        "{names:?}"
    );
}

#[test]
fn a_disk_is_exported_as_the_guest_had_it() {
    for qemu in chosen_qemus(1) {
        let bench = Bench::new();
        let drive = virtio(&image(&bench), "raw");
        let taken = three(&bench, &shell(&qemu, &words(&drive)));
        let store = bench.store();
        for (id, expected) in &taken {
            let args = ["export", id, "--store", &store, "--disk", "d", "--force", "-o"];
            let with = |more: &[&str]| bench.ok(&[&args[..], more].concat());
            with(&["d.raw"]);
            let raw = std::fs::read(bench.path().join("d.raw")).expect("the exported file");
            assert_same(&raw, expected, &format!("QEMU {}, checkpoint {id}, raw", qemu.label));
            with(&["d.qcow2", "--format", "qcow2"]);
            let qcow2 = of_qcow2(&bench.path().join("d.qcow2"), &bench.path().join("again.raw"));
            assert_same(&qcow2, expected, &format!("QEMU {}, checkpoint {id}, qcow2", qemu.label));
            let piped = bench.run(&[&args[..], &["-"]].concat());
            assert!(piped.stdout == *expected, "the pipe has other bytes");
        }
        let args = ["export", "latest", "--store", &store, "-o", "d.raw"];
        let refused = |more: &[&str], expected: &[&str]| {
            bench.refused(&[&args[..], more].concat(), 1, expected);
        };
        refused(&["--disk", "d"], &["exists", "--force"]);
        refused(&["--disk", "e", "--force"], &["no disk e", "it holds d"]);
        refused(&["--disk", "d", "--member", "a", "--force"], &["no member a"]);
        refused(&["--disk", "d", "--format", "elf", "--force"], &["raw or qcow2"]);
        refused(&["--format", "qcow2", "--force"], &["--disk"]);
    }
}

#[test]
fn stock_qemu_loads_an_exported_stream_and_the_guest_goes_on() {
    for qemu in chosen_qemus(0) {
        for machine in ["pc", "q35"] {
            let bench = Bench::new();
            let boot = boot(&qemu, machine).with(&["-device", "VGA"]);
            checkpoint_and_dump(&bench, &boot);
            export(&bench, "migration", "vm.mig");
            let line = boot.with(&["-incoming", "exec:cat vm.mig"]).command();
            let mut command = Command::new(&line[0]);
            command.args(&line[1..]).current_dir(bench.path());
            let mut loaded = Process::start(command);
            goes_on(&mut loaded, 3);
            assert!(loaded.is_running(), "{}", loaded.report());
        }
    }
}

/// QEMU's own stream of `boot`, which is then ended.
fn migrated(bench: &Bench, boot: &Boot) -> Vec<u8> {
    let mut foreign = Foreign::start(bench, boot);
    let said = foreign.console.wait_until(|p| (!hash_lines(&p.lines()).is_empty()).then_some(()));
    assert!(said.is_some(), "{}", foreign.console.report());
    let mut qmp = foreign.other();
    // What a guest under TCG writes while QEMU migrates it is lost now and then, for QEMU's own
    // `-incoming` too.
    qmp.stop().expect("stop");
    let file = bench.path().join("qemu.mig");
    let uri = format!("exec:cat > {}", file.display());
    qmp.execute("migrate", Some(json!({ "uri": uri }))).expect("migrate");
    until("the migration", || {
        let status = qmp.execute("query-migrate", None).expect("query-migrate");
        status["status"] == "completed"
    });
    std::fs::read(file).expect("the stream")
}

fn import(bench: &Bench, file: &str, boot: &Boot) -> Vec<String> {
    let store = bench.store();
    let mut args =
        ["import", file, "--store", &store, "--tag", "imported", "--"].map(String::from).to_vec();
    args.extend(boot.command());
    args
}

#[test]
fn qemus_own_stream_becomes_a_checkpoint_that_goes_on() {
    for qemu in chosen_qemus(1) {
        for machine in ["pc", "q35"] {
            let bench = Bench::new();
            let boot = boot(&qemu, machine).with(&["-device", "VGA"]);
            migrated(&bench, &boot);
            let args = import(&bench, "qemu.mig", &boot);
            bench.ok(&args.iter().map(String::as_str).collect::<Vec<_>>());
            let mut restored = bench.restore("imported", &[]);
            goes_on(&mut restored, 3);
            // It is exported as any other, and holds what the stream held.
            let first = export(&bench, "raw", "first.raw");
            assert_eq!(first.len(), 96 << 20);
            bench.ok(&["check", "--read-data", "--store", &bench.store()]);
        }
    }
}

#[test]
fn streams_that_are_hostile_or_another_machines_are_refused_and_leave_nothing() {
    let bench = Bench::new();
    let boot = boot(&distribution_qemu(), "pc");
    let good = migrated(&bench, &boot);
    let refused = |name: &str, bytes: &[u8], boot: &Boot, words: &[&str]| {
        std::fs::write(bench.path().join(name), bytes).unwrap();
        let args = import(&bench, name, boot);
        bench.refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), 1, words);
        assert!(bench.list().is_empty(), "{name} left a checkpoint");
    };
    refused("cut", &good[..good.len() / 2], &boot, &["cut short"]);
    refused("tail", &good[..good.len() - 3], &boot, &["end mark"]);
    refused("text", b"no stream at all", &boot, &["QEVM"]);
    let ram = good.windows(6).position(|w| w == b"pc.ram").expect("the list");
    let mut renamed = good.clone();
    renamed[ram..ram + 6].copy_from_slice(b"pc.rum");
    refused("renamed", &renamed, &boot, &["pc.rum", "command line"]);
    let mut huge = good.clone();
    huge[ram + 6..ram + 14].copy_from_slice(&(1u64 << 50).to_be_bytes());
    refused("huge", &huge, &boot, &["pc.ram"]);
    let mut smaller = boot.clone();
    smaller.mem_mib = 64;
    refused("smaller", &good, &smaller, &["pc.ram", "command line"]);
    let mut other = boot.clone();
    other.machine = "q35".into();
    refused("other", &good, &other, &["machine type"]);
    let mut single = boot;
    single.cpus = 1;
    refused("single", &good, &single, &["processors"]);
    assert!(!Path::new(&bench.path().join("imported")).exists());
}
