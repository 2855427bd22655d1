//! `keyframe console`: a console of a clone, by the clone's name.
//!
//! ```text
//!   this terminal, raw ─┬─ Ctrl-] ─▶ end
//!                       └──────────▶ serial.sock ─▶ guest ─▶ serial.sock ─▶ this terminal
//! ```
//!
//! Left out: VMs of `run` and `restore`, whose consoles are where their command lines put them.

use crate::failure::{DONE, Failure, Outcome};
use keyframe_machine::VmmKind;
use keyframe_replay_driver::jobs;
use keyframe_session::console::{RawTerminal, forward};
use keyframe_session::run_dir;
use keyframe_session::run_dir::{About, RunKind};
use std::io::{self, IsTerminal};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Sockets of a clone that are no consoles.
const NO_CONSOLES: [&str; 2] = ["qmp", "disks"];

/// Connect this terminal to a console of a clone
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Ctrl-] ends the connection, and the clone runs on. All other keys go to the guest, Ctrl-C too. One program at a time can be
connected to a console; a second one waits. What the guest has printed before is in NAME.log in the clone's directory (keyframe
status shows it).

If standard input is no terminal, the command ends when the input has ended and the guest has been silent for a second.

The console of a VM of `keyframe run` is where its command line puts it: with -nographic in the terminal of that command, where
Ctrl-A X ends QEMU and Ctrl-C goes to the guest if QEMU has -serial mon:stdio.

Examples:
  keyframe console web-2
  keyframe console web-2 --port agent
  echo 'dmesg | tail' | keyframe console web-2"
)]
pub struct Console {
    /// The clone, if several run
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Which console: serial, agent, console, parallel, or the name of a port; of several alike
    /// serial-2, and so on
    #[arg(long, value_name = "PORT", default_value = "serial")]
    port: String,
}

impl Console {
    /// Connects, until the user has seen enough or the clone has ended.
    pub fn run(&self) -> Outcome {
        let (place, about) = self.clone_that_is_meant()?;
        if about.vmm != VmmKind::Qemu {
            let vm = &about.vm;
            let log = place.join("console.log");
            return Err(Failure::new(format!("clone {vm} of {} has no input", about.vmm))
                .fix(format!("read what it prints: tail -f {}", log.display())));
        }
        let socket = self.socket(&place, &about)?;
        let connection = UnixStream::connect(&socket)
            .map_err(|e| Failure::new(format!("connect to {}: {e}", socket.display())))?;
        let interrupted = jobs::interruption()?;
        let input = io::stdin();
        if input.is_terminal() {
            eprintln!("keyframe: connected to {} of clone {}; Ctrl-] ends it", self.port, about.vm);
        }
        let terminal = RawTerminal::of(&input).map_err(failed)?;
        let ended = forward(&connection, &input, terminal.is_some(), &interrupted);
        if terminal.is_some() {
            drop(terminal);
            eprintln!();
        }
        ended.map_err(failed)?;
        Ok(DONE)
    }

    fn clone_that_is_meant(&self) -> Result<(PathBuf, About), Failure> {
        let mut all = run_dir::without_engine()?;
        all.retain(|(_, about)| about.kind == RunKind::Clone);
        let names = all.iter().map(|(_, about)| about.vm.clone()).collect::<Vec<_>>().join(", ");
        if let Some(name) = &self.name {
            all.retain(|(_, about)| about.vm == *name);
        }
        let count = all.len();
        match (all.pop(), &self.name) {
            (Some(one), _) if count == 1 => Ok(one),
            (Some(_), _) => {
                Err(Failure::new("several clones run").fix(format!("name one of them: {names}")))
            }
            (None, Some(name)) if names.is_empty() => {
                Err(Failure::new(format!("no clone is named {name}, and no other runs"))
                    .fix("start clones with: keyframe branch --store STORE CHECKPOINT"))
            }
            (None, Some(name)) => Err(Failure::new(format!("no clone is named {name}"))
                .fix(format!("name one of these: {names}"))),
            (None, None) => Err(Failure::new("no clone runs")
                .fix("start clones with: keyframe branch --store STORE CHECKPOINT")),
        }
    }

    /// The socket of the console.
    fn socket(&self, place: &Path, about: &About) -> Result<PathBuf, Failure> {
        let entries = std::fs::read_dir(place)
            .map_err(|e| Failure::new(format!("read {}: {e}", place.display())))?;
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut ports: Vec<String> = names
            .filter_map(|name| name.strip_suffix(".sock").map(str::to_owned))
            .filter(|name| !NO_CONSOLES.contains(&&**name))
            .collect();
        if ports.contains(&self.port) {
            return Ok(place.join(format!("{}.sock", self.port)));
        }
        ports.sort();
        let (vm, port) = (&about.vm, &self.port);
        let fix = match &*ports.join(", ") {
            "" => "give the VM one, such as -serial stdio, before you take the checkpoint".into(),
            ports => format!("it has: {ports}; choose one with --port"),
        };
        Err(Failure::new(format!("clone {vm} has no console {port}")).fix(fix))
    }
}

fn failed(error: impl Into<io::Error>) -> Failure {
    Failure::new(format!("the connection to the console: {}", error.into()))
}
