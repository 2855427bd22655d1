//! The results of an analysis: functions are named by the symbols in the guest's RAM, as the guest
//! itself names them, and `keyframe analysis show` prints and draws them.

use keyframe_tests::recording::{end_after, record, recordable_guest};
use keyframe_tests::{Process, TestEnv, chosen_qemus, number};
use std::collections::BTreeSet;
use std::time::Duration;

/// How often a line is typed: a guest that is busy loses characters of its console.
const TYPED_MAX: usize = 10;
/// How long the guest may take to list its symbols before the line is typed again.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// Part of the names that are compared: functions that run whenever a process begins.
const COMPARED: &str = "_fork";

#[test]
fn functions_have_the_names_that_the_guest_knows_and_are_shown() {
    for qemu in chosen_qemus(2) {
        let env = TestEnv::without_store();
        let boot = recordable_guest(&qemu.path, "shell");
        let mut vm = record(&env, &["--checkpoint-every", "600ms"], &boot);
        vm.wait_for("KF READY");
        let known = symbols_of_the_guest(&mut vm);
        end_after(&env, &mut vm, 4);

        let tool = ["--tool", "hot", "--tool-arg", "symbols=guest", "--tool-arg", "top=100000"];
        let how = ["--out", "A", "--check-sequential", "--json"];
        let report = env.json(&[&["analyze", "R"], &tool[..], &how].concat());
        assert_eq!(report["equals_sequential"], true, "{report:#}");
        let found = std::fs::read_to_string(env.path().join("A/hot-functions.csv")).unwrap();
        let compared: Vec<&str> = found.lines().filter(|line| line.contains(COMPARED)).collect();
        assert!(compared.len() >= 3, "the guest forks: {compared:?}");
        for line in compared {
            let cells: Vec<&str> = line.split(',').collect();
            let address = u64::from_str_radix(cells[0].trim_start_matches("0x"), 16).unwrap();
            let symbol = (address, cells[2].to_owned());
            assert!(known.contains(&symbol), "{symbol:x?} is not in {known:x?}");
        }
        are_shown(&env);
    }
}

/// The guest's own list of its functions, as far as their names contain [`COMPARED`].
fn symbols_of_the_guest(vm: &mut Process) -> BTreeSet<(u64, String)> {
    let symbol = |line: &String| {
        let mut words = line.split_whitespace();
        let address = u64::from_str_radix(words.next()?, 16).ok()?;
        words.next().filter(|kind| ["t", "T", "w", "W"].contains(kind))?;
        Some((address, words.next()?.to_owned()))
    };
    for _ in 0..TYPED_MAX {
        let skip = vm.lines().len();
        // The console repeats what is typed: only the shell makes 42 of it.
        vm.type_line(&format!("grep {COMPARED} /proc/kallsyms; echo end $((6*7))"));
        let listed = vm.wait_within(ANSWER_MAX, |vm| {
            let lines = vm.lines().split_off(skip);
            let has_ended = lines.iter().any(|line| line.contains("end 42"));
            has_ended.then(|| lines.iter().filter_map(symbol).collect::<BTreeSet<_>>())
        });
        if let Some(symbols) = listed.filter(|symbols| symbols.len() > 10) {
            return symbols;
        }
    }
    panic!("the guest does not list its symbols; {}", vm.report());
}

/// The analysis `A` of `hot` is printed and drawn.
fn are_shown(env: &TestEnv) {
    let text = env.ok(&["analysis", "show", "A", "--top", "5", "--plot", "A.png"]);
    for title in ["Functions that executed most", "Blocks that executed most", "Most used pages"] {
        assert!(text.contains(title), "{text}");
    }
    let shown = env.json(&["analysis", "show", "A", "--top", "5", "--json"]);
    let rows = shown["tables"][0]["rows"].as_array().expect("rows");
    assert_eq!((rows.len(), &shown["tool"]), (5, &"hot".into()), "{shown:#}");
    let executed: Vec<u64> = rows.iter().map(|row| number(row, "executed")).collect();
    assert!(executed.is_sorted_by(|a, b| a >= b) && executed[4] > 0, "{shown:#}");

    let file = std::fs::File::open(env.path().join("A.png")).expect("the picture");
    let mut reader = png::Decoder::new(std::io::BufReader::new(file)).read_info().expect("a PNG");
    let mut pixels = vec![0; reader.output_buffer_size().expect("its size")];
    reader.next_frame(&mut pixels).expect("its pixels");
    let is_coloured = |p: &&[u8]| p.iter().max().unwrap() - p.iter().min().unwrap() > 60;
    let coloured = pixels.chunks(3).filter(is_coloured).count();
    assert!(coloured > 5000, "{coloured} coloured pixels: no functions are drawn");

    env.refused(&["analysis", "show", "A", "--plot", "A.jpg"], 1, &["A.jpg", ".svg or .png"]);
    env.refused(&["analysis", "show", "R"], 1, &["analysis.json", "fix:"]);
    std::fs::write(env.path().join("A/hot-blocks.csv"), "a,b\n1,2\n").expect("damage a result");
    env.refused(&["analysis", "show", "A"], 1, &["hot-blocks.csv", "no column", "fix:"]);
}
