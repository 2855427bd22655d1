//! Each tool on a recorded guest: what a QEMU for each interval finds equals what one replay of all
//! finds, byte for byte.

mod support;

use keyframe_analysis::ThirdPartyTool;
use keyframe_analysis::tools::by_name;
use keyframe_testing::{
    NO_QEMU_10, NO_QEMU_11, distribution_qemu, qemu_10, qemu_11, skip, small_guest,
    tests_every_variant,
};
use std::path::Path;
use std::time::Duration;
use support::{Qemu, Recording};

const WORK: &str = "hash+dirty kf.mib=4 kf.hash.pause_ms=5";

/// The tools, each with arguments and a line that its result has in any guest that runs, but for
/// digits.
const TOOLS: [(&str, &[&str], &str); 12] = [
    ("icount", &[], "instructions: # user, # kernel"),
    ("memtrace", &[], "accesses, # bytes, #.# each"),
    ("hot", &["symbols=MAP"], "# % of instructions: block #x"),
    ("working-set", &[], "pages touched in all"),
    ("coverage", &["symbols=MAP"], "# of # functions entered"),
    ("coverage", &["symbols=PROGRAM"], "lines and # of # functions in # source files"),
    ("watch", &["addr=0x1000000", "len=16M", "space=physical"], "writes by # instructions"),
    ("syscalls", &["symbols=KERNEL"], "# by kfguest (thread # of #)"),
    ("cache", &["l1=4K:2", "l2=256K:8", "l3=none"], "level #: # accesses, # misses"),
    ("cache", &["l1=48K:12", "line=32"], "level #: # accesses, # misses"),
    ("cache", &["l1=4K:2", "l2=256K:8", "l3=none", "warmup=1"], "level #: # accesses, # misses"),
    // Larger than what an interval fills: the bounds are apart.
    ("cache", &["l3=256M:16", "warmup=0"], "level #: # accesses, # misses"),
];

/// Numbers as `#`.
fn shape(text: &str) -> String {
    let mut shape = String::new();
    for letter in text.chars() {
        match letter {
            '0'..='9' if shape.ends_with('#') => {}
            '0'..='9' => shape.push('#'),
            other => shape.push(other),
        }
    }
    shape
}

fn equal_in_both_ways(recording: &Recording, number: usize) {
    let (tool_name, arguments, line) = TOOLS[number];
    let name = format!("{tool_name}-{number}");
    let map = recording.file("System.map").display().to_string();
    let kernel = small_guest().join("vmlinux").display().to_string();
    let program = recording.file("program").display().to_string();
    let filled = |one: &&str| {
        one.replace("MAP", &map).replace("KERNEL", &kernel).replace("PROGRAM", &program)
    };
    let arguments: Vec<String> = arguments.iter().map(filled).collect();
    let tool = by_name(tool_name, &arguments).unwrap();
    let parallel = recording.side_by_side(&*tool, &format!("{name}-p"));
    let sequential = recording.in_sequence(&*tool, &format!("{name}-s"));
    let parallel = recording.merged(&*tool, &format!("{name}-out-p"), parallel);
    let sequential = recording.merged(&*tool, &format!("{name}-out-s"), sequential);
    println!("{name}: {:?}", parallel.lines);
    assert!(shape(&parallel.lines.join("\n")).contains(line), "{name}: {:?}", parallel.lines);
    assert_eq!(parallel.lines, sequential.lines, "{name}");
    assert!(!parallel.files.is_empty() && parallel.files.len() == sequential.files.len());
    for (one, other) in parallel.files.iter().zip(&sequential.files) {
        let same = std::fs::read(one).unwrap() == std::fs::read(other).unwrap();
        assert!(same, "{} and {} differ", one.display(), other.display());
    }
}

/// The small guest's kernel has no symbols: some addresses of its text.
fn write_map(path: &Path) {
    let lines: Vec<String> = (0..256)
        .map(|page| format!("{:x} T text_{page}\n", 0xffff_ffff_8100_0000_u64 + page * 0x10000))
        .collect();
    std::fs::write(path, lines.concat()).unwrap();
}

/// The guest's program again, with debug information, which changes no address of its code.
fn compile_program(path: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/small");
    let sources =
        std::fs::read_dir(&source).unwrap().map(|entry| entry.unwrap().path()).filter(|path| {
            let name = path.file_name().unwrap().to_string_lossy();
            let is_own =
                ["kfguest.c", "console.c", "params.c", "memory.c", "answering.c"].contains(&&*name);
            is_own || (name.starts_with("work_") && name.ends_with(".c"))
        });
    let mut cc = std::process::Command::new("gcc");
    cc.args(["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-static", "-g", "-o"]).arg(path);
    // As the guest's recipe has them: the linker puts code in this order.
    let mut sources: Vec<_> = sources.collect();
    let first = |path: &Path| {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        ["kfguest", "console", "params", "memory", "answering"]
            .iter()
            .position(|known| *known == name)
            .unwrap_or(9)
    };
    sources.sort_by_key(|path| (first(path), path.clone()));
    assert!(cc.args(sources).status().expect("a C compiler").success());
}

