//! A VM of Firecracker with a drive to which its guest, which checks each block, writes.

use crate::attach_soak::Draws;
use crate::firecracker::{
    ExternalFirecracker, FirecrackerGuest, assert_ends_well, assert_goes_on, attach,
};
use crate::helpers::{helper_of, kill};
use crate::mounted::Mounted;
use crate::{Scope, TestEnv, record_skip};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The size of the drive.
pub const DISK_BYTES: u64 = 4 << 20;
/// The payload checks each of its blocks.
const OPTIONS: &str = "kf.blocks=512";

/// Makes the drive's file in `folder`. Returns its path.
pub fn make_drive(folder: &Path) -> PathBuf {
    let path = folder.join("disk.img");
    std::fs::File::create(&path).and_then(|file| file.set_len(DISK_BYTES)).unwrap();
    path
}

/// The configuration of a VM with `drive`.
pub fn config(guest: &FirecrackerGuest, drive: &Path) -> String {
    let drive = format!(
        r#", "drives": [{{ "drive_id": "data", "path_on_host": "{}", "is_root_device": false,
            "is_read_only": false }}]"#,
        drive.display()
    );
    guest.config_with(128, OPTIONS, &drive)
}

/// The first kernel that holds writes to files on ext4.
const HOLDS_WRITES: (u32, u32) = (6, 14);

/// The first two numbers of the kernel's version.
fn kernel_version() -> (u32, u32) {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).flat_map(str::parse);
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Returns whether the kernel holds writes to files on ext4. If not, counts the running test as skipped.
pub fn holds_writes() -> bool {
    let (major, minor) = HOLDS_WRITES;
    let holds = kernel_version() >= HOLDS_WRITES;
    if !holds {
        record_skip(Scope::Test, format!("this kernel is older than Linux {major}.{minor}"));
    }
    holds
}

/// Starts a VM with a drive on a file system of `kind`. If this machine cannot have one, counts the
/// running test as skipped and returns `None`.
pub fn start_on(
    kind: &str,
    env: &TestEnv,
    guest: &FirecrackerGuest,
) -> Option<(Mounted, PathBuf, ExternalFirecracker)> {
    if kind == "ext4" && !holds_writes() {
        return None;
    }
    let mounted = Mounted::new(env, kind)?;
    let drive = make_drive(&mounted.dir);
    let vm = ExternalFirecracker::start(env, guest, &config(guest, &drive));
    Some((mounted, drive, vm))
}

/// The names of the files in `folder`.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Kills the engine of `vm` or its watchdog 200 times at a random moment. Each ten times two
/// checkpoints are compared with the RAM, and the newest one is restored.
pub fn soak_killed_engines(env: &TestEnv, vm: &ExternalFirecracker) {
    let seed = std::env::var("KEYFRAME_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let mut draws = Draws::new(seed.unwrap_or(1));
    for cycle in 1..=200 {
        let interval = format!("{}ms", 20 + draws.below(80));
        let mut run = attach(env, vm, &["--interval", &interval]);
        run.wait_for_error("a checkpoint every");
        std::thread::sleep(Duration::from_millis(draws.below(700)));
        if draws.below(4) == 0 {
            kill(helper_of(run.pid(), "__watchdog"));
            std::thread::sleep(Duration::from_millis(draws.below(200)));
        }
        kill(run.pid());
        run.wait();
        vm.grows(3);
        if cycle % 10 == 0 {
            let audited = ["--interval", "100ms", "--count", "2", "--audit", "audit"];
            assert_ends_well(&mut attach(env, vm, &audited));
            assert_goes_on(env, || vm.lines(), &[]);
            println!("{cycle} cycles, {} checkpoints", env.list().len());
            env.ok(&["forget", "--store", &env.store(), "--keep-last", "5"]);
            env.ok(&["prune", "--store", &env.store()]);
        }
    }
    env.ok(&["check", "--read-data", "--store", &env.store()]);
}
