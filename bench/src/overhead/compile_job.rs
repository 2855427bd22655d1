//! The compiling guest: gcc, assembler and linker in a Debian compile sources of this project on a
//! file system in RAM.
//!
//! ```text
//!   boot ─▶ sources written ─▶ "compiled 1" ─▶ "compiled 2" ─▶ ...
//!                                  counted from here, when all files are cached
//! ```

use crate::Error;
use crate::running_guest::RunningGuest;
use std::fmt::Write;

macro_rules! source {
    ($name:literal) => {
        ($name, include_str!(concat!("../../../guests/small/", $name)))
    };
}

/// The compiled sources: parts of the small guest's program.
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

/// The line that ends a file in the job.
const END: &str = "END_OF_FILE";
/// Longest time for the guest to boot, or to compile all sources once, in seconds.
const TIMEOUT_S: u64 = 180;

/// Returns shell commands that write the sources into a new directory and change to it.
pub fn sources() -> String {
    let mut commands = String::from("mkdir /tmp/compile\ncd /tmp/compile\n");
    for (name, text) in HEADERS.iter().chain(&SOURCES) {
        let _ = writeln!(commands, "cat > {name} <<'{END}'\n{text}\n{END}");
    }
    commands
}

/// Returns the script of the guest: it writes the sources and compiles them until the VM ends.
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

/// Returns the seconds for `compiles` compiles of all sources, by the host's clock.
pub fn seconds(guest: &mut RunningGuest, compiles: u64) -> Result<f64, Error> {
    for n in 1..=compiles + 1 {
        guest.wait_for(&line(n), TIMEOUT_S)?;
    }
    let at = |n: u64| guest.lines(&line(n)).first().map(|line| line.at);
    match (at(1), at(compiles + 1)) {
        (Some(from), Some(to)) if to > from => Ok(to.duration_since(from).as_secs_f64()),
        _ => Err(Error::failed("measure the compile", "the guest's lines are out of order")),
    }
}

/// Returns the line that the guest prints after compile `n`. (The line of 10 begins like that of 1,
/// but comes later.)
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
