//! Tests on directories of results: what a user reads, what is drawn, and files from elsewhere.

use super::*;
use proptest::prelude::*;
use std::fmt::Write as _;

/// Results of `tool` with these files; four intervals of 1,000 instructions each.
fn results(tool: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, AnalysisResults) {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let interval = |index: u32| {
        let start = 5000 + 1000 * u64::from(index);
        AnalysedInterval { index: index + 3, start, end: start + 1000 }
    };
    let results = AnalysisResults {
        dir: dir.path().to_owned(),
        tool: tool.into(),
        is_approximate: false,
        intervals: (0..4).map(interval).collect(),
    };
    (dir, results)
}

fn texts(results: &AnalysisResults, top: usize) -> String {
    let tables = results.tables(top).unwrap();
    tables.iter().map(|table| table.text(None)).collect::<Vec<_>>().join("\n")
}

const HOT: [(&str, &str); 4] = [
    (
        "hot-functions.csv",
        "address,executed,symbol\n0x0,2000,\n0xffffffff81000100,1000,do_work\n\
         0xffffffff81000200,600,schedule\n",
    ),
    (
        "hot-functions-by-interval.csv",
        "interval,start_icount,instructions,address,executed,symbol\n\
         3,5000,1000,0xffffffff81000100,900,do_work\n3,5000,1000,0x0,100,\n\
         4,6000,1000,0xffffffff81000100,100,do_work\n4,6000,1000,0xffffffff81000200,600,schedule\n\
         6,8000,1000,0x0,1000,\n",
    ),
    (
        "hot-blocks.csv",
        "address,bytes,instructions,times,executed,symbol\n\
         0xffffffff81000100,20,5,200,1000,do_work\n0x401000,9,3,300,900,\n",
    ),
    ("hot-pages.csv", "page,reads,writes\n0x1000,70,8\n0x2000,6,5\n"),
];

#[test]
fn the_hottest_functions_blocks_and_pages_are_listed_with_their_shares() {
    let (_dir, results) = results("hot", &HOT);
    assert_eq!(
        texts(&results, 2),
        "\
Functions that executed most instructions
  executed  percent             address  symbol
     2,000    50.00                   -  (no symbol)
     1,000    25.00  0xffffffff81000100  do_work
  and 1 more
Blocks that executed most instructions
  executed  percent  times             address  bytes  symbol
     1,000    25.00    200  0xffffffff81000100     20  do_work
       900    22.50    300            0x401000      9  (no symbol)
Most used pages
  reads  writes    page
     70       8  0x1000
      6       5  0x2000"
    );
    let tables = serde_json::to_value(results.tables(2).unwrap()).unwrap();
    let row = serde_json::json!({
        "executed": 1000, "percent": 25.0, "address": "0xffffffff81000100", "symbol": "do_work",
    });
    assert_eq!(tables[0]["rows"][1], row);
    assert_eq!(tables[0]["left_out"], 1);
}

#[test]
fn the_picture_of_hot_shows_each_functions_share_of_each_interval() {
    let (_dir, results) = results("hot", &HOT);
    let timeline = results.timeline().unwrap();
    assert_eq!(timeline.cells.len(), 4);
    assert_eq!((timeline.cells[0].from, timeline.cells[3].to), (5000.0, 9000.0));
    let bands: Vec<_> =
        timeline.panels[0].bands.iter().map(|one| (one.name.as_str(), &one.values)).collect();
    let shares = |values: &[f64]| -> Vec<Option<i64>> {
        values.iter().map(|value| value.is_finite().then(|| value.round() as i64)).collect()
    };
    let expected = [
        ("do_work", [Some(90), Some(10), None, Some(0)]),
        ("schedule", [Some(0), Some(60), None, Some(0)]),
        ("other functions", [Some(0), Some(30), None, Some(0)]),
        ("code without a symbol", [Some(10), Some(0), None, Some(100)]),
    ];
    assert_eq!(bands.len(), expected.len());
    for ((name, values), (expected_name, expected)) in bands.into_iter().zip(expected) {
        assert_eq!((name, &shares(values)[..]), (expected_name, &expected[..]));
    }
    timeline.png().unwrap();
}

#[test]
fn without_symbols_the_picture_of_hot_says_how_to_get_it() {
    let (_dir, results) = results("hot", &HOT[2..]);
    assert!(texts(&results, 9).starts_with("Blocks"));
    let error = results.timeline().unwrap_err();
    assert!(error.fix().unwrap().contains("symbols=guest"), "{error}");
}

