//! Rewrites the user's line so that QEMU records the VM, or replays a recording of it.
//!
//! ```text
//!   user's   -enable-kvm -smp 1 -drive file=a.img,if=virtio -netdev tap,id=n,... -nographic
//!   record   -accel tcg -icount shift=3,rr=record,rrfile=LOG -machine hpet=off
//!            -drive ...a.img served...,if=none,id=X-image
//!            -drive driver=blkreplay,image=X-image,id=X,if=virtio
//!            -netdev tap,id=n,... -object filter-replay,netdev=n   -nographic
//!   replay   the same with rr=replay; networks and consoles are not connected, and the user's
//!            monitors are removed
//! ```
//!
//! One function makes both lines from the same words, so both make the same machine. A machine that
//! no replay could repeat is refused before it is recorded, with reason and fix (`refusals`).
//!
//! Not handled here: the images (`drives`), and checkpoints.

mod block_layers;
mod clock;
mod refusals;

pub use clock::{RecordingClock, may_run_late};

use crate::drives::{DiskServer, rewrite_drives};
use crate::media::rewrite_media;
use crate::options::{Argument, escape, keys, properties, value_of};
use crate::{CommandLineError, Result};
use keyframe_machine::Processor;
use std::path::Path;

/// Guest nanoseconds per instruction, as a power of two: 8 ns, the value that `shift=auto` begins
/// with. `auto` itself is refused because replays of it stop (docs/design/record-replay.md).
const SHIFT: u32 = 3;

/// Whether QEMU records into the log or replays it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordingMode {
    /// QEMU writes the log.
    Record,
    /// QEMU follows the log.
    Replay,
}

/// The options for a command line that records or replays.
#[derive(Clone, Copy, Debug)]
pub struct RecordingLineOptions<'a> {
    /// Record or replay.
    pub mode: RecordingMode,
    /// The path of QEMU's log.
    pub log: &'a Path,
    /// The server of the disks that the guest can write to; `None` if there is no such disk.
    pub disks: Option<&'a DiskServer>,
    /// The server of the media that the guest can only read; `None` if QEMU reads them itself.
    pub media: Option<&'a DiskServer>,
    /// QEMU's version (`7.2.22 ...`).
    pub qemu_version: &'a str,
    /// The guest's processor.
    pub processor: Processor,
    /// The file for a replay's serial output; `None` to discard it.
    pub console: Option<&'a Path>,
    /// The guest's real-time clock.
    pub clock: RecordingClock<'a>,
}

/// A command line that records or replays.
#[derive(Clone, Debug, Default)]
pub struct RecordingLine {
    /// The words, without the binary.
    pub words: Vec<String>,
    /// The differences from the user's machine that the user should know, a text each.
    pub notes: Vec<String>,
}

/// Makes the command line that records or replays, from the user's words without the binary.
///
/// Error: [`CommandLineError::Argument`] for a machine that cannot be recorded exactly.
pub fn recording_line(
    words: &[String],
    options: RecordingLineOptions<'_>,
) -> Result<RecordingLine> {
    let arguments = crate::options::parse(words)?;
    let (arguments, notes) = recording_arguments(&arguments, options)?;
    Ok(RecordingLine { words: arguments.iter().flat_map(Argument::words).collect(), notes })
}

/// As [`recording_line`], for a parsed command line. Returns arguments and notes.
pub(crate) fn recording_arguments(
    arguments: &[Argument],
    options: RecordingLineOptions<'_>,
) -> Result<(Vec<Argument>, Vec<String>)> {
    refusals::check(arguments, options.qemu_version)?;
    let mut maker =
        LineMaker { options, notes: Vec::new(), icount: None, out: Vec::new(), consoles: 0 };
    let served = match options.disks {
        Some(server) => rewrite_drives(arguments, server)?,
        None => arguments.to_vec(),
    };
    let served = match options.media {
        Some(server) => rewrite_media(&served, server)?,
        None => served,
    };
    let layered = block_layers::add_block_layers(&served)?;
    for argument in &layered {
        maker.argument(argument)?;
    }
    maker.finish(arguments)
}

fn option(name: &str, value: impl Into<String>) -> Argument {
    Argument::Option(name.into(), value.into())
}

