//! Recordings: each interval replays exactly, and a tool finds the same in parallel intervals as in
//! one replay. Recordings that cannot work are refused.

use keyframe_tests::recording::{
    end_after, intervals, qemu_children, record, recordable_guest, verified,
};
use keyframe_tests::{
    Boot, Process, TestEnv, children, chosen_qemus, disks, number, on_path, small_guest, wait_until,
};
use rustix::process::Signal;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn each_interval_replays_exactly_and_tools_see_the_same_in_parallel() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::without_store();
        let image = disks::numbered_image(&env);
        let disk = disks::virtio_disk(&image, "raw");
        let before = std::fs::read(&image).expect("read the image");
        let boot = recordable_guest(&qemu.path, "journal").with(&disks::as_strs(&disk));
        let mut vm = record(&env, &["--checkpoint-every", "600ms"], &boot);
        vm.wait_for("journal written=");
        end_after(&env, &mut vm, 10);
        assert!(std::fs::read(&image).expect("read it again") == before, "the image is unchanged");
        let report = verified(&env);
        let all = intervals(&report);
        assert!(all.len() >= 9, "{report:#}");
        assert_eq!(all[0]["begin"], 0, "the first interval begins before the first instruction");
        let (_, but_last) = all.split_last().expect("intervals");
        assert!(
            but_last.iter().all(|one| !one["compared_with"].is_null()),
            "each ends at a checkpoint: {report:#}"
        );
        assert!(all.windows(2).all(|pair| pair[0]["end"] == pair[1]["begin"]));
        assert_eq!(all.last().map(|one| one["end"].clone()), Some(report["instructions"].clone()));

        let begin = number(&all[all.len() - 3], "begin").to_string();
        is_analyzed_and_planned(&env, &begin);
        caches_go_on(&env, &begin);

        // The image must be the one that the recording began with.
        std::fs::write(&image, &before[1..]).expect("change the image");
        let output = env.run(&["verify", "R", "--json"]);
        assert_eq!(output.status.code(), Some(1));
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert!(intervals(&report).iter().all(|one| one["error"].is_string()), "{report:#}");
    }
}

/// Analyzes `R` from instruction `begin` on, in parallel and in sequence, and plans the analysis on
/// a cluster.
fn is_analyzed_and_planned(env: &TestEnv, begin: &str) {
    let args = [
        "analyze",
        "R",
        "--tool",
        "icount",
        "--from",
        begin,
        "--out",
        "A",
        "--check-sequential",
        "--json",
    ];
    let found = env.json(&args);
    assert_eq!(found["equals_sequential"], true, "{found:#}");
    env.refused(&["analyze", "R", "--tool", "hot", "--out", "A"], 1, &["another analysis", "fix:"]);
    let plan = env.json(&["plan", "--from", "R", "--analysis", "A", "--nodes", "2", "--json"]);
    assert_eq!(
        number(&plan["measured"], "intervals") as usize,
        intervals(&found).len(),
        "{plan:#}"
    );
    assert!(number(&plan["measured"], "checkpoints") >= 9, "{plan:#}");
    assert!(plan["speed_up"].as_f64().is_some_and(|speed_up| speed_up > 0.0), "{plan:#}");
    is_simulated_on_a_cluster(env, &found);
}

/// Simulated caches keep their contents from one interval to the next, in parallel replays as in
/// one. The exact misses lie within the bounds of caches whose contents before the interval are
/// unknown.
fn caches_go_on(env: &TestEnv, begin: &str) {
    let (_, out) = analyzed(env, "cache", "line=64", begin);
    let bounds =
        ["--tool", "cache", "--tool-arg", "warmup=0", "--from", begin, "--out", "A-bounds"];
    env.ok(&[&["analyze", "R"], &bounds[..]].concat());
    let exact_columns = "interval,start_icount,level,reads,writes,read_misses,write_misses";
    let exact = numbers(&out.join("cache.csv"), exact_columns);
    let bounds_columns = format!("{exact_columns},misses_least,misses_most");
    let bounds = numbers(&env.path().join("A-bounds/cache.csv"), &bounds_columns);
    assert!(exact.len() >= 9 && exact.len() == bounds.len(), "{exact:?} {bounds:?}");
    let mut is_less_than_most = false;
    for (exact, bounds) in exact.iter().zip(&bounds) {
        assert_eq!(exact[..3], bounds[..3]);
        let (misses, least, most) = (exact[5] + exact[6], bounds[7], bounds[8]);
        assert!((least..=most).contains(&misses), "{exact:?} {bounds:?}");
        if exact[2] == 1 {
            assert_eq!(exact[3..5], bounds[3..5]);
            is_less_than_most |= misses < most;
        }
    }
    assert!(is_less_than_most, "no access found what an earlier interval had left: {exact:?}");
}

