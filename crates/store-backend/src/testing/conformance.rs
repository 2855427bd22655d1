//! The conformance suite: what every backend guarantees. Run on a directory, on the simulated
//! medium and on object storage, each also with encryption.

use crate::{Backend, DataKey, EncryptedBackend, Error};
use std::io;
use std::sync::Arc;
use zeroize::Zeroizing;

/// Opens the same place, which is empty at first, each time anew, as another process would.
pub type Open<'a> = &'a dyn Fn() -> Arc<dyn Backend>;

/// Checks that a backend keeps all promises of [`Backend`].
pub fn check_backend(open: Open<'_>) {
    small_files(open);
    names(open);
    growing_files(open);
    cutting(open);
    locks(open);
    slots(open);
    new_files(open);
}

/// Checks an encrypting backend over the opened one, as [`check_backend`] does.
pub fn check_encrypted_backend(open: Open<'_>) {
    let key = DataKey(Zeroizing::new([9; 32]));
    check_backend(&|| Arc::new(EncryptedBackend::new(open(), &key)));
}

fn kind(error: &Error) -> Option<io::ErrorKind> {
    match error {
        Error::Io { source, .. } => Some(source.kind()),
        _ => None,
    }
}

/// Returns `len` bytes of a pattern that depends on `seed`.
pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 253) as u8 ^ seed).collect()
}

fn small_files(open: Open<'_>) {
    let (one, other) = (open(), open());
    let missing = other.read("maps/0000000001.map", 100).unwrap_err();
    assert_eq!(kind(&missing), Some(io::ErrorKind::NotFound), "{missing}");
    assert!(missing.is_not_found());
    assert!(other.open("maps/0000000001.map").unwrap_err().is_not_found());
    for len in [0, 1, 5000, 70_000] {
        let bytes = pattern(len, len as u8);
        one.put("maps/0000000001.map", &bytes).unwrap();
        assert_eq!(other.read("maps/0000000001.map", 1 << 20).unwrap(), bytes);
        let file = other.open("maps/0000000001.map").unwrap();
        assert_eq!(file.len_bytes().unwrap(), len as u64);
        let mut middle = vec![0; len / 2];
        file.read_at(len as u64 / 4, &mut middle).unwrap();
        assert_eq!(middle, bytes[len / 4..len / 4 + len / 2]);
        let behind = file.read_at(len as u64, &mut [0]).unwrap_err();
        assert_eq!(kind(&behind), Some(io::ErrorKind::UnexpectedEof), "{behind}");
    }
    let too_long = other.read("maps/0000000001.map", 69_000).unwrap_err();
    assert!(matches!(too_long, Error::Damaged { .. }), "{too_long}");
    one.sync("maps/0000000001.map").unwrap();
    one.remove("maps/0000000001.map").unwrap();
    one.remove("maps/0000000001.map").unwrap();
    assert!(other.read("maps/0000000001.map", 100).unwrap_err().is_not_found());
    assert!(one.describe("maps/x").contains("maps/x"));
}

fn names(open: Open<'_>) {
    let (one, other) = (open(), open());
    assert!(other.list("tags").unwrap().is_empty());
    assert!(other.list("no-such-folder").unwrap().is_empty());
    let mut tags: Vec<String> = (0..7).map(|n| format!("tag-{n}.x_y")).collect();
    for tag in &tags {
        one.put(&format!("tags/{tag}"), tag.as_bytes()).unwrap();
    }
    let mut listed = other.list("tags").unwrap();
    listed.sort();
    assert_eq!(listed, tags);
    tags.push("not-there".into());
    let all: Vec<String> = tags.iter().map(|tag| format!("tags/{tag}")).collect();
    one.remove_all("tags", &all).unwrap();
    assert!(other.list("tags").unwrap().is_empty());
}

