//! Tests what a restored VM does to the host: it destroys no file of the first VM, takes over none
//! of its sockets, and notices files that have changed.

use keyframe_tests::{Boot, TestEnv, chosen_qemus};
use rustix::net::sockopt::socket_peercred;
use std::os::unix::net::UnixStream;
use std::path::Path;

fn hashing(qemu: &str) -> Boot {
    let mut boot = Boot::new("hash");
    qemu.clone_into(&mut boot.qemu);
    boot.mem_mib = 96;
    boot
}

/// The process that listens at `socket`.
fn listener(socket: &Path) -> i32 {
    let connection = UnixStream::connect(socket).unwrap();
    socket_peercred(connection).unwrap().pid.as_raw_nonzero().get()
}

#[test]
fn a_restored_vm_takes_nothing_from_the_vm_that_runs() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let at = |name: &str| env.path().join(name).display().to_string();
        let (con, log, pcap, socket) = (at("con"), at("q.log"), at("net.pcap"), at("monitor"));
        let mut boot = hashing(&qemu.path).with(&[
            "-D",
            &log,
            "-d",
            "cpu_reset",
            "-netdev",
            "user,id=n",
            "-device",
            "e1000,netdev=n",
            "-object",
            &format!("filter-dump,id=f,netdev=n,file={pcap}"),
            "-qmp",
            &format!("unix:{socket},server=on,wait=off"),
        ]);
        boot.serial = format!("file:{con}");
        let mut run = env.start(&["--interval", "300ms", "--name", "first"], &boot);
        keyframe_tests::wait_until("a checkpoint", || !env.list().is_empty());
        let owner = listener(Path::new(&socket));
        let files = [&con, &log, &pcap];
        let before: Vec<_> = files.iter().map(|path| std::fs::read(path).unwrap()).collect();
        let mut restored = env.restore("latest", &["--paused"]);
        restored.wait_for_error("is paused");
        assert_eq!(listener(Path::new(&socket)), owner, "{}", restored.report());
        assert!(Path::new(&format!("{socket}.restored")).exists(), "{}", restored.report());
        for (path, before) in files.iter().zip(&before) {
            let now = std::fs::read(path).unwrap();
            assert!(now.starts_with(before), "{path} was destroyed: {}", restored.report());
        }
        restored.signal(rustix::process::Signal::TERM);
        restored.wait();
        assert_eq!(listener(Path::new(&socket)), owner);
        env.ok(&["stop", "--name", "first"]);
        assert!(run.wait().success(), "{}", run.report());
        // Alone, it goes on in the same console file.
        let before = std::fs::read(&con).unwrap();
        let mut restored = env.restore("latest", &[]);
        keyframe_tests::wait_until("the console grows", || {
            std::fs::read(&con).unwrap().len() > before.len()
        });
        assert!(std::fs::read(&con).unwrap().starts_with(&before));
        restored.signal(rustix::process::Signal::TERM);
        restored.wait();
    }
}

#[test]
fn a_changed_cd_is_refused_and_a_changed_table_is_told() {
    let env = TestEnv::new();
    let (cd, fw) = (env.path().join("a.iso"), env.path().join("fw"));
    std::fs::write(&cd, vec![1u8; 1 << 20]).unwrap();
    std::fs::write(&fw, "one").unwrap();
    let boot = hashing("qemu-system-x86_64").with(&[
        "-cdrom",
        &cd.display().to_string(),
        "-fw_cfg",
        &format!("name=opt/x,file={}", fw.display()),
    ]);
    let mut run = env.start(&["--interval", "300ms", "--count", "2"], &boot);
    assert!(run.wait().success(), "{}", run.report());
    std::fs::write(&fw, "two").unwrap();
    let mut restored = env.restore("latest", &["--paused"]);
    restored.wait_for_error("is paused");
    assert!(restored.errors().contains("fw (-fw_cfg) has changed since the checkpoint"));
    restored.signal(rustix::process::Signal::TERM);
    restored.wait();
    std::fs::write(&cd, vec![2u8; 1 << 20]).unwrap();
    let store = env.store();
    let words = ["a.iso (-cdrom) has changed since the checkpoint", "--changed-as-now"];
    env.refused(&["restore", "--store", &store, "latest", "--paused"], 1, &words);
    env.refused(&["branch", "--store", &store, "latest"], 1, &words);
    let mut restored = env.restore("latest", &["--paused", "--changed-as-now"]);
    restored.wait_for_error("is paused");
    restored.signal(rustix::process::Signal::TERM);
    restored.wait();
}
