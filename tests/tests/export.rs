//! Tests exports for other tools: memory and registers equal QEMU's own dump of the same instant,
//! stock QEMU loads exported streams, and QEMU's own streams become checkpoints.

use crate::commit::{of_qcow2, three};
use crate::group;
use keyframe_qemu::Qmp;
use keyframe_tests::disks::{as_strs, assert_same, numbered_image, shell_guest, virtio_disk};
use keyframe_tests::{
    Boot, ExternalVm, Process, Qemu, Sequence, TestEnv, chosen_qemus, distribution_qemu,
    hash_lines, skip, wait_until,
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

/// Asserts that the guest of `vm` prints `least` further lines of its sequence, all correct.
fn goes_on(vm: &mut Process, least: usize) {
    let grown = vm.wait_until(|p| (hash_lines(&p.lines()).len() >= least).then_some(()));
    assert!(grown.is_some(), "the guest is silent; {}", vm.report());
    Sequence::new(16).check(&hash_lines(&vm.lines()), least);
}

/// `boot` with a monitor for the user, `NAME.sock`.
fn with_monitor(env: &TestEnv, boot: &Boot, name: &str) -> Boot {
    let monitor = env.path().join(format!("{name}.sock"));
    boot.clone().with(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())])
}

/// Stops the VM with monitor `NAME.sock` and writes QEMU's own dump of it to `NAME.elf`.
fn stop_and_dump(env: &TestEnv, name: &str) {
    let mut qmp = Qmp::connect(&env.path().join(format!("{name}.sock")), WAIT)
        .expect("connect to the monitor");
    qmp.stop().expect("stop");
    let file = format!("file:{}", env.path().join(format!("{name}.elf")).display());
    qmp.execute("dump-guest-memory", Some(json!({ "paging": false, "protocol": file })))
        .expect("dump");
}

/// Takes a checkpoint of the run `name` and ends it.
fn take_and_stop(env: &TestEnv, run: &mut Process, name: &str) {
    env.ok(&["take", "--name", name]);
    env.ok(&["stop", "--name", name]);
    assert!(run.wait().success(), "{}", run.report());
}

/// Runs `boot` under Keyframe and, in one pause, takes checkpoint 1 and QEMU's own dump into
/// `qemu.elf`.
fn checkpoint_and_dump(env: &TestEnv, boot: &Boot) {
    let boot = with_monitor(env, boot, "qemu");
    let mut run = env.start(&["--interval", "none", "--name", "guest"], &boot);
    let speaks = run.wait_until(|p| (!hash_lines(&p.lines()).is_empty()).then_some(()));
    assert!(speaks.is_some(), "the guest is silent; {}", run.report());
    stop_and_dump(env, "qemu");
    take_and_stop(env, &mut run, "guest");
}

fn export(env: &TestEnv, format: &str, name: &str) -> Vec<u8> {
    export_with(env, &[], format, name)
}

fn export_with(env: &TestEnv, options: &[&str], format: &str, name: &str) -> Vec<u8> {
    let store = env.store();
    let args = ["export", "latest", "--store", &store, "--format", format, "-o", name];
    env.ok(&[&args[..], options].concat());
    std::fs::read(env.path().join(name)).expect("the exported file")
}

/// A core file's notes, and its segments by physical address.
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
            let env = TestEnv::new();
            checkpoint_and_dump(&env, &boot(&qemu, machine));
            let theirs = std::fs::read(env.path().join("qemu.elf")).unwrap();
            let ours = export(&env, "elf", "ours.elf");
            let raw = export(&env, "raw", "ours.raw");
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
            // The output through a pipe is the same.
            let piped =
                env.run(&["export", "1", "--store", &env.store(), "--format", "elf", "-o", "-"]);
            assert!(piped.stdout == ours, "{what}: the pipe has other bytes");
        }
    }
}