/// The rows of a CSV file of numbers with this header.
fn numbers(path: &Path, header: &str) -> Vec<Vec<u64>> {
    let table = std::fs::read_to_string(path).expect("read a result");
    let mut lines = table.lines();
    assert_eq!(lines.next(), Some(header));
    let number = |cell: &str| cell.parse().expect("a number");
    lines.map(|line| line.split(',').map(number).collect()).collect()
}

/// `keyframe plan --simulate` has as many intervals as the analysis `found`.
fn is_simulated_on_a_cluster(env: &TestEnv, found: &Value) {
    let cluster =
        ["--nodes", "1,2", "--simulate", "--network", "1Gbit", "--node-start", "1s", "--json"];
    let plan = env.json(&[&["plan", "--from", "R", "--analysis", "A"], &cluster[..]].concat());
    let simulated = &plan["simulated"];
    assert_eq!(simulated["times"], "measured interval times", "{simulated:#}");
    assert_eq!(number(simulated, "intervals") as usize, intervals(found).len(), "{simulated:#}");
    for row in simulated["table"].as_array().expect("a table") {
        let outcome = &row["outcome"];
        assert_eq!(
            outcome["intervals"].as_array().map(Vec::len),
            Some(intervals(found).len()),
            "{row:#}"
        );
        assert!(
            outcome["sent_bytes"].as_f64() > Some(0.0) && row["speed_up"].as_f64() > Some(0.0),
            "{row:#}"
        );
    }
}

/// RAM of two backends, the CPU in the second NUMA node: tools find pages, and the kernel's data in
/// them, in both.
#[test]
#[ignore = "make soak"]
fn soak_tools_see_a_machine_of_two_nodes() {
    for qemu in chosen_qemus(1) {
        let env = TestEnv::without_store();
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
        let boot = Boot { mem_mib: 128, ..recordable_guest(&qemu.path, "hash+dirty kf.mib=4") }
            .with(&nodes);
        let mut vm = record(&env, &["--checkpoint-every", "400ms"], &boot);
        vm.wait_for("KF READY");
        end_after(&env, &mut vm, 8);
        let report = verified(&env);
        let all = intervals(&report);
        let begin = number(&all[all.len() - 3], "begin").to_string();
        pages_are_found_in_both_nodes(&env, &begin);
        system_calls_are_found(&env, &begin);
    }
}

/// Analyzes `R` with a tool from instruction `begin` on, in parallel and in sequence. Returns the
/// report and the directory of the results.
fn analyzed(env: &TestEnv, tool: &str, argument: &str, begin: &str) -> (Value, PathBuf) {
    let out = format!("A-{tool}");
    let args =
        ["analyze", "R", "--tool", tool, "--tool-arg", argument, "--from", begin, "--out", &out];
    let found = env.json(&[&args[..], &["--check-sequential", "--json"]].concat());
    assert_eq!(found["equals_sequential"], true, "{found:#}");
    (found, env.path().join(out))
}

fn pages_are_found_in_both_nodes(env: &TestEnv, begin: &str) {
    const NODE_BYTES: u64 = 48 << 20;
    let (_, out) = analyzed(env, "hot", "top=1000000", begin);
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
    // ROMs and the card's memory lie above RAM.
    assert!(first > 0 && second > 100, "{first} and {second} of {}", pages.len());
    assert!(first + second + 16 > pages.len(), "{first} and {second} of {}", pages.len());
}

fn system_calls_are_found(env: &TestEnv, begin: &str) {
    let kernel = format!("symbols={}", small_guest().join("vmlinux").display());
    let (found, out) = analyzed(env, "syscalls", &kernel, begin);
    let calls = std::fs::read_to_string(out.join("syscalls.csv")).expect("read syscalls.csv");
    // The kernel's stacks and tasks are in the CPU's node.
    assert!(calls.lines().filter(|line| line.ends_with(",kfguest")).count() > 20, "{found:#}");
    assert!(calls.lines().all(|line| !line.ends_with(',')), "{found:#}");
}