struct LineMaker<'a> {
    options: RecordingLineOptions<'a>,
    notes: Vec<String>,
    /// The user's `-icount`.
    icount: Option<String>,
    out: Vec<Argument>,
    consoles: usize,
}

impl LineMaker<'_> {
    fn argument(&mut self, argument: &Argument) -> Result<()> {
        let replays = self.options.mode == RecordingMode::Replay;
        match argument.name() {
            "enable-kvm" => self.notes.push("KVM is removed: a recording runs under TCG".into()),
            "accel" => self.accelerator(argument),
            "M" | "machine" => self.machine(argument),
            // `finish` adds -machine hpet=off, if there is one, which -no-hpet means in QEMU 7.2,
            // and -rtc.
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
                .push(format!("{} is removed: a recording runs under TCG", argument.display()));
        }
    }

    /// Keeps `-machine` without its accelerator, which `finish` adds.
    fn machine(&mut self, argument: &Argument) {
        let keys = keys(argument.value(), "type");
        let kept: Vec<String> = keys
            .iter()
            .filter(|(key, _)| key != "accel" && key != "hpet")
            .map(|(key, value)| format!("{key}={}", escape(value)))
            .collect();
        if !kept.is_empty() {
            self.out.push(option("machine", kept.join(",")));
        }
    }

    fn netdev(&mut self, argument: &Argument) {
        let keys = properties(argument.value(), "type").unwrap_or_default();
        let id = value_of(&keys, "id").unwrap_or_default();
        match self.options.mode {
            RecordingMode::Record => self.out.push(argument.clone()),
            // The log holds all packets that came; packets that are sent are dropped.
            RecordingMode::Replay => {
                self.out.push(option("netdev", format!("user,id={},restrict=on", escape(id))));
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

    /// The target of a replay's console: the first one writes to the chosen file.
    fn console(&mut self, was: &str) -> String {
        if was == "none" || was.starts_with("chardev:") {
            return was.into();
        }
        self.consoles += 1;
        match self.options.console {
            Some(path) if self.consoles == 1 => format!("file:{}", path.display()),
            _ => "null".into(),
        }
    }

    fn chardev(&mut self, argument: &Argument) -> Result<()> {
        let keys = properties(argument.value(), "backend").unwrap_or_default();
        let id = value_of(&keys, "id").unwrap_or_default();
        if id.is_empty() {
            return Err(CommandLineError::Argument {
                argument: argument.display(),
                reason: "this character device has no id".into(),
                fix: "correct it; QEMU refuses it too".into(),
            });
        }
        self.out.push(option("chardev", format!("null,id={}", escape(id))));
        Ok(())
    }

    fn finish(mut self, user: &[Argument]) -> Result<(Vec<Argument>, Vec<String>)> {
        let has = |name: &str| user.iter().any(|a| a.name() == name);
        if self.options.mode == RecordingMode::Replay {
            if !has("no-shutdown") {
                // The VM stays after the last instruction, so that it can be inspected.
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
            // Without it QEMU puts a monitor on the terminal.
            self.out.push(option("monitor", "none"));
        }
        if !has("nodefaults") && !["net", "nic", "netdev"].iter().any(|name| has(name)) {
            self.notes.push(
                "QEMU's default network card is removed (name one with -netdev and -device to \
                 keep it)"
                    .into(),
            );
            self.out.push(option("nic", "none"));
        }
        if self.options.processor.has_hpet() && !is_microvm(user) {
            self.out.push(option("machine", "hpet=off"));
        }
        self.out
            .extend(self.options.clock.values(user).into_iter().map(|value| option("rtc", value)));
        if clock::follows_host(user) {
            self.notes.push(
                "the guest's real-time clock follows the host's because of -rtc: replays take \
                 twice as long"
                    .into(),
            );
        }
        self.out.push(option("accel", "tcg"));
        let (word, log) = match self.options.mode {
            RecordingMode::Record => ("record", self.options.log),
            RecordingMode::Replay => ("replay", self.options.log),
        };
        let log = log.to_str().ok_or_else(|| CommandLineError::Argument {
            argument: log.display().to_string(),
            reason: "the path of the log is not UTF-8".into(),
            fix: "choose another directory for the recording".into(),
        })?;
        let icount = self.icount.unwrap_or_else(|| format!("shift={SHIFT}"));
        self.out.push(option("icount", format!("{icount},rr={word},rrfile={}", escape(log))));
        Ok((self.out, self.notes))
    }
}

/// The machine type that the command line names; empty if it names none.
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

    fn options(mode: RecordingMode) -> RecordingLineOptions<'static> {
        RecordingLineOptions {
            mode,
            log: Path::new("/r/log,1"),
            media: None,
            disks: None,
            qemu_version: "7.2.22",
            processor: Processor::X86_64,
            console: None,
            clock: RecordingClock::Same(&[]),
        }
    }

    fn text(user: &str, mode: RecordingMode) -> String {
        recording_line(&words(user), options(mode)).unwrap().words.join(" ")
    }

    #[test]
    fn a_line_under_kvm_becomes_one_that_is_recorded() {
        let user =
            "-machine q35,accel=kvm -enable-kvm -m 1G -smp 1 -nic none -serial stdio -monitor none";
        assert_eq!(
            text(user, RecordingMode::Record),
            "-machine type=q35 -m 1G -smp 1 -nic none -serial stdio -monitor none -machine hpet=off -accel tcg -icount shift=3,rr=record,rrfile=/r/log,,1"
        );
        assert_eq!(
            text(user, RecordingMode::Replay),
            "-machine type=q35 -m 1G -smp 1 -nic none -serial null -no-shutdown -display none -monitor none -machine hpet=off -accel tcg -icount shift=3,rr=replay,rrfile=/r/log,,1"
        );
    }

    #[test]
    fn the_users_icount_is_kept() {
        assert!(
            text("-nodefaults -icount shift=3,sleep=off", RecordingMode::Record)
                .ends_with("-icount shift=3,sleep=off,rr=record,rrfile=/r/log,,1")
        );
    }

    #[test]
    fn disks_and_networks_pass_the_log() {
        let user = "-nodefaults -blockdev driver=file,filename=/a,node-name=n,read-only=on -device virtio-blk-pci,drive=n -netdev tap,id=x,fd=3 -device e1000,netdev=x";
        let record = text(user, RecordingMode::Record);
        assert!(
            record.contains("driver=file,filename=/a,node-name=n-image,read-only=on"),
            "{record}"
        );
        assert!(record.contains("driver=blkreplay,node-name=n,image=n-image"), "{record}");
        assert!(
            record.contains("-netdev tap,id=x,fd=3 -object filter-replay,id=keyframe-x,netdev=x"),
            "{record}"
        );
        let replay = text(user, RecordingMode::Replay);
        assert!(
            replay.contains(
                "-netdev user,id=x,restrict=on -object filter-replay,id=keyframe-x,netdev=x"
            ),
            "{replay}"
        );
    }

    #[test]
    fn a_replay_has_the_recordings_clock_and_a_host_clock_is_noted() {
        let recorded = words("qemu -rtc base=2026-11-24T21:02:00,clock=vm");
        let replay = |user: &str| {
            let clock = RecordingClock::Same(&recorded);
            let options = RecordingLineOptions { clock, ..options(RecordingMode::Replay) };
            recording_line(&words(user), options).unwrap().words.join(" ")
        };
        let made = replay("-nodefaults -rtc base=localtime -m 64");
        assert!(
            made.contains("-rtc base=2026-11-24T21:02:00,clock=vm") && !made.contains("localtime"),
            "{made}"
        );
        let now = jiff::Zoned::now();
        let notes = |user: &str| {
            let clock = RecordingClock::StartAt(&now);
            let options = RecordingLineOptions { clock, ..options(RecordingMode::Record) };
            recording_line(&words(user), options).unwrap().notes
        };
        assert!(notes("-nodefaults -rtc base=localtime").is_empty());
        assert!(notes("-nodefaults -rtc clock=host")[0].contains("twice as long"));
    }

    #[test]
    fn a_removed_default_network_is_noted() {
        let made = recording_line(&words("-m 64"), options(RecordingMode::Record)).unwrap();
        assert!(
            made.words.join(" ").contains("-nic none") && made.notes[0].contains("network"),
            "{made:?}"
        );
        assert!(
            recording_line(&words("-m 64 -nodefaults"), options(RecordingMode::Record))
                .unwrap()
                .notes
                .is_empty()
        );
    }
}
