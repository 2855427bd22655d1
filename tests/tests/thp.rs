//! Tests transparent huge pages: each strategy takes exact checkpoints of a guest whose RAM the
//! kernel has put into 2 MiB pages. The VM runs before it is attached to: RAM that is tracked from
//! its first write on gets no huge pages.

use keyframe_tests::{
    Boot, ExternalVm, TestEnv, assert_no_errors, assert_restores_exactly, skip, variants,
};

const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const SHARED_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
/// The least number of huge pages that makes the test meaningful.
const HUGE_KIB_MIN: u64 = 16 * 1024;

/// The chosen word of a file like `always [madvise] never`; `never` if there is no such file.
fn chosen(file: &str) -> String {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let word = text.split_once('[').and_then(|(_, rest)| Some(rest.split_once(']')?.0.to_owned()));
    word.unwrap_or_else(|| "never".into())
}

/// KiB of process `pid` that are mapped as huge pages, by `key` of its memory map.
fn huge_kib(pid: u32, key: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))
        .expect("read QEMU's memory map");
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix(key))
        .unwrap_or_else(|| panic!("no {key} in {text}"));
    line.trim().trim_end_matches(" kB").parse().expect("a number of kB")
}

/// Takes four audited checkpoints of a `machine` in huge pages by `strategy`; restores one of them
/// and compares it.
fn exact(machine: &str, extra: &[&str], key: &str, strategy: &str) {
    let env = TestEnv::new();
    let mut boot = Boot::new("scribble kf.mib=48 kf.cpus=2").with(extra);
    (boot.machine, boot.mem_mib, boot.cpus) = (machine.into(), 128, 2);
    let mut vm = ExternalVm::start(&env, &boot);
    vm.console.wait_for("KF READY");
    let before = huge_kib(vm.console.pid(), key);
    println!("-- {strategy}: {before} KiB in huge pages");
    assert!(before >= HUGE_KIB_MIN, "{before} KiB of huge pages; {}", vm.console.report());
    let options = [
        "--strategy",
        strategy,
        "--count",
        "4",
        "--interval",
        "300ms",
        "--audit",
        "audit",
        // On a busy machine the guest writes much between the last look and the pause.
        "--staging",
        "512",
        "--name",
        "guest",
    ];
    let args = env.attach_args(&["--qmp", &vm.socket("a")], vm.console.pid(), &options);
    // The audit fails the run if a checkpoint differs from the copy made in its pause.
    env.ok(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let list = env.list();
    assert!(list.len() == 4 && list[1..].iter().all(|e| e["strategy"] == strategy), "{list:?}");
    assert!(vm.is_running(), "it was left paused");
    assert_no_errors(&vm.console);
    drop(vm);
    assert_restores_exactly(&env, "3");
}

#[test]
fn private_memory_in_huge_pages_is_exact_by_each_strategy() {
    if chosen(ENABLED) == "never" {
        skip!("{ENABLED} is `never`, which no process can override");
    }
    for strategy in variants(["precopy", "pre-scan", "stop-copy", "cow", "fork"], 1) {
        exact("pc", &[], "AnonHugePages:", strategy);
    }
}

#[test]
fn shared_memory_in_huge_pages_is_exact() {
    if ["never", "deny"].contains(&chosen(SHARED_ENABLED).as_str()) {
        skip!("{SHARED_ENABLED} forbids huge pages of shared memory");
    }
    let object = "memory-backend-memfd,id=mem,size=128M,share=on";
    for strategy in variants(["precopy", "cow"], 1) {
        exact("pc,memory-backend=mem", &["-object", object], "ShmemPmdMapped:", strategy);
    }
}