#[test]
fn each_member_of_a_group_is_exported_by_its_name() {
    let env = TestEnv::new();
    let members: Vec<Boot> = group::hashing(&env)
        .iter()
        .zip(["a", "b"])
        .map(|(boot, n)| with_monitor(&env, boot, n))
        .collect();
    let mut run = group::start(&env, &["--interval", "none"], &members);
    group::wait_until_ready(&env, &mut run);
    for name in ["a", "b"] {
        stop_and_dump(&env, name);
    }
    take_and_stop(&env, &mut run, "pair");
    for name in ["a", "b"] {
        let theirs = std::fs::read(env.path().join(format!("{name}.elf"))).unwrap();
        let ours = export_with(&env, &["--member", name], "elf", &format!("our-{name}.elf"));
        assert!(
            core(&theirs).0.len() > 400 && core(&theirs) == core(&ours),
            "{name}: the cores differ"
        );
    }
    export_with(&env, &["--member", "b"], "migration", "b.mig");
    let mut line = members[1].clone();
    line.serial = "stdio".into();
    let line = line.with(&["-incoming", "exec:cat b.mig"]).command();
    let mut command = Command::new(&line[0]);
    command.args(&line[1..]).current_dir(env.path());
    goes_on(&mut Process::start(command), 3);
    let store = env.store();
    let args = ["export", "latest", "--store", &store, "--format", "raw", "-o", "x"];
    env.refused(&args, 1, &["group, pair", "a, b", "--member"]);
    env.refused(&[&args[..], &["--member", "c"]].concat(), 1, &["no member c", "a, b"]);
    assert!(!env.path().join("x").exists());
}

