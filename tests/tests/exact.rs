//! Tests exactness: RAM that was copied in the pause equals the checkpoint in the store and the RAM
//! of the restored VM, page by page, for each kind of memory and with devices that write to it.

use keyframe_tests::{
    Boot, HugePages, Process, TestEnv, assert_no_errors, assert_restores_exactly, echo, number,
    small_guest, variants,
};
use serde_json::Value;

/// Takes audited checkpoints of a booted guest under load, restores some of them paused, and
/// compares their RAM with the audit's copy.
fn exact(boot: &Boot, ready: &str, healthy: impl Fn(&Process)) {
    let env = TestEnv::new();
    let mut run = env.start(&["--interval", "600ms", "--name", "guest", "--audit", "audit"], boot);
    run.wait_for(ready);
    let mark = env.list().len();
    let taken = run.wait_until(|_| (env.list().len() >= mark + 4).then_some(()));
    assert!(taken.is_some(), "{}", run.report());
    env.ok(&["stop"]);
    let exit = run.wait();
    // The audit compares each checkpoint with its copy, and fails the run if one differs.
    assert!(exit.success(), "{exit}: {}", run.report());
    healthy(&run);

    let list = env.list();
    // The audit keeps the newest eight copies; at least four are of the guest under load.
    for back in [1, 4] {
        let id = number(&list[list.len() - back], "id").to_string();
        assert_restores_exactly(&env, &id);
    }
    let id = number(&list[list.len() - 3], "id").to_string();
    let mut restored = env.restore(&id, &[]);
    let lines = restored.wait_until(|p| (p.lines().len() >= 4).then_some(()));
    assert!(lines.is_some(), "the restored guest is silent; {}", restored.report());
    healthy(&restored);
}

fn backed_by(objects: &[&str]) -> Boot {
    let mut boot = Boot::new("scribble kf.mib=24 kf.cpus=2");
    boot.cpus = 2;
    if !objects.is_empty() {
        boot.machine = "pc,memory-backend=mem".into();
    }
    boot.with(objects)
}

#[test]
fn anonymous_ram() {
    for (cpus, machine) in variants([(1, "pc"), (4, "q35")], 1) {
        let mut boot = backed_by(&[]);
        boot.append = format!("kf.work=scribble kf.mib=24 kf.cpus={cpus}");
        boot.cpus = cpus;
        boot.machine = machine.into();
        exact(&boot, "KF READY", assert_no_errors);
    }
}

#[test]
fn shared_memfd_ram() {
    exact(
        &backed_by(&["-object", "memory-backend-memfd,id=mem,size=128M,share=on"]),
        "KF READY",
        assert_no_errors,
    );
}

#[test]
fn file_ram() {
    for share in variants(["on", "off"], 1) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ram");
        let object = format!(
            "memory-backend-file,id=mem,size=128M,share={share},mem-path={}",
            path.display()
        );
        exact(&backed_by(&["-object", &object]), "KF READY", assert_no_errors);
    }
}

#[test]
fn hugetlb_ram() {
    let Some(_pages) = HugePages::reserve(64) else { return };
    let object = "memory-backend-memfd,id=mem,size=128M,share=on,hugetlb=on,hugetlbsize=2M";
    exact(&backed_by(&["-object", object]), "KF READY", assert_no_errors);
}

#[test]
fn a_disk_that_writes_to_ram_by_dma() {
    let drive = format!(
        "file={},if=virtio,format=raw,readonly=on",
        small_guest().join("disk.raw").display()
    );
    exact(&Boot::new("disk").with(&["-drive", &drive]), "KF READY", |vm| {
        assert_no_errors(vm);
        assert!(
            vm.lines().iter().any(|l| l.contains("reads=")),
            "the disk was not read; {}",
            vm.report()
        );
    });
}

#[test]
fn a_network_card_under_load() {
    let port = echo();
    let boot = Boot::new(&format!("net kf.net=10.0.2.2:{port}")).with(&[
        "-netdev",
        "user,id=n0",
        "-device",
        "virtio-net-pci,netdev=n0,romfile=",
    ]);
    exact(&boot, "KF READY", |vm| {
        assert_no_errors(vm);
        assert!(
            vm.lines().iter().any(|l| l.contains("blocks=")),
            "nothing was sent; {}",
            vm.report()
        );
    });
}

#[test]
fn a_guest_that_dirties_faster_than_staging_holds() {
    let env = TestEnv::new();
    let mut boot = Boot::new("dirty kf.rate=40000 kf.mib=150");
    boot.mem_mib = 256;
    let mut run = env.start(
        &[
            "--interval",
            "300ms",
            "--staging",
            "64",
            "--name",
            "guest",
            "--audit",
            "audit",
            "--strategy",
            "precopy",
        ],
        &boot,
    );
    run.wait_for("KF READY");
    let mark = env.list().len();
    let taken = run.wait_until(|_| (env.list().len() >= mark + 2).then_some(()));
    assert!(taken.is_some(), "{}", run.report());
    env.ok(&["stop"]);
    assert!(run.wait().code().is_some_and(|c| c == 0 || c == 3), "{}", run.report());
    assert!(!run.errors().contains("AUDIT"), "{}", run.report());
    let rounds: Vec<Value> = env.list();
    assert!(
        rounds.iter().any(|e| number(e, "dirty_pages") > 4000),
        "the guest hardly wrote: {rounds:?}"
    );
}

#[test]
fn stop_and_copy_is_exact_too() {
    let env = TestEnv::new();
    let boot = Boot::new("scribble kf.mib=32");
    let options =
        ["--interval", "600ms", "--strategy", "stop-copy", "--name", "guest", "--audit", "audit"];
    let mut run = env.start(&options, &boot);
    run.wait_for("KF READY");
    let mark = env.list().len();
    let taken = run.wait_until(|_| (env.list().len() >= mark + 4).then_some(()));
    assert!(taken.is_some(), "{}", run.report());
    env.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    let list = env.list();
    // If a set of pages exceeds the engine's memory for pages, each strategy copies some of them
    // before the pause.
    let stopped = list.iter().filter(|e| number(e, "precopy_rounds") == 0).count();
    assert!(stopped > list.len() / 2, "{list:?}");
    assert_restores_exactly(&env, &number(&list[list.len() - 3], "id").to_string());
}
