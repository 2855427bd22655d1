//! What keeps a store in order: tags and pins, the flight recorder, copies, repair.

use keyframe_tests::disks::{image, shell, virtio, words};
use keyframe_tests::{
    Bench, Boot, Process, assert_no_errors, assert_restores_exactly, distribution_qemu, number,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

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
    let there = run.wait_until(|_| (*ids(bench).last()? >= id).then_some(()));
    assert!(there.is_some(), "no checkpoint {id}; {}", run.report());
}

#[test]
fn a_flight_recorder_keeps_its_store_small_and_what_was_pinned() {
    let bench = Bench::new();
    let store = bench.store();
    let options =
        ["--name", "guest", "--interval", "150ms", "--keep-within", "1500ms", "--audit", "audit"];
    // Each checkpoint has 4 MiB of noise.
    let mut run = bench.start(&options, &boot("hash kf.mib=4 kf.pause_ms=5"));
    run.wait_for("KF READY");
    let base = *ids(&bench).last().expect("a checkpoint");
    bench.ok(&["pin", "--store", &store, &base.to_string()]);
    bench.ok(&["tag", "--store", &store, "latest", "named"]);
    let named = number(&bench.json(&["show", "--json", "--store", &store, "named"]), "id");
    bench.refused(&["unlock", "--store", &store], 11, &["keyframe run, VM guest", "keyframe stop"]);
    wait_for_id(&bench, &mut run, base + 30);
    // It forgets what is older and prunes now and then: the packs have ever less of what all
    // checkpoints would have, told by those that are still there.
    let small = run.wait_until(|_| {
        std::thread::sleep(Duration::from_millis(200));
        let status = bench.json(&["status", "--json", "--name", "guest"]);
        let recorder = &status[0]["recorder"];
        assert_eq!(number(recorder, "keep_within_ns"), 1_500_000_000, "{status}");
        assert!(recorder["last_error"].is_null(), "{status}");
        let kept: Vec<_> = bench.list().into_iter().filter(|e| number(e, "id") > named).collect();
        let stored: u64 = kept.iter().map(|e| number(e, "stored_bytes")).sum();
        let all = stored / kept.len().max(1) as u64 * (number(kept.last()?, "id") - base);
        let packs = bytes(&bench, "packs");
        let is_small = number(recorder, "freed_packs") > 0 && packs * 3 < all * 2;
        let is_recent = kept.iter().all(|e| number(e, "id") >= base + 20);
        (is_small
            && is_recent
            && number(recorder, "forgotten") > 15
            && number(recorder, "kept") >= 2)
            .then_some(packs)
    });
    let packs = small
        .unwrap_or_else(|| panic!("{} bytes of packs; {}", bytes(&bench, "packs"), run.report()));
    let text = bench.ok(&["status"]);
    assert!(
        text.contains("recorder    keeps 1.5 s") || text.contains("recorder    keeps 1.50 s"),
        "{text}"
    );
    assert!(!text.contains("recompress"), "{text}");
    bench.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    bench.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
    assert_no_errors(&run);
    let kept = ids(&bench);
    println!("kept {kept:?}");
    assert!(kept.contains(&base) && kept.contains(&named), "{kept:?}");
    assert!(!kept.iter().any(|id| (named + 1..base + 20).contains(id)), "{kept:?}");
    bench.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    let pinned: Vec<u64> =
        bench.list().iter().filter(|e| e["pinned"] == true).map(|e| number(e, "id")).collect();
    assert_eq!(pinned, [base]);
    // The audit has copies of the newest eight; the run compared each checkpoint with its own when
    // it was sealed.
    let recent: Vec<u64> = kept.iter().copied().filter(|id| *id > named).collect();
    let oldest = recent[recent.len().saturating_sub(8)];
    let newest = *recent.last().expect("a recent one");
    assert_restores_exactly(&bench, &oldest.to_string());
    bench.refused(&["forget", "--store", &store, &base.to_string()], 1, &["pinned", "--remove"]);
    bench.ok(&["forget", "--store", &store, "--keep-last", "1", "--keep-tag", "none"]);
    assert_eq!(ids(&bench), [base, newest]);
    bench.ok(&["forget", "--store", &store, "--force", &base.to_string()]);
    let pruned: Value =
        bench.json(&["prune", "--quiet", "--json", "--max-unused", "0%", "--store", &store]);
    assert!(
        number(&pruned, "after_bytes") < packs && number(&pruned, "postponed_packs") == 0,
        "{pruned}"
    );
    bench.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    assert_restores_exactly(&bench, &newest.to_string());
}

/// A checkpoint's RAM and its disk, as raw images.
fn images(bench: &Bench, store: &str, id: &str) -> [Vec<u8>; 2] {
    let export = |more: &[&str]| {
        bench.ok(&[&["export", id, "--store", store, "--force", "-o", "out.raw"], more].concat());
        std::fs::read(bench.path().join("out.raw")).expect("the exported file")
    };
    [export(&["--format", "raw"]), export(&["--disk", "d"])]
}

/// The pairs of numbers of a copy's report.
fn pairs(report: &Value, key: &str) -> BTreeMap<u64, u64> {
    let list = report[key].as_array().expect("a list");
    list.iter().map(|pair| (number(pair, "from"), number(pair, "to"))).collect()
}