#[test]
fn a_debugger_opens_the_core() {
    let Ok(version) = Command::new("gdb").arg("--version").output() else {
        skip!("no gdb (Debian package gdb)");
    };
    assert!(version.status.success());
    let env = TestEnv::new();
    checkpoint_and_dump(&env, &boot(&distribution_qemu(), "pc"));
    export(&env, "elf", "ours.elf");
    let asked = |core: &str, commands: &[&str]| {
        let mut gdb = Command::new("gdb");
        gdb.current_dir(env.path()).args(["-nx", "-batch", "-core", core]);
        gdb.args(commands.iter().flat_map(|c| ["-ex", c]));
        let output = gdb.output().expect("run gdb");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let registers = ["info threads", "info registers"];
    let (ours, theirs) = (asked("ours.elf", &registers), asked("qemu.elf", &registers));
    assert!(ours.contains("rip") && ours == theirs, "{ours}\n{theirs}");
    // The debugger also reads physical addresses: the reset vector is a far jump.
    assert!(asked("ours.elf", &["x/bx 0xfffffff0"]).contains("0xea"));
}

#[test]
fn a_file_is_replaced_only_when_asked_to() {
    let env = TestEnv::new();
    checkpoint_and_dump(&env, &boot(&distribution_qemu(), "pc"));
    export(&env, "raw", "there");
    let store = env.store();
    let args = ["export", "latest", "--store", &store, "--format", "raw", "-o", "there"];
    env.refused(&args, 1, &["exists", "--force"]);
    env.ok(&[&args[..], &["--force"]].concat());
    env.refused(
        &["export", "9", "--store", &store, "--format", "raw", "-o", "x"],
        1,
        &["9", "list"],
    );
    let member = ["--force", "--member", "a"];
    env.refused(&[&args[..], &member].concat(), 1, &["no member a", "leave --member out"]);
    let names: Vec<_> =
        std::fs::read_dir(env.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(
        !names.iter().any(|n| n.to_string_lossy().starts_with(".keyframe-export")),
        "{names:?}"
    );
}

#[test]
fn a_disk_is_exported_as_the_guest_had_it() {
    for qemu in chosen_qemus(1) {
        let env = TestEnv::new();
        let drive = virtio_disk(&numbered_image(&env), "raw");
        let taken = three(&env, &shell_guest(&qemu, &as_strs(&drive)));
        let store = env.store();
        for (id, expected) in &taken {
            let args = ["export", id, "--store", &store, "--disk", "d", "--force", "-o"];
            let with = |more: &[&str]| env.ok(&[&args[..], more].concat());
            with(&["d.raw"]);
            let raw = std::fs::read(env.path().join("d.raw")).expect("the exported file");
            assert_same(&raw, expected, &format!("QEMU {}, checkpoint {id}, raw", qemu.label));
            with(&["d.qcow2", "--format", "qcow2"]);
            let qcow2 = of_qcow2(&env.path().join("d.qcow2"), &env.path().join("again.raw"));
            assert_same(&qcow2, expected, &format!("QEMU {}, checkpoint {id}, qcow2", qemu.label));
            let piped = env.run(&[&args[..], &["-"]].concat());
            assert!(piped.stdout == *expected, "the pipe has other bytes");
        }
        let args = ["export", "latest", "--store", &store, "-o", "d.raw"];
        let refused = |more: &[&str], expected: &[&str]| {
            env.refused(&[&args[..], more].concat(), 1, expected);
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
            let env = TestEnv::new();
            let boot = boot(&qemu, machine).with(&["-device", "VGA"]);
            checkpoint_and_dump(&env, &boot);
            export(&env, "migration", "vm.mig");
            let line = boot.with(&["-incoming", "exec:cat vm.mig"]).command();
            let mut command = Command::new(&line[0]);
            command.args(&line[1..]).current_dir(env.path());
            let mut loaded = Process::start(command);
            goes_on(&mut loaded, 3);
            assert!(loaded.is_running(), "{}", loaded.report());
        }
    }
}

/// Writes QEMU's own migration stream of `boot`, and ends the VM.
fn migrated(env: &TestEnv, boot: &Boot) -> Vec<u8> {
    let mut foreign = ExternalVm::start(env, boot);
    let said = foreign.console.wait_until(|p| (!hash_lines(&p.lines()).is_empty()).then_some(()));
    assert!(said.is_some(), "{}", foreign.console.report());
    let mut qmp = foreign.monitor();
    // Under TCG a migration loses some writes of the running guest, also with QEMU's own
    // `-incoming`.
    qmp.stop().expect("stop");
    let file = env.path().join("qemu.mig");
    let uri = format!("exec:cat > {}", file.display());
    qmp.execute("migrate", Some(json!({ "uri": uri }))).expect("migrate");
    wait_until("the migration", || {
        let status = qmp.execute("query-migrate", None).expect("query-migrate");
        status["status"] == "completed"
    });
    std::fs::read(file).expect("the stream")
}

fn import(env: &TestEnv, file: &str, boot: &Boot) -> Vec<String> {
    let store = env.store();
    let mut args =
        ["import", file, "--store", &store, "--tag", "imported", "--"].map(String::from).to_vec();
    args.extend(boot.command());
    args
}

#[test]
fn qemus_own_stream_becomes_a_checkpoint_that_goes_on() {
    for qemu in chosen_qemus(1) {
        for machine in ["pc", "q35"] {
            let env = TestEnv::new();
            let boot = boot(&qemu, machine).with(&["-device", "VGA"]);
            migrated(&env, &boot);
            let args = import(&env, "qemu.mig", &boot);
            env.ok(&args.iter().map(String::as_str).collect::<Vec<_>>());
            let mut restored = env.restore("imported", &[]);
            goes_on(&mut restored, 3);
            // The checkpoint is exported as any other, and equals the stream.
            let first = export(&env, "raw", "first.raw");
            assert_eq!(first.len(), 96 << 20);
            env.ok(&["check", "--read-data", "--store", &env.store()]);
        }
    }
}

#[test]
fn streams_that_are_hostile_or_another_machines_are_refused_and_leave_nothing() {
    let env = TestEnv::new();
    let boot = boot(&distribution_qemu(), "pc");
    let good = migrated(&env, &boot);
    let refused = |name: &str, bytes: &[u8], boot: &Boot, words: &[&str]| {
        std::fs::write(env.path().join(name), bytes).unwrap();
        let args = import(&env, name, boot);
        env.refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), 1, words);
        assert!(env.list().is_empty(), "{name} left a checkpoint");
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
    assert!(!Path::new(&env.path().join("imported")).exists());
}
