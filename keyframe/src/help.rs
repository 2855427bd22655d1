//! What `--help` and `keyframe help` show: commands by what they are for, texts that fit the
//! terminal, topics.

pub mod topics;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};

/// The commands that people use, by what they are for.
const GROUPS: [(&str, &[&str]); 7] = [
    (
        "Take checkpoints",
        &[
            "doctor", "init", "run", "attach", "take", "status", "top", "stop", "console",
            "switch", "profile",
        ],
    ),
    (
        "Use them",
        &[
            "list", "show", "diff", "restore", "branch", "rollback", "mount", "export", "bundle",
            "import", "commit",
        ],
    ),
    ("Keep a store", &["stats", "check", "tag", "pin", "forget", "prune", "copy", "unlock"]),
    (
        "Record, replay, analyse",
        &["record", "segment", "verify", "log", "goto", "find", "analyze", "analysis", "plan"],
    ),
    ("Survive a host", &["protect", "standby", "witness", "failover"]),
    ("Show", &["serve", "report"]),
    ("Learn and install", &["help", "completions", "man"]),
];

const TEMPLATE: &str =
    "{about}\n\n{usage-heading} {usage}\n\n{before-help}Options:\n{options}{after-help}";

/// An error of the command line, with what to do about it where that is known.
pub fn explained(mut error: clap::Error) -> clap::Error {
    let names = |kind, what: &str| match error.get(kind) {
        Some(ContextValue::String(word)) => word.contains(what),
        Some(ContextValue::Strings(words)) => words.iter().any(|word| word.contains(what)),
        _ => false,
    };
    let tip =
        if error.kind() == ErrorKind::UnknownArgument && names(ContextKind::InvalidArg, "qemu") {
            "QEMU's command line stands behind two dashes: keyframe ... -- qemu-system-x86_64 ..."
        } else if error.kind() == ErrorKind::MissingRequiredArgument
            && names(ContextKind::InvalidArg, "--store")
        {
            "name it once for all that follows: export KEYFRAME_STORE=STORE"
        } else {
            return error;
        };
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    error
}

/// The program's command line with its help in shape.
pub fn shaped(command: Command) -> Command {
    let groups = groups(&command);
    let command = with_readable_times(reflowed(command));
    // The program's own help has its commands in groups, which clap knows only for options.
    command.help_template(TEMPLATE).before_help(groups)
}

fn groups(command: &Command) -> String {
    let line = |name: &str| {
        let about =
            command.find_subcommand(name).and_then(Command::get_about).map(ToString::to_string);
        format!("  {name:<12} {}", about.unwrap_or_default())
    };
    let group = |(heading, names): &(&str, &[&str])| {
        let lines: Vec<String> = names.iter().map(|name| line(name)).collect();
        format!("{heading}:\n{}\n\n", lines.join("\n"))
    };
    GROUPS.iter().map(group).collect::<String>().trim_end().to_owned()
}

/// Lets each option for a time read a negative one, so that the error names the time and not an option
/// `-5`.
fn with_readable_times(command: Command) -> Command {
    let is_time = |arg: &Arg| arg.get_value_names().is_some_and(|names| names == ["TIME"]);
    command
        .mut_args(|arg| if is_time(&arg) { arg.allow_hyphen_values(true) } else { arg })
        .mut_subcommands(with_readable_times)
}

/// Joins the lines of the paragraphs after the options, so that they are wrapped to the terminal's
/// width once.
fn reflowed(mut command: Command) -> Command {
    if let Some(text) = command.get_after_help().map(StyledStr::to_string) {
        command = command.after_help(paragraphs(&text));
    }
    command.mut_subcommands(reflowed)
}

/// Joins the lines of each paragraph. Lines that are set in, and the ones behind them up to an
/// empty one, stay as they are, as do headings.
fn paragraphs(text: &str) -> String {
    let mut joined = String::with_capacity(text.len());
    let mut is_prose = false;
    for line in text.lines() {
        let goes_on = is_prose && !line.is_empty() && !line.starts_with(' ');
        if !joined.is_empty() {
            joined.push(if goes_on { ' ' } else { '\n' });
        }
        joined += line;
        is_prose = !line.is_empty() && !line.starts_with(' ') && !line.ends_with(':');
    }
    joined
}

#[cfg(test)]
mod tests {
    mod commands_page;
    mod errors_page;

    use super::*;

    #[test]
    fn every_command_for_people_is_in_one_group_and_no_topic_has_its_name() {
        let command = crate::cli();
        let mut grouped: Vec<&str> =
            GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        grouped.sort_unstable();
        let mut shown: Vec<&str> =
            command.get_subcommands().filter(|c| !c.is_hide_set()).map(Command::get_name).collect();
        shown.sort_unstable();
        assert_eq!(grouped, shown);
        for topic in topics::ALL {
            assert!(!shown.contains(&topic.name), "{}", topic.name);
        }
    }

    #[test]
    fn paragraphs_are_joined_and_examples_are_not() {
        let text = "One goes\nover two lines.\n\nExamples:\n  keyframe a\n  keyframe b \\\n      -c\n\nThe\nend.";
        assert_eq!(
            paragraphs(text),
            "One goes over two lines.\n\nExamples:\n  keyframe a\n  keyframe b \\\n      -c\n\nThe end."
        );
    }

    #[test]
    fn a_negative_time_is_called_a_bad_time() {
        for line in [
            "prune --store S --wait -5s",
            "forget --store S --keep-within -1h",
            "top --every -1s",
            "goto R --time -2s",
            "standby --detection -1s",
        ] {
            let words = std::iter::once("keyframe").chain(line.split(' '));
            let error = crate::cli().try_get_matches_from(words).expect_err(line);
            assert_eq!(error.kind(), ErrorKind::ValueValidation, "{error}");
        }
    }

    #[test]
    fn the_definition_of_the_command_line_is_sound() {
        crate::cli().debug_assert();
    }
}
