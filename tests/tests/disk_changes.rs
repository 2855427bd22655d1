//! Tests disks that the VM's user unplugs, plugs in again, resizes or gives a snapshot while
//! `keyframe attach` takes checkpoints: the first `keyframe take` afterwards succeeds.

use keyframe_tests::disks::{
    IMAGE_BYTES, as_strs, assert_same, numbered_image, qemu_img, restored_disk_named, run_in_guest,
    shell_guest, take_checkpoint, virtio_disk,
};
use keyframe_tests::{ExternalVm, Process, Qemu, TestEnv, chosen_qemus, restored_pid, wait_until};
use serde_json::{Value, json};
use std::path::Path;

/// A VM with the disk `d`, and the disk `e` on a node, of device `b1`.
struct Changed {
    env: TestEnv,
    vm: ExternalVm,
    attached: Process,
}

impl Changed {
    fn start(qemu: &Qemu, options: &[&str]) -> Self {
        println!("-- QEMU {}: {options:?}", qemu.label);
        let env = TestEnv::new();
        let image = numbered_image(&env);
        let second = env.path().join("second.qcow2").display().to_string();
        qemu_img(&["create", "-q", "-f", "qcow2", &second, "8M"]);
        let node = format!("driver=qcow2,node-name=e,file.driver=file,file.filename={second}");
        let drive = format!("file={},format=raw,if=none,id=d", image.display());
        let mut words = vec!["-drive", &drive, "-device", "virtio-blk-pci,drive=d,id=b0"];
        words.extend(["-blockdev", &node, "-device", "virtio-blk-pci,drive=e,id=b1"]);
        let mut vm = ExternalVm::start(&env, &shell_guest(qemu, &words));
        vm.console.wait_for("KF READY");
        let monitor = vm.socket("a");
        let all = [&["--name", "guest", "--interval", "none"], options].concat();
        let args = env.attach_args(&["--qmp", &monitor], vm.console.pid(), &all);
        let mut attached = Process::start(env.command(&as_strs(&args)));
        attached.wait_for_error("VM guest");
        Self { env, vm, attached }
    }

    fn command(&self, command: &str, arguments: Value) {
        self.vm.monitor().execute(command, Some(arguments)).expect(command);
    }

    /// Fills the begin of the guest's disk `disk` with `letter`.
    fn write(&mut self, disk: &str, letter: char) {
        let write = format!(
            "head -c 262144 /dev/zero | tr '\\0' {letter} | dd of={disk} bs=4k conv=notrunc,fsync 2>/dev/null"
        );
        run_in_guest(&mut self.vm.console, &write, &format!("{disk} {letter}"));
    }

    /// Unplugs disk `e`, and waits until the guest has released it.
    fn unplug(&self) {
        self.command("device_del", json!({ "id": "b1" }));
        wait_until("the guest releases the disk", || {
            let blocks = self.vm.monitor().execute("query-block", None).expect("its disks");
            !blocks.to_string().contains("b1")
        });
    }

    /// The names of the disks of the newest checkpoint, and the number of runs.
    fn newest(&self) -> (Vec<String>, usize) {
        let list = self.env.list();
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let newest = list.last().expect("a checkpoint");
        let disks = newest["disks"].as_array().expect("its disks");
        let mut runs: Vec<_> = list.iter().map(|entry| text(&entry["run"])).collect();
        runs.dedup();
        (disks.iter().map(|disk| text(&disk["name"])).collect(), runs.len())
    }

    /// Ends the checkpoints, none of which has failed, and the VM.
    fn end(mut self) -> TestEnv {
        self.env.ok(&["stop", "--name", "guest"]);
        assert!(self.attached.wait().success(), "{}", self.attached.report());
        assert!(self.attached.errors().contains(", 0 failed"), "{}", self.attached.report());
        self.env
    }
}

fn begins_with(disk: &[u8], letter: char) {
    assert!(disk[..256 << 10].iter().all(|byte| *byte == letter as u8), "no {letter} on the disk");
}