#[test]
fn copies_and_what_a_repair_saves_are_exactly_what_was_taken() {
    let bench = Bench::new();
    let (store, second) = (bench.store(), bench.path().join("second").display().to_string());
    let disk = virtio(&image(&bench), "raw");
    let taken = crate::commit::three(&bench, &shell(&distribution_qemu(), &words(&disk)));
    let [first, middle, last] = [0, 1, 2].map(|at: usize| taken[at].0.clone());
    bench.ok(&["tag", "--store", &store, &middle, "middle"]);
    bench.ok(&["pin", "--store", &store, &last]);
    bench.refused(&["copy", "--store", &store, "--all", "--to", &second], 10, &["keyframe init"]);
    bench.refused(
        &["copy", "--store", &store, "--all", "--to", &store],
        1,
        &["this store already"],
    );
    bench.ok(&["init", &second]);

    // Killed behind its first checkpoint; the same command goes on.
    let mut command =
        bench.command(&["copy", "--quiet", "--store", &store, "--all", "--to", &second]);
    let mut copy = command.spawn().expect("start a copy");
    let sealed =
        || std::fs::read_dir(bench.path().join("second/checkpoints")).expect("a folder").count();
    let limit = Instant::now() + Duration::from_secs(60);
    while sealed() == 0 && copy.try_wait().expect("look at it").is_none() {
        assert!(Instant::now() < limit, "the copy comes to nothing");
        std::thread::sleep(Duration::from_millis(1));
    }
    let _ = copy.kill();
    copy.wait().expect("wait for it");
    let before = sealed();
    let report =
        bench.json(&["copy", "--quiet", "--json", "--store", &store, "--all", "--to", &second]);
    let mut copies = pairs(&report, "known");
    assert_eq!(copies.len(), before, "{report}");
    copies.extend(pairs(&report, "copied"));
    assert_eq!(copies.len(), ids(&bench).len(), "{report}");
    let again =
        bench.json(&["copy", "--quiet", "--json", "--store", &store, "--all", "--to", &second]);
    assert_eq!((pairs(&again, "known"), number(&again, "read_pages")), (copies.clone(), 0));
    bench.ok(&["check", "--read-data", "--quiet", "--store", &second]);
    let of = |id: &str| copies[&id.parse::<u64>().expect("a number")].to_string();
    let mut expected = BTreeMap::new();
    for (id, disk) in &taken {
        let [ram, of_disk] = images(&bench, &store, id);
        assert!(of_disk == *disk, "checkpoint {id}: the disk");
        let copied = images(&bench, &second, &of(id));
        assert!(copied[0] == ram && copied[1] == *disk, "checkpoint {id}: its copy");
        expected.insert(of(id), copied);
    }
    let show = |name: &str| bench.json(&["show", "--json", "--store", &second, name]);
    assert_eq!(number(&show("middle"), "id").to_string(), of(&middle));
    assert_eq!(show(&of(&last))["pinned"], true);

    // A pack loses a page: with it those that need it, and nothing else.
    let packs = bench.path().join("second/packs");
    let pack =
        std::fs::read_dir(packs).expect("packs").flatten().map(|e| e.path()).max().expect("a pack");
    let mut bytes = std::fs::read(&pack).expect("the pack");
    // In front of the index there are the newest records.
    let at = bytes.len() * 9 / 10;
    bytes[at] ^= 1;
    std::fs::write(&pack, bytes).expect("damage it");
    let output = bench.run(&["check", "--read-data", "--quiet", "--json", "--store", &second]);
    assert_eq!(output.status.code(), Some(1));
    let output = bench.run(&["check", "--repair", "--quiet", "--json", "--store", &second]);
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    let repaired: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let lost: Vec<u64> = repaired["lost"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|lost| number(lost, "id"))
        .collect();
    println!("lost {lost:?}, saved {} records", number(&repaired, "saved_records"));
    bench.ok(&["check", "--read-data", "--quiet", "--store", &second]);
    let left: Vec<u64> = bench
        .json(&["list", "--json", "--store", &second])
        .as_array()
        .expect("a list")
        .iter()
        .map(|entry| number(entry, "id"))
        .collect();
    assert_eq!(left.len() + lost.len(), copies.len());
    for (id, images_then) in &expected {
        if !lost.contains(&id.parse().expect("a number")) {
            assert!(
                images(&bench, &second, id) == *images_then,
                "checkpoint {id} after the repair"
            );
        }
    }
    // What was lost is in the first store still, and comes back.
    bench.ok(&["copy", "--quiet", "--store", &store, &first, &middle, &last, "--to", &second]);
    bench.ok(&["check", "--read-data", "--quiet", "--store", &second]);
    bench.ok(&["unlock", "--store", &second]);
    let shared = bench.json(&[
        "stats",
        "--json",
        "--sharing",
        "--growth",
        "--plot",
        "g.svg",
        "--store",
        &second,
    ]);
    let sharing = &shared["sharing"];
    assert!(number(sharing, "unique_bytes") < number(sharing, "raw_bytes"), "{shared}");
    let added = shared["growth"]["checkpoints"].as_array().expect("a list");
    assert_eq!(added.len() as u64, number(&shared, "checkpoints"));
    assert!(
        std::fs::read_to_string(bench.path().join("g.svg")).expect("the plot").contains("<svg")
    );
}
