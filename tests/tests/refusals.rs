//! Bad input and bad luck: each gets a clear error that names the fix, the right exit code, and
//! loses nothing.

use keyframe_tests::{Bench, Boot, NO_QEMU_10, Scope, qemu_10, record_skip, small_guest};
use std::process::Command;

/// `keyframe run` of `boot` must be refused with `code` and say every one of `words`.
fn run_refused(bench: &Bench, boot: &Boot, code: i32, words: &[&str]) {
    let store = bench.store();
    let line = boot.command();
    let mut args = vec!["run", "--store", &store, "--count", "1", "--"];
    args.extend(line.iter().map(String::as_str));
    bench.refused(&args, code, words);
}

fn small() -> Boot {
    let mut boot = Boot::new("idle");
    boot.mem_mib = 96;
    boot
}

#[test]
fn a_missing_store_is_named_with_the_way_to_make_it() {
    let bench = Bench::without_store();
    let store = bench.store();
    bench.refused(&["list", "--store", &store], 10, &[&store, "keyframe init"]);
    run_refused(&bench, &small(), 10, &["keyframe init"]);
    bench.refused(&["list"], 2, &["--store"]);
}

#[test]
fn a_second_writer_is_refused_and_readers_are_not() {
    let bench = Bench::new();
    let mut first = bench.start(&["--interval", "300ms", "--name", "first"], &small());
    first.wait_for("KF READY");
    let store = bench.store();
    let line = small().command();
    let mut args = vec!["run", "--store", &store, "--name", "second", "--"];
    args.extend(line.iter().map(String::as_str));
    bench.refused(&args, 11, &["lock", "first", "fix:"]);
    args[4] = "first";
    bench.refused(&args, 1, &["first", "--name"]);
    assert!(!bench.list().is_empty());
    bench.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    bench.ok(&["stop"]);
    assert!(first.wait().success(), "{}", first.report());
}

#[test]
fn disks_that_cannot_be_served_are_refused_before_the_guest_runs() {
    let bench = Bench::new();
    let image = bench.path().join("disk.raw");
    std::fs::write(&image, vec![7; 1 << 20]).unwrap();
    let drive =
        |options: &str| small().with(&["-drive", &format!("file={},{options}", image.display())]);
    run_refused(
        &bench,
        &drive("format=vmdk,if=virtio"),
        1,
        &["vmdk", "qemu-img convert", "readonly=on", "fix:"],
    );
    run_refused(&bench, &drive("format=raw,if=virtio,offset=512"), 1, &["offset", "fix:"]);
    run_refused(&bench, &drive("format=qcow2,if=virtio"), 1, &["disk.raw", "qcow2"]);
    run_refused(
        &bench,
        &drive("format=raw,if=virtio,readonly=on,cache=none"),
        1,
        &["direct", "cache"],
    );
    let remote = small().with(&["-drive", "file=nbd://127.0.0.1:1/x,format=raw,if=virtio"]);
    run_refused(&bench, &remote, 1, &["nbd", "fix:"]);
    // Not a way in which disks are looked for: the audit finds it.
    let floppy = small().with(&["-fda", &image.display().to_string()]);
    run_refused(&bench, &floppy, 1, &["disk.raw", "-drive", "fix:"]);
    let gone = small().with(&["-drive", "file=/nonexistent.img,format=raw,if=virtio"]);
    run_refused(&bench, &gone, 1, &["/nonexistent.img"]);
    assert_eq!(std::fs::read(&image).unwrap(), vec![7; 1 << 20], "the image was written to");
    assert!(bench.list().is_empty());
    let left = std::fs::read_dir(bench.path().join("store/disks")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "a run that was refused leaves nothing");
}

