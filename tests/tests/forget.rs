//! Tests `forget`, `prune` and `diff` on the checkpoints of real VMs: the rest restores exactly,
//! also after `kill -9` of a prune and during a run.

use keyframe_tests::{
    Boot, Sequence, TestEnv, assert_no_errors, assert_restores_exactly, hash_lines, number,
    take_audited_checkpoints,
};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::DirEntry;
use std::process::Command;
use std::time::{Duration, Instant};

fn boot() -> Boot {
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    boot
}

fn ids(env: &TestEnv) -> Vec<u64> {
    env.list().iter().map(|entry| number(entry, "id")).collect()
}

/// A checkpoint's RAM, as a raw image.
fn ram(env: &TestEnv, id: u64) -> Vec<u8> {
    let (id, store) = (id.to_string(), env.store());
    env.ok(&["export", &id, "--store", &store, "--format", "raw", "--force", "-o", "out.raw"]);
    std::fs::read(env.path().join("out.raw")).expect("the exported file")
}

fn forget(env: &TestEnv, options: &[&str]) -> Value {
    let store = env.store();
    let mut args = vec!["forget", "--json", "--store", &store];
    args.extend(options);
    env.json(&args)
}

fn prune(env: &TestEnv, options: &[&str]) -> Value {
    let store = env.store();
    let mut args = vec!["prune", "--quiet", "--json", "--store", &store];
    args.extend(options);
    env.json(&args)
}

fn assert_whole(env: &TestEnv, images: &BTreeMap<u64, Vec<u8>>, context: &str) {
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    assert_eq!(ids(env), images.keys().copied().collect::<Vec<_>>(), "{context}");
    for (id, image) in images {
        assert!(ram(env, *id) == *image, "{context}: checkpoint {id} has other RAM than before");
    }
}

/// The progress of a prune, as its store shows it.
#[derive(Clone, Copy, Debug)]
enum Seen {
    /// The list of moves that a writer follows.
    Moves,
    /// A removed pack.
    PackGone,
}

/// The packs of a store, with their sizes.
fn packs(env: &TestEnv) -> BTreeMap<OsString, u64> {
    let folder = std::fs::read_dir(env.path().join("store/packs")).expect("the packs");
    let sized = |entry: DirEntry| Some((entry.file_name(), entry.metadata().ok()?.len()));
    folder.flatten().filter_map(sized).collect()
}

/// The command of a prune that removes all unused pages.
fn prune_command(env: &TestEnv) -> Command {
    env.command(&["prune", "--quiet", "--max-unused", "0%", "--store", &env.store()])
}

/// Runs a prune that the kernel ends at a write past `limit` bytes of a file; the writes before it
/// are done.
fn killed_behind(env: &TestEnv, bytes: u64) {
    let before = packs(env);
    let command = prune_command(env);
    let mut limited = Command::new("prlimit");
    limited.arg(format!("--fsize={bytes}")).arg("--core=0");
    limited.arg(command.get_program()).args(command.get_args());
    limited.current_dir(env.path()).env("XDG_RUNTIME_DIR", env.path());
    let killed = limited.output().expect("run prlimit");
    assert!(!killed.status.success(), "the prune was to be killed");
    let begun = packs(env).into_iter().find(|(name, _)| !before.contains_key(name));
    assert!(begun.is_some_and(|(_, len)| len > 0), "the prune was to be killed while it copies");
}

/// Starts a prune and kills it at this progress. Returns false if it ended before.
fn killed_when(env: &TestEnv, seen: Seen) -> bool {
    let before = packs(env);
    let moves = env.path().join("store/moves");
    let is_seen = || match seen {
        Seen::Moves => moves.exists(),
        Seen::PackGone => before.keys().any(|name| !packs(env).contains_key(name)),
    };
    let mut prune = prune_command(env).spawn().expect("start a prune");
    let limit = Instant::now() + Duration::from_mins(2);
    while !is_seen() && prune.try_wait().expect("look at it").is_none() {
        assert!(Instant::now() < limit, "the prune neither ends nor comes to {seen:?}");
        std::thread::sleep(Duration::from_micros(200));
    }
    let _ = prune.kill();
    !prune.wait().expect("wait for it").success()
}