/// The guest hashes: most lines of that work ran, and none of the others' loops.
fn lines_are_the_guests(recording: &Recording, number: usize) {
    let info = recording.file(&format!("coverage-{number}-out-p")).join("coverage.info");
    let info = std::fs::read_to_string(info).unwrap();
    let share = |file: &str| {
        let record =
            info.split("end_of_record").find(|record| record.contains(&format!("/{file}\n")));
        let record = record.unwrap_or_else(|| panic!("no {file}"));
        let number = |name: &str| {
            let line = record.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.parse::<u64>().unwrap()
        };
        (number("LH:"), number("LF:"))
    };
    let (run, all) = share("hash.h");
    println!(
        "hash.h: {run} of {all}; work_hash.c: {:?}; work_compile.c: {:?}",
        share("work_hash.c"),
        share("work_compile.c")
    );
    assert!(run * 2 > all, "hash.h: {run} of {all}");
    assert_eq!(share("work_compile.c").0, 0);
}

fn all_tools(qemu: &Qemu, half: usize) {
    let recording = Recording::make(qemu, WORK, 4, Duration::from_millis(60));
    write_map(&recording.file("System.map"));
    compile_program(&recording.file("program"));
    println!("{qemu:?}: {:?}", recording.checkpoints);
    for (number, (_, arguments, _)) in TOOLS.into_iter().enumerate() {
        // The first two on each QEMU, each other one on one of them, unless all are asked for.
        if tests_every_variant() || number < 2 || number % 2 == half {
            equal_in_both_ways(&recording, number);
            if arguments == ["symbols=PROGRAM"] {
                lines_are_the_guests(&recording, number);
            }
        }
    }
    counts_are_qemus_own(&recording);
    third_party(&recording);
}

/// The plugin counts what QEMU counts, to a few instructions that faults start again.
fn counts_are_qemus_own(recording: &Recording) {
    let csv = std::fs::read_to_string(recording.file("icount-0-out-p").join("icount.csv")).unwrap();
    let rows =
        csv.lines().skip(1).map(|line| line.split(',').nth(2).unwrap().parse::<u64>().unwrap());
    for (interval, counted) in recording.intervals().into_iter().zip(rows) {
        let expected = interval.end.0 - interval.start.0;
        assert!(counted.abs_diff(expected) <= expected / 1000 + 100, "{interval:?}: {counted}");
    }
}

#[test]
fn side_by_side_equals_in_sequence_on_the_first_interface() {
    all_tools(&distribution_qemu().into(), 0);
}

#[test]
fn side_by_side_equals_in_sequence_on_the_fourth_interface() {
    if let Some(qemu) = qemu_10() { all_tools(&qemu.into(), 1) } else { skip!("{NO_QEMU_10}") }
}

#[test]
fn side_by_side_equals_in_sequence_on_the_seventh_interface() {
    if let Some(qemu) = qemu_11() { all_tools(&qemu.into(), 0) } else { skip!("{NO_QEMU_11}") }
}

/// The example of a third party's tool: compiled, run over each interval, merged.
fn third_party(recording: &Recording) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/third-party");
    let number = recording.qemu.interface.number();
    let compiled = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", &format!("-DINTERFACE={number}"), "-o"])
        .arg(recording.file(&format!("opcodes-{number}.so")))
        .arg(source.join("opcodes.c"))
        .status();
    assert!(compiled.expect("a C compiler").success());
    let manifest = recording.file("opcodes.toml");
    std::fs::copy(source.join("opcodes.toml"), &manifest).unwrap();
    let tool = ThirdPartyTool::read(&manifest, &[]).unwrap();
    let parts = recording.side_by_side(&tool, "opcodes");
    let summary = recording.merged(&tool, "opcodes-out", parts);
    let csv = std::fs::read_to_string(&summary.files[0]).unwrap();
    let rows =
        csv.lines().skip(1).map(|line| line.split(',').nth(1).unwrap().parse::<u64>().unwrap());
    let all = recording.starts.last().unwrap().0 - recording.starts[0].0;
    let counted: u64 = rows.sum();
    assert!(counted.abs_diff(all) <= all / 1000 + 100, "{counted} instructions of {all}");
}
