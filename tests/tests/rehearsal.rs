//! Tests the rehearsal of a restore: a second QEMU loads the first checkpoint of a run before it is
//! reported. The VM and its host notice nothing of it.

use keyframe_tests::{Boot, Process, TestEnv, wait_until};

fn guest(env: &TestEnv, extra: &[&str]) -> Boot {
    let image = env.path().join("disk.raw");
    std::fs::write(&image, vec![0; 4 << 20]).expect("an image");
    let disk = format!("file={},format=raw,if=virtio", image.display());
    let mut boot = Boot::new("hash kf.mib=8");
    boot.mem_mib = 96;
    boot.with(&[&["-drive", &disk], extra].concat())
}

/// Waits until the guest has hashed its memory some times more.
fn wait_for_hashes(vm: &mut Process) {
    let seen = vm.lines().len();
    for more in 0..3 {
        vm.wait_for_after(seen + more, "hash ");
    }
}

#[test]
fn a_second_qemu_takes_the_first_checkpoint_and_leaves_nothing() {
    let env = TestEnv::new().with_rehearsals();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let network = format!("user,id=n0,hostfwd=tcp:127.0.0.1:{port}-:22");
    let log = env.path().join("log").display().to_string();
    let extra = ["-netdev", &network, "-device", "virtio-net-pci,netdev=n0", "-D", &log];
    let mut run =
        env.start(&["--interval", "300ms", "--name", "guest", "--verbose"], &guest(&env, &extra));
    run.wait_for("KF READY");
    run.wait_for_error("a restore was rehearsed");
    // The run tells of the rehearsal before it tells of the first checkpoint.
    assert!(!run.errors().contains("checkpoint 1 "), "{}", run.report());
    wait_until("checkpoints follow", || env.list().len() >= 3);
    wait_for_hashes(&mut run);
    let temporary = std::fs::read_dir(env.path()).expect("the commands' temporary directory");
    let left: Vec<_> = temporary
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("keyframe-scratch-rehearsal-"))
        .collect();
    assert!(left.is_empty(), "directories of rehearsals stay: {left:?}");
    env.ok(&["stop", "--name", "guest"]);
    run.wait();
    assert!(!run.errors().contains("warning"), "{}", run.report());
}

/// QEMU would make the object of a configuration file twice: for the VM, and for the restored RAM.
#[test]
fn a_vm_whose_memory_a_configuration_file_defines_is_restored() {
    let env = TestEnv::new().with_rehearsals();
    let config = env.path().join("vm.cfg");
    let text = "[object \"ram0\"]\n  qom-type = \"memory-backend-memfd\"\n  size = \"96M\"\n\
                [machine]\n  memory-backend = \"ram0\"\n\
                [device \"rng0\"]\n  driver = \"virtio-rng-pci\"\n";
    std::fs::write(&config, text).expect("a configuration file");
    let config = config.display().to_string();
    let boot = guest(&env, &["-readconfig", &config]);
    let mut run = env.start(&["--count", "2", "--name", "guest"], &boot);
    assert!(run.wait().success(), "{}", run.report());
    assert!(!run.errors().contains("warning"), "{}", run.report());
    std::fs::remove_file(&config).expect("remove the file");
    let mut restored = env.restore("latest", &[]);
    wait_for_hashes(&mut restored);
}