#[test]
fn with_half_forgotten_the_rest_is_what_it_was_whenever_a_prune_is_killed() {
    let env = TestEnv::new();
    let (_run, _) = take_audited_checkpoints(&env, &boot(), &["--interval", "300ms"], 10);
    let all = ids(&env);
    let mut images: BTreeMap<u64, Vec<u8>> = all.iter().map(|id| (*id, ram(&env, *id))).collect();

    // A dry run changes nothing.
    let would = forget(&env, &["--keep-last", "3", "--dry-run"]);
    assert_eq!(would["forgotten"].as_array().map(Vec::len), Some(all.len() - 3), "{would}");
    assert_eq!(ids(&env), all);

    let half: Vec<String> =
        all.iter().skip(1).step_by(2).take(all.len() / 2 - 1).map(u64::to_string).collect();
    let done = forget(&env, &half.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(done["forgotten"].as_array().map(Vec::len), Some(half.len()), "{done}");
    images.retain(|id, _| !half.contains(&id.to_string()));
    let dry = prune(&env, &["--dry-run", "--max-unused", "0%"]);
    assert!(number(&dry, "after_bytes") < number(&dry, "before_bytes"), "{dry}");

    killed_behind(&env, number(&dry, "copied_bytes") / 2);
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    // Later prunes are killed at a visible progress, and may end before the signal.
    let mut killed = Vec::new();
    for seen in [Seen::Moves, Seen::PackGone] {
        if killed_when(&env, seen) {
            killed.push(seen);
        }
        env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    }
    println!("killed while it copied, and at {killed:?}");
    assert_whole(&env, &images, "killed");
    let before = number(&dry, "before_bytes");
    let report = prune(&env, &["--max-unused", "0%"]);
    println!("{report:#}");
    assert!(number(&report, "after_bytes") < before, "{report}");
    assert_eq!(report["damaged"].as_array().map(Vec::len), Some(0), "{report}");
    assert_whole(&env, &images, "pruned");
    // The audit keeps the newest copies.
    for id in images.keys().rev().take(2) {
        assert_restores_exactly(&env, &id.to_string());
    }

    let (first, last) = (all[0].to_string(), all[all.len() - 1].to_string());
    let diff = env.json(&["diff", "--quiet", "--json", "--store", &env.store(), &first, &last]);
    assert_counts(&diff, &images[&all[0]], &images[&all[all.len() - 1]]);
    env.refused(&["prune", "--store", "nowhere"], 10, &["no store"]);
    env.refused(&["forget", "--store", &env.store(), "4711"], 1, &["4711", "keyframe list"]);
}

/// The diff of the main RAM block has each page in which the raw images differ, and no byte more.
fn assert_counts(diff: &Value, first: &[u8], second: &[u8]) {
    let blocks = diff["ram"].as_array().expect("RAM blocks");
    let ram = blocks.iter().max_by_key(|block| number(block, "pages")).expect("a block");
    let len = (number(ram, "pages") * 4096) as usize;
    let (first, second) = (&first[..len.min(first.len())], &second[..len.min(second.len())]);
    let differ = |size: usize| {
        first.chunks(size).zip(second.chunks(size)).filter(|(a, b)| a != b).count() as u64
    };
    // The raw image has holes, and ROMs over RAM: the block has at least the pages in which both
    // images differ, and few more.
    let (pages, bytes) = (differ(4096), differ(1));
    let (changed_pages, changed_bytes) =
        (number(ram, "changed_pages"), number(ram, "changed_bytes"));
    assert!(
        pages > 0 && changed_pages.abs_diff(pages) <= 96,
        "{changed_pages} and {pages} pages: {ram}"
    );
    assert!(changed_bytes.abs_diff(bytes) <= 96 * 4096, "{changed_bytes} and {bytes} bytes: {ram}");
    assert!(number(ram, "changed_sectors") <= changed_pages * 8, "{ram}");
}

#[test]
fn a_run_goes_on_while_it_is_pruned_beneath_it() {
    let env = TestEnv::new();
    let mut sequence = Sequence::new(16);
    let options = ["--interval", "200ms", "--name", "guest"];
    let mut first = env.start(&options, &boot());
    first.wait_for("KF READY");
    let mark = env.list().len();
    assert!(first.wait_until(|_| (env.list().len() >= mark + 5).then_some(())).is_some());
    env.ok(&["stop", "--name", "guest"]);
    assert!(first.wait().success(), "{}", first.report());
    env.ok(&["stats", "--store", &env.store()]);

    // The second VM finds most of its pages in the pack of the first.
    let mut run = env.start(&options, &boot());
    run.wait_for("KF READY");
    let mut rewritten = 0;
    for _ in 0..2 {
        let newest = *ids(&env).last().expect("checkpoints");
        assert!(run.wait_until(|_| (*ids(&env).last()? >= newest + 4).then_some(())).is_some());
        let forgotten = forget(&env, &["--keep-last", "4"]);
        assert!(
            forgotten["forgotten"].as_array().is_some_and(|gone| !gone.is_empty()),
            "{forgotten}"
        );
        let report = prune(&env, &["--max-unused", "0%"]);
        assert_eq!(number(&report, "postponed_packs"), 0, "{report}");
        rewritten += number(&report, "rewritten_packs") + number(&report, "removed_packs");
        env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    }
    assert!(rewritten > 0, "no pack went");
    let store = env.store();
    let going = *ids(&env).last().expect("checkpoints");
    assert!(run.wait_until(|_| (*ids(&env).last()? >= going + 2).then_some(())).is_some());
    env.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
    assert_no_errors(&run);
    sequence.check(&hash_lines(&run.lines()), 3);
    env.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    let mut restored = env.restore("latest", &[]);
    let grown = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 4).then_some(()));
    assert!(grown.is_some(), "the newest checkpoint does not go on; {}", restored.report());
    sequence.check(&hash_lines(&restored.lines()), 4);
    restored.signal(Signal::TERM);
    restored.wait();
    prune(&env, &["--max-unused", "0%"]);
    env.ok(&["check", "--read-data", "--quiet", "--store", &store]);
}
