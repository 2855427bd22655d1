//! Tests encrypted stores: a run, an exact restore, no plain text of the guest in any file, and the
//! errors for a wrong or missing key.

use keyframe_tests::{Boot, TestEnv, assert_restores_exactly, number};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A text in the RAM of every Linux kernel, also in the compressed page.
const KNOWN: &[u8] = b"Linux version ";

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("list the store").flatten() {
        if entry.path().is_dir() { files(&entry.path(), found) } else { found.push(entry.path()) }
    }
}

fn holds(file: &Path, known: &[u8]) -> bool {
    let bytes = std::fs::read(file).expect("read");
    let first = known.first().expect("a word");
    let mut rest = bytes.as_slice();
    while let Some(at) = rest.iter().position(|byte| byte == first) {
        rest = &rest[at..];
        if rest.starts_with(known) {
            return true;
        }
        rest = &rest[1..];
    }
    false
}

/// Writes a key file that its owner alone may access.
fn write_key(file: &Path, byte: u8) {
    std::fs::write(file, [byte; 32]).expect("write a key file");
    set_mode(file, 0o600);
}

fn set_mode(file: &Path, mode: u32) {
    std::fs::set_permissions(file, Permissions::from_mode(mode)).expect("change the mode");
}

fn take_some(env: &TestEnv) -> Vec<String> {
    let boot = Boot::new("scribble kf.mib=8");
    let mut run = env.start(&["--interval", "700ms", "--name", "guest", "--audit", "audit"], &boot);
    run.wait_for("KF READY");
    let taken = run.wait_until(|_| (env.list().len() >= 3).then_some(()));
    assert!(taken.is_some(), "{}", run.report());
    env.ok(&["stop", "--name", "guest"]);
    let exit = run.wait();
    assert!(exit.success(), "{exit}: {}", run.report());
    env.list().iter().map(|entry| number(entry, "id").to_string()).collect()
}

#[test]
fn an_encrypted_store_restores_exactly_and_shows_nothing() {
    let mut env = TestEnv::without_store();
    let state = env.path().join("state").display().to_string();
    env.set("XDG_STATE_HOME", &state);
    let store = env.store();
    env.refused(&["init", &store, "--encrypt", "--key-file", "missing"], 1, &["missing"]);
    env.set("KEYFRAME_PASSPHRASE", "short");
    env.refused(&["init", &store, "--encrypt"], 1, &["too short"]);
    env.set("KEYFRAME_PASSPHRASE", "some words of a test");
    env.refused(&["init", &store], 2, &["--encrypt"]);
    assert!(!Path::new(&store).exists());
    // A key file, because each command would spend a tenth of a second on a passphrase.
    env.set("KEYFRAME_PASSPHRASE", "");
    let key = env.path().join("key");
    write_key(&key, 0x5a);
    set_mode(&key, 0o644);
    let line = ["init", &store, "--encrypt", "--key-file", "key"];
    env.refused(&line, 1, &["others may read or write it", "chmod 600 key"]);
    assert!(!Path::new(&store).exists());
    set_mode(&key, 0o600);
    env.ok(&["init", &store, "--encrypt", "--key-file", "key"]);
    env.refused(&["list", "--store", &store], 1, &["key file is needed", "--key-file"]);
    env.set("KEYFRAME_KEY_FILE", "key");
    let ids = take_some(&env);
    env.ok(&["check", "--read-data", "--store", &store]);
    assert_restores_exactly(&env, &ids[ids.len() - 1]);
    let mut all = Vec::new();
    files(Path::new(&store), &mut all);
    assert!(all.len() > 6, "{all:?}");
    let copy = env.path().join("audit").join(format!("{}.ram", ids[ids.len() - 1]));
    assert!(holds(&copy, KNOWN), "the guest's RAM does not have what is looked for");
    for file in all {
        assert!(!holds(&file, KNOWN), "{} has the guest's RAM in plain", file.display());
        assert!(
            !holds(&file, b"\"machine_type\""),
            "{} has a checkpoint's meta in plain",
            file.display()
        );
    }

    write_key(&env.path().join("other"), 0x5b);
    let wrong = ["list", "--store", &store, "--key-file", "other"];
    env.refused(&wrong, 1, &["key file is not that of this store"]);
    // One changed byte is found, with the checkpoints that it damages.
    let checkpoint = Path::new(&store).join(format!("checkpoints/{:0>10}.ckpt", ids[0]));
    let mut bytes = std::fs::read(&checkpoint).expect("read a checkpoint");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&checkpoint, bytes).expect("change a checkpoint");
    env.refused(&["show", "--store", &store, &ids[0]], 1, &["the bytes are not authentic"]);
    // A key for an unencrypted store is refused.
    let plain = env.path().join("plain").display().to_string();
    env.set("KEYFRAME_KEY_FILE", "");
    env.ok(&["init", &plain]);
    env.refused(
        &["list", "--store", &plain, "--key-file", "key"],
        1,
        &["is not encrypted", "--key-file"],
    );
}

