//! A store in a real directory: its lock, its creation, and leftovers of the local backend.

use super::*;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

#[test]
fn a_repair_is_refused_while_there_are_writers_and_names_all_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::init(&dir.path().join("s")).unwrap();
    let mut writer = store.lock_writer("vm web, keyframe run").unwrap();
    let other = Store::open(store.path()).unwrap();
    let second = other.lock_writer("vm mail, keyframe run").unwrap();
    let error = other.lock_alone("x").unwrap_err();
    let Error::Locked { holder } = &error else { panic!("{error}") };
    let pid = std::process::id().to_string();
    for text in ["vm web, keyframe run", "vm mail, keyframe run", &pid] {
        assert!(holder.contains(text), "{holder}");
    }
    drop(second);
    // A run keeps its place for itself.
    let run = writer.begin_run("vm", &layout(1)).unwrap();
    drop(writer);
    assert!(matches!(other.lock_alone("x"), Err(Error::Locked { .. })));
    run.finish().unwrap();
    let alone = other.lock_alone("keyframe check --repair").unwrap();
    let refused = store.lock_writer("x").unwrap_err();
    assert!(
        matches!(&refused, Error::Locked { holder } if holder.contains("check --repair")),
        "{refused}"
    );
    drop(alone);
    store.lock_writer("x").unwrap();
}

#[test]
fn a_lock_held_by_another_process_counts_and_ends_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::init(&dir.path().join("s")).unwrap();
    let lock = store.path().join("lock");
    let held = Command::new("flock")
        .arg(&lock)
        .args(["sh", "-c", "echo held; read line"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut child) = held else {
        keyframe_testing::skip!("no `flock` program (Debian package util-linux)");
    };
    let mut word = [0; 5];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut word).unwrap();
    let error = store.lock_writer("x").unwrap_err();
    assert!(matches!(&error, Error::Locked { holder } if holder == "another process"), "{error}");
    drop(child.stdin.take());
    child.wait().unwrap();
    store.lock_writer("x").unwrap();
}

#[test]
fn a_store_is_made_only_where_nothing_is() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let store = Store::init(&at("s")).unwrap();
    assert_eq!(fs::metadata(at("s")).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(Store::open(&at("s")).unwrap().id(), store.id());
    assert!(matches!(Store::init(&at("s")), Err(Error::Exists { .. })));
    fs::create_dir(at("empty")).unwrap();
    Store::init(&at("empty")).unwrap();
    fs::create_dir(at("full")).unwrap();
    fs::write(at("full/notes.txt"), "mine").unwrap();
    assert!(matches!(Store::init(&at("full")), Err(Error::Exists { .. })));
    assert!(matches!(Store::init(&at("full/notes.txt")), Err(Error::Exists { .. })));
    assert_eq!(fs::read_dir(at("full")).unwrap().count(), 1);
    // What an interrupted attempt left is no hindrance; a pack with something in it is.
    fs::create_dir_all(at("half/packs")).unwrap();
    fs::create_dir_all(at("half/tmp")).unwrap();
    fs::write(at("half/tmp/store.json-1-0"), "{").unwrap();
    Store::init(&at("half")).unwrap();
    fs::create_dir_all(at("orphan/packs")).unwrap();
    fs::write(at("orphan/packs/00000001.pack"), "pages").unwrap();
    assert!(matches!(Store::init(&at("orphan")), Err(Error::Exists { .. })));
    assert!(matches!(Store::init(&at("no/such/parent")), Err(Error::Io { .. })));
    for none in ["nothing", "empty/tags", "full", "full/notes.txt"] {
        let error = Store::open(&at(none)).unwrap_err();
        assert!(matches!(error, Error::NoStore { .. }), "{none}: {error}");
    }
}

#[test]
fn a_directory_keeps_checkpoints_and_clears_what_was_unfinished() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::init(&dir.path().join("s")).unwrap();
    fs::write(store.path().join("tmp/maps-1.map-1-0"), "half").unwrap();
    assert_eq!(check(&store).notes.len(), 1);
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer.begin_run("vm", &layout(40)).unwrap();
    let mut truth = BTreeMap::new();
    let mut old = vec![0; 40];
    for epoch in 0..12 {
        let image: Image =
            (0..40).map(|p| if p % 5 == epoch % 5 { epoch + p } else { old[p as usize] }).collect();
        put_changes(&mut run, &old, &image).unwrap();
        truth.insert(seal(&mut run, 40).unwrap().id, image.clone());
        old = image;
    }
    run.finish().unwrap();
    assert_eq!(fs::read_dir(store.path().join("tmp")).unwrap().count(), 0);
    let again = Store::open(store.path()).unwrap();
    for (id, image) in &truth {
        assert_image(&again, *id, image);
        let loaded = again.load(*id).unwrap();
        assert_eq!(loaded.read_page(PageIndex(7)).unwrap(), content(image[7]));
        assert_eq!(loaded.is_zero(PageIndex(7)), image[7] == 0);
        let part = PageRange::new(PageIndex(3), 9);
        let mut seen = 0;
        loaded
            .read_pages(part, &mut |page, page_content| {
                assert!((3..12).contains(&page.0));
                assert_eq!(*page_content, content(image[page.0 as usize]));
                seen += 1;
                Ok::<_, Error>(())
            })
            .unwrap();
        assert_eq!(seen, image[3..12].iter().filter(|n| **n != 0).count());
    }
    assert_clean(&again);
}

#[test]
fn a_sink_that_fails_ends_the_reading_with_its_own_error() {
    #[derive(Debug)]
    enum Own {
        Enough(PageIndex),
        Store,
    }
    impl From<Error> for Own {
        fn from(_: Error) -> Self {
            Self::Store
        }
    }
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut run = store.lock_writer("test").unwrap().begin_run("vm", &layout(4)).unwrap();
    put_changes(&mut run, &[0; 3], &[1, 2, 3]).unwrap();
    let loaded = store.load(seal(&mut run, 4).unwrap().id).unwrap();
    let all = PageRange::new(PageIndex(0), 4);
    let result = loaded
        .read_pages(all, &mut |page, _| if page.0 == 1 { Err(Own::Enough(page)) } else { Ok(()) });
    assert!(matches!(result, Err(Own::Enough(PageIndex(1)))));
    let pack = medium.files().keys().find(|n| n.starts_with("packs/")).unwrap().clone();
    medium.overwrite(&pack, None);
    let fresh = on(&medium).unwrap().load(CheckpointId(1)).unwrap();
    assert!(matches!(fresh.read_pages(all, &mut |_, _| Ok::<_, Own>(())), Err(Own::Store)));
}
