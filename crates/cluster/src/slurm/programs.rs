//! Runs Slurm's programs, with limits on their time and output.

use crate::{Error, Result};
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The longest time for an answer: a busy controller takes seconds.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest answer, in bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// Time between two tries to reach the controller.
const TRY_EVERY: Duration = Duration::from_secs(1);
/// What Slurm's programs print if they do not reach slurmctld. It has not received the request.
const UNREACHABLE: [&str; 3] = [
    "Unable to contact slurm controller (connect failure)",
    "Connection refused",
    "No route to host",
];
/// What they print if the answer of slurmctld is lost. It may have carried out the request.
const ANSWER_LOST: [&str; 8] = [
    "Unable to contact slurm controller (send failure)",
    "Unable to contact slurm controller (receive failure)",
    "Unable to contact slurm controller (shutdown failure)",
    "Zero Bytes were transmitted or received",
    "Socket timed out",
    "Communication connection failure",
    "Connection reset by peer",
    "Transport endpoint is not connected",
];
/// Time between two looks whether a program has ended.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The location of Slurm's programs.
#[derive(Clone, Debug, Default)]
pub struct SlurmPrograms {
    /// The directory with the programs; `None` to search PATH.
    pub dir: Option<PathBuf>,
}

impl SlurmPrograms {
    /// Runs `program` with `input` as its standard input and returns its standard output. A busy
    /// slurmctld may not answer for seconds; the program is then run again, for up to a minute. A
    /// job is submitted again only if slurmctld cannot have received it.
    ///
    /// Errors: [`Error::NoProgram`] if the program cannot be run, [`Error::TimedOut`] if it has not
    /// ended within a minute, [`Error::Refused`] if it fails.
    pub fn ask(
        &self,
        program: &'static str,
        args: &[impl AsRef<OsStr>],
        input: &[u8],
    ) -> Result<String> {
        // The end of a command that was interrupted does not wait for slurmctld.
        if program == super::SCANCEL {
            return self.ask_once(program, args, input);
        }
        let is_repeatable = program != super::SBATCH;
        let limit = Instant::now() + PATIENCE;
        loop {
            match self.ask_once(program, args, input) {
                Err(Error::Refused { message, .. })
                    if Instant::now() < limit && is_unanswered(&message, is_repeatable) =>
                {
                    std::thread::sleep(TRY_EVERY);
                }
                answer => return answer,
            }
        }
    }

    fn ask_once(
        &self,
        program: &'static str,
        args: &[impl AsRef<OsStr>],
        input: &[u8],
    ) -> Result<String> {
        let failed = |source| Error::NoProgram { program, source };
        let path = self.dir.as_ref().map_or_else(|| program.into(), |dir| dir.join(program));
        let mut command = Command::new(path);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let (out, err) = (read(child.stdout.take()), read(child.stderr.take()));
        if let Some(mut stdin) = child.stdin.take() {
            // A program that does not read its input reports its own error.
            let _ = stdin.write_all(input);
        }
        let status = wait(&mut child, program)?;
        let [out, err] = [out, err].map(|reader| reader.join().unwrap_or_default());
        if status.success() {
            return Ok(out);
        }
        let message = if err.trim().is_empty() { out } else { err };
        let message = format!("{} ({status})", message.trim());
        Err(Error::Refused { program, message })
    }
}

/// Returns whether `message` says that slurmctld did not answer. A lost answer counts only if the
/// request `is_repeatable`.
fn is_unanswered(message: &str, is_repeatable: bool) -> bool {
    let has = |texts: &[&str]| texts.iter().any(|text| message.contains(text));
    if has(&ANSWER_LOST) { is_repeatable } else { has(&UNREACHABLE) }
}

fn read(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(pipe) = pipe {
            // After an error, the bytes so far count.
            let _ = pipe.take(ANSWER_BYTES_MAX).read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn wait(child: &mut Child, program: &'static str) -> Result<std::process::ExitStatus> {
    let failed = |source| Error::NoProgram { program, source };
    let limit = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            return Ok(status);
        }
        if Instant::now() > limit {
            let _ = child.kill();
            let _ = child.wait();
            return Err(Error::TimedOut { program, seconds: PATIENCE.as_secs() });
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