#[test]
fn a_disk_that_is_unplugged_is_in_no_further_checkpoint_until_it_is_plugged_in_again() {
    for qemu in chosen_qemus(0) {
        let mut changed = Changed::start(&qemu, &["--disk", "bitmap"]);
        changed.write("/dev/vdb", 'a');
        let with = take_checkpoint(&changed.env);
        changed.unplug();
        changed.write("/dev/vda", 'b');
        let without = take_checkpoint(&changed.env);
        assert_eq!(changed.newest(), (vec!["d".to_owned()], 2));
        // A node of the line is there for another device.
        let device = json!({ "driver": "virtio-blk-pci", "id": "b1", "drive": "e" });
        changed.command("device_add", device);
        let there = "until [ -b /dev/vdb ]; do sleep 0.1; done";
        run_in_guest(&mut changed.vm.console, there, "there");
        changed.write("/dev/vdb", 'c');
        let again = take_checkpoint(&changed.env);
        assert_eq!(changed.newest(), (vec!["d".to_owned(), "e".to_owned()], 3));
        let env = changed.end();
        begins_with(&restored_disk_named(&env, &with, &[], "e"), 'a');
        begins_with(&restored_disk_named(&env, &again, &[], "e"), 'c');
        begins_with(&restored_disk_named(&env, &without, &[], "d"), 'b');
        // The restored machine has no such device, and opens no image of it.
        std::fs::remove_file(env.path().join("second.qcow2")).expect("remove the image");
        let mut restored = env.restore(&without, &[]);
        restored.wait_for_error("is running after");
        let line = std::fs::read(format!("/proc/{}/cmdline", restored_pid(&restored)));
        let line = String::from_utf8_lossy(&line.expect("its line")).into_owned();
        assert!(!line.contains("second.qcow2") && !line.contains("id=b1"), "{line}");
        run_in_guest(&mut restored, "[ -b /dev/vdb ] && echo KF-\"\"BAD", "restored");
        assert!(!restored.lines().iter().any(|l| l.trim() == "KF-BAD"), "{}", restored.report());
    }
}

#[test]
fn a_disk_that_is_plugged_in_again_on_another_node_before_the_next_checkpoint_is_complete_in_it() {
    for qemu in chosen_qemus(2) {
        let mut changed = Changed::start(&qemu, &["--disk", "bitmap"]);
        changed.write("/dev/vdb", 'a');
        take_checkpoint(&changed.env);
        changed.unplug();
        // QEMU releases the node a little later than the device.
        let delete = || {
            let node = json!({ "node-name": "e" });
            changed.vm.monitor().execute("blockdev-del", Some(node)).is_ok()
        };
        wait_until("QEMU releases the node", delete);
        let file = changed.env.path().join("second.qcow2");
        let node = json!({ "driver": "qcow2", "node-name": "e2",
            "file": { "driver": "file", "filename": file } });
        changed.command("blockdev-add", node);
        let device = json!({ "driver": "virtio-blk-pci", "id": "b2", "drive": "e2" });
        changed.command("device_add", device);
        let there = "until [ -b /dev/vdb ]; do sleep 0.1; done";
        run_in_guest(&mut changed.vm.console, there, "there");
        let again = take_checkpoint(&changed.env);
        changed.write("/dev/vdb", 'b');
        let written = take_checkpoint(&changed.env);
        assert_eq!(changed.newest().0, ["d", "e"]);
        let env = changed.end();
        begins_with(&restored_disk_named(&env, &again, &[], "e"), 'a');
        begins_with(&restored_disk_named(&env, &written, &[], "e"), 'b');
        let mut restored = env.restore(&written, &[]);
        restored.wait_for_error("is running after");
        let read = "head -c 4 /dev/vdb | grep -q bbbb && echo KF-\"\"DISK";
        run_in_guest(&mut restored, read, "restored");
        assert!(restored.lines().iter().any(|l| l.trim() == "KF-DISK"), "{}", restored.report());
    }
}

