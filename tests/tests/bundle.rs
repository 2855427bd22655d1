//! Bundles: a checkpoint leaves its machine in one file, with all that its restore needs, and comes
//! back exactly.

use keyframe_tests::disks::{
    as_strs, assert_same, copy_disk, disk_socket, numbered_image_in, qemu_img, restored_disk,
    restored_disk_named, run_in_guest, shell_guest, start_guest, take_checkpoint,
};
use keyframe_tests::{Process, Qemu, TestEnv, chosen_qemus};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A checkpoint of a VM whose files are all in one directory.
struct Packed {
    env: TestEnv,
    id: String,
    /// The contents of the disks `d` and `s` at the checkpoint.
    disks: [Vec<u8>; 2],
    /// The content of the CD.
    cd: Vec<u8>,
    /// The RAM at the checkpoint.
    ram: Vec<u8>,
    /// The directory of the images.
    images: PathBuf,
}

/// Makes a disk over another image, a part of a raw image, a CD, and a read-only disk over another
/// image, in `dir`.
fn make_images(dir: &Path) {
    std::fs::create_dir(dir).expect("a directory");
    numbered_image_in(dir);
    let at = |name: &str| dir.join(name).display().to_string();
    for top in ["over.qcow2", "read.qcow2"] {
        qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "disk.raw", &at(top)]);
    }
    let letters = |begin: u8| (0..6 << 20).map(move |n: u32| begin + (n >> 12) as u8 % 16);
    for name in ["slice.raw", "slice2.raw"] {
        std::fs::write(at(name), letters(b'a').collect::<Vec<_>>()).expect("write an image");
    }
    // Zeros that hide letters: what the command line says lies beneath it shows through otherwise.
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "slice2.raw", &at("zeros.qcow2")]);
    let zeros = Command::new("qemu-io").args(["-c", "write -z 0 64k", &at("zeros.qcow2")]).output();
    assert!(zeros.expect("run qemu-io").status.success(), "qemu-io fails");
    std::fs::write(at("cd.iso"), letters(b'A').collect::<Vec<_>>()).expect("write the CD");
}

fn export_ram(env: &TestEnv, id: &str) -> Vec<u8> {
    let file = env.path().join("ram.raw");
    let output = file.display().to_string();
    env.ok(&["export", "--store", &env.store(), id, "--format", "raw", "-o", &output]);
    let ram = std::fs::read(&file).expect("the RAM");
    std::fs::remove_file(file).expect("remove the RAM");
    ram
}

impl Packed {
    fn new(qemu: &Qemu, options: &[&str]) -> Self {
        let env = TestEnv::new();
        let images = env.path().join("ima ges,1");
        make_images(&images);
        let escaped = images.display().to_string().replace(',', ",,");
        let drive = |words: &str| ["-drive".to_owned(), words.replace("DIR", &escaped)];
        let words = [
            drive("file=DIR/over.qcow2,format=qcow2,if=virtio,id=d"),
            drive("file=DIR/slice.raw,format=raw,offset=1048576,size=4194304,if=virtio,id=s"),
            drive("file=DIR/read.qcow2,format=qcow2,if=virtio,id=r,readonly=on"),
            drive("file=DIR/cd.iso,format=raw,media=cdrom,readonly=on,id=cd"),
        ];
        let node = |words: &str| ["-blockdev".to_owned(), words.replace("DIR", &escaped)];
        let layered = [
            node(
                "driver=raw,node-name=below,read-only=on,file.driver=file,file.filename=DIR/slice2.raw",
            ),
            node("driver=file,node-name=zeros0,read-only=on,filename=DIR/zeros.qcow2"),
            node("driver=qcow2,node-name=zeros,read-only=on,file=zeros0,backing=below"),
            ["-device".into(), "virtio-blk-pci,drive=zeros,addr=0x1f".into()],
        ];
        let words = [&words[..], &layered].concat();
        let options = [&["--interval", "none"], options].concat();
        let boot = shell_guest(qemu, &as_strs(words.as_flattened()));
        let mut run = start_guest(&env, &options, &boot);
        let write = |disk: &str, at: u32| {
            format!(
                "dd if=/dev/urandom of={disk} bs=4k count=300 seek={at} conv=notrunc,fsync 2>/dev/null"
            )
        };
        run_in_guest(&mut run, &write("/dev/vda", 500), "1");
        run_in_guest(&mut run, &write("/dev/vdb", 200), "2");
        let id = take_checkpoint(&env);
        let copy = |name| copy_disk(&disk_socket(&env), name, &env.path().join("copy.raw"));
        let is_served = disk_socket(&env).exists();
        let disks = if is_served { ["d", "s"].map(copy) } else { Default::default() };
        env.ok(&["stop"]);
        assert!(run.wait().success(), "{}", run.report());
        let ram = export_ram(&env, &id);
        let cd = std::fs::read(images.join("cd.iso")).expect("the CD");
        Self { env, id, disks, cd, ram, images }
    }

