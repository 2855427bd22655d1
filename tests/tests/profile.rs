//! Tests `keyframe profile` on real guests: the counts are physically possible, the files are
//! readable, and the VM is unharmed.

use keyframe_qemu::Qmp;
use keyframe_tests::{
    Boot, PATIENCE, Process, TestEnv, children, chosen_qemus, number, wait_until,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const RATE: u64 = 20_000;
const SET_MIB: u64 = 32;
/// The pages that a small guest's kernel and console may write beside the workload; they write far
/// fewer.
const OTHER_PAGES: u64 = 6000;

/// A guest that writes to 32 MiB at 20,000 pages a second.
fn dirtying() -> Boot {
    Boot::new(&format!("dirty kf.rate={RATE} kf.mib={SET_MIB}"))
}

/// Asserts that no epoch has more pages than the working set, or than the guest writes in that
/// time.
fn check_curve(curve: &Value, lengths_ms: &[u64]) {
    let rows = curve["rows"].as_array().unwrap();
    let lengths: Vec<u64> = rows.iter().map(|r| number(r, "epoch_ns") / 1_000_000).collect();
    assert_eq!(lengths, lengths_ms);
    for row in rows {
        let pages = |key: &str| row["pages"][key].as_f64().unwrap();
        let (least, mean, most) =
            (number(&row["pages"], "min"), pages("mean"), number(&row["pages"], "max"));
        assert!(least as f64 <= mean && mean <= most as f64, "{row}");
        assert!(
            number(&row["measured_ns"], "min") >= number(row, "epoch_ns"),
            "shorter than asked: {row}"
        );
        assert!(most <= SET_MIB * 256 + OTHER_PAGES, "more than the working set: {row}");
        // After a delay the workload makes up for at most 50 ms.
        let longest_ms = number(&row["measured_ns"], "max") / 1_000_000;
        assert!(
            most <= RATE * (longest_ms + 100) / 1000 + OTHER_PAGES,
            "faster than it writes: {row}"
        );
    }
    let mean = |row: &Value| row["pages"]["mean"].as_f64().unwrap();
    let (first, last) = (mean(&rows[0]), mean(rows.last().unwrap()));
    assert!(
        last > 0.0 && last >= first,
        "{first} pages in the shortest epochs, {last} in the longest"
    );
}

/// The number of packet filters of Keyframe in QEMU.
fn filters(qmp: &mut Qmp) -> usize {
    let objects = qmp.execute("qom-list", Some(json!({ "path": "/objects" }))).unwrap();
    objects
        .as_array()
        .unwrap()
        .iter()
        .filter(|o| o["name"].as_str().unwrap().contains("keyframe"))
        .count()
}

/// A QEMU with a monitor at `socket`, after its boot.
fn plain(boot: &Boot, socket: &Path) -> Process {
    let boot =
        boot.clone().with(&["-qmp", &format!("unix:{},server=on,wait=off", socket.display())]);
    let line = boot.command();
    let mut command = Command::new(&line[0]);
    command.args(&line[1..]);
    let mut vm = Process::start(command);
    vm.wait_for("KF READY");
    vm
}

/// Asserts that the VM is unchanged: it runs, it is not traced or tracked, it has no further
/// descriptor, and its workload continues.
fn check_untouched(vm: &mut Process, socket: &Path, descriptors: usize) {
    let proc = |file: &str| std::fs::read_to_string(format!("/proc/{}/{file}", vm.pid())).unwrap();
    let status = proc("status");
    assert!(status.contains("TracerPid:\t0\n"), "{status}");
    assert!(!status.contains("State:\tt") && !status.contains("State:\tT"), "{status}");
    let tracked =
        |line: &str| line.starts_with("VmFlags:") && line.split(' ').any(|flag| flag == "uw");
    assert!(!proc("smaps").lines().any(tracked), "memory is still write-protected");
    // QEMU closes its end of the monitor when it next looks at it.
    wait_until("QEMU has no more descriptors than before", || open_files(vm) == descriptors);
    let mut qmp = Qmp::connect(socket, PATIENCE).unwrap();
    assert!(qmp.status().unwrap().is_running());
    assert_eq!(filters(&mut qmp), 0, "packets are still dumped");
    let lines = vm.lines().len();
    vm.wait_for_after(lines, "dirty t=");
}

fn open_files(vm: &Process) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", vm.pid())).unwrap().count()
}