#[test]
fn the_first_take_after_a_resize_and_after_a_snapshot_succeeds() {
    for qemu in chosen_qemus(1) {
        let mut changed = Changed::start(&qemu, &["--disk", "bitmap"]);
        take_checkpoint(&changed.env);
        changed.command("block_resize", json!({ "node-name": "e", "size": 16 << 20 }));
        changed.write("/dev/vdb", 'a');
        let resized = take_checkpoint(&changed.env);
        assert_eq!(changed.newest().1, 2);
        // The kernel writes into guest RAM from now on, and RAM is scanned in pauses.
        let options = json!([{ "driver": "qcow2", "node-name": "e", "cache": { "direct": true },
            "file": { "driver": "file", "filename": changed.env.path().join("second.qcow2"),
                "cache": { "direct": true } } }]);
        changed.command("blockdev-reopen", json!({ "options": options }));
        let direct = take_checkpoint(&changed.env);
        let shown = changed.env.list().last().expect("a checkpoint")["strategy"].clone();
        assert_eq!((shown, changed.newest().1), (json!("paused-scan"), 3));
        let over = changed.env.path().join("over.qcow2");
        let snapshot = json!({ "node-name": "e", "snapshot-node-name": "o",
            "snapshot-file": over, "format": "qcow2" });
        changed.command("blockdev-snapshot-sync", snapshot);
        changed.write("/dev/vdb", 'b');
        let over = take_checkpoint(&changed.env);
        assert_eq!(changed.newest().1, 3);
        let env = changed.end();
        for (id, letter) in [(resized, 'a'), (direct, 'a'), (over, 'b')] {
            let disk = restored_disk_named(&env, &id, &[], "e");
            assert_eq!(disk.len(), 16 << 20);
            begins_with(&disk, letter);
        }
    }
}

/// Serves a raw image of this content over NBD until the result is dropped.
fn nbd_export(image: &Path, socket: &Path) -> Process {
    let mut command = std::process::Command::new("qemu-nbd");
    command.args(["-t", "-r", "-f", "raw", "-k"]).arg(socket).arg(image);
    let export = Process::start(command);
    wait_until("qemu-nbd listens", || socket.exists());
    export
}

#[test]
fn a_backing_image_is_found_by_its_description_and_one_that_is_no_file_is_refused() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let below = numbered_image(&env);
        let (top, socket) = (env.path().join("top.qcow2"), env.path().join("nbd"));
        let top = top.display().to_string();
        let create = |backing: &str| {
            qemu_img(&["create", "-q", "-f", "qcow2", "-b", backing, "-F", "raw", &top]);
        };
        let _export = nbd_export(&below, &socket);
        create(&format!("nbd+unix:///?socket={}", socket.display()));
        let words = virtio_disk(Path::new(&top), "qcow2");
        let boot = shell_guest(&qemu, &as_strs(&words));
        let (store, line) = (env.store(), boot.command());
        let run = [&["run", "--store", &store, "--"][..], &as_strs(&line)].concat();
        env.refused(
            &run,
            1,
            &["nbd+unix", "is no local file", "--disk bitmap", "qemu-img convert"],
        );
        let file = json!({ "driver": "file", "filename": below });
        create(&format!("json:{}", json!({ "driver": "raw", "file": file })));
        let mut run = keyframe_tests::disks::start_guest(&env, &["--interval", "none"], &boot);
        let write = "dd if=/dev/zero of=/dev/vda bs=4k count=3 conv=notrunc,fsync 2>/dev/null";
        run_in_guest(&mut run, write, "write");
        let id = take_checkpoint(&env);
        env.ok(&["stop"]);
        assert!(run.wait().success(), "{}", run.report());
        let mut expected = std::fs::read(&below).expect("the image");
        expected[..3 * 4096].fill(0);
        assert_eq!(expected.len() as u64, IMAGE_BYTES);
        let disk = restored_disk_named(&env, &id, &[], "d");
        assert_same(&disk, &expected, "the disk over its described image");
    }
}
