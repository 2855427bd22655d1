//! Chooses the QEMU binary of a restore, and decides whether its version can load the checkpoint.
//!
//! | the binary is of | restore | replay |
//! |---|---|---|
//! | the checkpoint's release (7.2.22) | yes | yes |
//! | another release of its series (7.2.9) | yes, with a note | no |
//! | a later series (10.0) | if the machine type has a version and is known there, with a note | no |
//! | an earlier series | no | no |
//!
//! A standby accepts no later series: a VM that had failed over could not come back.
//!
//! Releases of one series load each other's states. From one series to a later one QEMU promises
//! the same for versioned machine types: that is how a VM migrates to a newer host. What the newer
//! QEMU cannot load it refuses, and then the guest has not run there.
//!
//! A replay needs the same release: its code executes the same path.

use crate::binary::{self, QemuIdentity, release, series};
use crate::error::VersionProblem;
use crate::probe;
use crate::{Error, Result};
use keyframe_machine::MachineSpec;
use keyframe_qemu_cmdline::options;
use std::path::{Path, PathBuf};

/// The versions that a restore accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Accepted {
    /// The checkpoint's release.
    Release,
    /// All releases of its series.
    Series,
    /// Later series, too.
    LaterSeries,
}

/// A binary that can load the checkpoint.
#[derive(Debug)]
pub(super) struct ChosenBinary {
    /// Its absolute path.
    pub path: PathBuf,
    /// True if it belongs to a later series than the checkpoint's. The machine type must then be
    /// named: an alias such as `pc` stands for another type there.
    pub is_later: bool,
    /// What the user should know.
    pub note: Option<String>,
}

/// Finds the binary: `chosen`; or else the checkpoint's, at its path or anywhere in `PATH`; or else
/// another one of its name. Error: [`Error::Binary`] if there is none.
fn locate(
    machine: &MachineSpec,
    chosen: Option<&Path>,
    accepted: Accepted,
) -> Result<(PathBuf, QemuIdentity)> {
    let path = match chosen {
        Some(path) => {
            let name = path.to_str().ok_or_else(|| Error::Binary {
                path: path.into(),
                reason: "its path is not UTF-8".into(),
                fix: "name it by a link".into(),
            })?;
            binary::find(name)?
        }
        None => own_place(machine, accepted)?,
    };
    let identify = |path: &Path| {
        let known = QemuIdentity {
            path: path.to_owned(),
            version: machine.vmm_version.clone(),
            blake3: machine.binary_blake3.clone(),
        };
        QemuIdentity::of_known(path, &known)
    };
    let (mut path, mut identity) = (path.clone(), identify(&path)?);
    // The binary was replaced, and may be at another place of PATH.
    if chosen.is_none()
        && identity.blake3 != machine.binary_blake3
        && let Some(same) = binary::find_same(&path, &machine.binary_blake3)
    {
        identity = identify(&same)?;
        path = same;
    }
    Ok((path, identity))
}

