//! The table of all commands, as Markdown: `docs/commands.md`, from the definitions of the help.

use crate::help::GROUPS;
use clap::Command;
use std::fmt::Write;

const HEAD: &str = "# Commands

This page is generated from the program's help. `keyframe help COMMAND` explains a command in full,
`keyframe help topics` lists the concepts that have a page.

`CHECKPOINT` is a number, a tag or `latest`. `KEYFRAME_STORE` stands in for `--store`. Exit codes: 0
done, 1 failed, 2 usage, 3 done with warnings, 4 the guest panicked, 5 its watchdog expired, 10 no
store, 11 store locked, 12 store full: the newest checkpoints of the run are missing.
";

/// The page: for each group of commands a table with purpose and first example of each command.
pub fn commands_page(command: &Command) -> String {
    let mut page = HEAD.to_owned();
    for (heading, names) in GROUPS {
        // Writing to a string cannot fail.
        let _ =
            write!(page, "\n## {heading}\n\n| command | what it does | example |\n|---|---|---|\n");
        for name in names {
            let Some(command) = command.find_subcommand(name) else { continue };
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let example = example(&help).map(|line| format!("`{line}`")).unwrap_or_default();
            let about = about.replace('|', "\\|");
            let _ = writeln!(page, "| `{name}` | {about} | {} |", example.replace('|', "\\|"));
        }
    }
    page
}

/// The first example in the text after a command's options.
fn example(help: &str) -> Option<&str> {
    help.lines().map(str::trim).find(|line| line.starts_with("keyframe ") && !line.ends_with('\\'))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With `KEYFRAME_BLESS=1` the page is written instead.
    #[test]
    fn the_page_of_commands_is_that_of_the_program() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/commands.md");
        keyframe_testing::assert_golden(path, &commands_page(&crate::plain_cli()));
    }
}
