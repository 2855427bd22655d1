//! Every end-to-end test, in one program: it is linked once, and tests of all files share the
//! threads of one runner.
//!
//! A new file is one line below. `cargo test -p keyframe-tests --test end_to_end FILE::` runs the
//! tests of one.

mod analysis_results;
mod attach;
mod attach_disks;
mod bench;
mod branch;
mod budgets;
mod bundle;
mod cluster;
mod commands;
mod commit;
mod crash;
mod cross_version;
mod cycles;
mod dashboard;
mod direct_io;
mod disk_changes;
mod disk_server;
mod disks;
mod encrypt;
mod exact;
mod export;
mod faults;
mod firecracker;
mod firecracker_copied_drives;
mod firecracker_drives;
mod firecracker_network;
mod firecracker_pauses;
mod firecracker_rollback;
mod forget;
mod generated_vms;
mod goto;
mod graphics;
mod group;
mod guest_end;
mod guide;
mod hotplug;
mod killed_helpers;
mod kvm;
mod lazy;
mod main_job;
mod mount;
mod moved_images;
mod ops;
mod other_processors;
mod pacemaker;
mod profile;
mod protect;
mod protect_faults;
mod protect_plugged;
mod protect_servers;
mod readiness;
mod record;
mod recordings;
mod reflink;
mod refusals;
mod rehearsal;
mod report;
mod rollback;
mod rollback_disks;
mod rollback_flash;
mod rollback_rescue;
mod s3;
mod screens;
mod sectors;
mod self_test;
mod serve;
mod served_writers;
mod session_example;
mod standing;
mod strategies;
mod thp;
mod tools;
mod writers;

/// A file without its line above would be tests that nobody runs.
#[test]
fn every_file_is_listed() {
    let tests = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    for file in std::fs::read_dir(tests).expect("list the tests") {
        let path = file.expect("an entry").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let listed = include_str!("main.rs").lines().any(|l| l == format!("mod {name};"));
        assert!(listed || name == "main", "tests/tests/{name}.rs has no line in main.rs");
    }
}
