//! Tests `keyframe mount`: the same bytes as an export, new checkpoints of a live run, and each way
//! in which a mount ends.

use crate::commit;
use crate::group;
use keyframe_tests::disks::{as_strs, assert_same, numbered_image, shell_guest, virtio_disk};
use keyframe_tests::{
    Boot, JournalImage, Process, TestEnv, distribution_qemu, journal_counter, number, wait_until,
};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::Signal;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A mount that ends with its test.
pub struct Mounted {
    process: Process,
    dir: PathBuf,
}

impl Mounted {
    pub fn new(env: &TestEnv) -> Self {
        let dir = env.path().join("mnt");
        let _ = std::fs::create_dir(&dir);
        let (store, name) = (env.store(), dir.display().to_string());
        let mut process = Process::start(env.command(&["mount", &name, "--store", &store]));
        process.wait_for_error("umount ends it");
        Self { process, dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn names(&self, directory: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(directory)).expect("list a directory");
        let mut names: Vec<String> = entries
            .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.dir, UnmountFlags::DETACH);
    }
}

fn is_mount(dir: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("the list of mounts");
    mounts.lines().any(|l| l.split(' ').nth(1) == dir.to_str())
}

fn boot() -> Boot {
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    boot
}

/// A store with three checkpoints, the second tagged `golden`.
fn three(env: &TestEnv) {
    let mut run = env.start(&["--interval", "none", "--name", "guest"], &boot());
    run.wait_for("KF READY");
    for tag in [&[][..], &["--tag", "golden"], &[]] {
        env.ok(&[&["take", "--name", "guest"], tag].concat());
    }
    env.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
}

#[test]
fn files_are_what_show_and_export_give() {
    let env = TestEnv::new();
    three(&env);
    let store = env.store();
    let mut mounted = Mounted::new(&env);
    assert_eq!(mounted.names(""), ["1", "2", "3", "golden", "latest"]);
    assert_eq!(mounted.names("2"), ["device.state", "info.json", "ram.elf", "ram.raw"]);
    assert_eq!(std::fs::read_link(mounted.path("golden")).unwrap(), Path::new("2"));
    assert_eq!(std::fs::read_link(mounted.path("latest")).unwrap(), Path::new("3"));
    let info = std::fs::read_to_string(mounted.path("golden/info.json")).unwrap();
    assert_eq!(info, env.ok(&["show", "--json", "--store", &store, "golden"]));
    for (format, file) in [("raw", "ram.raw"), ("elf", "ram.elf")] {
        env.ok(&["export", "2", "--store", &store, "--format", format, "-o", file]);
        let (exported, seen) =
            (std::fs::read(env.path().join(file)), std::fs::read(mounted.path("2").join(file)));
        assert!(exported.unwrap() == seen.unwrap(), "{file} differs from the export");
    }
    assert!(std::fs::read(mounted.path("2/device.state")).unwrap().starts_with(b"QEVM"));
    for absent in ["4", "02", "nothing", "2/disk-a.raw"] {
        assert_eq!(
            std::fs::metadata(mounted.path(absent)).unwrap_err().kind(),
            std::io::ErrorKind::NotFound
        );
    }
    assert!(
        File::create(mounted.path("2/new")).is_err()
            && std::fs::remove_file(mounted.path("2/ram.raw")).is_err()
    );
    // A checkpoint that the store loses disappears here.
    std::fs::remove_file(Path::new(&store).join("checkpoints/0000000001.ckpt")).unwrap();
    wait_until("checkpoint 1 is gone", || std::fs::metadata(mounted.path("1")).is_err());
    mounted.process.signal(Signal::INT);
    assert!(mounted.process.wait().success(), "{}", mounted.process.report());
    assert!(!is_mount(&mounted.dir));
}

