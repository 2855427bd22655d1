//! Damage of every byte of a store, one at a time: `check` finds it, and names exactly the
//! checkpoints that it affects.

use super::*;
use std::collections::BTreeSet;

const PAGES: u64 = 8;

/// A store with everything in it: closed and unfinished packs, superseded records, several runs,
/// chains, tags.
pub fn subject() -> (FaultyBackend, BTreeMap<CheckpointId, Image>) {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut truth = BTreeMap::new();
    let sessions: [&[[u64; 4]]; 3] = [
        &[[2, 4, 6, 0], [2, 8, 6, 10], [2, 8, 12, 10], [14, 8, 0, 10]],
        &[[2, 16, 6, 1]],
        &[[18, 2, 0, 0], [20, 2, 0, 0]],
    ];
    for (session, images) in sessions.iter().enumerate() {
        let mut writer =
            store.lock_writer_tuned("test", Tuning { pack_bytes_max: 600, ..TINY }).unwrap();
        let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
        let mut old = vec![0; 4];
        for image in *images {
            // A content that no checkpoint needs.
            run.put_page(PageIndex(0), &content(100 + 2 * session as u64)).unwrap();
            run.put_page(PageIndex(0), &content(image[0])).unwrap();
            put_changes(&mut run, &old, image).unwrap();
            let id = seal(&mut run, PAGES).unwrap().id;
            truth.insert(id, image.to_vec());
            old = image.to_vec();
        }
        if session < 2 {
            run.finish().unwrap();
        }
    }
    let mut writer = store.lock_writer("test").unwrap();
    writer.set_tag("first", CheckpointId(1)).unwrap();
    (medium, truth)
}

/// The checkpoints whose image, meta or device state cannot be had any more.
pub fn lost(
    medium: &FaultyBackend,
    truth: &BTreeMap<CheckpointId, Image>,
) -> BTreeSet<CheckpointId> {
    let Ok(store) = on(medium) else { return truth.keys().copied().collect() };
    let is_lost = |(id, image): &(&CheckpointId, &Image)| match image_is(&store, **id, image) {
        Ok(same) => {
            assert!(same, "checkpoint {id} was read without an error and is wrong");
            false
        }
        Err(Error::Damaged { .. } | Error::UnknownCheckpoint { .. }) => true,
        Err(other) => panic!("checkpoint {id}: {other}"),
    };
    truth.iter().filter(is_lost).map(|(id, _)| *id).collect()
}

fn assert_found(
    medium: &FaultyBackend,
    truth: &BTreeMap<CheckpointId, Image>,
    baseline: &CheckReport,
    what: &str,
) {
    let Ok(store) = on(medium) else {
        // The store cannot be opened, and all checkpoints are lost.
        assert!(
            matches!(on(medium).unwrap_err(), Error::Damaged { .. } | Error::NoStore { .. }),
            "{what}"
        );
        return;
    };
    let report = check(&store);
    assert!(!report.is_clean() || report.notes != baseline.notes, "{what}: nobody noticed");
    assert_eq!(report.hurt_checkpoints(), lost(medium, truth), "{what}: {report:#?}");
    for damage in &report.damages {
        assert!(!damage.object.is_empty() && !damage.problem.is_empty());
    }
}

#[test]
fn the_subject_is_intact_and_has_all_kinds_of_files() {
    let (medium, truth) = subject();
    assert!(lost(&medium, &truth).is_empty());
    let report = check(&on(&medium).unwrap());
    assert!(report.is_clean(), "{report:#?}");
    assert_eq!((report.checkpoints, report.maps, report.notes.len()), (7, 7, 1), "{report:#?}");
    assert!(report.packs >= 4 && report.notes[0].contains("unfinished"), "{report:#?}");
}

#[test]
fn a_check_finds_every_flipped_bit_and_names_the_right_checkpoints() {
    flip_every(1);
}

/// Flips a bit of each byte, or of every so many.
pub fn flip_every(step: usize) {
    let (medium, truth) = subject();
    let baseline = check(&on(&medium).unwrap());
    let mut flips = 0;
    for (name, bytes) in medium.files() {
        for at in (0..bytes.len()).step_by(step) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            medium.overwrite(&name, Some(flipped));
            assert_found(&medium, &truth, &baseline, &format!("{name}, byte {at}"));
            flips += 1;
        }
        medium.overwrite(&name, Some(bytes));
    }
    assert!(flips > 10_000 / step, "{flips}");
    assert!(check(&on(&medium).unwrap()).is_clean());
}