/// The JSON object on the standard output of an ended `profile`. On a busy machine the output
/// arrives late.
fn printed(run: &mut Process) -> Value {
    for _ in 0..400 {
        if let Ok(object) = serde_json::from_str(&run.lines().join("\n")) {
            return object;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("no JSON object in {:?}; {}", run.lines(), run.report());
}

/// True if packets are dumped. That begins after the attach; before it, QEMU runs Keyframe's system
/// call and would not survive a kill of Keyframe.
fn has_dump(vm: &Process) -> bool {
    let files = std::fs::read_dir(format!("/proc/{}/fd", vm.pid())).unwrap();
    let target = |file: std::fs::DirEntry| std::fs::read_link(file.path()).unwrap_or_default();
    files.flatten().any(|file| target(file).to_string_lossy().contains("keyframe-packets"))
}

#[test]
fn a_launched_vm_is_measured_and_ended() {
    let env = TestEnv::without_store();
    let name = format!("profiled-{}", std::process::id());
    let mut boot =
        dirtying().with(&["-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0"]);
    boot.extra.extend(["-name".into(), name.clone(), "-smp".into(), "4,sockets=4".into()]);
    let mut args =
        vec!["profile", "--json", "--epochs", "10ms,1s", "--samples", "3", "--vcpus", "1,2"];
    args.extend(["--when", "KF READY", "--csv", "a.csv", "--plot", "a.svg", "--"]);
    let line = boot.command();
    args.extend(line.iter().map(String::as_str));
    let mut run = Process::start(env.command(&args));
    let exit = run.wait();
    assert!(exit.success(), "{exit}: {}", run.report());

    let found = printed(&mut run);
    run.wait_for_error("KF READY");
    assert_eq!(found["complete"], true);
    assert!(number(&found, "ram_bytes") >= boot.mem_mib << 20);
    let curves = found["curves"].as_array().unwrap();
    assert_eq!(curves.iter().map(|c| number(c, "vcpus")).collect::<Vec<_>>(), [1, 2]);
    for curve in curves {
        check_curve(curve, &[10, 1000]);
        for row in curve["rows"].as_array().unwrap() {
            assert_eq!(number(row, "samples"), 3);
            assert!(
                row["sectors"].is_null() && row["disk_writes"].is_null(),
                "a VM without disks: {row}"
            );
            assert!(number(&row["packets"], "max") < 10_000, "{row}");
        }
    }
    assert!(
        found["notes"].to_string().contains("sectors: not counted: the VM has no disks"),
        "{}",
        found["notes"]
    );

    let csv = std::fs::read_to_string(env.path().join("a.csv")).unwrap();
    let columns: Vec<usize> = csv.lines().map(|l| l.split(',').count()).collect();
    assert_eq!(columns.len(), 5, "{csv}");
    assert!(columns.iter().all(|c| *c == columns[0]), "{csv}");
    let svg = std::fs::read_to_string(env.path().join("a.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    for text in ["1 vCPU", "2 vCPUs", "memory pages written", "network packets sent"] {
        assert!(svg.contains(text), "no {text:?} in the plot");
    }
    assert!(!svg.contains("disk sectors"), "a chart of what was not measured");

    let left =
        |e: &std::fs::DirEntry| e.file_name().to_string_lossy().starts_with("keyframe-profile");
    assert!(
        !std::fs::read_dir(env.path()).unwrap().flatten().any(|e| left(&e)),
        "a directory is left"
    );
    let is_ours = |e: std::fs::DirEntry| {
        std::fs::read(e.path().join("cmdline"))
            .is_ok_and(|l| String::from_utf8_lossy(&l).contains(&name))
    };
    assert!(!std::fs::read_dir("/proc").unwrap().flatten().any(is_ours), "a QEMU is left");
}

#[test]
fn a_running_vm_is_measured_and_left_as_it_was() {
    for qemu in chosen_qemus(0) {
        println!("-- QEMU {}", qemu.label);
        let env = TestEnv::without_store();
        let socket = env.path().join("qmp.sock");
        let mut boot =
            dirtying().with(&["-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0"]);
        boot.qemu = qemu.path;
        let mut vm = plain(&boot, &socket);
        let (pid, descriptors) = (vm.pid().to_string(), open_files(&vm));
        let measured = ["profile", "--json", "--epochs", "10ms,1s", "--samples", "3"];

        let outside = env.json(&[&measured[..], &[&pid]].concat());
        check_curve(&outside["curves"][0], &[10, 1000]);
        assert_eq!(number(&outside, "ram_bytes"), boot.mem_mib << 20);
        assert_eq!(number(&outside["curves"][0], "vcpus"), 1);
        assert!(outside["curves"][0]["rows"][0]["packets"].is_null(), "who counted these?");
        check_untouched(&mut vm, &socket, descriptors);

        let socket_text = socket.display().to_string();
        let with = ["--qmp", &socket_text, "--plot", "a.png", &pid];
        let inside = env.json(&[&measured[..], &with[..]].concat());
        check_curve(&inside["curves"][0], &[10, 1000]);
        assert!(
            number(&inside, "ram_bytes") > boot.mem_mib << 20,
            "video RAM and ROMs are RAM too"
        );
        assert!(inside["curves"][0]["rows"][1]["packets"]["max"].is_u64(), "{inside}");
        assert!(std::fs::read(env.path().join("a.png")).unwrap().starts_with(b"\x89PNG\r\n"));
        check_untouched(&mut vm, &socket, descriptors);

        let args = [
            "profile",
            "--json",
            "--epochs",
            "10ms",
            "--samples",
            "100000",
            "--qmp",
            &socket_text,
            &pid,
        ];
        let mut run = Process::start(env.command(&args));
        let begun = vm.wait_until(|v| has_dump(v).then_some(()));
        assert!(begun.is_some(), "no packets are dumped; {}", run.report());
        // Long enough for one epoch of 10 ms on any machine.
        std::thread::sleep(Duration::from_secs(2));
        run.signal(Signal::INT);
        assert_eq!(run.wait().code(), Some(3), "{}", run.report());
        let found = printed(&mut run);
        assert!(
            found["complete"] == false && number(&found["curves"][0]["rows"][0], "samples") > 0
        );
        check_untouched(&mut vm, &socket, descriptors);

        // A killed `profile` cannot clean up: the kernel ends the tracking, and the next `profile`
        // the dump.
        let mut run = Process::start(env.command(&args));
        let begun = vm.wait_until(|v| has_dump(v).then_some(()));
        assert!(begun.is_some(), "no packets are dumped; {}", run.report());
        run.signal(Signal::KILL);
        assert!(!run.wait().success());
        env.ok(&["profile", "--epochs", "10ms", "--samples", "1", "--qmp", &socket_text, &pid]);
        check_untouched(&mut vm, &socket, descriptors);
    }
}

#[test]
fn a_launched_vm_does_not_outlive_its_profile() {
    let env = TestEnv::without_store();
    let line = dirtying().command();
    let mut args = vec!["profile", "--epochs", "10ms", "--samples", "100000", "--"];
    args.extend(line.iter().map(String::as_str));
    let mut run = Process::start(env.command(&args));
    run.wait_for("KF READY");
    let (of, count) = (run.pid(), || children(run.pid()));
    let qemus = count();
    let [qemu] = qemus[..] else { panic!("{qemus:?} are children of {of}") };
    let qemu = keyframe_kernel::Process::open(qemu).unwrap();
    assert!(qemu.is_alive());
    run.signal(Signal::KILL);
    assert!(!run.wait().success());
    wait_until("QEMU has ended with its profile", || !qemu.is_alive());
}

#[test]
fn a_vm_that_ends_leaves_what_was_measured_by_then() {
    let env = TestEnv::without_store();
    let boot = dirtying();
    let mut args = vec![
        "profile",
        "--json",
        "--epochs",
        "10ms",
        "--samples",
        "100000",
        "--when",
        "KF READY",
        "--",
    ];
    let line = boot.command();
    args.extend(line.iter().map(String::as_str));
    let mut run = Process::start(env.command(&args));
    run.wait_for_error("dirty t=2");
    run.type_line("poweroff");
    assert_eq!(run.wait().code(), Some(3), "{}", run.report());
    let found = printed(&mut run);
    assert_eq!(found["complete"], false);
    check_curve(&found["curves"][0], &[10]);
    run.wait_for_error("ended early");
}

#[test]
fn what_cannot_be_measured_is_refused_with_a_way_out() {
    let env = TestEnv::without_store();
    let us = std::process::id().to_string();
    env.refused(&["profile", &us], 1, &["is no QEMU", "fix:", "--qmp"]);
    env.refused(&["profile", "--qmp", "no.sock", &us], 1, &["no.sock", "fix:"]);
    env.refused(&["profile", "--plot", "a.jpg", &us], 1, &["a.jpg", ".svg"]);
    env.refused(&["profile", "--csv", "no/where.csv", &us], 1, &["no/where.csv", "fix:"]);
    env.refused(&["profile", "--epochs", "2s..1s", &us], 2, &["10ms..2s"]);
    env.refused(&["profile", "--vcpus", "2", &us], 2, &["--vcpus"]);
    env.refused(&["profile"], 2, &["PID"]);
    let socket = env.path().join("qmp.sock");
    let vm = plain(&dirtying(), &socket);
    // The monitor of one QEMU and the pid of another process.
    env.refused(
        &["profile", "--qmp", &socket.display().to_string(), &us],
        1,
        &["fix:", "qmp.sock"],
    );
    drop(vm);
}
