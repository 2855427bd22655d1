//! A full disk, at any byte: sealed checkpoints stay, and once there is space the run goes on.

use super::crash::{Known, assert_known, play, script};
use super::*;

#[test]
fn a_disk_full_at_any_byte_harms_nothing_and_the_run_goes_on_with_space() {
    // A step that is no divisor of any record length, so that all kinds of cuts occur.
    fill_at_every(211);
}

/// Has the disk full at every so many bytes.
pub fn fill_at_every(step: usize) {
    let sessions = script(11);
    let medium = FaultyBackend::default();
    init_on(&medium).unwrap();
    let least = medium.used_bytes();
    play(&medium, &sessions, &mut Known::default(), &mut |_, _| false).unwrap();
    let most = medium.used_bytes() + 5000;
    let mut never_full = 0;
    for capacity in (least..most).step_by(step) {
        let medium = FaultyBackend::default();
        init_on(&medium).unwrap();
        // The id is random, its length is not: every attempt meets the limit at the same place.
        medium.limit(Some(capacity));
        let (mut known, mut times) = (Known::default(), 0);
        play(&medium, &sessions, &mut known, &mut |error, so_far| {
            times += 1;
            assert!(error.is_disk_full(), "{capacity} bytes: {error}");
            let sealed = Known { sealed: so_far.sealed.clone(), in_progress: None };
            assert_known(&medium, &sealed, &format!("full at {capacity} bytes"));
            // The first retry meets the full disk again; then there is space.
            if times == 2 {
                medium.limit(None);
            }
            times <= 2
        })
        .unwrap_or_else(|e| panic!("{capacity} bytes: {e}"));
        assert_eq!(known.sealed.len(), 10);
        let report = check(&on(&medium).unwrap());
        assert!(
            !report.notes.iter().any(|n| n.contains("uses this map")),
            "{capacity} bytes: {report:#?}"
        );
        never_full += usize::from(times == 0);
        assert_known(&medium, &known, &format!("was full at {capacity} bytes"));
        assert_known(
            &medium.after_power_loss(capacity as u64),
            &known,
            &format!("was full at {capacity} bytes, then lost power"),
        );
    }
    assert!((1..60).contains(&never_full), "{never_full} of the capacities were never reached");
}

#[test]
fn a_tag_that_does_not_fit_leaves_the_checkpoint_sealed() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer("test").unwrap();
    let mut run = writer.begin_run("vm", &layout(2)).unwrap();
    let before = medium.used_bytes();
    seal(&mut run, 2).unwrap();
    let per_seal = medium.used_bytes() - before;
    // Enough for what the next seal writes, not for its tag. The second one has one more map in its
    // list.
    medium.limit(Some(medium.used_bytes() + per_seal + 10));
    let tagged = SealRequest { tag: Some("a-tag-of-some-length"), ..request(&layout(2)) };
    let error = run.seal(tagged.clone()).unwrap_err();
    assert!(
        error.is_disk_full() && matches!(error, Error::TagNotSet { id: CheckpointId(2), .. }),
        "{error}"
    );
    medium.limit(None);
    assert_eq!((store.checkpoints().unwrap().sealed.len(), run.epoch().0), (2, 2));
    assert_eq!(run.seal(tagged).unwrap().meta.map_chain, [3, 2, 1]);
    assert_clean(&store);
}