/// Finds the binary as [`locate`] does, and checks that it can load the checkpoint.
///
/// Errors: [`Error::Binary`] if there is none; [`Error::DifferentVersion`] if its version cannot
/// load the checkpoint.
pub(super) fn choose(
    machine: &MachineSpec,
    chosen: Option<&Path>,
    accepted: Accepted,
) -> Result<ChosenBinary> {
    let (path, identity) = locate(machine, chosen, accepted)?;
    let wanted = machine.processor;
    // The checkpoint's own binary need not be asked.
    if identity.blake3 != machine.binary_blake3 {
        let emulated = probe::processor(&path)?;
        if emulated != wanted {
            return Err(Error::Binary {
                path,
                reason: format!("it emulates {emulated}, and the checkpoint's VM is of {wanted}"),
                fix: format!("use qemu-system-{wanted}"),
            });
        }
    }
    let (expected, found) = (&machine.vmm_version, &identity.version);
    let machine_type = &machine.machine_type;
    let age = match compare(expected, found, accepted) {
        Ok(age) => age,
        Err(problem) => return Err(refusal(path, machine, identity.version, problem)),
    };
    if age == Age::LaterSeries {
        let known = binary::machine_types(&path)?;
        if let Err(problem) = require_versioned(machine_type, &known) {
            return Err(refusal(path, machine, identity.version, problem));
        }
    }
    let same = identity.blake3 == machine.binary_blake3;
    let shown = path.display();
    let note = match age {
        Age::LaterSeries => Some(format!(
            "{shown} is QEMU {found}, and the checkpoint was taken from QEMU {expected}: QEMU loads \
             the state of machine type {machine_type} as it does for a migration{}",
            unversioned_cpu(machine).map_or(String::new(), |cpu| format!(
                "; -cpu {cpu} may have other features there than the guest found when it booted"
            ))
        )),
        _ if same => None,
        Age::SameRelease | Age::SameSeries => Some(format!(
            "{shown} (QEMU {found}) is not the very binary that the checkpoint was taken of (QEMU {expected}), but of the same {}",
            if age == Age::SameRelease { "release" } else { "series" },
        )),
    };
    let path = std::path::absolute(&path).map_err(Error::io(format!("resolve {shown}")))?;
    Ok(ChosenBinary { path, is_later: age == Age::LaterSeries, note })
}

/// Returns the absolute path of the binary for replays of a VM that `recorded` recorded: `chosen`, or
/// else that binary, at its path or anywhere in `PATH`, or another one of its name and release.
///
/// Errors: [`Error::Binary`] if there is none; [`Error::DifferentVersion`] for another release.
pub fn replay_binary(recorded: &QemuIdentity, chosen: Option<&Path>) -> Result<PathBuf> {
    let machine = MachineSpec {
        binary_path: recorded.path.to_string_lossy().into_owned(),
        vmm_version: recorded.version.clone(),
        binary_blake3: recorded.blake3.clone(),
        ..MachineSpec::default()
    };
    let (path, identity) = locate(&machine, chosen, Accepted::Release)?;
    if let Err(problem) = compare(&recorded.version, &identity.version, Accepted::Release) {
        return Err(refusal(path, &machine, identity.version, problem));
    }
    std::path::absolute(&path).map_err(Error::io(format!("resolve {}", path.display())))
}

/// Returns the binary of the checkpoint, or one of its file name in `PATH` if it is gone: the same one,
/// or any other.
fn own_place(machine: &MachineSpec, accepted: Accepted) -> Result<PathBuf> {
    let own = &machine.binary_path;
    let missing = match binary::find(own) {
        Err(missing @ Error::Binary { .. }) => missing,
        other => return other,
    };
    if let Some(same) = binary::find_same(Path::new(own), &machine.binary_blake3) {
        return Ok(same);
    }
    let name = Path::new(own).file_name().and_then(|name| name.to_str());
    if let Some(Ok(other)) = name.map(binary::find) {
        return Ok(other);
    }
    let Error::Binary { path, reason, .. } = missing else { return Err(missing) };
    let later = if accepted == Accepted::LaterSeries { " or later" } else { "" };
    let version = &machine.vmm_version;
    let fix = format!("install QEMU {version}{later}, or name it with --qemu PATH");
    Err(Error::Binary { path, reason, fix })
}

fn refusal(path: PathBuf, machine: &MachineSpec, found: String, problem: VersionProblem) -> Error {
    let expected = machine.vmm_version.clone();
    Error::DifferentVersion { path, expected, found, problem: Box::new(problem) }
}

/// A binary's version, compared with the checkpoint's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Age {
    SameRelease,
    SameSeries,
    LaterSeries,
}

