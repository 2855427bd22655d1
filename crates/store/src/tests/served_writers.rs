//! Writers behind a checkpoint server: what they share with others, and what a lease that ends, a
//! server that ends and a full medium leave.

use super::direct_server::{Calm, DirectWriters, LEASE_MS};
use super::served::{Running, init};
use super::*;
use crate::{PruneOptions, Writer};
use keyframe_serve::ServerIdentity;
use std::time::Duration;

const PAGES: u64 = 40;
const ROOMY: Tuning = Tuning { pack_bytes_max: 1 << 30, ..TINY };

fn image(first: u64) -> Image {
    (0..PAGES).map(|page| first + 2 * page).collect()
}

fn blank() -> Image {
    vec![0; PAGES as usize]
}

fn seal_image(run: &mut Run, old: &[u64], new: &[u64]) -> Result<Sealed> {
    put_changes(run, old, new)?;
    seal(run, PAGES)
}

fn begin(store: &Store, tuning: Tuning) -> Result<(Writer, Run)> {
    let mut writer = store.lock_writer_tuned("test", tuning)?;
    let run = writer.begin_run("vm", &layout(PAGES))?;
    Ok((writer, run))
}

fn serve(medium: &FaultyBackend) -> Arc<DirectWriters> {
    let other = medium.clone();
    DirectWriters::start(medium, move || other.process())
}

fn elsewhere(server: &Arc<DirectWriters>, tuning: Tuning) -> (Writer, Run) {
    begin(&server.client(Arc::new(Calm)).unwrap(), tuning).unwrap()
}

/// Over the network, with files in a directory: many packs, maps and tags, and a prune beside.
#[test]
fn writers_elsewhere_and_here_share_one_store_over_the_network() {
    let dir = tempfile::tempdir().unwrap();
    let place = init(dir.path());
    let (listen, identity) = ("127.0.0.1:0".parse().unwrap(), ServerIdentity::fresh().unwrap());
    let running = Running::with(&place, listen, identity, Some(Duration::from_secs(60)));
    let store = Store::open(&place).unwrap();
    let [one, two] = ["one", "two"].map(|node| running.store(&dir.path().join(node)));
    let (_here, mut here) = begin(&store, TINY).unwrap();
    let mut known = BTreeMap::new();
    let first = seal_image(&mut here, &blank(), &image(101)).unwrap();
    known.insert(first.id, image(101));
    let (mut writer_one, mut a) = begin(&one, TINY).unwrap();
    let (_writer_two, mut b) = begin(&two, TINY).unwrap();
    let holders = store.lock_holder().unwrap().unwrap();
    assert_eq!(holders.matches("test (process").count(), 3, "{holders}");
    for round in 0..6_u64 {
        let (old, new) = match round {
            0 => (blank(), image(101)),
            _ => (image(99 + 2 * round), image(101 + 2 * round)),
        };
        for run in [&mut a, &mut b] {
            let sealed = seal_image(run, &old, &new).unwrap();
            known.insert(sealed.id, new.clone());
            if round == 0 {
                assert_eq!(sealed.meta.counts.stored_pages, 0, "the others had it");
            }
        }
        writer_one.set_tag("newest", *known.keys().next_back().unwrap()).unwrap();
        if round == 3 {
            // The newest of each run stays.
            let oldest: Vec<CheckpointId> = known.keys().skip(1).take(3).copied().collect();
            store.forget(&oldest.iter().copied().collect()).unwrap();
            let options = PruneOptions { max_unused: 0.0, ..PruneOptions::default() };
            std::thread::scope(|scope| {
                let pruning = scope.spawn(|| store.prune(&options, &mut |_| {}).unwrap());
                while !pruning.is_finished() {
                    for run in [&mut a, &mut b, &mut here] {
                        run.follow_prune().unwrap();
                    }
                    std::thread::sleep(Duration::from_millis(2));
                }
                let report = pruning.join().unwrap();
                assert_eq!(report.postponed_packs, 0, "{report:?}");
            });
            for id in &oldest {
                known.remove(id);
            }
        }
    }
    assert!(one.forget(&known.keys().take(1).copied().collect()).is_err());
    assert!(one.prune(&PruneOptions::default(), &mut |_| {}).is_err());
    for run in [a, b, here] {
        run.finish().unwrap();
    }
    assert_intact(&store, &known, "in the directory");
    assert_images(&running.store(&dir.path().join("three")), &known, "through the server");
}

