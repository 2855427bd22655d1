//! Tests the upkeep of a store: tags and pins, the flight recorder, copies, repair.

use keyframe_tests::disks::{as_strs, numbered_image, shell_guest, virtio_disk};
use keyframe_tests::{
    Boot, Process, TestEnv, assert_no_errors, assert_restores_exactly, distribution_qemu, number,
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

fn ids(env: &TestEnv) -> Vec<u64> {
    env.list().iter().map(|entry| number(entry, "id")).collect()
}

/// The size of all files of a directory of the store; files that disappear meanwhile count 0.
fn bytes(env: &TestEnv, folder: &str) -> u64 {
    let path = Path::new(&env.store()).join(folder);
    let files = std::fs::read_dir(path).expect("a folder").flatten();
    files.filter_map(|file| Some(file.metadata().ok()?.len())).sum()
}

fn wait_for_id(env: &TestEnv, run: &mut Process, id: u64) {
    let there = run.wait_until(|_| (*ids(env).last()? >= id).then_some(()));
    assert!(there.is_some(), "no checkpoint {id}; {}", run.report());
}

#[test]
fn a_flight_recorder_keeps_its_store_small_and_pinned_checkpoints() {
    let env = TestEnv::new();
    let store = env.store();
    let options =
        ["--name", "guest", "--interval", "150ms", "--keep-within", "1500ms", "--audit", "audit"];
    // Each checkpoint has 4 MiB of noise.
    let mut run = env.start(&options, &boot("hash kf.mib=4 kf.pause_ms=5"));
    run.wait_for("KF READY");
    let base = *ids(&env).last().expect("a checkpoint");
    env.ok(&["pin", "--store", &store, &base.to_string()]);
    env.ok(&["tag", "--store", &store, "latest", "named"]);
    let named = number(&env.json(&["show", "--json", "--store", &store, "named"]), "id");
    env.refused(&["unlock", "--store", &store], 11, &["keyframe run, VM guest", "keyframe stop"]);
    wait_for_id(&env, &mut run, base + 30);
    let packs = wait_until_small(&env, &mut run, base, named);
    let text = env.ok(&["status"]);
    assert!(
        text.contains("recorder    keeps 1.5 s") || text.contains("recorder    keeps 1.50 s"),
        "{text}"
    );
    assert!(!text.contains("recompress"), "{text}");
    env.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    env.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
    assert_no_errors(&run);
    let kept = ids(&env);
    println!("kept {kept:?}");
    assert!(kept.contains(&base) && kept.contains(&named), "{kept:?}");
    assert!(!kept.iter().any(|id| (named + 1..base + 20).contains(id)), "{kept:?}");
    env.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    let pinned: Vec<u64> =
        env.list().iter().filter(|e| e["pinned"] == true).map(|e| number(e, "id")).collect();
    assert_eq!(pinned, [base]);
    // The audit has the newest eight copies; the run compared each checkpoint with its own at the
    // seal.
    let recent: Vec<u64> = kept.iter().copied().filter(|id| *id > named).collect();
    let oldest = recent[recent.len().saturating_sub(8)];
    let newest = *recent.last().expect("a recent one");
    assert_restores_exactly(&env, &oldest.to_string());
    forgets_and_prunes(&env, base, newest, packs);
    assert_restores_exactly(&env, &newest.to_string());
}

/// Waits until the recorder has forgotten and pruned: the packs are smaller than those of all
/// checkpoints would be. Returns their bytes.
fn wait_until_small(env: &TestEnv, run: &mut Process, base: u64, named: u64) -> u64 {
    let small = run.wait_until(|_| {
        std::thread::sleep(Duration::from_millis(200));
        let status = env.json(&["status", "--json", "--name", "guest"]);
        let recorder = &status[0]["recorder"];
        assert_eq!(number(recorder, "keep_within_ns"), 1_500_000_000, "{status}");
        assert!(recorder["last_error"].is_null(), "{status}");
        let kept: Vec<_> = env.list().into_iter().filter(|e| number(e, "id") > named).collect();
        let stored: u64 = kept.iter().map(|e| number(e, "stored_bytes")).sum();
        let all = stored / kept.len().max(1) as u64 * (number(kept.last()?, "id") - base);
        let packs = bytes(env, "packs");
        let is_small = number(recorder, "freed_packs") > 0 && packs * 3 < all * 2;
        let is_recent = kept.iter().all(|e| number(e, "id") >= base + 20);
        (is_small
            && is_recent
            && number(recorder, "forgotten") > 15
            && number(recorder, "kept") >= 2)
            .then_some(packs)
    });
    small.unwrap_or_else(|| panic!("{} bytes of packs; {}", bytes(env, "packs"), run.report()))
}

/// A pinned checkpoint is forgotten by force only; then a prune shrinks the packs.
fn forgets_and_prunes(env: &TestEnv, base: u64, newest: u64, packs: u64) {
    let store = env.store();
    env.refused(&["forget", "--store", &store, &base.to_string()], 1, &["pinned", "--remove"]);
    env.ok(&["forget", "--store", &store, "--keep-last", "1", "--keep-tag", "none"]);
    assert_eq!(ids(env), [base, newest]);
    env.ok(&["forget", "--store", &store, "--force", &base.to_string()]);
    let pruned: Value =
        env.json(&["prune", "--quiet", "--json", "--max-unused", "0%", "--store", &store]);
    assert!(
        number(&pruned, "after_bytes") < packs && number(&pruned, "postponed_packs") == 0,
        "{pruned}"
    );
    env.ok(&["check", "--read-data", "--quiet", "--store", &store]);
}

/// A checkpoint's RAM and its disk, as raw images.
fn images(env: &TestEnv, store: &str, id: &str) -> [Vec<u8>; 2] {
    let export = |more: &[&str]| {
        env.ok(&[&["export", id, "--store", store, "--force", "-o", "out.raw"], more].concat());
        std::fs::read(env.path().join("out.raw")).expect("the exported file")
    };
    [export(&["--format", "raw"]), export(&["--disk", "d"])]
}

/// The pairs of numbers of a copy's report.
fn pairs(report: &Value, key: &str) -> BTreeMap<u64, u64> {
    let list = report[key].as_array().expect("a list");
    list.iter().map(|pair| (number(pair, "from"), number(pair, "to"))).collect()
}

/// The images of checkpoints of the second store, by id: RAM and disk.
type Images = BTreeMap<String, [Vec<u8>; 2]>;

#[test]
fn copies_and_repaired_checkpoints_are_exact() {
    let env = TestEnv::new();
    let (store, second) = (env.store(), env.path().join("second").display().to_string());
    let disk = virtio_disk(&numbered_image(&env), "raw");
    let taken = crate::commit::three(&env, &shell_guest(&distribution_qemu(), &as_strs(&disk)));
    let [first, middle, last] = [0, 1, 2].map(|at: usize| taken[at].0.clone());
    env.ok(&["tag", "--store", &store, &middle, "middle"]);
    env.ok(&["pin", "--store", &store, &last]);
    env.refused(&["copy", "--store", &store, "--all", "--to", &second], 10, &["keyframe init"]);
    env.refused(&["copy", "--store", &store, "--all", "--to", &store], 1, &["this store already"]);
    env.ok(&["init", &second]);

    let copies = copy_with_a_kill(&env, &store, &second);
    let of = |id: &str| copies[&id.parse::<u64>().expect("a number")].to_string();
    let mut expected = Images::new();
    for (id, disk) in &taken {
        let [ram, of_disk] = images(&env, &store, id);
        assert!(of_disk == *disk, "checkpoint {id}: the disk");
        let copied = images(&env, &second, &of(id));
        assert!(copied[0] == ram && copied[1] == *disk, "checkpoint {id}: its copy");
        expected.insert(of(id), copied);
    }
    let show = |name: &str| env.json(&["show", "--json", "--store", &second, name]);
    assert_eq!(number(&show("middle"), "id").to_string(), of(&middle));
    assert_eq!(show(&of(&last))["pinned"], true);

    repair_a_damaged_pack(&env, &second, &expected);
    // The first store still has the lost page, and it comes back.
    env.ok(&["copy", "--quiet", "--store", &store, &first, &middle, &last, "--to", &second]);
    env.ok(&["check", "--read-data", "--quiet", "--store", &second]);
    env.ok(&["unlock", "--store", &second]);
    let shared = env.json(&[
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
    assert!(std::fs::read_to_string(env.path().join("g.svg")).expect("the plot").contains("<svg"));
}

/// Copies all checkpoints into `second`. The copy is killed after its first checkpoint; the same
/// command continues it. Returns the id of each copy by the id of its original.
fn copy_with_a_kill(env: &TestEnv, store: &str, second: &str) -> BTreeMap<u64, u64> {
    let mut command = env.command(&["copy", "--quiet", "--store", store, "--all", "--to", second]);
    let mut copy = command.spawn().expect("start a copy");
    let sealed =
        || std::fs::read_dir(env.path().join("second/checkpoints")).expect("a directory").count();
    let limit = Instant::now() + Duration::from_secs(60);
    while sealed() == 0 && copy.try_wait().expect("wait for the copy").is_none() {
        assert!(Instant::now() < limit, "the copy seals no checkpoint");
        std::thread::sleep(Duration::from_millis(1));
    }
    let _ = copy.kill();
    copy.wait().expect("wait for it");
    let before = sealed();
    let report =
        env.json(&["copy", "--quiet", "--json", "--store", store, "--all", "--to", second]);
    let mut copies = pairs(&report, "known");
    assert_eq!(copies.len(), before, "{report}");
    copies.extend(pairs(&report, "copied"));
    assert_eq!(copies.len(), ids(env).len(), "{report}");
    let again = env.json(&["copy", "--quiet", "--json", "--store", store, "--all", "--to", second]);
    assert_eq!((pairs(&again, "known"), number(&again, "read_pages")), (copies.clone(), 0));
    env.ok(&["check", "--read-data", "--quiet", "--store", second]);
    copies
}

/// Damages a page in a pack of the store `second`: the checkpoints that need it are lost, and no
/// others.
fn repair_a_damaged_pack(env: &TestEnv, second: &str, expected: &Images) {
    let packs = env.path().join("second/packs");
    let pack =
        std::fs::read_dir(packs).expect("packs").flatten().map(|e| e.path()).max().expect("a pack");
    let mut bytes = std::fs::read(&pack).expect("the pack");
    // The newest records are just before the index.
    let at = bytes.len() * 9 / 10;
    bytes[at] ^= 1;
    std::fs::write(&pack, bytes).expect("damage it");
    let output = env.run(&["check", "--read-data", "--quiet", "--json", "--store", second]);
    assert_eq!(output.status.code(), Some(1));
    let output = env.run(&["check", "--repair", "--quiet", "--json", "--store", second]);
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    let repaired: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let lost: Vec<u64> = repaired["lost"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|lost| number(lost, "id"))
        .collect();
    println!("lost {lost:?}, saved {} records", number(&repaired, "saved_records"));
    env.ok(&["check", "--read-data", "--quiet", "--store", second]);
    let left: Vec<u64> = env
        .json(&["list", "--json", "--store", second])
        .as_array()
        .expect("a list")
        .iter()
        .map(|entry| number(entry, "id"))
        .collect();
    assert_eq!(left.len() + lost.len(), expected.len());
    for (id, images_then) in expected {
        if !lost.contains(&id.parse().expect("a number")) {
            assert!(images(env, second, id) == *images_then, "checkpoint {id} after the repair");
        }
    }
}
