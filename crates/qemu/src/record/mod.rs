//! The user's line as one that QEMU records, or replays what was recorded of.
//!
//! ```text
//!   user's   -enable-kvm -smp 1 -drive file=a.img,if=virtio        -netdev tap,id=n,...  -nographic
//!   record   -accel tcg -icount shift=3,rr=record,rrfile=LOG -machine hpet=off
//!            -drive ...a.img served...,if=none,id=X-image -drive driver=blkreplay,image=X-image,id=X,if=virtio
//!            -netdev tap,id=n,... -object filter-replay,netdev=n   -nographic
//!   replay   the same with rr=replay; the network leads nowhere, consoles lead nowhere, no monitors of the user's
//! ```
//!
//! Both lines make the same machine: they are made by one function from the same words. What a
//! replay could not repeat is refused before anything is recorded, with the reason and the fix
//! (`refuse`).
//!
//! Left out: which images there are (`drives`), and the checkpoints.

mod block;
mod clock;
mod refuse;
mod requests;

pub use clock::{Clock, may_be_late};
pub use requests::Queues;

use crate::drives::{self, DiskServer};
use crate::media;
use crate::options::{self, Argument, escape, keys, properties, value_of};
use crate::{Error, Result};
use std::path::Path;

/// Virtual nanoseconds an instruction, as a power of two: 8, which is what `shift=auto` begins
/// with. That one is refused: it bounds the jumps of a halted guest's clock by how the host's and
/// the guest's stand to each other just then, and replays of such guests stop in one interval of
/// seven (docs/design/record-replay.md).
const SHIFT: u32 = 3;

/// What QEMU is to do with the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Write it.
    Record,
    /// Follow it.
    Replay,
}

/// What becomes of a line.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Which of the two.
    pub mode: Mode,
    /// QEMU's log.
    pub log: &'a Path,
    /// Who serves the disks that the guest can write to; none where it has no such disk.
    pub disks: Option<&'a DiskServer>,
    /// Who serves the media that it can only read; QEMU itself without one.
    pub media: Option<&'a DiskServer>,
    /// The QEMU's version (`7.2.22 ...`).
    pub version: &'a str,
    /// Where a replay's serial output goes; nowhere without one.
    pub console: Option<&'a Path>,
    /// The guest's real-time clock.
    pub clock: Clock<'a>,
}

/// A line that was made.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// The words behind the binary.
    pub words: Vec<String>,
    /// What a person should know of what differs.
    pub notes: Vec<String>,
}

/// The line for `wanted` from the user's words behind the binary.
///
/// Error: [`Error::CommandLine`] for what cannot be recorded exactly.
pub fn line(words: &[String], wanted: Wanted<'_>) -> Result<Line> {
    let arguments = options::parse(words)?;
    let (arguments, notes) = made(&arguments, wanted)?;
    Ok(Line { words: arguments.iter().flat_map(Argument::words).collect(), notes })
}

/// The same over a line that was taken apart.
pub(crate) fn made(
    arguments: &[Argument],
    wanted: Wanted<'_>,
) -> Result<(Vec<Argument>, Vec<String>)> {
    refuse::check(arguments, wanted.version)?;
    let mut making =
        Making { wanted, notes: Vec::new(), icount: None, out: Vec::new(), consoles: 0 };
    let served = match wanted.disks {
        Some(server) => drives::rewrite(arguments, server)?,
        None => arguments.to_vec(),
    };
    let served = match wanted.media {
        Some(server) => media::rewrite(&served, server)?,
        None => served,
    };
    let layered = block::layer(&served)?;
    for argument in &layered {
        making.argument(argument)?;
    }
    making.finish(arguments)
}

fn option(name: &str, value: impl Into<String>) -> Argument {
    Argument::Option(name.into(), value.into())
}

struct Making<'a> {
    wanted: Wanted<'a>,
    notes: Vec<String>,
    /// The user's `-icount`.
    icount: Option<String>,
    out: Vec<Argument>,
    consoles: usize,
}

