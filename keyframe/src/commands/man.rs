//! `keyframe man`: the manual pages, from the definitions that `--help` stands on.

use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use std::path::PathBuf;

/// Write the manual pages into a directory
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The command writes one page for the program and one for each command: keyframe.1, keyframe-run.1, ...

Examples:
  keyframe man /usr/local/share/man/man1
  keyframe man M && man M/keyframe-run.1"
)]
pub struct Man {
    /// The directory; it is made if it is missing
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

impl Man {
    /// Writes them.
    pub fn run(&self) -> Outcome {
        let failed = |e: std::io::Error| {
            Failure::new(format!("write manual pages into {}: {e}", self.folder.display()))
        };
        std::fs::create_dir_all(&self.folder).map_err(failed)?;
        let mut command = crate::plain_cli();
        command.build();
        clap_mangen::generate_to(command, &self.folder).map_err(failed)?;
        let pages = std::fs::read_dir(&self.folder).map_err(failed)?.count();
        output::print_line(&format!(
            "{pages} files in {}; read one with: man {}/keyframe.1",
            self.folder.display(),
            self.folder.display()
        ))?;
        Ok(DONE)
    }
}