const CACHE: (&str, &str) = (
    "cache.csv",
    "interval,start_icount,level,reads,writes,read_misses,write_misses\n\
     3,5000,1,400,100,40,10\n3,5000,2,40,10,4,1\n4,6000,1,100,0,20,0\n4,6000,2,20,0,20,0\n",
);

#[test]
fn misses_are_summed_and_drawn_by_level() {
    let (_dir, results) = results("cache", &[CACHE]);
    let text = texts(&results, 1);
    assert!(
        text.contains("      1       600      70    11.67\n      2        70      25    35.71"),
        "{text}"
    );
    assert!(text.contains("3              5,000      1       500      50    10.00"), "{text}");
    let timeline = results.timeline().unwrap();
    let [misses, rates] = &timeline.panels[..] else { panic!("two panels") };
    assert_eq!(misses.bands[0].values, [50.0, 20.0, 0.0, 0.0]);
    assert_eq!(misses.bands[1].values[..2], [5.0, 20.0]);
    assert_eq!(rates.bands[0].values[..2], [10.0, 20.0]);
    assert_eq!(misses.y.label, "misses per 1,000 instructions");
}

#[test]
fn bounds_of_an_approximate_analysis_are_shown() {
    let text = "interval,start_icount,level,reads,writes,read_misses,write_misses,misses_least,\
                misses_most\n3,5000,1,400,100,40,10,30,50\n4,6000,1,400,100,40,10,20,60\n";
    let (_dir, results) = results("cache", &[("cache.csv", text)]);
    let text = texts(&results, 5);
    assert!(text.contains("1     1,000     100    10.00            50          110"), "{text}");
}

#[test]
fn working_sets_instructions_and_events_are_shown_and_drawn() {
    let (_dir, sets) = results(
        "working-set",
        &[(
            "working-set.csv",
            "interval,start_icount,pages,pages_read,pages_written,pages_first_touched,reads,\
             writes\n3,5000,512,300,400,512,9,8\n4,6000,256,100,200,64,7,6\n",
        )],
    );
    let all = texts(&sets, 9);
    let has_all =
        |line: &str| line.split_whitespace().eq(["all", "intervals", "2.2", "MiB", "576"]);
    assert!(all.lines().any(has_all), "{all}");
    let timeline = sets.timeline().unwrap();
    assert_eq!(timeline.panels[0].bands[0].values[..2], [2.0, 1.0]);
    assert_eq!(timeline.panels[1].bands[0].values[..2], [2.0, 2.25]);

    let (_dir, counts) = results(
        "icount",
        &[("icount.csv", "interval,start_icount,instructions,user,kernel\n3,5000,1000,250,750\n")],
    );
    assert!(texts(&counts, 9).contains("1,000   250     750         25.00"));
    assert_eq!(counts.timeline().unwrap().panels[0].bands[0].values[..1], [75.0]);

    let header = "icount,pc,number,name,arg0,arg1,arg2,arg3,arg4,arg5,pid,tid,comm\n";
    let call = |icount: u64, name: &str, caller: &str| {
        format!("{icount},0x1,0,{name},0x0,0x0,0x0,0x0,0x0,0x0,{caller}\n")
    };
    let calls = [
        header.to_owned(),
        call(5001, "read", "7,8,sh"),
        call(6500, "read", "7,8,sh"),
        call(8999, "", ",,"),
    ];
    let (_dir, calls) = results("syscalls", &[("syscalls.csv", &calls.concat())]);
    let text = texts(&calls, 9);
    assert!(text.contains("      2    66.67  read\n      1    33.33  call 0"), "{text}");
    assert!(text.contains("sh (thread 8 of 7)"), "{text}");
    let timeline = calls.timeline().unwrap();
    assert_eq!(timeline.panels[0].bands[0].values, [1.0, 1.0, 0.0, 0.0]);
    assert_eq!(timeline.panels[0].bands[1].values, [0.0, 0.0, 0.0, 1.0]);
}

#[test]
fn a_foreign_tool_shows_the_heads_of_its_files_without_control_characters() {
    let table = "opcode,count\n\x1b[31mmov,7\nadd,3\n";
    let (_dir, results) =
        results("/tools/opcodes.toml", &[("opcodes.csv", table), ("z.txt", "no table")]);
    assert_eq!(texts(&results, 1), "opcodes.csv\n  opcode    count\n   [31mmov  7\n  and 1 more");
    assert!(matches!(results.timeline(), Err(Error::NoPicture { .. })));
}

