//! Tests wrong input and failing environments: each gets an error that names the fix and the right
//! exit code, and loses no data.

use keyframe_tests::{Boot, ExternalVm, TestEnv, chosen_qemus, small_guest};
use std::process::Command;

/// Asserts that `keyframe run` of `boot` fails with `code` and an error that contains each of
/// `words`.
fn run_refused(env: &TestEnv, boot: &Boot, code: i32, words: &[&str]) {
    let store = env.store();
    let line = boot.command();
    let mut args = vec!["run", "--store", &store, "--count", "1", "--"];
    args.extend(line.iter().map(String::as_str));
    env.refused(&args, code, words);
}

fn small() -> Boot {
    let mut boot = Boot::new("idle");
    boot.mem_mib = 96;
    boot
}

#[test]
fn a_missing_store_is_named_with_the_way_to_make_it() {
    let env = TestEnv::without_store();
    let store = env.store();
    env.refused(&["list", "--store", &store], 10, &[&store, "keyframe init"]);
    run_refused(&env, &small(), 10, &["keyframe init"]);
    env.refused(&["list"], 2, &["--store"]);
}

#[test]
fn a_second_vm_of_the_same_name_is_refused_and_readers_are_not() {
    let env = TestEnv::new();
    let mut first = env.start(&["--interval", "300ms", "--name", "first"], &small());
    first.wait_for("KF READY");
    let store = env.store();
    let line = small().command();
    let mut args = vec!["run", "--store", &store, "--name", "first", "--"];
    args.extend(line.iter().map(String::as_str));
    env.refused(&args, 1, &["first", "--name"]);
    assert!(!env.list().is_empty());
    env.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    env.ok(&["stop"]);
    assert!(first.wait().success(), "{}", first.report());
}

#[test]
fn disks_that_cannot_be_served_are_refused_before_the_guest_runs() {
    let env = TestEnv::new();
    let image = env.path().join("disk.raw");
    std::fs::write(&image, vec![7; 1 << 20]).unwrap();
    let drive =
        |options: &str| small().with(&["-drive", &format!("file={},{options}", image.display())]);
    run_refused(
        &env,
        &drive("format=vmdk,if=virtio"),
        1,
        &["vmdk", "qemu-img convert", "readonly=on", "fix:"],
    );
    run_refused(&env, &drive("format=qcow2,if=virtio"), 1, &["disk.raw", "qcow2"]);
    let remote = small().with(&["-drive", "file=nbd://127.0.0.1:1/x,format=raw,if=virtio"]);
    run_refused(&env, &remote, 1, &["nbd", "fix:"]);
    // The scan for disks does not know this way of giving one; the audit finds it.
    let floppy = small().with(&["-fda", &image.display().to_string()]);
    run_refused(&env, &floppy, 1, &["disk.raw", "-drive", "fix:"]);
    let gone = small().with(&["-drive", "file=/nonexistent.img,format=raw,if=virtio"]);
    run_refused(&env, &gone, 1, &["/nonexistent.img"]);
    assert_eq!(std::fs::read(&image).unwrap(), vec![7; 1 << 20], "the image was written to");
    assert!(env.list().is_empty());
    let left = std::fs::read_dir(env.path().join("store/disks")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "a run that was refused leaves nothing");
}

#[test]
fn command_lines_that_cannot_be_checkpointed_are_refused() {
    let env = TestEnv::new();
    run_refused(&env, &small().with(&["-incoming", "defer"]), 1, &["-incoming", "fix:"]);
    run_refused(&env, &small().with(&["-daemonize"]), 1, &["-daemonize", "fix:"]);
    let balloon = Boot { machine: "pc,memory-backend=m".into(), ..small() }.with(&[
        "-object",
        "memory-backend-memfd,id=m,size=96M,share=on",
        "-device",
        "virtio-balloon-pci",
    ]);
    run_refused(&env, &balloon, 1, &["balloon", "fix:"]);
    let other = Boot { qemu: "/nonexistent/qemu".into(), ..small() };
    run_refused(&env, &other, 1, &["/nonexistent/qemu"]);
    let not_qemu = Boot { qemu: "/bin/true".into(), ..small() };
    run_refused(&env, &not_qemu, 1, &["/bin/true", "QEMU"]);
    run_refused(&env, &small().with(&["-device", "no-such-device"]), 1, &["QEMU"]);
    assert!(env.list().is_empty());
}

#[test]
fn wrong_usage_is_exit_code_2() {
    let env = TestEnv::new();
    let store = env.store();
    env.refused(&["run", "--store", &store], 2, &["VMM COMMAND"]);
    env.refused(&["run", "--store", &store, "--interval", "0s", "--", "qemu"], 2, &["interval"]);
    env.refused(&["run", "--store", &store, "--count", "0", "--", "qemu"], 2, &["count"]);
    env.refused(&["frobnicate"], 2, &["frobnicate"]);
}

#[test]
fn nothing_running_is_said() {
    let env = TestEnv::new();
    assert_eq!(env.json(&["status", "--json"]).as_array().map(Vec::len), Some(0));
    env.refused(&["take"], 1, &["no VM runs", "keyframe run"]);
    env.refused(&["stop", "--name", "web"], 1, &["web"]);
}