/// A server serves read-only media as it serves disks. The guest sees the media's content, and each
/// interval replays exactly.
#[test]
fn read_only_media_are_served_and_replay_exactly() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::without_store();
        // The raw medium ends within a sector.
        let content: Vec<u8> =
            (0..3_000_100u32).flat_map(|n| (n / 7).to_le_bytes()).take(3_000_100).collect();
        std::fs::write(env.path().join("raw.img"), &content).expect("write an image");
        let image = |name: &str| env.path().join(name).display().to_string();
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
        let boot = recordable_guest(&qemu.path, "shell").with(&["-drive", &raw, "-drive", &packed]);
        let mut vm = record(&env, &["--checkpoint-every", "500ms"], &boot);
        vm.wait_for("KF READY");
        let line =
            |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let served =
            children(vm.pid()).into_iter().filter(|pid| line(*pid).contains("media.sock")).count();
        assert_eq!(served, 1, "QEMU's line names the server; {}", vm.report());
        let padded = guest_reads_media(&env, &mut vm, &content);
        end_after(&env, &mut vm, 4);
        let report = verified(&env);
        assert!(intervals(&report).len() >= 3, "{report:#}");
        assert!(
            std::fs::read(env.path().join("raw.img")).expect("read the image again") == content
        );
        let found = env.json(&[
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
        env.refused(&["verify", "R"], 1, &["packed.img"]);
        std::fs::rename(image("away"), image("packed.img")).expect("put it back");
        // A changed image must not be read in place of the recorded one.
        std::fs::write(image("raw.img"), &padded).expect("change an image");
        env.refused(&["verify", "R"], 1, &["raw.img", "has changed", "touch -d"]);
    }
}

/// Has the guest print checksums of both disks, which must be the one of `content`. Returns
/// `content` padded to whole sectors.
fn guest_reads_media(env: &TestEnv, vm: &mut Process, content: &[u8]) -> Vec<u8> {
    // QEMU pads the medium to whole sectors.
    let copy = env.path().join("padded");
    let mut padded = content.to_vec();
    padded.resize(content.len().next_multiple_of(512), 0);
    std::fs::write(&copy, &padded).expect("write a file");
    let summed = Command::new("md5sum").arg(&copy).output().expect("run md5sum");
    let sum = String::from_utf8_lossy(&summed.stdout).chars().take(32).collect::<String>();
    // A recorded serial port takes 16 characters at a time.
    for (line, answer) in [
        ("cd /dev", "cd /dev"),
        ("md5sum vda vdb", "  vdb"),
        ("cd /sys/block", "cd /sys"),
        ("cat vd?/ro", "1"),
    ] {
        vm.type_line(line);
        vm.wait_for(answer);
    }
    let console = vm.lines();
    for disk in ["vda", "vdb"] {
        assert!(
            console.iter().any(|line| line.contains(&format!("{sum}  {disk}"))),
            "{}",
            vm.report()
        );
    }
    padded
}

