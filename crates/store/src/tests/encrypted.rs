//! An encrypted store: crashes, failing syncs, a full disk, damage of every byte. And that its
//! files show nothing of the guest.

use super::*;
use crate::{Secret, SecretKind};
use std::cell::Cell;
use zeroize::Zeroizing;

thread_local! {
    static IS_ASKED: Cell<bool> = const { Cell::new(false) };
}

/// True where the test wants its stores encrypted.
pub fn is_asked() -> bool {
    IS_ASKED.get()
}

/// Has the stores that this thread makes from here on encrypted, or not.
pub fn ask(encrypted: bool) {
    IS_ASKED.set(encrypted);
}

/// What opens the stores of tests; a key file costs no time.
pub fn secret() -> Secret {
    Secret::KeyFile(Zeroizing::new(b"the key file of all tests, 32 bytes and more".to_vec()))
}

fn encrypted(test: impl FnOnce()) {
    IS_ASKED.set(true);
    let medium = FaultyBackend::default();
    assert!(init_on(&medium).unwrap().is_encrypted());
    test();
    IS_ASKED.set(false);
}

#[test]
fn a_crash_loses_no_more_than_without() {
    encrypted(|| crash::crash_at_every(7));
}

#[test]
fn a_crash_while_it_is_made_leaves_none_or_a_whole_one() {
    encrypted(crash::a_crash_while_a_store_is_made_leaves_none_or_a_whole_one);
}

#[test]
fn a_failed_sync_costs_a_retry() {
    encrypted(crash::a_failed_sync_costs_a_retry_and_nothing_else);
}

#[test]
fn a_full_disk_harms_nothing() {
    encrypted(|| full_disk::fill_at_every(1511));
}

#[test]
fn every_flipped_bit_is_found() {
    encrypted(|| damage::flip_every(13));
}

#[test]
fn cut_missing_swapped_and_foreign_files_are_found() {
    encrypted(damage::cut_missing_and_swapped_files_are_found);
    encrypted(damage::a_file_of_another_store_is_found);
    encrypted(damage::a_damaged_pack_is_not_deduplicated_against);
}

#[test]
fn an_interrupted_recompression_costs_only_work() {
    encrypted(recompress::a_recompressed_store_is_smaller_and_can_be_written);
    encrypted(recompress::a_run_continues_with_deltas_on_recompressed_records);
    encrypted(recompress::a_crash_at_any_operation_costs_nothing_but_work);
    encrypted(recompress::a_failed_sync_and_a_full_disk_cost_nothing_but_work);
    encrypted(recompress::readers_keep_loaded_checkpoints_and_can_load_others_during_a_prune);
}

#[test]
fn checkpoints_that_are_not_synced_one_by_one_are_intact_or_quarantined() {
    encrypted(
        durability::after_power_loss_the_next_writer_keeps_intact_checkpoints_and_quarantines_the_others,
    );
    encrypted(durability::a_writer_that_ends_well_leaves_all_durable);
}

/// A store of some checkpoints, and the bytes of its files.
fn subject() -> FaultyBackend {
    let medium = FaultyBackend::default();
    encrypted(|| drop(init_on(&medium).unwrap()));
    let store = on(&medium).unwrap();
    let mut run =
        store.lock_writer_tuned("test", TINY).unwrap().begin_run("vm", &layout(9)).unwrap();
    for epoch in 0..3 {
        put_changes(&mut run, &[0; 9], &[2, 4, 6, 8, 10, 12, 14, 16, epoch]).unwrap();
        seal(&mut run, 9).unwrap();
    }
    run.finish().unwrap();
    medium
}

#[test]
fn nothing_of_the_guest_and_no_key_is_in_any_file() {
    let medium = subject();
    let key = on(&medium).unwrap().inner().config.clone();
    let data_key = key.encryption.unwrap().data_key;
    let page = content(4);
    let words: [&[u8]; 5] = [
        &page[..24],
        &page[100..130],
        &key.key.0[..8],
        &data_key.0[..8],
        b"the devices, the devices",
    ];
    for (name, bytes) in medium.files() {
        for word in words {
            assert!(!bytes.windows(word.len()).any(|window| window == word), "{name}");
        }
        let hex = String::from_utf8_lossy(&bytes).into_owned();
        assert!(!hex.contains(&keyframe_bytes::hex::to_hex(&key.key.0)), "{name}");
    }
}

#[test]
fn two_stores_of_the_same_content_have_no_frame_in_common() {
    let (one, other) = (subject(), subject());
    for (name, bytes) in one.files().iter().filter(|(name, _)| name.starts_with("packs/")) {
        let theirs = &other.files()[name];
        assert!(
            !bytes[32..].windows(24).step_by(24).any(|w| theirs.windows(24).any(|t| t == w)),
            "{name}"
        );
    }
}

#[test]
fn a_wrong_a_missing_and_another_kind_of_key_have_different_errors() {
    let medium = subject();
    let open = |ask: &dyn Fn(SecretKind) -> Result<Option<Secret>>| {
        Store::open_on_with(Arc::new(medium.clone()), Path::new("memory"), ask).map(drop)
    };
    assert!(matches!(open(&|_| Ok(None)), Err(Error::KeyNeeded { kind: SecretKind::KeyFile, .. })));
    let other = Secret::KeyFile(Zeroizing::new(vec![1; 32]));
    assert!(matches!(open(&|_| Ok(Some(other.clone()))), Err(Error::WrongKey { .. })));
    let words = Secret::Passphrase(Zeroizing::new("as long as it takes".into()));
    assert!(matches!(open(&|_| Ok(Some(words.clone()))), Err(Error::KeyNeeded { .. })));
    open(&|kind| Ok((kind == SecretKind::KeyFile).then(secret))).unwrap();
}

/// An attacker with write access to the medium replaces `store.json` with that of a plain store:
/// its files are not taken for good.
#[test]
fn a_plain_identity_opens_nothing_of_it() {
    let medium = subject();
    let plain = FaultyBackend::default();
    init_on(&plain).unwrap();
    medium.overwrite("store.json", Some(plain.files()["store.json"].clone()));
    let store = on(&medium).unwrap();
    assert!(!store.is_encrypted());
    assert!(store.checkpoints().unwrap().sealed.is_empty());
    assert!(matches!(store.load(CheckpointId(1)), Err(Error::Damaged { .. })));
}
