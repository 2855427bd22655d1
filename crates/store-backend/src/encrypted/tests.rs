//! Encrypted files of every length, cut and appended in every order, compared with plain bytes.

use super::*;
use crate::testing::FaultyBackend;
use proptest::prelude::*;
use std::collections::BTreeSet;
use zeroize::Zeroizing;

fn over(medium: &FaultyBackend) -> EncryptedBackend {
    EncryptedBackend::new(Arc::new(medium.clone()), &DataKey(Zeroizing::new([7; 32])))
}

fn all(backend: &dyn Backend, name: &str) -> Vec<u8> {
    backend.read(name, 1 << 30).unwrap()
}

/// Bytes that depend on their offset.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|at| (at * 31 + at / 251 + seed * 17) as u8).collect()
}

/// The nonces (salt and counter) of all frames of a file.
fn nonces(bytes: &[u8]) -> Vec<(Vec<u8>, u64)> {
    let salt = bytes[16..32].to_vec();
    let blocks = bytes.chunks(BLOCK_BYTES as usize).enumerate();
    blocks
        .flat_map(|(number, block)| {
            let counters =
                frame::frames(block, number as u64).into_iter().map(|frame| frame.counter());
            counters.map(|counter| (salt.clone(), counter)).collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn whole_files_of_all_lengths_come_back() {
    let medium = FaultyBackend::default();
    let backend = over(&medium);
    let block = PLAIN_BYTES_MAX as usize;
    for len in
        [0, 1, block - 33, block - 32, block - 31, block, block + 1, 2 * block - 32, 5 * block + 7]
    {
        let bytes = pattern(len, 1);
        backend.put("maps/x", &bytes).unwrap();
        assert_eq!(all(&backend, "maps/x"), bytes, "{len}");
        let file = backend.open("maps/x").unwrap();
        for at in [0, len / 3, len.saturating_sub(1)] {
            let mut part = vec![0; (len - at).min(70_000)];
            file.read_at(at as u64, &mut part).unwrap();
            assert_eq!(part, bytes[at..at + part.len()], "{len} at {at}");
        }
        assert!(file.read_at(len as u64, &mut [0]).is_err());
    }
}

#[test]
fn a_whole_file_that_was_cut_between_two_frames_is_told() {
    let medium = FaultyBackend::default();
    let backend = over(&medium);
    backend.put("moves", &pattern(150_000, 1)).unwrap();
    let bytes = medium.files()["moves"].clone();
    medium.overwrite("moves", Some(bytes[..BLOCK_BYTES as usize].to_vec()));
    let error = backend.read("moves", 1 << 20).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
    // Frames of two versions of a file do not mix.
    medium.overwrite("moves", Some(bytes.clone()));
    backend.put("moves", &pattern(150_000, 2)).unwrap();
    let other = medium.files()["moves"].clone();
    let mixed = [&bytes[..BLOCK_BYTES as usize], &other[BLOCK_BYTES as usize..]].concat();
    medium.overwrite("moves", Some(mixed));
    assert!(matches!(backend.read("moves", 1 << 20), Err(Error::Damaged { .. })));
    // A file is not valid under another name.
    medium.overwrite("tags/a", Some(bytes));
    assert!(matches!(backend.read("tags/a", 1 << 20), Err(Error::Damaged { .. })));
}

#[test]
fn a_reader_follows_a_file_that_grows() {
    let backend = over(&FaultyBackend::default());
    let mut growing = backend.create("packs/1").unwrap();
    let file = backend.open("packs/1").unwrap();
    let mut expected = Vec::new();
    assert_eq!(file.len_bytes().unwrap(), 0);
    for step in 0..40 {
        let bytes = pattern(1 + step * 997, step as u64);
        growing.append(&bytes).unwrap();
        let at = expected.len() as u64;
        expected.extend(bytes);
        assert_eq!(file.len_bytes().unwrap(), expected.len() as u64);
        let mut last = vec![0; expected.len() - at as usize];
        file.read_at(at, &mut last).unwrap();
        assert_eq!(last, expected[at as usize..]);
    }
    assert_eq!(all(&backend, "packs/1"), expected);
}

/// Writes a file of ten blocks with frames of many lengths; returns its plaintext.
fn ten_blocks(backend: &EncryptedBackend) -> Vec<u8> {
    let mut growing = backend.create("packs/1").unwrap();
    let mut plain = Vec::new();
    for seed in 0.. {
        let bytes = pattern(1 + (seed as usize * 7919) % 30_000, seed);
        growing.append(&bytes).unwrap();
        plain.extend(bytes);
        if plain.len() > 620_000 {
            return plain;
        }
    }
    unreachable!()
}

#[test]
fn a_read_that_fails_is_no_damage_and_gives_no_wrong_bytes() {
    let medium = FaultyBackend::default();
    let backend = over(&medium);
    let plain = ten_blocks(&backend);
    let mut failed = 0;
    for at in (0..plain.len() - 9000).step_by(17_011) {
        let file = backend.open("packs/1").unwrap();
        let read = || {
            let mut part = vec![0; 9000];
            file.read_at(at as u64, &mut part).map(|()| part)
        };
        // The header is read only once.
        assert_eq!(read().unwrap(), plain[at..at + 9000]);
        let before = medium.reads();
        assert_eq!(read().unwrap(), plain[at..at + 9000]);
        let reads = medium.reads() - before;
        for number in 1..=reads {
            medium.fail_read_in(number);
            let error = read().map(drop).expect_err("a read below failed");
            assert!(matches!(error, Error::Io { .. }), "read {number} of {reads} at {at}: {error}");
            failed += 1;
            assert_eq!(read().unwrap(), plain[at..at + 9000], "the same again at {at}");
        }
    }
    assert!(failed > 60, "{failed} reads failed: the search for blocks was hardly met");
}

/// A file with a bad sector.
#[derive(Debug)]
struct BadSector(Arc<dyn ReadFile>, u64);

impl ReadFile for BadSector {
    fn len_bytes(&self) -> Result<u64> {
        self.0.len_bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        if offset < self.1 + 512 && self.1 < offset + buffer.len() as u64 {
            let source = io::Error::from_raw_os_error(5);
            return Err(Error::Io { object: "packs/1".into(), operation: "read", source });
        }
        self.0.read_at(offset, buffer)
    }
}

#[test]
fn a_bad_sector_costs_its_block_alone_and_is_told_as_what_it_is() {
    let medium = FaultyBackend::default();
    let backend = over(&medium);
    let plain = ten_blocks(&backend);
    for bad in 1..9 {
        let below = Arc::new(BadSector(medium.open("packs/1").unwrap(), bad * BLOCK_BYTES));
        let file = EncryptedReader {
            file: below,
            cipher: backend.cipher.clone(),
            name: "packs/1".into(),
            object: "packs/1".into(),
            header: OnceLock::new(),
            len: Mutex::default(),
        };
        let mut lost = 0;
        for at in (0..plain.len() - 1).step_by(997) {
            let mut byte = [0];
            match file.read_at(at as u64, &mut byte) {
                Ok(()) => assert_eq!(byte[0], plain[at]),
                Err(Error::Io { source, .. }) if source.raw_os_error() == Some(5) => lost += 997,
                Err(error) => panic!("{bad}, {at}: {error}"),
            }
        }
        let most = PLAIN_BYTES_MAX + 997;
        assert!(0 < lost && lost <= most, "block {bad}: {lost} bytes are not given");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Append(usize),
    Cut(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => prop_oneof![0usize..200, 0usize..40_000, 60_000usize..140_000].prop_map(Step::Append),
        1 => any::<usize>().prop_map(Step::Cut),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn appending_and_cutting_give_what_a_plain_file_gives_and_no_nonce_twice(
        steps in prop::collection::vec(step(), 1..14), at in any::<usize>(),
    ) {
        let medium = FaultyBackend::default();
        let backend = over(&medium);
        let mut growing = backend.create("packs/1").unwrap();
        let mut plain: Vec<u8> = Vec::new();
        let mut seen: BTreeSet<(Vec<u8>, u64)> = BTreeSet::new();
        let mut before: BTreeSet<(Vec<u8>, u64)> = BTreeSet::new();
        for (seed, step) in steps.iter().enumerate() {
            match step {
                Step::Append(len) => {
                    let bytes = pattern(*len, seed as u64);
                    growing.append(&bytes).unwrap();
                    plain.extend(bytes);
                }
                Step::Cut(to) => {
                    let to = to % (plain.len() + 1);
                    growing.truncate(to as u64).unwrap();
                    plain.truncate(to);
                }
            }
            // A new frame has a nonce that no frame had before, including frames that were cut off.
            let now: BTreeSet<_> = nonces(&medium.files()["packs/1"]).into_iter().collect();
            for nonce in now.difference(&before) {
                prop_assert!(seen.insert(nonce.clone()), "{nonce:?} twice");
            }
            before = now;
            prop_assert_eq!(backend.open("packs/1").unwrap().len_bytes().unwrap(), plain.len() as u64);
        }
        prop_assert!(all(&backend, "packs/1") == plain);
        let at = at % (plain.len() + 1);
        let mut part = vec![0; (plain.len() - at).min(5000)];
        backend.open("packs/1").unwrap().read_at(at as u64, &mut part).unwrap();
        prop_assert!(part == plain[at..at + part.len()]);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), is_headed in any::<bool>()) {
        let medium = FaultyBackend::default();
        let backend = over(&medium);
        backend.put("x", b"").unwrap();
        let mut file = if is_headed { medium.files()["x"][..32].to_vec() } else { Vec::new() };
        file.extend(bytes);
        medium.overwrite("x", Some(file));
        let _ = backend.read("x", 1 << 20);
        if let Ok(file) = backend.open("x") {
            let _ = file.read_at(3, &mut [0; 9]);
        }
    }
}