#[test]
fn a_recording_ends_with_its_guest_and_a_killed_one_is_closed() {
    for qemu in chosen_qemus(1) {
        let env = TestEnv::without_store();
        let mut vm = record(&env, &[], &recordable_guest(&qemu.path, "compute"));
        vm.wait_for("compute t=");
        vm.type_line("poweroff");
        assert!(vm.wait().success(), "{}", vm.report());
        let report = verified(&env);
        let [only] = intervals(&report) else { panic!("one interval: {report:#}") };
        let end = number(only, "end");
        assert!(only["compared_with"].is_null() && end > 1_000_000, "{report:#}");
        // The guest ran some 12,000 further instructions until QEMU ended. No replay runs them,
        // because not every replay could. A tool sees all instructions before the last event of
        // the log. An instruction that an exception interrupts is counted twice.
        let analysis = env.json(&["analyze", "R", "--tool", "icount", "--out", "A", "--json"]);
        let end = number(&analysis, "instructions");
        assert!(
            (number(only, "end") - 10..number(only, "end")).contains(&end),
            "{analysis:#} of {report:#}"
        );
        let table = std::fs::read_to_string(env.path().join("A/icount.csv")).expect("its table");
        let ran: u64 = table
            .lines()
            .last()
            .and_then(|row| row.split(',').nth(2)?.parse().ok())
            .expect("a count");
        assert!((end..end + 6000).contains(&ran), "{ran} of {end} instructions");

        // The engine is killed, then QEMU: the log has no header and no end.
        std::fs::rename(env.path().join("R"), env.path().join("R1")).expect("put it aside");
        let mut vm = record(
            &env,
            &["--checkpoint-every", "500ms"],
            &recordable_guest(&qemu.path, "compute"),
        );
        vm.wait_for("compute t=");
        let started = qemu_children(vm.pid());
        vm.signal(Signal::KILL);
        vm.wait();
        env.refused(&["verify", "R"], 1, &["still being recorded", "fix:"]);
        for pid in started {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        // A killed QEMU's files are closed a moment later.
        let segment = ["segment", "R", "--every-instructions", "999999999999"];
        wait_until("the recording is closed", || env.run(&segment).status.success());
        let report = verified(&env);
        assert!(
            intervals(&report).iter().filter(|one| !one["compared_with"].is_null()).count() >= 2,
            "{report:#}"
        );
    }
}

/// With `isa-debug-exit` QEMU ends within an instruction of the guest, in the recording and in each
/// replay.
#[test]
fn a_recording_ends_before_the_instruction_that_ended_qemu() {
    // mov ecx, 0x2000000; again: mov [0x8000], ecx; dec ecx; jnz again; mov al, 16; out 0xf4, al
    const COUNTS_AND_ENDS: &[u8] =
        b"\x66\xb9\0\0\0\x02\x66\x89\x0e\0\x80\x66\x49\x75\xf7\xb0\x10\xe6\xf4";
    for qemu in chosen_qemus(0) {
        let env = TestEnv::without_store();
        let mut image = COUNTS_AND_ENDS.to_vec();
        image.resize(1 << 20, 0);
        image[510..512].copy_from_slice(&[0x55, 0xaa]);
        std::fs::write(env.path().join("boot.img"), image).expect("write an image");
        let mut command =
            env.command(&["record", "--out", "R", "--checkpoint-every", "200ms", "--"]);
        command.args([&qemu.path, "-machine", "pc", "-m", "16M", "-nodefaults", "-no-user-config"]);
        command.args(["-display", "none", "-device", "isa-debug-exit,iobase=0xf4,iosize=1"]);
        command.args(["-drive", "file=boot.img,format=raw,readonly=on,if=virtio"]);
        let mut vm = Process::start(command);
        assert_eq!(vm.wait().code(), Some(1), "{}", vm.report());
        assert!(vm.errors().contains("QEMU ended with exit status: 33"), "{}", vm.report());
        let report = verified(&env);
        assert!(number(&report, "instructions") > 3 << 25, "{report:#}");
        let found = env.json(&[
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

#[test]
fn a_recording_finds_its_qemu_where_it_is_now() {
    let mut env = TestEnv::without_store();
    let own = env.path().join("one/qemu-system-x86_64");
    let (moved, path) = (env.path().join("two"), std::env::var("PATH").expect("PATH"));
    let program = format!("#!/bin/sh\nexec {} \"$@\"\n", on_path("qemu-system-x86_64").display());
    std::fs::create_dir(env.path().join("one")).expect("a directory");
    std::fs::write(&own, program).expect("write QEMU");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&own, mode).expect("make it a program");
    let boot = recordable_guest(&own.display().to_string(), "compute");
    let mut vm = record(&env, &["--checkpoint-every", "300ms"], &boot);
    end_after(&env, &mut vm, 3);
    std::fs::rename(env.path().join("one"), &moved).expect("move QEMU");
    // The programs that a replay runs besides QEMU are Keyframe's own.
    env.set("PATH", "/nowhere");
    let verify = ["verify", "R", "--jobs", "1"];
    env.refused(&verify, 1, &["no such program", "install QEMU", "--qemu PATH"]);
    let analyze = ["analyze", "R", "--tool", "icount", "--jobs", "1", "--out"];
    let program = moved.join("qemu-system-x86_64").display().to_string();
    env.ok(&["verify", "R", "--qemu", &program]);
    let said = env.ok(&["verify", "R", "--qemu", &program, "--interval", "1"]);
    assert!(said.starts_with("the interval replays exactly"), "{said}");
    let other = ["verify", "R", "--qemu", &program, "--interval", "1", "--interval", "99"];
    env.refused(&other, 1, &["no interval 99", "name one of 0 to"]);
    env.ok(&[&analyze[..], &["A", "--qemu", &program]].concat());
    env.set("PATH", &moved.display().to_string());
    verified(&env);
    env.ok(&[&analyze[..], &["B"]].concat());
    // Another binary of the same release does, too.
    env.set("PATH", &path);
    std::fs::remove_dir_all(moved).expect("remove QEMU");
    verified(&env);
}

#[test]
fn what_cannot_be_recorded_or_replayed_is_refused() {
    let env = TestEnv::without_store();
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
        env.refused(&line, 1, words);
        assert!(!env.path().join("R").exists(), "{extra:?} left something");
    }
    // The options that a script adds are not in the command line.
    let script = env.path().join("vm.sh");
    std::fs::write(
        &script,
        "#!/bin/sh\nexec qemu-system-x86_64 -nodefaults -m 64 -display none \"$@\"\n",
    )
    .expect("write a script");
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("make it one");
    let words = ["vm.sh adds -nodefaults", "give the QEMU command line of the script"];
    env.refused(
        &["record", "--out", "R", "--quiet", "--", &script.display().to_string()],
        1,
        &words,
    );
    assert!(!env.path().join("R").exists(), "something is left");
    env.refused(&["verify", "R"], 1, &["no recording", "keyframe record"]);
    env.refused(&["analyze", "R", "--tool", "nope", "--out", "A"], 1, &["nope", "icount"]);
    assert!(!Path::new("A").exists());
    let tools = env.ok(&["analyze", "--list-tools"]);
    assert!(
        ["icount", "memtrace", "hot", "syscalls", "cache"].iter().all(|tool| tools.contains(tool)),
        "{tools}"
    );
}
