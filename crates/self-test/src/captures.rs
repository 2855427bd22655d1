//! Checkpoints by each strategy and of each RAM backing, each compared with the RAM in its pause.

use crate::check::Check;
use crate::guest::{Backing, DEFAULT_RAM, Guest, passes};
use crate::program::Program;
use std::time::Duration;

/// The number of checkpoints of each run.
const COUNT: &str = "5";
/// How long a run may take.
const RUN_WAIT: Duration = Duration::from_secs(60);

/// The strategies, with the options of `keyframe run`.
const STRATEGIES: &[(&str, &[&str])] = &[
    ("precopy", &["--strategy", "precopy"]),
    ("pre-scan", &["--strategy", "pre-scan"]),
    ("stop-copy", &["--strategy", "stop-copy"]),
    ("cow", &["--strategy", "cow"]),
    ("fork", &["--strategy", "fork"]),
    ("compare", &["--strategy", "stop-copy", "--tracker", "compare"]),
];

/// The backings beside QEMU's default, which each strategy has.
const BACKINGS: &[Backing] = &[
    Backing { name: "private memory backend", object: Some("memory-backend-ram"), options: "" },
    Backing { name: "shared memfd", object: Some("memory-backend-memfd"), options: ",share=on" },
    Backing { name: "shared file", object: Some("memory-backend-file"), options: "" },
    Backing {
        name: "huge pages",
        object: Some("memory-backend-memfd"),
        options: ",share=on,hugetlb=on,hugetlbsize=2M",
    },
];

/// Runs the checks.
pub(crate) fn run(program: &Program<'_>, guest: &Guest<'_>, on_check: &dyn Fn(Check)) {
    for (name, options) in STRATEGIES {
        let body = || capture(program, guest, name, options, &DEFAULT_RAM);
        on_check(Check::run("capture", format!("strategy {name}"), body));
    }
    for backing in BACKINGS {
        let name = format!("RAM in {}", backing.name);
        if backing.options.contains("hugetlb=on") && free_huge_pages() < HUGE_PAGES {
            let reason = "no free huge pages of 2 MiB (sysctl vm.nr_hugepages)";
            on_check(Check::skipped("capture", name, reason));
            continue;
        }
        let options = ["--strategy", "precopy"];
        // A VM that a dead engine has left keeps its name.
        let vm = backing.name.replace(' ', "-");
        let body = || capture(program, guest, &vm, &options, backing);
        on_check(Check::run("capture", name, body));
    }
}

/// The huge pages that the guest's RAM takes.
const HUGE_PAGES: u64 = 32;

fn free_huge_pages() -> u64 {
    let path = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Takes audited checkpoints. The audit fails the run if one differs from the RAM in its pause.
fn capture(
    program: &Program<'_>,
    guest: &Guest<'_>,
    name: &str,
    options: &[&str],
    backing: &Backing,
) -> Result<String, String> {
    let console = program.path_of("capture.log");
    let ram = console.with_extension("ram");
    // A run begins with no leftovers of the one before.
    for left in [&console, &ram] {
        let _ = std::fs::remove_file(left);
    }
    let _ = std::fs::remove_dir_all(program.path_of("S"));
    program.ok(&["init", "S"])?;
    let command = guest.command(&console, backing);
    let mut words = vec!["run", "--store", "S", "--name", name, "--interval", "100ms"];
    words.extend(["--count", COUNT, "--audit", "audit", "--no-rehearsal"]);
    words.extend(options);
    words.push("--");
    words.extend(command.iter().map(String::as_str));
    let mut run = program.start("capture", &words)?;
    let status = run.wait(RUN_WAIT)?;
    if !status.success() {
        return Err(run.problem(&format!("ended with {status}")));
    }
    let listed = program.json(&["list", "--store", "S", "--json"])?;
    let count = listed.as_array().map_or(0, Vec::len);
    if count.to_string() != COUNT {
        return Err(run.problem(&format!("sealed {count} of {COUNT} checkpoints")));
    }
    let passes = passes(&console)?;
    if passes == 0 {
        return Err(run.problem("the guest has made no pass"));
    }
    Ok(format!("{COUNT} checkpoints equal the RAM in their pauses"))
}