#[test]
fn a_group_has_a_directory_for_each_member() {
    let env = TestEnv::new();
    let mut run =
        group::start(&env, &["--interval", "300ms", "--count", "2"], &group::hashing(&env));
    assert!(run.wait().success(), "{}", run.report());
    let store = env.store();
    let mounted = Mounted::new(&env);
    assert_eq!(mounted.names("2"), ["a", "b", "info.json"]);
    let info = std::fs::read_to_string(mounted.path("latest/info.json")).unwrap();
    assert_eq!(info, env.ok(&["show", "--json", "--store", &store, "2"]));
    let mut images = Vec::new();
    for member in ["a", "b"] {
        let dir = format!("2/{member}");
        assert_eq!(mounted.names(&dir), ["device.state", "ram.elf", "ram.raw"]);
        for (format, file) in [("raw", "ram.raw"), ("elf", "ram.elf")] {
            let name = format!("{member}.{format}");
            let args = ["export", "2", "--store", &store, "--format", format, "-o", &name];
            env.ok(&[&args[..], &["--member", member]].concat());
            let seen = std::fs::read(mounted.path(&dir).join(file)).unwrap();
            assert!(seen == std::fs::read(env.path().join(&name)).unwrap(), "{name} differs");
            images.push(seen);
        }
        assert!(
            std::fs::read(mounted.path(&dir).join("device.state")).unwrap().starts_with(b"QEVM")
        );
    }
    // The members boot independently: each directory has the memory of its own VM.
    assert!(
        images[0].len() == 96 << 20 && images[0] != images[2],
        "both members have the same memory"
    );
    for absent in ["2/c", "2/ram.raw", "2/device.state", "2/a/info.json", "2/a/a"] {
        assert_eq!(
            std::fs::metadata(mounted.path(absent)).unwrap_err().kind(),
            std::io::ErrorKind::NotFound
        );
    }
}

#[test]
fn checkpoints_of_a_live_run_appear() {
    let env = TestEnv::new();
    let mut mounted = Mounted::new(&env);
    assert!(mounted.names("").is_empty());
    let mut run = env.start(&["--interval", "300ms", "--name", "guest", "--count", "4"], &boot());
    wait_until("a checkpoint", || !mounted.names("").is_empty());
    // The test reads while the run writes the next checkpoints.
    assert_eq!(std::fs::read(mounted.path("1/ram.raw")).unwrap().len(), 96 << 20);
    assert!(run.wait().success(), "{}", run.report());
    assert_eq!(std::fs::read_link(mounted.path("latest")).unwrap(), Path::new("4"));
    // `umount` ends an idle mount.
    unmount(&mounted.dir, UnmountFlags::empty()).expect("umount");
    assert!(mounted.process.wait().success(), "{}", mounted.process.report());
}

#[test]
fn one_that_is_in_use_or_was_killed_is_cleared() {
    let env = TestEnv::new();
    three(&env);
    let store = env.store();
    let mut mounted = Mounted::new(&env);
    let used = File::open(mounted.path("3/ram.raw")).unwrap();
    mounted.process.signal(Signal::TERM);
    assert!(mounted.process.wait().success(), "{}", mounted.process.report());
    assert!(mounted.process.errors().contains("still in use") && !is_mount(&mounted.dir));
    drop(used);

    let mut mounted = Mounted::new(&env);
    mounted.process.signal(Signal::KILL);
    mounted.process.wait();
    let dir = mounted.dir.display().to_string();
    env.refused(&["mount", &dir, "--store", &store], 1, &["was killed", "umount"]);
    unmount(&mounted.dir, UnmountFlags::empty()).expect("umount a dead mount");
    std::fs::write(mounted.path("file"), "x").unwrap();
    env.refused(&["mount", &dir, "--store", &store], 1, &["not empty"]);
    env.refused(&["mount", "/nowhere", "--store", &store], 1, &["no directory"]);
    std::fs::remove_file(mounted.path("file")).unwrap();
    drop(Mounted::new(&env));
}

