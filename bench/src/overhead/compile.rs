//! The compile: gcc, assembler and linker in a Debian, over sources of this project, on a file
//! system in RAM.
//!
//! ```text
//!   boot ─▶ sources written ─▶ "compiled 1" ─▶ "compiled 2" ─▶ ...      counted from the first: by then all is cached
//! ```

use crate::Error;
use crate::vm::Guest;
use std::fmt::Write;

macro_rules! source {
    ($name:literal) => {
        ($name, include_str!(concat!("../../../guests/small/", $name)))
    };
}

/// What is compiled: parts of the small guest's program.
pub const SOURCES: [(&str, &str); 6] = [
    source!("kfguest.c"),
    source!("console.c"),
    source!("memory.c"),
    source!("params.c"),
    source!("work_dirty.c"),
    source!("work_net.c"),
];
const HEADERS: [(&str, &str); 3] =
    [source!("kfguest.h"), source!("hash.h"), source!("diskblock.h")];

/// Ends a file in the job.
const END: &str = "END_OF_FILE";
/// How long the guest may take to boot, and to compile once.
const TIMEOUT_S: u64 = 180;

/// Shell commands that write the sources into a directory of their own, and go there.
pub fn sources() -> String {
    let mut commands = String::from("mkdir /tmp/compile\ncd /tmp/compile\n");
    for (name, text) in HEADERS.iter().chain(&SOURCES) {
        let _ = writeln!(commands, "cat > {name} <<'{END}'\n{text}\n{END}");
    }
    commands
}

/// The script that the guest runs: it writes the sources and compiles them until the machine ends.
pub fn job() -> String {
    let mut job = format!("#!/bin/sh\nset -e\n{}", sources());
    job.push_str(
        "n=0
while :; do
    for source in *.c; do
        gcc -std=gnu11 -D_GNU_SOURCE -O2 -c \"$source\"
    done
    gcc -r -o program.o [!p]*.o
    n=$((n + 1))
    echo \"compiled $n\"
done
",
    );
    job
}

/// How long `compiles` of all sources take, by the host's clock.
pub fn seconds(guest: &mut Guest, compiles: u64) -> Result<f64, Error> {
    for n in 1..=compiles + 1 {
        guest.wait_for(&line(n), TIMEOUT_S)?;
    }
    let at = |n: u64| guest.lines(&line(n)).first().map(|(at, _)| *at);
    match (at(1), at(compiles + 1)) {
        (Some(from), Some(to)) if to > from => Ok(to.duration_since(from).as_secs_f64()),
        _ => Err(Error::failed("measure the compile", "the guest's lines are out of order")),
    }
}

/// What the guest prints after the nth. (10 begins as 1 does, but comes later.)
fn line(n: u64) -> String {
    format!("compiled {n}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_source_ends_its_file_early() {
        for (name, text) in HEADERS.iter().chain(&SOURCES) {
            assert!(!text.lines().any(|line| line == END), "{name}");
        }
        assert!(job().len() < 1 << 20, "the guest reads 1 MiB of it");
        assert_eq!(
            job().lines().filter(|line| *line == END).count(),
            HEADERS.len() + SOURCES.len()
        );
    }
}
