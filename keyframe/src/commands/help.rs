//! `keyframe help`: the program, a command, or a topic explained.

use crate::failure::{DONE, Failure, Outcome, USAGE};
use crate::help::topics;
use crate::output;

/// Explain the program, a command or a topic
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  keyframe help
  keyframe help run
  keyframe help replication
  keyframe help topics")]
pub struct Help {
    /// A command, a topic, or `topics` for a list
    #[arg(value_name = "COMMAND|TOPIC")]
    words: Vec<String>,
}

impl Help {
    /// Prints the text.
    pub fn run(&self) -> Outcome {
        let mut root = crate::cli();
        root.build();
        match self.words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
            [] => {
                output::print_line(root.render_help().to_string().trim_end())?;
                output::print_line(&format!(
                    "\nTopics (keyframe help TOPIC):\n{}",
                    topics::list()
                ))?;
            }
            ["topics"] => output::print_line(&topics::list())?,
            [name] if topics::find(name).is_some() => {
                let text = topics::find(name).map_or("", |topic| topic.text);
                output::print_line(text.trim_end())?;
            }
            words => {
                let mut command = &mut root;
                for word in words {
                    command = command.find_subcommand_mut(word).ok_or_else(|| unknown(words))?;
                }
                output::print_line(command.render_long_help().to_string().trim_end())?;
            }
        }
        Ok(DONE)
    }
}

fn unknown(words: &[&str]) -> Failure {
    let failure = Failure::new(format!("there is no command or topic named {}", words.join(" ")));
    let topics: Vec<&str> = topics::ALL.iter().map(|topic| topic.name).collect();
    let fix = format!("commands: keyframe --help; topics: {}", topics.join(", "));
    Failure { code: USAGE, ..failure.fix(fix) }
}