#[test]
fn a_damaged_record_hurts_those_who_read_it() {
    let env = TestEnv::new();
    three(&env);
    let pack = Path::new(&env.store()).join("packs/00000001.pack");
    let file = File::options().read(true).write(true).open(&pack).unwrap();
    // Some of these records were superseded before the seal and damage no checkpoint.
    let step = file.metadata().unwrap().len() / 32;
    for k in 1..=16 {
        file.write_all_at(&[0x5a; 64], k * step).unwrap();
    }
    let mounted = Mounted::new(&env);
    let ram = File::open(mounted.path("1/ram.raw")).unwrap();
    // Page by page, without read-ahead.
    rustix::fs::fadvise(&ram, 0, None, rustix::fs::Advice::Random).unwrap();
    let mut page = vec![0; 4096];
    let mut bad = Vec::new();
    let pages = (96 << 20) / 4096;
    for k in 0..pages {
        if let Err(e) = ram.read_exact_at(&mut page, k * 4096) {
            assert_eq!(e.raw_os_error(), Some(5), "{e}");
            bad.push(k);
        }
    }
    assert!(!bad.is_empty() && bad.len() < 1000, "{} pages cannot be read", bad.len());
    assert!(
        mounted.process.errors().contains("ram.raw of checkpoint 1"),
        "{}",
        mounted.process.report()
    );
    assert!(std::fs::read(mounted.path("1/device.state")).unwrap().starts_with(b"QEVM"));
    let report = env.run(&["export", "1", "--store", &env.store(), "--format", "raw", "-o", "x"]);
    assert_eq!(report.status.code(), Some(1));
    assert!(!env.path().join("x").exists(), "half a file was left");
    assert_eq!(number(&env.list()[2], "id"), 3);
}

fn info(mounted: &Mounted, checkpoint: &str) -> serde_json::Value {
    let text = std::fs::read(mounted.path(checkpoint).join("info.json")).expect("info.json");
    serde_json::from_slice(&text).expect("JSON")
}

#[test]
fn disks_are_as_the_guest_had_them_and_an_error_once_their_image_has_changed() {
    let env = TestEnv::new();
    let base = numbered_image(&env);
    let drive = virtio_disk(&base, "raw");
    let taken = commit::three(&env, &shell_guest(&distribution_qemu(), &as_strs(&drive)));
    let mounted = Mounted::new(&env);
    assert_eq!(
        mounted.names("1"),
        ["device.state", "disk-d.raw", "info.json", "ram.elf", "ram.raw"]
    );
    let disk = |id: &str| mounted.path(id).join("disk-d.raw");
    for (id, expected) in &taken {
        assert_eq!(disk(id).metadata().expect("the disk").len(), expected.len() as u64);
        assert_same(
            &std::fs::read(disk(id)).expect("the disk"),
            expected,
            &format!("checkpoint {id}"),
        );
    }
    // Reads at several offsets, across the ends of blocks, and past the end.
    let (id, expected) = &taken[2];
    let file = File::open(disk(id)).expect("the disk");
    for at in [0, 4095, 77 * 3000 - 5, 1500 * 4096 + 100, expected.len() - 10] {
        let mut part = vec![0; 9000.min(expected.len() - at)];
        file.read_exact_at(&mut part, at as u64).expect("a part of the disk");
        assert!(part == expected[at..at + part.len()], "at {at}");
    }
    assert_eq!(file.read_at(&mut [0; 10], expected.len() as u64).expect("behind the end"), 0);
    // An image that is being read cannot be written.
    let store = env.store();
    let in_place = ["commit", "--store", &store, id, "--in-place", "--yes"];
    env.refused(&in_place, 1, &["in use"]);
    drop(file);
    let modified = base.metadata().and_then(|meta| meta.modified()).expect("the image");
    let image = File::options().write(true).open(&base).expect("the image");
    image.set_modified(modified + Duration::from_secs(5)).expect("touch the image");
    let denied = std::fs::read(disk(id)).expect_err("its image has changed");
    assert_eq!(denied.raw_os_error(), Some(5), "{denied}");
    let why = info(&mounted, id)["disks"][0]["unreadable"].to_string();
    assert!(why.contains("disk.raw has changed"), "{why}");
    assert!(
        mounted.process.errors().contains("disk-d.raw of checkpoint 3"),
        "{}",
        mounted.process.report()
    );
    assert!(
        std::fs::read(mounted.path("3/device.state")).expect("the devices").starts_with(b"QEVM")
    );
    assert_eq!(std::fs::read(mounted.path("3/ram.raw")).expect("the RAM").len(), 96 << 20);
    // Restored, it can be read again.
    image.set_modified(modified).expect("touch the image");
    assert_same(
        &std::fs::read(disk(id)).expect("the disk"),
        expected,
        "an image that was put back",
    );
    assert!(info(&mounted, id)["disks"][0].get("unreadable").is_none());
    let away = env.path().join("away.raw");
    std::fs::rename(&base, &away).expect("move the image");
    assert_eq!(std::fs::read(disk(id)).expect_err("no image").raw_os_error(), Some(5));
    std::fs::rename(&away, &base).expect("move the image");
    // It can be unmounted after all its files are closed.
    wait_until("the image is free", || env.run(&in_place).status.success());
    assert_same(&std::fs::read(&base).expect("the image"), expected, "in place");
}

