//! The command line that restores a checkpoint, derived from the checkpoint's own. The plan is
//! complete before any process starts.
//!
//! ```text
//!   kept:   qemu -m 1G -object memory-backend-ram,id=a,size=512M,prealloc=on ...  -S  -mem-prealloc
//!   run:    qemu -m 1G -object memory-backend-file,id=a,size=536870912,mem-path=/proc/self/fd/N,share=on ...
//!                -S -global migration.send-configuration=off -machine suppress-vmdesc=on -incoming fd:N ...
//! ```
//!
//! Invariant: exactly one backend of the new command line provides each RAM block that has a memory
//! backend.

use super::binary_choice::{self, Accepted};
use super::host_probe::PresentHost;
use super::stand_in::name_stand_ins;
use super::{Lineage, ReplayStart, RestoreOptions, RestorePurpose, RestoreSource};
use crate::{Result, stream};
use keyframe_machine::Accelerator;
use keyframe_qemu_cmdline::{
    Argument, HostProbe, LineUse, LineWord, NoHost, RestorableLine, check_added,
    has_accelerator_choice, moved_user_networks, named_accelerator, options, plan_backends,
    restorable_line, rewrite_drives, with_accelerator, without_accelerator,
};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The plan of a restore: what will be started, with which command line.
#[derive(Debug)]
pub struct Plan {
    pub(super) binary: PathBuf,
    pub(super) working_directory: Option<PathBuf>,
    pub(super) words: Vec<LineWord>,
    pub(super) arguments: Vec<Argument>,
    pub(super) source: RestoreSource,
    pub(super) paused: bool,
    pub(super) replays: Option<ReplayStart>,
    pub(super) accelerator: Option<Accelerator>,
    /// True if the restored VM's clock counts instructions and the checkpoint's did not.
    pub(super) counts: bool,
    pub(super) lineage: Option<Lineage>,
    pub(super) monitor: Option<PathBuf>,
    pub(super) log: Option<PathBuf>,
    /// Arguments after all others.
    pub(super) added: Vec<String>,
    pub(super) spawned: Option<fn()>,
    /// For each user network of the checkpoint its number in this VM, if any differs.
    pub(super) moved_networks: Option<Vec<Option<u32>>>,
    /// The kept arguments, if they name several accelerators.
    choice: Option<Vec<Argument>>,
    notes: Vec<String>,
    /// True if the VM never runs.
    pub(super) is_rehearsal: bool,
}

impl Plan {
    /// Plans the restore of `source`, with `extra` arguments after its own.
    ///
    /// Errors: [`Error::Binary`] and [`Error::DifferentVersion`] for the QEMU binary;
    /// [`Error::CommandLine`] for an argument of `extra` that would change the machine;
    /// [`Error::Source`] if command line and RAM layout do not fit together.
    pub fn new(
        source: RestoreSource,
        extra: Vec<OsString>,
        options: RestoreOptions,
    ) -> Result<Self> {
        let RestoreOptions {
            qemu,
            accepts_later,
            paused,
            replays,
            icount_shift,
            accelerator,
            disks,
            lineage,
            monitor,
            log,
            added,
            spawned,
            lazy,
            purpose,
        } = options;
        let mut notes = Vec::new();
        let binary = {
            let accepted = match (replays, accepts_later) {
                (Some(_), _) => Accepted::Release,
                (None, false) => Accepted::Series,
                (None, true) => Accepted::LaterSeries,
            };
            binary_choice::choose(&source.machine, qemu.as_deref(), accepted)?
        };
        notes.extend(binary.note);
        let added_by_user = check_added(extra)?;
        let kept = options::parse(source.machine.user_command.get(1..).unwrap_or_default())?;
        let working_directory = Some(source.machine.directory()).filter(|dir| dir.is_dir());
        let host = PresentHost { directory: working_directory.clone().unwrap_or_default() };
        let probe: &dyn HostProbe = if purpose == RestorePurpose::Run { &host } else { &NoHost };
        let line_use = if replays.is_some() || icount_shift.is_some() {
            LineUse::Replay
        } else {
            LineUse::Restore { lazy }
        };
        let first = kept;
        let RestorableLine { arguments: kept, notes: removed } =
            restorable_line(&first, &added_by_user, probe, line_use)?;
        notes.extend(removed);
        let mut kept = kept;
        notes.extend(name_stand_ins(&mut kept, &host.directory, &source.ram));
        let kept = match &disks {
            Some(server) => rewrite_drives(&kept, server)?,
            None => kept,
        };
        let line = match accelerator {
            Some(_) => plan_backends(&without_accelerator(&kept), &source.ram)?,
            None => plan_backends(&kept, &source.ram)?,
        };
        notes.extend(line.notes);
        // An alias such as `pc` stands for another machine in a later QEMU.
        let machine_type = binary.is_later.then_some(&*source.machine.machine_type);
        let added_words = added_words(machine_type, accelerator, icount_shift, &added_by_user);
        let words = line.words.into_iter().chain(added_words).collect();
        if working_directory.is_none() {
            notes.push(format!(
                "the VM's working directory {} is gone: relative paths of its line are looked for here",
                source.machine.working_directory
            ));
        }
        let choice = (accelerator.is_none() && has_accelerator_choice(&kept)).then(|| kept.clone());
        let arguments: Vec<_> = kept.into_iter().chain(added_by_user).collect();
        let moved_networks = moved_user_networks(&first, &arguments);
        Ok(Self {
            binary: binary.path,
            working_directory,
            words,
            arguments,
            source,
            paused,
            replays,
            accelerator,
            counts: icount_shift.is_some(),
            lineage,
            monitor,
            log,
            added,
            spawned,
            moved_networks,
            choice,
            notes,
            is_rehearsal: purpose == RestorePurpose::Rehearsal,
        })
    }