/// Compares the version `found` with the checkpoint's, `expected`. Fails if it cannot load the
/// checkpoint in any case.
fn compare(
    expected: &str,
    found: &str,
    accepted: Accepted,
) -> std::result::Result<Age, VersionProblem> {
    if release(found) == release(expected) {
        return Ok(Age::SameRelease);
    }
    if accepted == Accepted::Release {
        return Err(VersionProblem::Replay);
    }
    match (series(expected), series(found)) {
        (then, now) if then == now => Ok(Age::SameSeries),
        (Some(then), Some(now)) if now > then => match accepted {
            Accepted::LaterSeries => Ok(Age::LaterSeries),
            _ => Err(VersionProblem::Series),
        },
        _ => Err(VersionProblem::Earlier),
    }
}

/// Fails unless `machine_type` has a version and is one of `known`, those of another binary.
fn require_versioned(
    machine_type: &str,
    known: &[String],
) -> std::result::Result<(), VersionProblem> {
    let version = machine_type.rsplit_once('-').map(|(_, version)| version);
    let machine_type = machine_type.to_owned();
    if version.and_then(series).is_none() {
        return Err(VersionProblem::MachineWithoutVersion { machine_type });
    }
    if !known.contains(&machine_type) {
        return Err(VersionProblem::UnknownMachine { machine_type });
    }
    Ok(())
}

/// The processor model of the command line, if each QEMU gives it features of its own.
fn unversioned_cpu(machine: &MachineSpec) -> Option<String> {
    let line = options::parse(machine.user_command.get(1..)?).ok()?;
    let cpu = line.iter().rfind(|argument| argument.name() == "cpu")?;
    let model = cpu.value().split(',').next()?;
    matches!(model, "max" | "host").then(|| model.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_qemu_restores_and_only_the_same_release_replays() {
        let restored = |then, now| compare(then, now, Accepted::LaterSeries);
        assert_eq!(restored("7.2.22 (Debian 1:7.2+dfsg-7)", "7.2.22"), Ok(Age::SameRelease));
        assert_eq!(restored("7.2.22 (Debian 1:7.2+dfsg-7)", "7.2.9"), Ok(Age::SameSeries));
        assert_eq!(restored("7.2.22", "10.0.2 (Debian)"), Ok(Age::LaterSeries));
        assert_eq!(restored("7.2.22", "7.20.1"), Ok(Age::LaterSeries));
        for earlier in ["6.2.0", "7.1.9", "", "seven"] {
            assert_eq!(restored("7.2.22", earlier), Err(VersionProblem::Earlier), "{earlier}");
        }
        assert_eq!(compare("7.2.22 (Debian)", "7.2.22", Accepted::Release), Ok(Age::SameRelease));
        for other in ["7.2.23", "10.0.2", "6.2.0"] {
            assert_eq!(
                compare("7.2.22", other, Accepted::Release),
                Err(VersionProblem::Replay),
                "{other}"
            );
        }
        assert_eq!(
            (series("11.1.3 (Debian)"), series("x.1"), series("")),
            (Some((11, 1)), None, None)
        );
        assert_eq!(compare("7.2.22", "7.2.9", Accepted::Series), Ok(Age::SameSeries));
        assert_eq!(compare("7.2.22", "10.0.2", Accepted::Series), Err(VersionProblem::Series));
    }

    #[test]
    fn a_later_series_needs_a_versioned_machine_that_it_knows() {
        let known = ["pc-i440fx-7.2", "pc", "microvm", "none"].map(str::to_owned);
        assert_eq!(require_versioned("pc-i440fx-7.2", &known), Ok(()));
        for without in ["microvm", "none", "pc-i440fx", ""] {
            assert!(
                matches!(
                    require_versioned(without, &known),
                    Err(VersionProblem::MachineWithoutVersion { .. })
                ),
                "{without}"
            );
        }
        assert!(matches!(
            require_versioned("pc-i440fx-1.4", &known),
            Err(VersionProblem::UnknownMachine { .. })
        ));
    }
}