#[test]
fn long_names_are_shortened_to_the_terminal() {
    let name = "a_function_with_a_very_long_name_".repeat(4);
    let text = format!("address,bytes,bytes_run,instructions_run,symbol\n0x1000,9,8,3,{name}\n");
    let files = [
        ("coverage.csv", "address,bytes,instructions,symbol\n0x1000,9,3,f\n"),
        ("coverage-functions.csv", &text),
    ];
    let (_dir, results) = results("coverage", &files);
    let table = &results.tables(9).unwrap()[1];
    assert!(table.text(None).contains(&name));
    for width in [1, 20, 60, 80] {
        let text = table.text(Some(width));
        let fits = |line: &str| line.chars().count() <= width;
        assert!(text.lines().skip(1).all(fits) && text.contains('…'), "{text}");
    }
}

#[test]
fn many_intervals_are_drawn_in_cells() {
    let (dir, mut results) = results("icount", &[]);
    let mut text = "interval,start_icount,instructions,user,kernel\n".to_owned();
    results.intervals.clear();
    for index in 0..5000 {
        let start = u64::from(index) * 10;
        results.intervals.push(AnalysedInterval { index, start, end: start + 10 });
        writeln!(text, "{index},{start},10,4,6").unwrap();
    }
    std::fs::write(dir.path().join("icount.csv"), text).unwrap();
    let timeline = results.timeline().unwrap();
    assert!(timeline.cells.len() <= keyframe_plot::CELLS_MAX);
    let all: f64 = timeline.panels[1].bands[0].values.iter().sum();
    assert_eq!(all as u64, 50_000);
}

#[test]
fn damaged_and_missing_files_are_named() {
    let refused = |files: &[(&str, &str)]| {
        let (_dir, results) = results("icount", files);
        let error = results.tables(9).unwrap_err();
        (error.to_string(), error.fix().unwrap_or_default())
    };
    let (text, fix) = refused(&[]);
    assert!(
        text.contains("icount.csv") && fix.contains("until keyframe analyze has ended"),
        "{text}"
    );
    let header = "interval,start_icount,instructions,user,kernel\n";
    let long = format!("{header}3,{},1,1,1\n", "7".repeat(2 << 20));
    for (contents, problem) in [
        ("", "it is empty"),
        ("a,b\n1,2\n", "no column \"interval\""),
        (&format!("{header}3,5000,1,x,1\n"), "line 2: \"x\" is not a number"),
        (&format!("{header}3,5000\n"), "line 2: a cell is missing"),
        (&long, "a row has more than"),
    ] {
        let (text, fix) = refused(&[("icount.csv", contents)]);
        assert!(text.contains(problem), "{text}");
        assert!(fix.contains("analyze again"), "{fix}");
    }
    let (_dir, odd) = results("icount", &[("icount.csv", &format!("{header}99,0,1,1,1\n"))]);
    assert!(odd.timeline().unwrap_err().to_string().contains("interval 99"));
}

/// Each tool, with a file of its results.
const TOOL_FILES: [(&str, &str); 8] = [
    ("icount", "icount.csv"),
    ("hot", "hot-functions-by-interval.csv"),
    ("hot", "hot-blocks.csv"),
    ("cache", "cache.csv"),
    ("working-set", "working-set.csv"),
    ("syscalls", "syscalls.csv"),
    ("memtrace", "memtrace.parquet"),
    ("foreign.toml", "some.csv"),
];

proptest! {
    /// Whatever a file contains, there is a table or an error, and no panic.
    #[test]
    fn any_file_is_shown_or_refused(
        (tool, file) in prop::sample::select(TOOL_FILES.to_vec()),
        start in prop::sample::select(vec![HOT[1].1, CACHE.1, "a,b\n", ""]),
        bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let (dir, results) = results(tool, &HOT[2..]);
        std::fs::write(dir.path().join(file), [start.as_bytes(), &bytes].concat()).unwrap();
        let is_printable = |text: &str| !text.contains(|c: char| c.is_control() && c != '\n');
        match results.tables(3) {
            Ok(tables) => {
                prop_assert!(tables.iter().all(|table| is_printable(&table.text(Some(80)))));
            }
            Err(error) => prop_assert!(is_printable(&error.to_string())),
        }
        if let Ok(timeline) = results.timeline() {
            let _ = timeline.svg();
        }
    }
}
