//! What `keyframe help TOPIC` explains: one text file each.

/// A topic.
pub struct Topic {
    /// What it is asked for by.
    pub name: &'static str,
    /// What it is about.
    pub about: &'static str,
    /// The text.
    pub text: &'static str,
}

macro_rules! topic {
    ($name:literal, $about:literal) => {
        Topic { name: $name, about: $about, text: include_str!(concat!("topics/", $name, ".txt")) }
    };
}

/// All of them, in the order of reading.
pub const ALL: [Topic; 10] = [
    topic!("checkpoints", "what a checkpoint is, and what can be done with one"),
    topic!("pause", "why the guest pauses, for how long, and how to choose"),
    topic!("stores", "where checkpoints are kept, checked and forgotten"),
    topic!("disks", "where the guest's writes go"),
    topic!("recordings", "executing each instruction again"),
    topic!("clusters", "many machines for one analysis"),
    topic!("replication", "a second host that continues the VM"),
    topic!("serving", "dashboard, API, metrics, remote stores"),
    topic!("security", "rights, keys, sockets and networks"),
    topic!("scripting", "exit codes, JSON, environment"),
];

/// The one with that name.
pub fn find(name: &str) -> Option<&'static Topic> {
    ALL.iter().find(|topic| topic.name == name)
}

/// A line for each.
pub fn list() -> String {
    let lines = ALL.iter().map(|topic| format!("  {:<12} {}", topic.name, topic.about));
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Command;

    /// A topic that names a missing command or option misleads its reader.
    #[test]
    fn topics_name_commands_and_options_that_there_are() {
        let command = crate::cli();
        let has = |command: &Command, word: &str| {
            command.get_arguments().any(|arg| arg.get_long() == Some(word))
        };
        for topic in &ALL {
            for (at, _) in topic.text.match_indices("keyframe ") {
                // A path or an address ends in the same word.
                let rest = &topic.text[at + "keyframe ".len()..];
                let name: String = rest.chars().take_while(char::is_ascii_lowercase).collect();
                if name.is_empty() || !topic.text[..at].ends_with(['`', ' ', '$', ':', '(', '\n']) {
                    continue;
                }
                let found = command.find_subcommand(&name);
                assert!(found.is_some(), "{}: keyframe {name}", topic.name);
            }
            for word in topic.text.split(|c: char| !(c.is_ascii_lowercase() || c == '-')) {
                let Some(option) = word.strip_prefix("--").filter(|option| !option.is_empty())
                else {
                    continue;
                };
                let is_known =
                    option == "help" || command.get_subcommands().any(|sub| has(sub, option));
                assert!(is_known, "{}: --{option}", topic.name);
            }
        }
    }
}