/// Copies a store that needs no VM.
fn golden(to: &Path) {
    fn copy(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).expect("make a directory");
        for entry in std::fs::read_dir(from).expect("list the golden store").flatten() {
            let to = to.join(entry.file_name());
            if entry.path().is_dir() {
                copy(&entry.path(), &to);
            } else {
                std::fs::copy(entry.path(), to).expect("copy a file");
            }
        }
    }
    copy(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/store/tests/golden/v1")), to);
}

#[test]
fn checkpoints_are_copied_between_stores_with_keys_of_their_own_or_none() {
    let mut env = TestEnv::without_store();
    let state = env.path().join("state").display().to_string();
    env.set("XDG_STATE_HOME", &state);
    let path = |name: &str| env.path().join(name).display().to_string();
    let [plain, one, two, words, back] = ["plain", "one", "two", "words", "back"].map(path);
    golden(Path::new(&plain));
    for (file, byte) in [("one.key", 1), ("two.key", 2)] {
        write_key(&env.path().join(file), byte);
    }
    env.ok(&["init", &one, "--encrypt", "--key-file", "one.key"]);
    env.ok(&["init", &two, "--encrypt", "--key-file", "two.key"]);
    env.ok(&["init", &back]);
    let ids = |env: &TestEnv, store: &str, keys: &[&str]| {
        let args = [&["list", "--json", "--store", store], keys].concat();
        env.json(&args).as_array().expect("a list").len()
    };
    let all = ids(&env, &plain, &[]);
    assert!(all > 0);
    let copy = |from: &str, to: &str| {
        ["copy", "--quiet", "--all", "--store", from, "--to", to].map(String::from).to_vec()
    };
    let with = |line: Vec<String>, keys: &[&str]| {
        line.into_iter().chain(keys.iter().map(|key| (*key).to_owned())).collect::<Vec<_>>()
    };
    let args = keyframe_tests::disks::as_strs;
    // Plain to encrypted: each key belongs to its own store.
    env.refused(&args(&copy(&plain, &one)), 1, &["key file is needed", "--to-key-file"]);
    let line = with(copy(&plain, &one), &["--key-file", "one.key"]);
    env.refused(&args(&line), 1, &["is not encrypted"]);
    let line = with(copy(&plain, &one), &["--to-key-file", "two.key"]);
    env.refused(&args(&line), 1, &["key file is not that of this store"]);
    env.ok(&args(&with(copy(&plain, &one), &["--to-key-file", "one.key"])));
    assert_eq!(ids(&env, &one, &["--key-file", "one.key"]), all);
    // Encrypted to encrypted.
    let keys = ["--key-file", "one.key", "--to-key-file", "two.key"];
    env.ok(&args(&with(copy(&one, &two), &keys)));
    // Encrypted to plain.
    let line = with(copy(&two, &back), &["--key-file", "two.key", "--to-key-file", "one.key"]);
    env.refused(&args(&line), 1, &["is not encrypted", "--to-key-file"]);
    env.ok(&args(&with(copy(&two, &back), &["--key-file", "two.key"])));
    for (store, keys) in
        [(&one, &["--key-file", "one.key"][..]), (&two, &["--key-file", "two.key"]), (&back, &[])]
    {
        assert_eq!(ids(&env, store, keys), all);
        env.ok(&args(&with(
            ["check", "--read-data", "--store", store].map(String::from).to_vec(),
            keys,
        )));
    }
    // With passphrases from the environment.
    env.set("KEYFRAME_PASSPHRASE", "some words of a test");
    env.ok(&["init", &words, "--encrypt"]);
    env.set("KEYFRAME_PASSPHRASE", "");
    env.set("KEYFRAME_TO_PASSPHRASE", "other words of a test");
    env.refused(&args(&copy(&back, &words)), 1, &["passphrase is not that"]);
    env.set("KEYFRAME_TO_PASSPHRASE", "some words of a test");
    env.ok(&args(&copy(&back, &words)));
    env.set("KEYFRAME_TO_PASSPHRASE", "");
    env.set("KEYFRAME_PASSPHRASE", "some words of a test");
    env.set("KEYFRAME_TO_KEY_FILE", "one.key");
    let again = env.ok(&args(&copy(&words, &one)));
    assert!(again.contains(&format!("{all} were there")), "{again}");
}
