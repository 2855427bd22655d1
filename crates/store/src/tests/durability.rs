//! Checkpoints that are not synced one by one: the death of the process costs none, and after power loss what is there is whole.

use super::*;
use std::time::Duration;

const PAGES: u64 = 14;

fn tuning(durability: Durability) -> Tuning {
    Tuning { durability, ..TINY }
}

/// Seals `images`, and leaves all as a killed engine does.
fn killed_after(medium: &Faulty, durability: Durability, images: &[Image]) -> Vec<(CheckpointId, Image)> {
    let store = on(medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", tuning(durability)).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    let mut old = vec![0; PAGES as usize];
    let mut sealed = Vec::new();
    for image in images {
        put_changes(&mut run, &old, image).unwrap();
        sealed.push((seal(&mut run, PAGES).unwrap().id, image.clone()));
        old.clone_from(image);
    }
    drop(writer);
    drop(run);
    sealed
}

fn images(seed: u64) -> Vec<Image> {
    crash::script(seed).concat()
}

/// Whatever is listed is right, and nothing is damaged.
fn assert_whole(medium: &Faulty, known: &[(CheckpointId, Image)], context: &str) -> usize {
    let store = on(medium).unwrap();
    let sealed = store.checkpoints().unwrap().sealed;
    for checkpoint in &sealed {
        let image = known.iter().find(|(id, _)| *id == checkpoint.id).map(|(_, image)| image);
        assert_image(
            &store,
            checkpoint.id,
            image.unwrap_or_else(|| panic!("{context}: {} is unknown", checkpoint.id)),
        );
    }
    let report = check(&store);
    assert!(report.is_clean(), "{context}: {report:#?}");
    sealed.len()
}

#[test]
fn after_power_loss_the_next_writer_keeps_what_is_whole_and_sets_the_rest_aside() {
    let mut lost = 0;
    for seed in 0..60 {
        let medium = Faulty::default();
        init_on(&medium).unwrap();
        let durability = if seed % 2 == 0 { Durability::Never } else { Durability::Every(Duration::ZERO) };
        let known = killed_after(&medium, durability, &images(seed));
        // The process died, and the machine did not.
        assert_eq!(assert_whole(&medium, &known, "killed"), known.len());
        let medium = medium.after_power_loss(seed);
        let store = on(&medium).unwrap();
        let writer = store.lock_writer_tuned("test", TINY).unwrap();
        let torn = writer.torn().len();
        drop(writer);
        let left = assert_whole(&medium, &known, &format!("seed {seed}"));
        assert!(torn + left <= known.len());
        if durability != Durability::Never {
            assert_eq!((torn, left), (0, known.len()), "seed {seed}: all were synced");
        }
        lost += known.len() - left;
        assert!(!medium.files().contains_key("unsynced"));
        // Gone on with, also where records were lost that the store believed to have.
        let more = killed_after(&medium, Durability::Checkpoint, &images(seed));
        // The numbers of those that nobody has seen since may come again.
        let kept = known.into_iter().filter(|(id, _)| !more.iter().any(|(again, _)| again == id));
        let all: Vec<_> = kept.chain(more.iter().cloned()).collect();
        assert_whole(&medium.after_power_loss(seed), &all, &format!("seed {seed}, gone on with"));
    }
    assert!(lost > 20, "power loss took {lost} checkpoints only: nothing was tested");
}

#[test]
fn a_writer_that_ends_well_leaves_all_durable() {
    for durability in [Durability::Never, Durability::Every(Duration::from_secs(3600))] {
        let medium = Faulty::default();
        let store = init_on(&medium).unwrap();
        let mut writer = store.lock_writer_tuned("test", tuning(durability)).unwrap();
        let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
        let begun = medium.syncs();
        run.put_page(PageIndex(1), &content(3)).unwrap();
        let id = seal(&mut run, PAGES).unwrap().id;
        assert_eq!(medium.syncs(), begun, "a seal waited for a sync");
        run.finish().unwrap();
        drop(writer);
        assert!(medium.syncs() > begun, "nothing was synced at the end");
        let medium = medium.after_power_loss(5);
        let mut image = vec![0; PAGES as usize];
        image[1] = 3;
        assert_whole(&medium, &[(id, image)], "ended well");
        assert!(!medium.files().contains_key("unsynced"));
    }
}