    fn bundle_words<'a>(&'a self, store: &'a str, file: &'a str) -> Vec<&'a str> {
        vec!["bundle", "--store", store, &self.id, "-o", file]
    }

    /// Makes the bundle, and takes everything away that it was made of.
    fn bundle(&self) -> String {
        let file = self.env.path().join("vm.bundle").display().to_string();
        self.env.ok(&self.bundle_words(&self.env.store(), &file));
        std::fs::remove_dir_all(&self.images).expect("remove the images");
        std::fs::remove_dir_all(self.env.store()).expect("remove the store");
        file
    }
}

/// Checks that the checkpoint that was imported into the store of `env` is that of `packed`.
fn assert_is_here(env: &TestEnv, packed: &Packed) {
    assert_eq!(export_ram(env, "1"), packed.ram, "the RAM");
    assert_same(&restored_disk(env, "1", &[]), &packed.disks[0], "disk d");
    // The server serves the whole image, of which QEMU shows the guest a part.
    assert_same(&restored_disk_named(env, "1", &[], "s"), &packed.disks[1], "disk s");
    let mut restored = env.restore("1", &[]);
    restored.wait_for_error("is running after");
    let begins = |disk: &str, skip: u32, bytes: u32, expected: &str| {
        format!(
            "[ $(dd if={disk} bs=4k skip={skip} count=1 2>/dev/null | head -c {bytes}) = {expected} ]"
        )
    };
    // The caches are dropped: the guest reads the devices.
    let drop = "echo 3 > /proc/sys/vm/drop_caches";
    run_in_guest(&mut restored, drop, "dropped");
    // Block 256 of the image is the first one of its part; 256 % 16 = 0.
    let part = begins("/dev/vdb", 1, 3, "bbb");
    let zeros = "[ $(head -c 65536 /dev/vdd | tr -d '\\000' | wc -c) = 0 ]";
    let all = format!("{part} && {zeros} && cmp -n 65536 /dev/vda /dev/vdc && echo KF-\"\"SAME");
    run_in_guest(&mut restored, &all, "read");
    let same = restored.lines().iter().any(|line| line.trim() == "KF-SAME");
    assert!(same, "{}", restored.report());
}

#[test]
fn a_bundle_needs_nothing_of_the_machine_on_which_it_was_made() {
    for qemu in chosen_qemus(0) {
        let packed = Packed::new(&qemu, &[]);
        let file = packed.bundle();
        let (other, third) = (TestEnv::new(), TestEnv::new());
        other.ok(&["check", "--read-data", "--store", &file]);
        let listed = other.json(&["list", "--json", "--store", &file]);
        assert_eq!(listed.as_array().map(Vec::len), Some(1));
        other.ok(&["import", "--store", &other.store(), &file]);
        assert_is_here(&other, &packed);
        let imported = PathBuf::from(other.store()).join("imported");
        let files = imported.read_dir().expect("the files").map(|file| file.expect("one").path());
        let cd =
            files.filter(|path| path.to_string_lossy().ends_with("-cd.iso")).collect::<Vec<_>>();
        let cd = std::fs::read(cd.first().expect("the CD")).expect("its content");
        assert!(cd == packed.cd, "the CD differs");
        let again = other.run(&["import", "--store", &other.store(), &file]);
        assert!(again.status.success());
        assert!(String::from_utf8_lossy(&again.stderr).contains("was imported before"));
        assert_eq!(other.list().len(), 1);
        // An import brings back the files that were lost.
        std::fs::remove_dir_all(&imported).expect("remove the files");
        other.ok(&["import", "--store", &other.store(), &file]);
        let mut restored = other.restore("1", &["--paused"]);
        restored.wait_for_error("is paused after");
        drop(restored);
        // What was imported can be bundled again.
        let next = other.path().join("next.bundle").display().to_string();
        other.ok(&["bundle", "--store", &other.store(), "1", "-o", &next]);
        let files = third.path().join("files").display().to_string();
        std::fs::remove_dir_all(other.store()).expect("remove the store");
        third.ok(&["import", "--store", &third.store(), "--files", &files, &next]);
        assert_is_here(&third, &packed);
        // Without its files, a restore names the one that is missing.
        std::fs::remove_dir_all(&files).expect("remove the files");
        third.refused(&["restore", "--store", &third.store(), "1"], 1, &["read.qcow2"]);
    }
}

#[test]
fn a_bundle_of_disks_that_qemu_opens_itself_holds_them_too() {
    for qemu in chosen_qemus(1) {
        let packed = Packed::new(&qemu, &["--disk", "bitmap"]);
        let file = packed.bundle();
        let other = TestEnv::new();
        other.ok(&["import", "--store", &other.store(), &file]);
        assert_eq!(export_ram(&other, "1"), packed.ram, "the RAM");
        let mut restored = other.restore("1", &[]);
        restored.wait_for_error("is running after");
        let read = "[ $(dd if=/dev/vdb bs=4k skip=1 count=1 2>/dev/null | head -c 3) = bbb ]";
        run_in_guest(&mut restored, &format!("{read} && echo KF-\"\"SAME"), "read");
        let same = restored.lines().iter().any(|line| line.trim() == "KF-SAME");
        assert!(same, "{}", restored.report());
    }
}