    /// Names the accelerator that wrote `device_state` alone, if the command line names several:
    /// QEMU might choose another one here.
    pub(super) fn pin_accelerator(&mut self, device_state: &[u8]) -> Result<()> {
        let Some(kept) = self.choice.take() else { return Ok(()) };
        let Some(chosen) = stream::written_by(device_state, self.source.machine.processor)? else {
            return Ok(());
        };
        let pinned = with_accelerator(&kept, chosen);
        // The words and the arguments end with those that were added.
        let before = plan_backends(&kept, &self.source.ram)?.words.len();
        let added_words = self.words.split_off(before.min(self.words.len()));
        self.words = plan_backends(&pinned, &self.source.ram)?.words;
        self.words.extend(added_words);
        let added = self.arguments.split_off(kept.len().min(self.arguments.len()));
        self.arguments = pinned;
        self.arguments.extend(added);
        Ok(())
    }

    /// Returns notes for the user about differences between the restored VM and the checkpoint's.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the logarithm of the nanoseconds that each instruction of a replay takes (`-icount
    /// shift`); `None` if this is no replay.
    pub(super) fn replay_shift(&self) -> Option<u32> {
        self.replays?;
        let icount = self.arguments.iter().rfind(|argument| argument.name() == "icount")?;
        options::value_of(&options::keys(icount.value(), "shift"), "shift")?.parse().ok()
    }

    /// Returns the accelerator of the command line; `None` if the line leaves QEMU a choice.
    pub fn named_accelerator(&self) -> Option<Accelerator> {
        self.accelerator.or_else(|| named_accelerator(&self.arguments))
    }

    /// Returns the path of the QEMU binary.
    pub fn binary(&self) -> &Path {
        &self.binary
    }
}

/// The words after those of the checkpoint's command line: the machine type, the accelerator, the
/// clock that counts instructions, and the user's arguments.
fn added_words(
    machine_type: Option<&str>,
    accelerator: Option<Accelerator>,
    icount_shift: Option<u32>,
    added_by_user: &[Argument],
) -> Vec<LineWord> {
    let accelerator = accelerator.map(|accelerator| ["-accel".into(), accelerator.to_string()]);
    let machine = machine_type.map(|named| ["-machine".into(), format!("type={named}")]);
    let counted = icount_shift.map(|shift| ["-icount".into(), format!("shift={shift}")]);
    let of_user = added_by_user.iter().flat_map(Argument::words);
    let first = machine.into_iter().chain(accelerator).chain(counted).flatten();
    first.chain(of_user).map(LineWord::Plain).collect()
}

/// Returns the numbers of the RAM blocks with a memory backend, in the order in which a restored
/// QEMU makes them. Error: [`Error::CommandLine`] if the command line does not fit the RAM blocks.
pub fn backends_as_made(source: &RestoreSource) -> Result<Vec<usize>> {
    Ok(keyframe_qemu_cmdline::backends_as_made(&source.machine.user_command, &source.ram)?)
}