fn growing_files(open: Open<'_>) {
    let (one, other) = (open(), open());
    let name = "packs/00000001.pack";
    assert!(other.open(name).unwrap_err().is_not_found());
    let mut growing = one.create(name).unwrap();
    assert!(other.create(name).unwrap_err().is_already_exists());
    assert_eq!(other.list("packs").unwrap(), ["00000001.pack"]);
    let reader = other.open(name).unwrap();
    assert_eq!(reader.len_bytes().unwrap(), 0);
    let own = one.open(name).unwrap();
    let mut expected = Vec::new();
    // Crosses all internal limits of the backends, with many small steps.
    let lengths = [64, 1, 0, 300_000, 1 << 20, 5 << 20].into_iter().chain([700; 40]);
    for (step, len) in lengths.enumerate() {
        let bytes = pattern(len, step as u8);
        growing.append(&bytes).unwrap();
        let from = expected.len();
        expected.extend(bytes);
        // The writer's process reads bytes that are not durable yet.
        assert_eq!(own.len_bytes().unwrap(), expected.len() as u64);
        let mut last = vec![0; expected.len() - from];
        own.read_at(from as u64, &mut last).unwrap();
        assert!(last == expected[from..], "step {step}");
        growing.sync().unwrap();
        let mut around = vec![0; expected.len().min(100_000)];
        let at = expected.len() - around.len();
        reader.read_at(at as u64, &mut around).unwrap();
        assert!(around == expected[at..], "step {step}");
        assert_eq!(reader.len_bytes().unwrap(), expected.len() as u64);
    }
    let mut whole = vec![0; expected.len()];
    reader.read_at(0, &mut whole).unwrap();
    assert!(whole == expected);
    drop(growing);
    let fresh = open();
    let file = fresh.open(name).unwrap();
    assert_eq!(file.len_bytes().unwrap(), expected.len() as u64);
    file.read_at(0, &mut whole).unwrap();
    assert!(whole == expected);
    let behind = file.read_at(expected.len() as u64 - 1, &mut [0; 2]).unwrap_err();
    assert_eq!(kind(&behind), Some(io::ErrorKind::UnexpectedEof), "{behind}");
    assert!(fresh.create(name).unwrap_err().is_already_exists());
    fresh.remove_all("packs", &[name.to_owned(), "packs/00000002.pack".into()]).unwrap();
    assert!(fresh.list("packs").unwrap().is_empty());
    assert!(fresh.open(name).unwrap_err().is_not_found());
}

fn cutting(open: Open<'_>) {
    let (one, other) = (open(), open());
    let name = "packs/00000003.pack";
    let mut growing = one.create(name).unwrap();
    let mut expected = Vec::new();
    let cuts = [
        (100, 70),
        (5 << 20, 4 << 20),
        (1000, 10_000_000),
        (3000, 50),
        (10, 0),
        (6 << 20, 5_000_000),
    ];
    for (step, (len, cut)) in cuts.into_iter().enumerate() {
        let bytes = pattern(len, step as u8);
        growing.append(&bytes).unwrap();
        expected.extend(bytes);
        if step % 2 == 0 {
            growing.sync().unwrap();
        }
        let keep = expected.len().min(cut);
        growing.truncate(keep as u64).unwrap();
        expected.truncate(keep);
        growing.append(b"behind the cut").unwrap();
        expected.extend(b"behind the cut");
        growing.sync().unwrap();
        assert!(other.read(name, 1 << 30).unwrap() == expected, "step {step}");
    }
    drop(growing);
    assert!(open().read(name, 1 << 30).unwrap() == expected);
    one.remove(name).unwrap();
}

fn locks(open: Open<'_>) {
    let (one, other) = (open(), open());
    assert_eq!(other.lock_holder().unwrap(), None);
    let held = one.lock("the first").unwrap();
    let refused = other.lock("the second").unwrap_err();
    assert!(matches!(&refused, Error::Locked { holder } if holder == "the first"), "{refused}");
    assert_eq!(other.lock_holder().unwrap().as_deref(), Some("the first"));
    assert!(!other.is_pruning().unwrap());
    let pruning = other.lock_prune("the one that prunes").unwrap();
    assert!(one.is_pruning().unwrap());
    assert!(matches!(one.lock_prune("x"), Err(Error::Locked { .. })));
    one.put("tags/held", b"x").unwrap();
    drop(held);
    assert_eq!(other.lock_holder().unwrap(), None);
    drop(other.lock("the second").unwrap());
    drop(pruning);
    assert!(!one.is_pruning().unwrap());
    one.remove("tags/held").unwrap();
}