#[test]
pub fn cut_missing_and_swapped_files_are_found() {
    let (medium, truth) = subject();
    let baseline = check(&on(&medium).unwrap());
    let files = medium.files();
    for (name, bytes) in &files {
        for len in (0..bytes.len()).step_by(97) {
            medium.overwrite(name, Some(bytes[..len].to_vec()));
            assert_found(&medium, &truth, &baseline, &format!("{name} cut to {len} bytes"));
        }
        for (other, others_bytes) in &files {
            let folder = |name: &str| name.split('/').next().unwrap_or_default().to_string();
            if other != name && folder(other) == folder(name) {
                medium.overwrite(name, Some(others_bytes.clone()));
                assert_found(
                    &medium,
                    &truth,
                    &baseline,
                    &format!("{other} in the place of {name}"),
                );
            }
        }
        // A checkpoint or a tag that is gone is not missed, unless a tag points to it; all else is.
        let is_missed = !name.starts_with("tags/") && !name.starts_with("checkpoints/");
        if is_missed || name == "checkpoints/0000000001.ckpt" {
            medium.overwrite(name, None);
            assert_found(&medium, &truth, &baseline, &format!("{name} is gone"));
        }
        medium.overwrite(name, Some(bytes.clone()));
    }
}

#[test]
pub fn a_file_of_another_store_is_found() {
    let (medium, truth) = subject();
    let (other, _) = subject();
    let baseline = check(&on(&medium).unwrap());
    for (name, bytes) in other.files() {
        let own = medium.files().remove(&name);
        medium.overwrite(&name, Some(bytes));
        assert_found(&medium, &truth, &baseline, &format!("{name} of another store"));
        medium.overwrite(&name, own);
    }
}

#[test]
fn a_check_without_pages_checks_all_other_files() {
    let (medium, truth) = subject();
    let quick = |medium: &FaultyBackend| {
        on(medium).unwrap().check(&CheckOptions::default(), &mut |_| {}).unwrap()
    };
    assert!(quick(&medium).is_clean());
    for (name, bytes) in medium.files() {
        let is_checked =
            ["maps/", "checkpoints/", "tags/"].iter().any(|folder| name.starts_with(folder));
        if is_checked || name == "packs/00000001.pack" {
            medium.overwrite(&name, Some(bytes[..bytes.len() - 1].to_vec()));
            let report = quick(&medium);
            assert!(!report.is_clean() || report.notes.len() > 1, "{name}");
            assert_eq!(report.hurt_checkpoints(), lost(&medium, &truth), "{name}");
            medium.overwrite(&name, Some(bytes));
        }
    }
}

#[test]
fn progress_rises_to_the_whole() {
    let (medium, _) = subject();
    let (mut last, mut total) = (0, 0);
    let mut hear = |progress: crate::CheckProgress| {
        assert!(progress.done_bytes >= last && progress.done_bytes <= progress.total_bytes);
        (last, total) = (progress.done_bytes, progress.total_bytes);
    };
    on(&medium).unwrap().check(&CheckOptions { read_data: true }, &mut hear).unwrap();
    assert!(last == total && total > 0, "{last} of {total}");
}

/// A writer goes on over damage without leaning on it.
#[test]
pub fn a_damaged_pack_is_not_deduplicated_against() {
    let (medium, _) = subject();
    // A bad record in the unfinished pack, and a pack whose header is bad.
    let unfinished = medium.files().keys().rfind(|n| n.starts_with("packs/")).unwrap().clone();
    for name in [unfinished, "packs/00000001.pack".into()] {
        let mut bytes = medium.files()[&name].clone();
        let at = if name.ends_with("1.pack") { 20 } else { 70 };
        bytes[at] ^= 1;
        medium.overwrite(&name, Some(bytes));
    }
    let store = on(&medium).unwrap();
    let hurt = check(&store).hurt_checkpoints();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    let image = [2, 4, 18, 20, 6];
    put_changes(&mut run, &[0; 5], &image).unwrap();
    let id = seal(&mut run, PAGES).unwrap().id;
    run.finish().unwrap();
    assert_image(&store, id, &image);
    assert_eq!(check(&store).hurt_checkpoints(), hurt);
}
