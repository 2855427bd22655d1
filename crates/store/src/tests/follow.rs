//! A run follows a prune while one of its reads fails. The run has put a delta that no checkpoint
//! has yet, and the prune removes the pack with the base of that delta.

use super::*;
use crate::{PruneOptions, PruneStep, Writer};

const PAGES: u64 = 12;

/// An image whose page 0 has the content `first`. Pages 1 and 2 are others for each `group`.
fn image(first: u64, group: u64) -> Image {
    let mut image: Image = (0..PAGES).map(|page| 101 + 2 * page).collect();
    image[0] = first;
    image[1] += 100 * group;
    image[2] += 100 * group;
    image
}

/// A run, and what it has sealed.
struct Session {
    writer: Writer,
    run: Run,
    image: Image,
    known: BTreeMap<CheckpointId, Image>,
}

impl Session {
    fn begin(store: &Store) -> Self {
        let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
        let run = writer.begin_run("vm", &layout(PAGES)).unwrap();
        Self { writer, run, image: vec![0; PAGES as usize], known: BTreeMap::new() }
    }

    fn put(&mut self, image: &[u64]) -> Result<()> {
        put_changes(&mut self.run, &self.image, image)
    }

    fn seal(&mut self, image: Image) {
        self.put(&image).unwrap();
        self.known.insert(seal(&mut self.run, PAGES).unwrap().id, image.clone());
        self.image = image;
    }

    /// Seals `image`, which was put, while read number `read` of `medium` fails. Seals it again if
    /// the seal fails. Returns false if the seal takes fewer reads.
    fn seal_with_a_failed_read(
        &mut self,
        image: &[u64],
        medium: &FaultyBackend,
        read: u64,
    ) -> bool {
        let last = medium.reads() + read;
        medium.fail_read_in(read);
        let sealed = seal(&mut self.run, PAGES);
        let came = medium.reads() >= last;
        medium.calm();
        let sealed = sealed.or_else(|_| {
            self.run.abandon();
            self.put(image)?;
            seal(&mut self.run, PAGES)
        });
        self.known.insert(sealed.unwrap().id, image.to_vec());
        came
    }

    fn end(self) -> BTreeMap<CheckpointId, Image> {
        self.run.finish().unwrap();
        drop(self.writer);
        self.known
    }
}

/// A run that puts the delta into its own pack.
fn run_with_own_delta(store: &Store) -> Session {
    let mut session = Session::begin(store);
    session.seal(image(11, 0));
    session.seal(image(11, 1));
    store.forget(&[CheckpointId(1)].into()).unwrap();
    session.known.remove(&CheckpointId(1));
    session
}

/// A run that finds the delta in the pack of a writer that was killed.
fn run_with_known_delta(store: &Store) -> Session {
    let mut first = Session::begin(store);
    first.seal(image(11, 0));
    first.seal(image(11, 1));
    first.end();
    let mut killed = Session::begin(store);
    killed.seal(image(11, 1));
    killed.seal(image(15, 1));
    drop(killed);
    store.forget(&[CheckpointId(1), CheckpointId(4)].into()).unwrap();
    let mut session = Session::begin(store);
    session.seal(image(11, 1));
    session
}

/// One prune. Read number `read` of the run that follows it fails. Returns false if the run takes
/// fewer reads.
fn followed_with_a_failed_read(begin: fn(&Store) -> Session, read: u64) -> bool {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut session = begin(&store);
    let next = image(15, 1);
    let (mut is_put, mut came) = (false, None);
    let elsewhere = on(&medium).unwrap();
    let options = PruneOptions::default();
    let report = elsewhere.prune_tuned(&options, TINY, &mut |progress| match progress.step {
        // The prune has looked at all checkpoints before.
        PruneStep::Copying if !is_put => {
            session.put(&next).unwrap();
            is_put = true;
        }
        PruneStep::Waiting if came.is_none() => {
            came = Some(session.seal_with_a_failed_read(&next, &medium, read));
        }
        PruneStep::Waiting => session.run.follow_prune().unwrap(),
        _ => {}
    });
    let report = report.unwrap();
    assert!(is_put && report.rewritten_packs > 0, "read {read}: {report:#?}");
    let known = session.end();
    let fresh = on(&medium).unwrap();
    assert_intact(&fresh, &known, &format!("read {read}"));
    came.unwrap()
}

#[test]
fn a_read_that_fails_while_a_run_follows_a_prune_costs_a_seal_and_no_page() {
    for begin in [run_with_own_delta, run_with_known_delta] {
        let reads = (1..1000).take_while(|read| followed_with_a_failed_read(begin, *read)).count();
        assert!(reads > 8, "only {reads} reads");
    }
}

/// Without the delta the test above would test nothing.
#[test]
fn the_run_has_one_delta_of_its_own_or_of_a_killed_writer() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut session = run_with_own_delta(&store);
    session.seal(image(15, 1));
    assert_eq!(deltas::kinds(&store).get(&'D'), Some(&1));
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut session = run_with_known_delta(&store);
    let before = medium.files();
    assert_eq!(deltas::kinds(&store).get(&'D'), Some(&1));
    session.seal(image(15, 1));
    assert_eq!(deltas::kinds(&store).get(&'D'), Some(&1));
    let packs = |files: &BTreeMap<String, Vec<u8>>| {
        files.keys().filter(|name| name.starts_with("packs/")).count()
    };
    assert_eq!(packs(&medium.files()), packs(&before), "the run put a record of its own");
}