/// A store with two checkpoints of a small VM.
fn stored() -> TestEnv {
    let env = TestEnv::new();
    let mut run = env.start(&["--interval", "500ms", "--count", "2", "--name", "guest"], &small());
    assert!(run.wait().success(), "{}", run.report());
    env
}

#[test]
fn restores_that_cannot_be_right_are_refused() {
    let env = stored();
    let store = env.store();
    env.refused(&["restore", "--store", &store, "99"], 1, &["99", "keyframe list"]);
    env.refused(
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
        env.refused(&args, 1, &[extra[0], "fix:"]);
    }
    env.refused(
        &["restore", "--store", &store, "latest", "--qemu", "/bin/true"],
        1,
        &["/bin/true"],
    );
}

#[test]
fn a_checkpoint_keeps_the_users_own_line() {
    let env = stored();
    let store = env.store();
    let shown = env.json(&["show", "--json", "--store", &store, "latest"]);
    let command: Vec<&str> = shown["machine"]["user_command"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|a| a.as_str())
        .collect();
    assert!(command.contains(&"96M"), "the kept line is the user's own: {command:?}");
}

/// Flips bytes in the middle half of each pack. A second call restores them.
fn flip(store: &str) {
    for pack in std::fs::read_dir(format!("{store}/packs")).unwrap() {
        let path = pack.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        let part = bytes.len() / 48;
        // That many, because no checkpoint refers to pages that were superseded before the seal.
        for step in 12..36 {
            bytes[part * step] ^= 4;
        }
        std::fs::write(&path, &bytes).unwrap();
    }
}

#[test]
fn a_damaged_store_names_what_is_hurt_and_still_gives_the_rest() {
    let env = stored();
    let store = env.store();
    flip(&store);
    let output = env.run(&["check", "--read-data", "--json", "--quiet", "--store", &store]);
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
            env.refused(
                &["restore", "--store", &store, &id, "--paused"],
                1,
                &["damaged", "check --read-data"],
            );
        }
    }
    flip(&store);
    env.ok(&["check", "--read-data", "--quiet", "--store", &store]);

    // One checkpoint's own file: the others are still listed.
    let mut files: Vec<_> = std::fs::read_dir(format!("{store}/checkpoints"))
        .unwrap()
        .map(|f| f.unwrap().path())
        .collect();
    files.sort();
    let all = env.list().len();
    std::fs::write(&files[0], b"KEYFRAME no more").unwrap();
    for command in ["list", "stats"] {
        env.refused(
            &[command, "--store", &store],
            3,
            &["checkpoint 1 is left out", "keyframe check"],
        );
    }
    let output = env.run(&["list", "--json", "--store", &store]);
    let listed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), listed.as_array().unwrap().len()), (Some(3), all - 1));
    env.refused(&["restore", "--store", &store, "1", "--paused"], 1, &["damaged"]);
}

#[test]
fn a_store_of_a_later_version_is_left_alone() {
    let env = TestEnv::new();
    let store = env.store();
    let config = format!("{store}/store.json");
    let text =
        std::fs::read_to_string(&config).unwrap().replace("\"version\": 1", "\"version\": 99");
    // The store is not damaged: the writer sealed it with its checksum.
    let covered = &text[..text.rfind("\"checksum\"").unwrap()].trim_end_matches(' ');
    let checksum = blake3::hash(covered.as_bytes()).to_hex();
    std::fs::write(&config, format!("{covered}  \"checksum\": \"{checksum}\"\n}}\n")).unwrap();
    env.refused(&["list", "--store", &store], 1, &["99", "later"]);
    run_refused(&env, &small(), 1, &["99", "later"]);
}

#[test]
fn a_user_without_the_right_to_trace_is_told_what_is_missing() {
    let env = TestEnv::new();
    let guest = small_guest();
    // A user without capabilities: doctor and run name what is missing.
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
    drop(env);
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

#[test]
fn devices_with_which_qemu_dies_at_a_save_are_refused_and_the_vm_is_left_alone() {
    let serial = ["-chardev", "null,id=c1", "-chardev", "null,id=c2", "-device"];
    let serial = [&serial[..], &["pci-serial-2x,chardev1=c1,chardev2=c2,id=ser0"]].concat();
    let bridge = vec!["-device", "vmbus-bridge"];
    for qemu in chosen_qemus(0) {
        for (words, kind) in [(&serial, "pci-serial-2x"), (&bridge, "vmbus-bridge")] {
            let env = TestEnv::new();
            let mut boot = small().with(words);
            boot.qemu.clone_from(&qemu.path);
            run_refused(&env, &boot, 1, &[kind, "QEMU ends when it saves", "fix:"]);
            let mut vm = ExternalVm::start(&env, &boot);
            vm.console.wait_for("KF READY");
            let monitor = vm.socket("a");
            let args = env.attach_args(&["--qmp", &monitor], vm.console.pid(), &[]);
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            env.refused(&args, 1, &[kind, "QEMU ends when it saves", "fix:"]);
            assert!(vm.is_running(), "QEMU {}: {kind}", qemu.label);
            assert!(env.list().is_empty());
        }
    }
}