#[test]
fn command_lines_that_cannot_be_checkpointed_are_refused() {
    let bench = Bench::new();
    run_refused(&bench, &small().with(&["-incoming", "defer"]), 1, &["-incoming", "fix:"]);
    run_refused(&bench, &small().with(&["-daemonize"]), 1, &["-daemonize", "fix:"]);
    let balloon = Boot { machine: "pc,memory-backend=m".into(), ..small() }.with(&[
        "-object",
        "memory-backend-memfd,id=m,size=96M,share=on",
        "-device",
        "virtio-balloon-pci",
    ]);
    run_refused(&bench, &balloon, 1, &["balloon", "fix:"]);
    let other = Boot { qemu: "/nonexistent/qemu".into(), ..small() };
    run_refused(&bench, &other, 1, &["/nonexistent/qemu"]);
    let not_qemu = Boot { qemu: "/bin/true".into(), ..small() };
    run_refused(&bench, &not_qemu, 1, &["/bin/true", "QEMU"]);
    run_refused(&bench, &small().with(&["-device", "no-such-device"]), 1, &["QEMU"]);
    assert!(bench.list().is_empty());
}

#[test]
fn wrong_usage_is_exit_code_2() {
    let bench = Bench::new();
    let store = bench.store();
    bench.refused(&["run", "--store", &store], 2, &["QEMU COMMAND"]);
    bench.refused(&["run", "--store", &store, "--interval", "0s", "--", "qemu"], 2, &["interval"]);
    bench.refused(&["run", "--store", &store, "--count", "0", "--", "qemu"], 2, &["count"]);
    bench.refused(&["frobnicate"], 2, &["frobnicate"]);
}

#[test]
fn nothing_running_is_said() {
    let bench = Bench::new();
    assert_eq!(bench.json(&["status", "--json"]).as_array().map(Vec::len), Some(0));
    bench.refused(&["take"], 1, &["no VM runs", "keyframe run"]);
    bench.refused(&["stop", "--name", "web"], 1, &["web"]);
}

/// A store with two checkpoints of a small VM.
fn stored() -> Bench {
    let bench = Bench::new();
    let mut run =
        bench.start(&["--interval", "500ms", "--count", "2", "--name", "guest"], &small());
    assert!(run.wait().success(), "{}", run.report());
    bench
}

#[test]
fn restores_that_cannot_be_right_are_refused() {
    let bench = stored();
    let store = bench.store();
    bench.refused(&["restore", "--store", &store, "99"], 1, &["99", "keyframe list"]);
    bench.refused(
        &["restore", "--store", &store, "no-such-tag"],
        1,
        &["no-such-tag", "keyframe list"],
    );
    for extra in [
        ["-machine", "q35"],
        ["-m", "1G"],
        ["-smp", "2"],
        ["-device", "virtio-rng-pci"],
        ["-cpu", "max"],
    ] {
        let mut args = vec!["restore", "--store", &store, "latest", "--"];
        args.extend(extra);
        bench.refused(&args, 1, &[extra[0], "fix:"]);
    }
    bench.refused(
        &["restore", "--store", &store, "latest", "--qemu", "/bin/true"],
        1,
        &["/bin/true"],
    );
    let Some(ten) = qemu_10() else {
        record_skip(Scope::Part, NO_QEMU_10);
        return;
    };
    bench.refused(
        &["restore", "--store", &store, "latest", "--qemu", &ten.path],
        1,
        &["7.2", "10.0", "fix:"],
    );
}

#[test]
fn a_checkpoint_keeps_the_users_own_line() {
    let bench = stored();
    let store = bench.store();
    let shown = bench.json(&["show", "--json", "--store", &store, "latest"]);
    let command: Vec<&str> = shown["machine"]["user_command"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|a| a.as_str())
        .collect();
    assert!(command.contains(&"96M"), "the kept line is the user's own: {command:?}");
}

/// Flips bytes in the middle half of each pack; done again, they are whole again.
fn flip(store: &str) {
    for pack in std::fs::read_dir(format!("{store}/packs")).unwrap() {
        let path = pack.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        let part = bytes.len() / 48;
        // So many, as pages that were written again before the seal are in no checkpoint.
        for step in 12..36 {
            bytes[part * step] ^= 4;
        }
        std::fs::write(&path, &bytes).unwrap();
    }
}