impl Making<'_> {
    fn argument(&mut self, argument: &Argument) -> Result<()> {
        let replays = self.wanted.mode == Mode::Replay;
        match argument.name() {
            "enable-kvm" => self.notes.push("KVM is left out: a recording runs under TCG".into()),
            "accel" => self.accelerator(argument),
            "M" | "machine" => self.machine(argument),
            // QEMU 7.2's word for what `-machine hpet=off` says; and what is said anew at the end.
            "no-hpet" | "rtc" => {}
            "icount" => self.icount = Some(argument.value().into()),
            "netdev" => self.netdev(argument),
            "monitor" | "qmp" | "qmp-pretty" | "mon" | "gdb" | "s" | "vnc" | "spice"
            | "display" | "pidfile"
                if replays => {}
            "nographic" if replays => self.nographic(),
            "serial" | "parallel" | "debugcon" if replays => {
                let console = self.console(argument.value());
                self.out.push(option(argument.name(), console));
            }
            "chardev" if replays => self.chardev(argument)?,
            _ => self.out.push(argument.clone()),
        }
        Ok(())
    }

    fn accelerator(&mut self, argument: &Argument) {
        let keys = keys(argument.value(), "accel");
        if value_of(&keys, "accel") != Some("tcg") {
            self.notes
                .push(format!("{} is left out: a recording runs under TCG", argument.display()));
        }
    }

    /// Without an accelerator: that is named once, at the end.
    fn machine(&mut self, argument: &Argument) {
        let keys = keys(argument.value(), "type");
        let stay: Vec<String> = keys
            .iter()
            .filter(|(key, _)| key != "accel" && key != "hpet")
            .map(|(key, value)| format!("{key}={}", escape(value)))
            .collect();
        if !stay.is_empty() {
            self.out.push(option("machine", stay.join(",")));
        }
    }

    fn netdev(&mut self, argument: &Argument) {
        let keys = properties(argument.value(), "type").unwrap_or_default();
        let id = value_of(&keys, "id").unwrap_or_default();
        match self.wanted.mode {
            Mode::Record => self.out.push(argument.clone()),
            // All that came is in the log; what is sent goes nowhere.
            Mode::Replay => {
                self.out.push(option("netdev", format!("user,id={},restrict=on", escape(id))))
            }
        }
        self.out.push(option(
            "object",
            format!("filter-replay,id=keyframe-{},netdev={}", escape(id), escape(id)),
        ));
    }

    /// `-nographic` without the terminal.
    fn nographic(&mut self) {
        self.out.extend([option("machine", "graphics=off"), option("monitor", "none")]);
    }

    /// Where a replay's console leads: the first to the file that is wanted.
    fn console(&mut self, was: &str) -> String {
        if was == "none" || was.starts_with("chardev:") {
            return was.into();
        }
        self.consoles += 1;
        match self.wanted.console {
            Some(path) if self.consoles == 1 => format!("file:{}", path.display()),
            _ => "null".into(),
        }
    }

    fn chardev(&mut self, argument: &Argument) -> Result<()> {
        let keys = properties(argument.value(), "backend").unwrap_or_default();
        let id = value_of(&keys, "id").unwrap_or_default();
        if id.is_empty() {
            return Err(Error::CommandLine {
                argument: argument.display(),
                reason: "this character device has no id".into(),
                fix: "correct it; QEMU does not take it either".into(),
            });
        }
        self.out.push(option("chardev", format!("null,id={}", escape(id))));
        Ok(())
    }

    fn finish(mut self, user: &[Argument]) -> Result<(Vec<Argument>, Vec<String>)> {
        let has = |name: &str| user.iter().any(|a| a.name() == name);
        if self.wanted.mode == Mode::Replay {
            if !has("no-shutdown") {
                // Behind the last instruction the VM stays, for a look at it.
                self.out.push(Argument::Flag("no-shutdown".into()));
            }
            self.out.push(option("display", "none"));
            if !has("serial")
                && !has("nodefaults")
                && (has("nographic") || is_without_display(user))
            {
                let console = self.console("");
                self.out.push(option("serial", console));
            }
            if has("nographic") && !has("parallel") && !has("nodefaults") {
                self.out.push(option("parallel", "null"));
            }
            // Else QEMU puts a monitor of its own onto the terminal.
            self.out.push(option("monitor", "none"));
        }
        if !has("nodefaults") && !["net", "nic", "netdev"].iter().any(|name| has(name)) {
            self.notes.push(
                "the network card that QEMU adds by itself is left out (give one with -netdev and -device to have it)".into(),
            );
            self.out.push(option("nic", "none"));
        }
        if !is_microvm(user) {
            self.out.push(option("machine", "hpet=off"));
        }
        self.out
            .extend(self.wanted.clock.values(user).into_iter().map(|value| option("rtc", value)));
        if clock::is_hosts(user) {
            self.notes.push(
                "the guest's real-time clock follows the host's, as -rtc has it: replays take twice as long"
                    .into(),
            );
        }
        self.out.push(option("accel", "tcg"));
        let (word, log) = match self.wanted.mode {
            Mode::Record => ("record", self.wanted.log),
            Mode::Replay => ("replay", self.wanted.log),
        };
        let log = log.to_str().ok_or_else(|| Error::CommandLine {
            argument: log.display().to_string(),
            reason: "the path of the log is not UTF-8".into(),
            fix: "choose another directory for the recording".into(),
        })?;
        let icount = self.icount.unwrap_or_else(|| format!("shift={SHIFT}"));
        self.out.push(option("icount", format!("{icount},rr={word},rrfile={}", escape(log))));
        Ok((self.out, self.notes))
    }
}

