//! The page of error messages, as Markdown: `docs/errors.md`, from the golden texts of the crates.
//!
//! Each crate's errors are an enum, and a test of the crate compares the text of every variant with
//! `tests/golden/errors.txt`: the message, its causes, and what to do. This page arranges these texts
//! for readers.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

const HEAD: &str = "# Error messages

This page is generated from the errors of the program. Names and numbers in the messages are
examples. The program prints a message as `keyframe: MESSAGE: CAUSE`, and what to do in a second line
that begins with `fix:`. The cause is often the text of the system, such as `permission denied`; this
page leaves it out. A message without advice here is explained by its cause.

How a VM that cannot be checkpointed is refused: [the audit](architecture.md). The exit codes are in
[the table of commands](commands.md).
";

/// The crates with golden texts, in the order of the page, each with the heading of its section.
const SECTIONS: [(&str, &str); 25] = [
    ("session", "Running VMs"),
    ("qemu", "QEMU"),
    ("qemu-cmdline", "QEMU's command line"),
    ("qemu-stream", "QEMU's device state"),
    ("firecracker", "Firecracker"),
    ("capture", "Capture of RAM"),
    ("disk-capture", "Disks in checkpoints"),
    ("vm-disks", "Disks of VMs"),
    ("disk", "Disk images and their server"),
    ("net", "Networks between VMs"),
    ("store", "Stores"),
    ("inspect", "Checkpoints and exports"),
    ("replay-driver", "Recordings: replay, analysis, time travel"),
    ("replay", "Files of a recording"),
    ("gdb", "Debuggers"),
    ("analysis", "Analysis tools"),
    ("results", "Results of an analysis"),
    ("cluster", "Distributed analysis"),
    ("profiler", "Profiles"),
    ("failover", "Protected VMs"),
    ("replication", "Replication protocol"),
    ("scheduling", "Policies"),
    ("link", "Connections between hosts"),
    ("web", "HTTP interface and dashboard"),
    ("confine", "Rights of processes"),
];

/// A message and what to do about it.
struct ErrorText {
    message: String,
    fix: Option<String>,
}

/// Returns the messages of a golden file. A line that is not set in begins a message, and a line that
/// is set in deeper continues the one before.
fn error_texts(golden: &str) -> Vec<ErrorText> {
    let mut all: Vec<ErrorText> = Vec::new();
    let mut is_message = false;
    for line in golden.lines().filter(|line| !line.is_empty()) {
        if let (Some(last), Some(more)) = (all.last_mut(), line.strip_prefix("  ")) {
            let fix = more.strip_prefix("fix: ");
            is_message &= fix.is_none() && !more.starts_with("cause: ");
            match (fix, &mut last.fix) {
                (Some(fix), _) => last.fix = Some(fix.into()),
                (None, Some(fix)) => fix.extend([" ", more.trim()]),
                (None, None) if is_message => last.message.extend([" ", more.trim()]),
                (None, None) => {}
            }
        } else {
            all.push(ErrorText { message: line.into(), fix: None });
            is_message = true;
        }
    }
    all
}

/// Returns the page from the golden texts below `crates`, the directory of the crates.
fn errors_page(crates: &Path) -> std::io::Result<String> {
    let mut page = HEAD.to_owned();
    for (name, heading) in SECTIONS {
        let golden = std::fs::read_to_string(golden_file(&crates.join(name)))?;
        // Writing to a string cannot fail.
        let _ = write!(page, "\n## {heading}\n\n| message | what to do |\n|---|---|\n");
        let mut seen = BTreeSet::new();
        for ErrorText { message, fix } in error_texts(&golden) {
            let row = format!("| {} | {} |", cell(&message), cell(&fix.unwrap_or_default()));
            if seen.insert(row.clone()) {
                let _ = writeln!(page, "{row}");
            }
        }
    }
    Ok(page)
}

fn golden_file(directory: &Path) -> std::path::PathBuf {
    directory.join("tests/golden/errors.txt")
}

/// Returns `text` as Markdown shows it in a cell of a table.
fn cell(text: &str) -> String {
    let mut cell = String::with_capacity(text.len());
    for c in text.chars() {
        if "|<>*_`[]\\".contains(c) {
            cell.push('\\');
        }
        cell.push(c);
    }
    cell
}

#[test]
fn the_page_of_errors_is_that_of_the_crates() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = errors_page(&root.join("crates")).expect("the golden texts");
    keyframe_testing::assert_golden(root.join("docs/errors.md"), &page);
}

#[test]
fn each_crate_with_golden_texts_has_a_section() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let entries = std::fs::read_dir(crates).expect("the crates").map(|entry| entry.unwrap().path());
    let with_texts: BTreeSet<String> = entries
        .filter(|path| golden_file(path).is_file())
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    assert_eq!(with_texts, SECTIONS.iter().map(|(name, _)| (*name).to_owned()).collect());
}

#[test]
fn a_golden_text_has_messages_of_several_lines_and_fixes() {
    let golden = "this VM cannot be checkpointed:\n  vfio-pci: it writes\n  fix: remove it\n       too\n\nlock D\n  cause: permission denied\n";
    let texts = error_texts(golden);
    let shown: Vec<_> =
        texts.iter().map(|text| (text.message.as_str(), text.fix.as_deref())).collect();
    assert_eq!(
        shown,
        [
            ("this VM cannot be checkpointed: vfio-pci: it writes", Some("remove it too")),
            ("lock D", None)
        ]
    );
}
