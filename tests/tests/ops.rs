//! What keeps a store in order: tags and pins, the flight recorder, copies, repair.

use keyframe_tests::{Bench, Boot, Process, assert_no_errors, assert_restores_exactly, number};
use serde_json::Value;
use std::path::Path;

fn boot(work: &str) -> Boot {
    let mut boot = Boot::new(work);
    boot.mem_mib = 96;
    boot
}

fn ids(bench: &Bench) -> Vec<u64> {
    bench.list().iter().map(|entry| number(entry, "id")).collect()
}

/// Bytes of all files of a folder of the store; those that go meanwhile count nothing.
fn bytes(bench: &Bench, folder: &str) -> u64 {
    let path = Path::new(&bench.store()).join(folder);
    let files = std::fs::read_dir(path).expect("a folder").flatten();
    files.filter_map(|file| Some(file.metadata().ok()?.len())).sum()
}

fn wait_for_id(bench: &Bench, run: &mut Process, id: u64) {
    let there = run.wait_until(90, |_| (*ids(bench).last()? >= id).then_some(()));
    assert!(there.is_some(), "no checkpoint {id}; {}", run.report());
}

#[test]
fn a_flight_recorder_keeps_its_store_small_and_what_was_pinned() {
    let bench = Bench::new();
    let store = bench.store();
    let options = ["--name", "guest", "--interval", "150ms", "--keep-within", "2s", "--audit", "audit"];
    let mut run = bench.start(&options, &boot("dirty kf.rate=1500 kf.mib=16"));
    run.wait_for("KF READY");
    let first = *ids(&bench).first().expect("a checkpoint");
    let base = *ids(&bench).last().expect("a checkpoint");
    bench.ok(&["pin", "--store", &store, &(base).to_string()]);
    bench.ok(&["tag", "--store", &store, "latest", "named"]);
    let named = number(&bench.json(&["show", "--json", "--store", &store, "named"]), "id");
    wait_for_id(&bench, &mut run, base + 30);
    let (packs, maps) = (bytes(&bench, "packs"), bytes(&bench, "maps"));
    wait_for_id(&bench, &mut run, base + 90);
    let (packs_then, maps_then) = (bytes(&bench, "packs"), bytes(&bench, "maps"));
    println!("packs {packs} bytes, then {packs_then}; maps {maps}, then {maps_then}");
    // Without a recorder it would be three times as much, and go on.
    assert!(packs_then < packs * 2, "packs: {packs} bytes, then {packs_then}");
    assert!(maps_then < maps * 2, "maps: {maps} bytes, then {maps_then}");
    bench.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    bench.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
    assert_no_errors(&run);
    let kept = ids(&bench);
    println!("kept {kept:?}");
    assert!(kept.contains(&base) && kept.contains(&named) && !kept.contains(&(base + 20)), "{kept:?}");
    assert!(first == base || first == named || !kept.contains(&first), "{kept:?}");
    bench.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    // The audit has the newest copies; each sealed one was compared with its own when it was sealed.
    let recent = kept.iter().filter(|id| **id != base && **id != named);
    let newest = recent.clone().max().expect("a recent one");
    let listed = bench.list();
    let pinned: Vec<u64> = listed.iter().filter(|e| e["pinned"] == true).map(|e| number(e, "id")).collect();
    assert_eq!(pinned, [base]);
    assert_restores_exactly(&bench, &newest.to_string());
    bench.refused(&["forget", "--store", &store, &base.to_string()], 1, &["pinned", "--remove"]);
    bench.ok(&["forget", "--store", &store, "--keep-last", "1", "--keep-tag", "none"]);
    assert_eq!(ids(&bench), [base, *newest]);
    bench.ok(&["forget", "--store", &store, "--force", &base.to_string()]);
    let after: Value = bench.json(&["prune", "--quiet", "--json", "--max-unused", "0%", "--store", &store]);
    assert_eq!(number(&after, "postponed_packs"), 0, "{after}");
    bench.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    assert_restores_exactly(&bench, &newest.to_string());
}
