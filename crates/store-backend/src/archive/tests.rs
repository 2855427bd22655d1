use super::*;
use crate::{Backend, LocalBackend};

/// A store's directory with a few files, and an archive of it.
fn archived() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("S");
    let store = LocalBackend::create(&root).unwrap();
    store.put(STORE_JSON, b"{}").unwrap();
    store.put("checkpoints/0000000001.ckpt", b"sealed").unwrap();
    store.put("worksets/0000000001.wset", b"advice").unwrap();
    let mut pack = store.create("packs/00000001.pack").unwrap();
    pack.append(&[7; 3000]).unwrap();
    std::fs::create_dir(root.join(FILES)).unwrap();
    store.put(&layout::bundled_file(&"0a".repeat(32)), b"kernel").unwrap();
    std::fs::write(root.join("lock"), b"not archived").unwrap();
    let path = dir.path().join("vm.bundle");
    let mut told = 0;
    write_archive(&root, &File::create_new(&path).unwrap(), &mut |bytes| told = bytes).unwrap();
    assert_eq!(told, 2 + 6 + 3000 + 6);
    (dir, path)
}

fn refusal(path: &Path) -> String {
    ArchiveBackend::open(path).unwrap_err().to_string()
}

#[test]
fn files_come_back_and_nothing_is_written() {
    let (_dir, path) = archived();
    let store = crate::open(&path).unwrap();
    assert!(crate::is_read_only(&path));
    assert_eq!(store.read("checkpoints/0000000001.ckpt", 9).unwrap(), b"sealed");
    assert_eq!(store.list(PACKS).unwrap(), ["00000001.pack"]);
    assert_eq!(store.list(TAGS).unwrap(), Vec::<String>::new());
    let pack = store.open("packs/00000001.pack").unwrap();
    let mut part = [0; 10];
    pack.read_at(2990, &mut part).unwrap();
    assert_eq!(part, [7; 10]);
    assert!(pack.read_at(2991, &mut part).is_err() && pack.read_at(u64::MAX, &mut part).is_err());
    for absent in ["lock", "worksets/0000000001.wset", "packs"] {
        assert!(store.open(absent).unwrap_err().is_not_found(), "{absent}");
    }
    let error = store.put("tags/a", b"1").unwrap_err();
    assert!(error.fix().unwrap().contains("keyframe import"), "{error}");
    assert!(store.lock("a writer").is_err() && store.create("packs/00000002.pack").is_err());
}

#[test]
fn an_archive_that_was_cut_off_anywhere_is_refused() {
    let (dir, path) = archived();
    let whole = std::fs::read(&path).unwrap();
    let short = dir.path().join("short");
    for len in (0..whole.len() - 1).step_by(100) {
        std::fs::write(&short, &whole[..len]).unwrap();
        assert!(refusal(&short).contains("is damaged"), "{len} of {} bytes", whole.len());
    }
}

#[test]
fn an_archive_with_other_members_is_refused() {
    let (dir, _) = archived();
    let path = dir.path().join("made");
    let make = |members: &[(&str, EntryType)]| {
        let mut builder = Builder::new(File::create(&path).unwrap());
        for (name, kind) in members {
            let mut header = Header::new_gnu();
            header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
            header.set_entry_type(*kind);
            header.set_size(1);
            header.set_cksum();
            builder.append(&header, &b"x"[..]).unwrap();
        }
        drop(builder.into_inner().unwrap());
    };
    let json = (STORE_JSON, EntryType::Regular);
    for (bad, kind) in [
        ("../escaped", EntryType::Regular),
        ("/etc/passwd", EntryType::Regular),
        ("files/../../x", EntryType::Regular),
        ("lock", EntryType::Regular),
        ("packs/00000001.pack", EntryType::Symlink),
        ("packs/00000001.pack", EntryType::GNULongName),
        ("packs/00000001.pack", EntryType::XHeader),
    ] {
        make(&[json, (bad, kind)]);
        assert!(refusal(&path).contains("no file of a store"), "{bad} {kind:?}");
    }
    make(&[json, json]);
    assert!(refusal(&path).contains("twice"));
    make(&[("tags/a", EntryType::Regular)]);
    assert!(refusal(&path).contains("no store.json"));
    make(&[json, ("tags/a", EntryType::Regular)]);
    assert!(ArchiveBackend::open(&path).is_ok());
    std::fs::write(&path, [b'x'; 4096]).unwrap();
    assert!(refusal(&path).contains("no whole bundle"));
}