#[test]
fn a_server_that_is_restarted_loses_nothing_sealed_and_a_writer_begins_anew() {
    let dir = tempfile::tempdir().unwrap();
    let place = init(dir.path());
    let identity = || ServerIdentity::kept(&dir.path().join("identity")).unwrap();
    let lease = Some(Duration::from_secs(60));
    let running = Running::with(&place, "127.0.0.1:0".parse().unwrap(), identity(), lease);
    let address = running.address;
    let mut client = running.client(&dir.path().join("node"));
    client.hasten(Duration::from_millis(300));
    let client = Store::open_on(Arc::new(client), Path::new("kf://test")).unwrap();
    let store = Store::open(&place).unwrap();
    let (mut writer, mut run) = begin(&client, TINY).unwrap();
    let first = seal_image(&mut run, &blank(), &image(101)).unwrap();
    put_changes(&mut run, &image(101), &image(301)).unwrap();
    drop(running);
    let error = seal(&mut run, PAGES).unwrap_err();
    assert!(error.to_string().contains("no answer from the checkpoint server"), "{error}");
    run.abandon();
    assert!(!writer.is_lost(), "it may still have its place");
    assert!(writer.again().is_err());
    let _running = Running::with(&place, address, identity(), lease);
    let error = seal_image(&mut run, &image(101), &image(301)).unwrap_err();
    assert!(error.to_string().contains("no place in the store any more"), "{error}");
    run.abandon();
    assert!(writer.is_lost());
    drop(run);
    writer = writer.again().unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    let second = seal_image(&mut run, &blank(), &image(301)).unwrap();
    run.finish().unwrap();
    let known = BTreeMap::from([(first.id, image(101)), (second.id, image(301))]);
    assert_intact(&store, &known, "after a restart");
}

#[test]
fn a_writer_whose_lease_has_ended_cannot_seal_and_holds_up_nobody() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let server = serve(&medium);
    let (writer, mut run) = elsewhere(&server, ROOMY);
    let first = seal_image(&mut run, &blank(), &image(101)).unwrap();
    // All but the seal has arrived.
    put_changes(&mut run, &image(101), &image(301)).unwrap();
    server.pass(LEASE_MS);
    assert!(store.lock_holder().unwrap().is_some(), "the lease is not over yet");
    server.pass(1);
    assert_eq!(store.lock_holder().unwrap(), None);
    // A prune does not wait for a writer, and may take what the old run builds on.
    store.forget(&[first.id].into()).unwrap();
    let options = PruneOptions { max_unused: 0.0, ..PruneOptions::default() };
    let report = store.prune(&options, &mut |_| {}).unwrap();
    assert_eq!(report.postponed_packs, 0);
    let before = medium.files();
    let error = seal(&mut run, PAGES).unwrap_err();
    assert!(error.to_string().contains("lease has ended"), "{error}");
    assert!(writer.is_lost() && error.fix().is_some());
    run.abandon();
    drop(run);
    assert_eq!(medium.files(), before, "a late writer has changed the store");
    let (_again, mut run) = elsewhere(&server, ROOMY);
    // The late one has no power over the place that it had.
    drop(writer);
    assert!(store.lock_holder().unwrap().is_some());
    let second = seal_image(&mut run, &blank(), &image(301)).unwrap();
    run.finish().unwrap();
    assert_intact(&store, &BTreeMap::from([(second.id, image(301))]), "after the late one");
}

#[test]
fn a_full_medium_of_the_server_is_told_as_such_and_the_run_goes_on_when_there_is_space() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let server = serve(&medium);
    let (_writer, mut run) = elsewhere(&server, TINY);
    let first = seal_image(&mut run, &blank(), &image(101)).unwrap();
    medium.limit(Some(medium.used_bytes() + 30_000));
    let error = seal_image(&mut run, &image(101), &image(301)).unwrap_err();
    assert!(error.is_disk_full() && error.fix().is_some(), "{error}");
    run.abandon();
    medium.limit(None);
    let second = seal_image(&mut run, &image(101), &image(301)).unwrap();
    run.finish().unwrap();
    let known = BTreeMap::from([(first.id, image(101)), (second.id, image(301))]);
    assert_intact(&store, &known, "after a full medium");
}

#[test]
fn an_encrypted_store_with_something_to_settle_takes_no_writer_elsewhere_until_it_is_settled() {
    encrypted::ask(true);
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let server = serve(&medium);
    let (_writer, mut run) = elsewhere(&server, TINY);
    let first = seal_image(&mut run, &blank(), &image(101)).unwrap();
    run.finish().unwrap();
    let killed = medium.process();
    let never = Tuning { durability: Durability::Never, ..TINY };
    let (dead, open) = begin(&on(&killed).unwrap(), never).unwrap();
    killed.kill_in(0);
    drop((open, dead));
    let refused = begin(&server.client(Arc::new(Calm)).unwrap(), TINY).unwrap_err();
    assert!(refused.to_string().contains("check --repair"), "{refused}");
    drop(store.lock_writer_tuned("here", TINY).unwrap());
    drop(elsewhere(&server, TINY));
    assert_intact(&store, &BTreeMap::from([(first.id, image(101))]), "settled");
    encrypted::ask(false);
}