/// The machine's type, as the line says it.
fn machine_type(arguments: &[Argument]) -> String {
    let of = arguments.iter().filter(|a| matches!(a.name(), "M" | "machine"));
    of.filter_map(|a| value_of(&keys(a.value(), "type"), "type").map(str::to_owned))
        .next_back()
        .unwrap_or_default()
}

fn is_microvm(arguments: &[Argument]) -> bool {
    machine_type(arguments).starts_with("microvm")
}

fn is_without_display(arguments: &[Argument]) -> bool {
    arguments.iter().any(|a| a.name() == "display" && a.value().starts_with("none"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn wanted(mode: Mode) -> Wanted<'static> {
        Wanted {
            mode,
            log: Path::new("/r/log,1"),
            media: None,
            disks: None,
            version: "7.2.22",
            console: None,
            clock: Clock::As(&[]),
        }
    }

    fn text(user: &str, mode: Mode) -> String {
        line(&words(user), wanted(mode)).unwrap().words.join(" ")
    }

    #[test]
    fn a_line_under_kvm_becomes_one_that_is_recorded() {
        let user =
            "-machine q35,accel=kvm -enable-kvm -m 1G -smp 1 -nic none -serial stdio -monitor none";
        assert_eq!(
            text(user, Mode::Record),
            "-machine type=q35 -m 1G -smp 1 -nic none -serial stdio -monitor none -machine hpet=off -accel tcg -icount shift=3,rr=record,rrfile=/r/log,,1"
        );
        assert_eq!(
            text(user, Mode::Replay),
            "-machine type=q35 -m 1G -smp 1 -nic none -serial null -no-shutdown -display none -monitor none -machine hpet=off -accel tcg -icount shift=3,rr=replay,rrfile=/r/log,,1"
        );
    }

    #[test]
    fn what_counts_instructions_stays_as_the_user_has_it() {
        assert!(
            text("-nodefaults -icount shift=3,sleep=off", Mode::Record)
                .ends_with("-icount shift=3,sleep=off,rr=record,rrfile=/r/log,,1")
        );
    }

    #[test]
    fn disks_and_networks_stand_behind_the_log() {
        let user = "-nodefaults -blockdev driver=file,filename=/a,node-name=n,read-only=on -device virtio-blk-pci,drive=n -netdev tap,id=x,fd=3 -device e1000,netdev=x";
        let record = text(user, Mode::Record);
        assert!(
            record.contains("driver=file,filename=/a,node-name=n-image,read-only=on"),
            "{record}"
        );
        assert!(record.contains("driver=blkreplay,node-name=n,image=n-image"), "{record}");
        assert!(
            record.contains("-netdev tap,id=x,fd=3 -object filter-replay,id=keyframe-x,netdev=x"),
            "{record}"
        );
        let replay = text(user, Mode::Replay);
        assert!(
            replay.contains(
                "-netdev user,id=x,restrict=on -object filter-replay,id=keyframe-x,netdev=x"
            ),
            "{replay}"
        );
    }

    #[test]
    fn the_real_time_clock_is_that_of_the_recording_and_by_the_hosts_it_is_slow() {
        let recorded = words("qemu -rtc base=2026-11-24T21:02:00,clock=vm");
        let replay = |user: &str| {
            let wanted = Wanted { clock: Clock::As(&recorded), ..wanted(Mode::Replay) };
            line(&words(user), wanted).unwrap().words.join(" ")
        };
        let made = replay("-nodefaults -rtc base=localtime -m 64");
        assert!(
            made.contains("-rtc base=2026-11-24T21:02:00,clock=vm") && !made.contains("localtime"),
            "{made}"
        );
        let now = jiff::Zoned::now();
        let notes = |user: &str| {
            let wanted = Wanted { clock: Clock::From(&now), ..wanted(Mode::Record) };
            line(&words(user), wanted).unwrap().notes
        };
        assert!(notes("-nodefaults -rtc base=localtime").is_empty());
        assert!(notes("-nodefaults -rtc clock=host")[0].contains("twice as long"));
    }

    #[test]
    fn the_implied_network_is_said_to_be_left_out() {
        let made = line(&words("-m 64"), wanted(Mode::Record)).unwrap();
        assert!(
            made.words.join(" ").contains("-nic none") && made.notes[0].contains("network"),
            "{made:?}"
        );
        assert!(line(&words("-m 64 -nodefaults"), wanted(Mode::Record)).unwrap().notes.is_empty());
    }
}