/// A backend with slots: several writers at a time, none while a process has the store alone, and
/// each sees what the others say, also of those that have ended.
fn slots(open: Open<'_>) {
    let (one, other) = (open(), open());
    let first = one.join("the first").unwrap();
    let Some(number) = first.slot.number() else { return };
    drop(first.start);
    first.slot.tell(b"a").unwrap();
    let second = other.join("the second").unwrap();
    drop(second.start);
    assert_ne!(second.slot.number(), Some(number));
    let refused = open().lock("x").unwrap_err();
    let is_named = |holder: &str| holder.contains("the first") && holder.contains("the second");
    assert!(matches!(&refused, Error::Locked { holder } if is_named(holder)), "{refused}");
    assert!(is_named(&open().lock_holder().unwrap().unwrap()));
    for state in [&b"b"[..], b"", &[7; crate::STATE_BYTES_MAX]] {
        second.slot.tell(state).unwrap();
        let seen = open().writers().unwrap();
        let said: Vec<_> = seen.iter().map(|w| (w.lives, w.state.as_deref())).collect();
        assert_eq!(said, [(true, Some(&b"a"[..])), (true, Some(state))]);
    }
    assert!(second.slot.tell(&[7; crate::STATE_BYTES_MAX + 1]).is_err());
    drop(first.slot);
    let seen = open().writers().unwrap();
    assert_eq!((seen[0].lives, seen[0].state.as_deref()), (false, Some(&b"a"[..])));
    // The next one keeps what was said last, until it says more.
    let third = one.join("the third").unwrap();
    assert_eq!(third.slot.number(), Some(number));
    let seen = open().writers().unwrap();
    assert_eq!((seen[0].lives, seen[0].state.as_deref()), (true, Some(&b"a"[..])));
    assert_eq!(seen[0].holder, "the third");
    third.slot.tell(b"c").unwrap();
    assert_eq!(open().writers().unwrap()[0].state.as_deref(), Some(&b"c"[..]));
    drop((third, second.slot));
    assert_eq!(open().lock_holder().unwrap(), None);
    let alone = one.lock("alone").unwrap();
    assert!(matches!(other.join("x"), Err(Error::Locked { holder }) if holder == "alone"));
    drop(alone);
    drop(other.join("x").unwrap());
}

/// A name is given once, to a file that is whole.
fn new_files(open: Open<'_>) {
    let one = open();
    let is_shared = one.join("x").unwrap().slot.number().is_some();
    one.put_new("maps/0000000001.map", b"first").unwrap();
    if is_shared {
        let taken = one.put_new("maps/0000000001.map", b"second").unwrap_err();
        assert!(taken.is_already_exists(), "{taken}");
        assert_eq!(one.read("maps/0000000001.map", 100).unwrap(), b"first");
        assert!(one.list("tmp").unwrap().is_empty());
    }
    one.remove("maps/0000000001.map").unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LocalBackend;
    use crate::testing::FaultyBackend;

    #[test]
    fn a_directory_conforms() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("s");
        drop(LocalBackend::create(&root).unwrap());
        check_backend(&|| Arc::new(LocalBackend::open(&root)));
        check_encrypted_backend(&|| Arc::new(LocalBackend::open(&root)));
    }

    #[test]
    fn the_simulated_medium_conforms() {
        let medium = FaultyBackend::default();
        check_backend(&|| Arc::new(medium.clone()));
        check_encrypted_backend(&|| Arc::new(medium.clone()));
    }
}
