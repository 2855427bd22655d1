//! Links and special files in a store's directory, and the descriptor of syncs.

use super::*;
use rustix::fs::{CWD, Mode, mkfifoat};
use std::os::unix::fs::symlink;

fn assert_refused<T: std::fmt::Debug>(result: Result<T>, expected: &str) {
    let error = result.unwrap_err();
    let fix = error.fix().unwrap_or_default();
    assert!(error.to_string().contains(expected) && fix.contains("remove it"), "{error}; {fix}");
}

#[test]
fn links_and_special_files_are_neither_read_nor_written_and_do_not_block() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let store = LocalBackend::create(&root).unwrap();
    let outside = dir.path().join("outside");
    std::fs::write(&outside, "not of the store").unwrap();
    let link = |place: &Path| symlink(&outside, place).unwrap();
    let dangling = |place: &Path| symlink(dir.path().join("missing"), place).unwrap();
    let fifo = |place: &Path| mkfifoat(CWD, place, Mode::RUSR | Mode::WUSR).unwrap();
    let things: [&dyn Fn(&Path); 3] = [&link, &dangling, &fifo];
    for make in things {
        for name in ["lock", "prune.lock", "store.json", "tags/x", "maps/0000000001.map"] {
            make(&root.join(name));
            assert_refused(store.open(name), "no regular file");
            assert_refused(store.read(name, 100), "no regular file");
            assert_refused(store.sync(name), "no regular file");
            match name {
                "lock" => {
                    assert_refused(store.lock("x"), "no regular file");
                    assert_refused(store.lock_holder(), "no regular file");
                }
                "prune.lock" => {
                    assert_refused(store.lock_prune("x"), "no regular file");
                    assert_refused(store.is_pruning(), "no regular file");
                }
                _ => {}
            }
            store.remove(name).unwrap();
        }
    }
    assert_eq!(std::fs::read(&outside).unwrap(), b"not of the store");
    assert!(!dir.path().join("missing").exists());
    store.lock("x").unwrap();
}

#[test]
fn a_folder_that_is_a_link_is_neither_read_nor_emptied() {
    for folder in FOLDERS.into_iter().chain([QUARANTINE]) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("store");
        let store = LocalBackend::create(&root).unwrap();
        let elsewhere = dir.path().join("elsewhere");
        std::fs::create_dir(&elsewhere).unwrap();
        std::fs::write(elsewhere.join("work"), "not of the store").unwrap();
        // The quarantine does not exist yet.
        let _ = std::fs::remove_dir(root.join(folder));
        symlink(&elsewhere, root.join(folder)).unwrap();
        let [old, new] = ["work", "new"].map(|file| format!("{folder}/{file}"));
        assert_refused(store.lock("x"), "no directory");
        assert_refused(store.lock_prune("x"), "no directory");
        assert_refused(store.list(folder), "no directory");
        assert_refused(store.open(&old), "no directory");
        assert_refused(store.sync(&old), "no directory");
        assert_refused(store.create(&new), "no directory");
        assert_refused(store.put(&new, b"x"), "no directory");
        assert_refused(store.remove(&old), "no directory");
        assert_refused(store.remove_all(folder, std::slice::from_ref(&old)), "no directory");
        let left: Vec<_> = std::fs::read_dir(&elsewhere).unwrap().collect();
        assert_eq!(left.len(), 1, "{folder}: {left:?}");
        assert_eq!(std::fs::read(elsewhere.join("work")).unwrap(), b"not of the store");
    }
}

#[test]
fn the_store_itself_may_be_named_by_a_link_but_is_not_made_over_one() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    LocalBackend::create(&at("store")).unwrap().put("tags/a", b"x").unwrap();
    symlink(at("store"), at("link")).unwrap();
    let linked = LocalBackend::open(&at("link"));
    linked.lock("x").unwrap();
    assert_eq!(linked.read("tags/a", 9).unwrap(), b"x");
    std::fs::create_dir(at("new")).unwrap();
    std::fs::create_dir(at("elsewhere")).unwrap();
    symlink(at("elsewhere"), at("new/tmp")).unwrap();
    let refused = LocalBackend::create(&at("new")).unwrap_err();
    assert!(matches!(refused, Error::Exists { .. }), "{refused}");
}

/// The kernel reports the failure of a write to the descriptors that were open before, even if
/// another process has seen it.
#[test]
fn a_sync_of_everything_uses_the_descriptor_of_before_the_first_write() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let store = LocalBackend::create(&root).unwrap();
    let lock = store.lock("x").unwrap();
    let relaxed = store.without_syncs().unwrap();
    relaxed.put("tags/a", b"x").unwrap();
    // A descriptor that is opened by its path now would not be found.
    std::fs::rename(&root, dir.path().join("moved")).unwrap();
    relaxed.sync_all().unwrap();
    store.sync_all().unwrap();
    drop(lock);
}
