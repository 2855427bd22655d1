//! `forget`, `prune` and `diff` on the checkpoints of real VMs: what is kept restores exactly, also
//! after `kill -9` of a prune and while a run goes on.

use keyframe_tests::{
    Bench, Boot, Sequence, assert_no_errors, assert_restores_exactly, audited, hash_lines, number,
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

fn ids(bench: &Bench) -> Vec<u64> {
    bench.list().iter().map(|entry| number(entry, "id")).collect()
}

/// A checkpoint's RAM, as a raw image.
fn ram(bench: &Bench, id: u64) -> Vec<u8> {
    let (id, store) = (id.to_string(), bench.store());
    bench.ok(&["export", &id, "--store", &store, "--format", "raw", "--force", "-o", "out.raw"]);
    std::fs::read(bench.path().join("out.raw")).expect("the exported file")
}

fn forget(bench: &Bench, options: &[&str]) -> Value {
    let store = bench.store();
    let mut args = vec!["forget", "--json", "--store", &store];
    args.extend(options);
    bench.json(&args)
}

fn prune(bench: &Bench, options: &[&str]) -> Value {
    let store = bench.store();
    let mut args = vec!["prune", "--quiet", "--json", "--store", &store];
    args.extend(options);
    bench.json(&args)
}

fn assert_whole(bench: &Bench, images: &BTreeMap<u64, Vec<u8>>, context: &str) {
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    assert_eq!(ids(bench), images.keys().copied().collect::<Vec<_>>(), "{context}");
    for (id, image) in images {
        assert!(ram(bench, *id) == *image, "{context}: checkpoint {id} has other RAM than before");
    }
}

/// How far a prune is, as its store shows it.
#[derive(Clone, Copy, Debug)]
enum Seen {
    /// What the writer is to follow.
    Moves,
    /// A pack less.
    PackGone,
}

/// The packs of a store, with their sizes.
fn packs(bench: &Bench) -> BTreeMap<OsString, u64> {
    let folder = std::fs::read_dir(bench.path().join("store/packs")).expect("the packs");
    let sized = |entry: DirEntry| Some((entry.file_name(), entry.metadata().ok()?.len()));
    folder.flatten().filter_map(sized).collect()
}

/// A prune that leaves nothing unused, ready to be started.
fn prune_command(bench: &Bench) -> Command {
    bench.command(&["prune", "--quiet", "--max-unused", "0%", "--store", &bench.store()])
}

/// Runs a prune that the kernel ends when it writes behind so many bytes of a file: what lies
/// before is written then.
fn killed_behind(bench: &Bench, bytes: u64) {
    let before = packs(bench);
    let command = prune_command(bench);
    let mut limited = Command::new("prlimit");
    limited.arg(format!("--fsize={bytes}")).arg("--core=0");
    limited.arg(command.get_program()).args(command.get_args());
    limited.current_dir(bench.path()).env("XDG_RUNTIME_DIR", bench.path());
    let killed = limited.output().expect("run prlimit");
    assert!(!killed.status.success(), "the prune was to be killed");
    let begun = packs(bench).into_iter().find(|(name, _)| !before.contains_key(name));
    assert!(begun.is_some_and(|(_, len)| len > 0), "the prune was to be killed while it copies");
}

/// Starts a prune and kills it when so much of it is seen; false where it came to its end before.
fn killed_when(bench: &Bench, seen: Seen) -> bool {
    let before = packs(bench);
    let moves = bench.path().join("store/moves");
    let is_seen = || match seen {
        Seen::Moves => moves.exists(),
        Seen::PackGone => before.keys().any(|name| !packs(bench).contains_key(name)),
    };
    let mut prune = prune_command(bench).spawn().expect("start a prune");
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
    let bench = Bench::new();
    let (_run, _) = audited(&bench, &boot(), &["--interval", "300ms"], 10);
    let all = ids(&bench);
    let mut images: BTreeMap<u64, Vec<u8>> = all.iter().map(|id| (*id, ram(&bench, *id))).collect();

    // What is only looked at changes nothing.
    let would = forget(&bench, &["--keep-last", "3", "--dry-run"]);
    assert_eq!(would["forgotten"].as_array().map(Vec::len), Some(all.len() - 3), "{would}");
    assert_eq!(ids(&bench), all);

    let half: Vec<String> =
        all.iter().skip(1).step_by(2).take(all.len() / 2 - 1).map(u64::to_string).collect();
    let done = forget(&bench, &half.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(done["forgotten"].as_array().map(Vec::len), Some(half.len()), "{done}");
    images.retain(|id, _| !half.contains(&id.to_string()));
    let dry = prune(&bench, &["--dry-run", "--max-unused", "0%"]);
    assert!(number(&dry, "after_bytes") < number(&dry, "before_bytes"), "{dry}");

    killed_behind(&bench, number(&dry, "copied_bytes") / 2);
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    // Later ones are killed when that can be seen in the store, and may end sooner than the signal
    // comes.
    let mut killed = Vec::new();
    for seen in [Seen::Moves, Seen::PackGone] {
        if killed_when(&bench, seen) {
            killed.push(seen);
        }
        bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    }
    println!("killed while it copied, and at {killed:?}");
    assert_whole(&bench, &images, "killed");
    let before = number(&dry, "before_bytes");
    let report = prune(&bench, &["--max-unused", "0%"]);
    println!("{report:#}");
    assert!(number(&report, "after_bytes") < before, "{report}");
    assert_eq!(report["damaged"].as_array().map(Vec::len), Some(0), "{report}");
    assert_whole(&bench, &images, "pruned");
    // The audit keeps the newest copies.
    for id in images.keys().rev().take(2) {
        assert_restores_exactly(&bench, &id.to_string());
    }

    let (first, last) = (all[0].to_string(), all[all.len() - 1].to_string());
    let diff = bench.json(&["diff", "--quiet", "--json", "--store", &bench.store(), &first, &last]);
    assert_counts(&diff, &images[&all[0]], &images[&all[all.len() - 1]]);
    bench.refused(&["prune", "--store", "nowhere"], 10, &["no store"]);
    bench.refused(&["forget", "--store", &bench.store(), "4711"], 1, &["4711", "keyframe list"]);
}

/// The main RAM block of a raw image: all that differs in the images differs in some block of the
/// diff, and no byte more.
fn assert_counts(diff: &Value, first: &[u8], second: &[u8]) {
    let blocks = diff["ram"].as_array().expect("RAM blocks");
    let ram = blocks.iter().max_by_key(|block| number(block, "pages")).expect("a block");
    let len = (number(ram, "pages") * 4096) as usize;
    let (first, second) = (&first[..len.min(first.len())], &second[..len.min(second.len())]);
    let differ = |size: usize| {
        first.chunks(size).zip(second.chunks(size)).filter(|(a, b)| a != b).count() as u64
    };
    // The raw image has holes, and ROMs over RAM: the block has at least what both show, and few
    // pages more.
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
    let bench = Bench::new();
    let mut sequence = Sequence::new(16);
    let options = ["--interval", "200ms", "--name", "guest"];
    let mut first = bench.start(&options, &boot());
    first.wait_for("KF READY");
    let mark = bench.list().len();
    assert!(first.wait_until(|_| (bench.list().len() >= mark + 5).then_some(())).is_some());
    bench.ok(&["stop", "--name", "guest"]);
    assert!(first.wait().success(), "{}", first.report());
    bench.ok(&["stats", "--store", &bench.store()]);

    // The second one finds most of its pages in the pack of the first.
    let mut run = bench.start(&options, &boot());
    run.wait_for("KF READY");
    let mut rewritten = 0;
    for _ in 0..2 {
        let newest = *ids(&bench).last().expect("checkpoints");
        assert!(run.wait_until(|_| (*ids(&bench).last()? >= newest + 4).then_some(())).is_some());
        let forgotten = forget(&bench, &["--keep-last", "4"]);
        assert!(
            forgotten["forgotten"].as_array().is_some_and(|gone| !gone.is_empty()),
            "{forgotten}"
        );
        let report = prune(&bench, &["--max-unused", "0%"]);
        assert_eq!(number(&report, "postponed_packs"), 0, "{report}");
        rewritten += number(&report, "rewritten_packs") + number(&report, "removed_packs");
        bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    }
    assert!(rewritten > 0, "no pack went");
    let store = bench.store();
    let going = *ids(&bench).last().expect("checkpoints");
    assert!(run.wait_until(|_| (*ids(&bench).last()? >= going + 2).then_some(())).is_some());
    bench.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
    assert_no_errors(&run);
    sequence.check(&hash_lines(&run.lines()), 3);
    bench.ok(&["check", "--read-data", "--quiet", "--store", &store]);
    let mut restored = bench.restore("latest", &[]);
    let grown = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 4).then_some(()));
    assert!(grown.is_some(), "the newest checkpoint does not go on; {}", restored.report());
    sequence.check(&hash_lines(&restored.lines()), 4);
    restored.signal(Signal::TERM);
    restored.wait();
    prune(&bench, &["--max-unused", "0%"]);
    bench.ok(&["check", "--read-data", "--quiet", "--store", &store]);
}