#[test]
fn disks_of_a_group_are_in_the_directories_of_its_members() {
    const MIB: u64 = 2;
    let env = TestEnv::new();
    let members: Vec<Boot> = ["a", "b"]
        .iter()
        .map(|name| {
            let path = env.path().join(format!("{name}.img"));
            // After the journal the disks may differ, since both VMs wrote.
            let image = [vec![0; (MIB << 20) as usize], name.repeat(4096).into_bytes()].concat();
            std::fs::write(&path, image).expect("an image");
            let work = format!("journal kf.mib={MIB} kf.rate=300");
            let drive = format!("file={},format=raw,if=none,id=d", path.display());
            let node = ["-drive", &drive, "-device", "virtio-blk-pci,drive=d"];
            group::member(&env, name, &work, 96).with(&node)
        })
        .collect();
    let mut run = group::start(&env, &["--interval", "none"], &members);
    group::wait_until_ready(&env, &mut run);
    let synced = |name| journal_counter(&group::console(&env, name), "synced=");
    let written = run.wait_until(|_| (synced("a") > 0 && synced("b") > 0).then_some(()));
    assert!(written.is_some(), "{}", run.report());
    let known = ["a", "b"].map(synced);
    env.ok(&["take", "--name", "pair"]);
    env.ok(&["stop", "--name", "pair"]);
    assert!(run.wait().success(), "{}", run.report());
    let mounted = Mounted::new(&env);
    let store = env.store();
    for (name, known) in ["a", "b"].into_iter().zip(known) {
        let place = mounted.path("latest").join(name);
        assert!(mounted.names(&format!("latest/{name}")).contains(&"disk-d.raw".to_owned()));
        let seen = std::fs::read(place.join("disk-d.raw")).expect("the disk");
        JournalImage::read(&place.join("disk-d.raw"), MIB).assert_whole_to(known, name);
        let args = [
            "export", "latest", "--store", &store, "--member", name, "--disk", "d", "-o", "x",
            "--force",
        ];
        env.ok(&args);
        assert_same(&std::fs::read(env.path().join("x")).expect("the export"), &seen, name);
        let full = format!("{name}/d");
        env.ok(&[
            "commit",
            "--store",
            &store,
            "latest",
            "--disk",
            &full,
            "-o",
            &format!("{name}.new"),
        ]);
        let new = env.path().join(format!("{name}.new"));
        assert_same(&std::fs::read(new).expect("the image"), &seen, name);
    }
    let both =
        ["a", "b"].map(|name| std::fs::read(mounted.path("latest").join(name).join("disk-d.raw")));
    let [a, b] = both.map(|disk| disk.expect("the disk"));
    assert!(a != b, "both members have the same disk");
    let args = ["export", "latest", "--store", &store, "--disk", "d", "-o", "y"];
    env.refused(&args, 1, &["no disk d", "a/d, b/d"]);
}
