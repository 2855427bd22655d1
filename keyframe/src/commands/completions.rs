//! `keyframe completions`: what lets a shell complete commands and options.

use crate::failure::{DONE, Failure, Outcome};
use crate::output::Pipe;
use clap_complete::Shell;
use std::io::Write;

/// Print completions for a shell
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  source <(keyframe completions bash)                       # for this shell
  keyframe completions bash > /etc/bash_completion.d/keyframe
  keyframe completions zsh > \"${fpath[1]}/_keyframe\"
  keyframe completions fish > ~/.config/fish/completions/keyframe.fish")]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    /// Prints them.
    pub fn run(&self) -> Outcome {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut crate::cli(), "keyframe", &mut text);
        let written = Pipe::new().write_all(&text);
        written.map_err(|e| Failure::new(format!("write to standard output: {e}")))?;
        Ok(DONE)
    }
}