#[test]
fn a_bundle_that_was_interrupted_goes_on_and_a_damaged_one_brings_nothing() {
    let qemu = chosen_qemus(0).remove(0);
    let packed = Packed::new(&qemu, &[]);
    let (store, file) = (packed.env.store(), packed.env.path().join("vm.bundle"));
    let name = file.display().to_string();
    let words = packed.bundle_words(&store, &name);
    let mut killed = 0;
    for delay_ms in (10..).step_by(60).take(12) {
        let mut command = packed.env.command(&words);
        let mut child = command.stderr(Stdio::null()).spawn().expect("start keyframe");
        std::thread::sleep(Duration::from_millis(delay_ms));
        let ended = child.try_wait().expect("its state").is_some();
        child.kill().expect("kill it");
        child.wait().expect("its end");
        // It may have been killed after its last step.
        if ended || file.exists() {
            break;
        }
        killed += 1;
    }
    assert!(killed > 0, "no bundle was interrupted");
    if packed.env.path().join("vm.bundle.partial").exists() && !file.exists() {
        let other =
            |more: &[&str]| packed.env.refused(&[&words[..], more].concat(), 1, &["no part"]);
        let moved = format!("{0}/cd.iso={0}/slice.raw", packed.images.display());
        other(&["--image", &moved, "--changed-as-now"]);
        packed.env.ok(&words);
    } else if packed.env.path().join("vm.bundle.partial").exists() {
        packed.env.ok(&words);
    }
    packed.env.refused(&words, 1, &["exists already"]);
    assert!(!packed.env.path().join("vm.bundle.partial").exists());
    // A store that has the name of an unfinished bundle is the user's.
    let users = packed.env.path().join("u.partial").display().to_string();
    packed.env.ok(&["init", &users]);
    packed.env.ok(&["copy", "--store", &store, &packed.id, "--to", &users]);
    let place = packed.env.path().join("u").display().to_string();
    packed.env.refused(&packed.bundle_words(&store, &place), 1, &["u.partial is no part"]);
    packed.env.ok(&["check", "--store", &users]);
    let whole = std::fs::read(&file).expect("the bundle");
    let other = TestEnv::new();
    let bad = other.path().join("bad.bundle");
    let refused = |bytes: &[u8], expected: &str| {
        std::fs::write(&bad, bytes).expect("write a bundle");
        let bad = bad.display().to_string();
        other.refused(&["import", "--store", &other.store(), &bad], 1, &[expected, "again"]);
        assert!(other.list().is_empty(), "something was imported");
    };
    for cut in [whole.len() / 5, whole.len() / 2, whole.len() - 3000, whole.len() - 600] {
        refused(&whole[..cut], "is damaged");
    }
    let began = Instant::now();
    for part in 1..8 {
        let mut changed = whole.clone();
        changed[whole.len() / 8 * part] ^= 4;
        refused(&changed, "damaged");
        assert!(began.elapsed() < Duration::from_secs(300), "too slow a machine for this test");
    }
    std::fs::write(&bad, &whole).expect("write a bundle");
    other.ok(&["import", "--store", &other.store(), &bad.display().to_string()]);
    assert_is_here(&other, &packed);
}

#[test]
fn a_bundle_of_an_encrypted_store_is_encrypted_or_says_that_it_is_not() {
    let mut env = TestEnv::without_store();
    let key = |name: &str, byte: u8| {
        let path = env.path().join(name);
        std::fs::write(&path, [byte; 32]).expect("write a key");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, mode).expect("its mode");
        path.display().to_string()
    };
    let (own, its) = (key("own", 1), key("its", 2));
    let state = env.path().join("state").display().to_string();
    env.set("XDG_STATE_HOME", &state);
    env.set("KEYFRAME_KEY_FILE", &own);
    let store = env.store();
    env.ok(&["init", &store, "--encrypt"]);
    let qemu = chosen_qemus(0).remove(0);
    let mut run = start_guest(&env, &["--interval", "none"], &shell_guest(&qemu, &[]));
    let id = take_checkpoint(&env);
    env.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    let file = env.path().join("vm.bundle").display().to_string();
    let words = ["bundle", "--store", &store, &id, "-o", &file];
    env.refused(&words, 2, &["--encrypt", "--plain"]);
    let with_key = [&words[..], &["--bundle-key-file", &its]].concat();
    env.refused(&with_key, 2, &["--encrypt"]);
    env.ok(&[&with_key[..], &["--encrypt"]].concat());
    let other = TestEnv::new();
    let import = ["import", "--store", &other.store(), &file];
    other.refused(&import, 1, &["--bundle-key-file"]);
    other.refused(&[&import[..], &["--bundle-key-file", &own]].concat(), 1, &["key"]);
    other.ok(&[&import[..], &["--bundle-key-file", &its]].concat());
    let mut restored: Process = other.restore("1", &[]);
    restored.wait_for_error("is running after");
    run_in_guest(&mut restored, "true", "it answers");
}
