//! Encrypted stores: a run, an exact restore, nothing of the guest in any file, and what a wrong or missing key says.

use keyframe_tests::{Bench, Boot, assert_restores_exactly, number};
use std::path::{Path, PathBuf};

/// Part of every Linux kernel's RAM.
const KNOWN: &[u8] = b"Linux version ";

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("list the store").flatten() {
        if entry.path().is_dir() { files(&entry.path(), found) } else { found.push(entry.path()) }
    }
}

/// Raw bytes, so that what is not encrypted is found: the guest's line is in its RAM as it is.
fn holds(store: &Path, known: &[u8]) -> bool {
    let mut all = Vec::new();
    files(store, &mut all);
    assert!(all.len() > 4, "{all:?}");
    all.iter()
        .any(|file| std::fs::read(file).expect("read").windows(known.len()).any(|window| window == known))
}

fn take_some(bench: &Bench) -> Vec<String> {
    let boot = Boot { mem_mib: 64, ..Boot::new("scribble kf.mib=8") };
    let mut run = bench.start(&["--interval", "700ms", "--name", "guest", "--audit", "audit"], &boot);
    run.wait_for("KF READY");
    let taken = run.wait_until(90, |_| (bench.list().len() >= 3).then_some(()));
    assert!(taken.is_some(), "{}", run.report());
    bench.ok(&["stop", "--name", "guest"]);
    let exit = run.wait();
    assert!(exit.success(), "{exit}: {}", run.report());
    bench.list().iter().map(|entry| number(entry, "id").to_string()).collect()
}

#[test]
fn an_encrypted_store_restores_exactly_and_shows_nothing() {
    let mut bench = Bench::without_store();
    let state = bench.path().join("state").display().to_string();
    bench.set("XDG_STATE_HOME", &state);
    let store = bench.store();
    bench.refused(&["init", &store, "--encrypt", "--key-file", "missing"], 1, &["missing"]);
    bench.set("KEYFRAME_PASSPHRASE", "short");
    bench.refused(&["init", &store, "--encrypt"], 1, &["too short"]);
    bench.set("KEYFRAME_PASSPHRASE", "some words of a test");
    bench.refused(&["init", &store], 2, &["--encrypt"]);
    assert!(!Path::new(&store).exists());
    bench.ok(&["init", &store, "--encrypt"]);
    let ids = take_some(&bench);
    bench.ok(&["check", "--read-data", "--store", &store]);
    assert_restores_exactly(&bench, &ids[ids.len() - 1]);
    assert!(!holds(Path::new(&store), KNOWN), "the guest's RAM is in the store in plain");
    assert!(
        !holds(Path::new(&store), b"\"machine_type\""),
        "what a checkpoint tells is in the store in plain"
    );

    bench.set("KEYFRAME_PASSPHRASE", "some words of the test");
    bench.refused(&["list", "--store", &store], 1, &["passphrase is not that of this store"]);
    bench.refused(&["list", "--store", &store, "--key-file", "Cargo.toml"], 1, &["passphrase is not that"]);
    // One changed byte is told, and whom it hurts.
    bench.set("KEYFRAME_PASSPHRASE", "some words of a test");
    let checkpoint = Path::new(&store).join(format!("checkpoints/{:0>10}.ckpt", ids[0]));
    let mut bytes = std::fs::read(&checkpoint).expect("read a checkpoint");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&checkpoint, bytes).expect("change a checkpoint");
    bench.refused(&["show", "--store", &store, &ids[0]], 1, &["with this store's key"]);
}

/// The test above can fail: the same words are found where nothing is encrypted.
#[test]
fn a_plain_store_shows_them_and_refuses_a_key() {
    let mut bench = Bench::new();
    let ids = take_some(&bench);
    let store = bench.store();
    assert!(!ids.is_empty() && holds(Path::new(&store), KNOWN));
    bench.set("KEYFRAME_PASSPHRASE", "some words of a test");
    bench.refused(&["list", "--store", &store], 1, &["is not encrypted", "KEYFRAME_PASSPHRASE"]);
}