#[test]
fn a_damaged_store_names_what_is_hurt_and_still_gives_the_rest() {
    let bench = stored();
    let store = bench.store();
    flip(&store);
    let output = bench.run(&["check", "--read-data", "--json", "--quiet", "--store", &store]);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stdout));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let damage = report["damages"].as_array().unwrap();
    assert!(!damage.is_empty(), "{report}");
    let hurt: Vec<u64> = damage
        .iter()
        .flat_map(|d| d["checkpoints"].as_array().unwrap())
        .filter_map(serde_json::Value::as_u64)
        .collect();
    assert!(!hurt.is_empty(), "{report}");
    for id in [1, 2u64].map(|id| id.to_string()) {
        if hurt.contains(&id.parse().unwrap()) {
            bench.refused(
                &["restore", "--store", &store, &id, "--paused"],
                1,
                &["damaged", "check --read-data"],
            );
        }
    }
    flip(&store);
    bench.ok(&["check", "--read-data", "--quiet", "--store", &store]);

    // One checkpoint's own file: the others are still listed.
    let mut files: Vec<_> = std::fs::read_dir(format!("{store}/checkpoints"))
        .unwrap()
        .map(|f| f.unwrap().path())
        .collect();
    files.sort();
    let all = bench.list().len();
    std::fs::write(&files[0], b"KEYFRAME no more").unwrap();
    for command in ["list", "stats"] {
        bench.refused(
            &[command, "--store", &store],
            3,
            &["checkpoint 1 is left out", "keyframe check"],
        );
    }
    let output = bench.run(&["list", "--json", "--store", &store]);
    let listed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), listed.as_array().unwrap().len()), (Some(3), all - 1));
    bench.refused(&["restore", "--store", &store, "1", "--paused"], 1, &["damaged"]);
}

#[test]
fn a_store_of_a_later_version_is_left_alone() {
    let bench = Bench::new();
    let store = bench.store();
    let config = format!("{store}/store.json");
    let text =
        std::fs::read_to_string(&config).unwrap().replace("\"version\": 1", "\"version\": 99");
    // Not damaged: whoever wrote it sealed it with its checksum.
    let covered = &text[..text.rfind("\"checksum\"").unwrap()].trim_end_matches(' ');
    let checksum = blake3::hash(covered.as_bytes()).to_hex();
    std::fs::write(&config, format!("{covered}  \"checksum\": \"{checksum}\"\n}}\n")).unwrap();
    bench.refused(&["list", "--store", &store], 1, &["99", "later"]);
    run_refused(&bench, &small(), 1, &["99", "later"]);
}

#[test]
fn a_user_without_the_right_to_trace_is_told_what_is_missing() {
    let bench = Bench::new();
    let guest = small_guest();
    // Somebody without capabilities: what doctor and run say must name what is missing.
    let dir = tempfile::tempdir().unwrap();
    let open = Command::new("chmod").args(["a+rx"]).arg(dir.path()).status().unwrap();
    assert!(open.success() && guest.exists());
    let binary = dir.path().join("keyframe");
    std::fs::copy(keyframe_tests::keyframe(), &binary).unwrap();
    let output = Command::new("setpriv")
        .args([
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--inh-caps=-all",
            "--bounding-set=-all",
        ])
        .arg(&binary)
        .args(["doctor", "--json"])
        .env("XDG_RUNTIME_DIR", dir.path())
        .output()
        .unwrap();
    drop(bench);
    let text = String::from_utf8_lossy(&output.stdout);
    let report: serde_json::Value = serde_json::from_str(&text)
        .unwrap_or_else(|e| panic!("{e}: {text}{}", String::from_utf8_lossy(&output.stderr)));
    for item in report["items"].as_array().unwrap() {
        if item["available"] == false && item["required"] == true {
            assert!(item["fix"].as_str().is_some_and(|f| !f.is_empty()), "no fix for {item}");
        }
    }
    let all = report["items"]
        .as_array()
        .unwrap()
        .iter()
        .all(|i| i["available"] == true || i["required"] == false);
    assert_eq!(report["ready"] == true, all);
    assert_eq!(output.status.success(), all);
}
