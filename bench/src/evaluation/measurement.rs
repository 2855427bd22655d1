//! The measurements of an evaluation, one file for each workload, interval and round.
//!
//! ```text
//!   OUT/measurements/compile-2000ms-1.json     written beside it, synced, then renamed
//! ```
//!
//! Invariants: a file is complete. All measurements of a report have the same [`Provenance`]: a file
//! with another one is refused, and never mixed in or overwritten.

use super::evaluated_run::EvaluatedRun;
use super::machine::{Machine, first_line_of};
use crate::{Error, Options};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The version of the files.
const FORMAT: u32 = 1;
/// The longest file that is read. A run of an hour with intervals of 0.5 s has about 10 MB.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// What measurements must have in common to stand in one report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// The output of `keyframe --version`.
    pub keyframe: String,
    /// The BLAKE3 hash of the `keyframe` program: another build is another program.
    pub keyframe_blake3: String,
    /// The durations and amounts of the plan.
    pub plan: String,
    pub machine: Machine,
}

impl Provenance {
    /// Describes what a measurement now would be made with.
    pub fn now(options: &Options, plan: String) -> Result<Self, Error> {
        let program = options.keyframe.display().to_string();
        let bytes =
            std::fs::read(&options.keyframe).map_err(Error::io(format!("read {program}")))?;
        Ok(Self {
            keyframe: first_line_of(&program, &["--version"])?,
            keyframe_blake3: blake3::hash(&bytes).to_hex().to_string(),
            plan,
            machine: Machine::this(options)?,
        })
    }

    /// Returns the first property in which `other` differs: its name, its value here and there.
    fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let properties = |of: &Self| {
            [
                ("keyframe version", of.keyframe.clone()),
                ("build of keyframe (BLAKE3)", of.keyframe_blake3.clone()),
                ("QEMU", of.machine.qemu.clone()),
                ("plan", of.plan.clone()),
                ("processor", of.machine.processor.clone()),
                ("number of processors", of.machine.processors.to_string()),
                ("kernel", of.machine.kernel.clone()),
                ("virtualisation", of.machine.virtualisation.clone()),
                ("file system of the recordings", of.machine.scratch.clone()),
            ]
        };
        let pairs = properties(self).into_iter().zip(properties(other));
        pairs.map(|((name, here), (_, there))| (name, here, there)).find(|(_, a, b)| a != b)
    }
}

/// Which measurement it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MeasurementKey {
    /// The round, from 1. It comes first, so that complete rounds come first.
    pub round: u16,
    pub workload: &'static str,
    pub every_ms: u64,
}

impl MeasurementKey {
    fn file(self) -> String {
        format!("{}-{}ms-{}.json", self.workload, self.every_ms, self.round)
    }
}

/// A complete measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measurement {
    format: u32,
    pub provenance: Provenance,
    /// The commit of the checkout that holds the `keyframe` program; `None` if there is none.
    pub commit: Option<String>,
    pub measured_at: Timestamp,
    pub run: EvaluatedRun,
}

impl Measurement {
    /// Describes a run that was just measured.
    pub fn of(run: EvaluatedRun, provenance: &Provenance, commit: Option<String>) -> Self {
        let (provenance, measured_at) = (provenance.clone(), Timestamp::now());
        Self { format: FORMAT, provenance, commit, measured_at, run }
    }

    /// Returns which measurement it is.
    pub fn key(&self) -> MeasurementKey {
        let every_ms = (self.run.every_s * 1e3).round() as u64;
        MeasurementKey { round: self.run.round, workload: self.run.workload.key, every_ms }
    }
}

/// Returns the commit of the checkout that holds `program`, with `, changed` if files differ from
/// it; `None` if there is no checkout, or no git.
pub fn commit_of(program: &Path) -> Option<String> {
    let dir = program.parent()?.display().to_string();
    let commit = first_line_of("git", &["-C", &dir, "rev-parse", "HEAD"]).ok()?;
    let root = first_line_of("git", &["-C", &dir, "rev-parse", "--show-toplevel"]).ok()?;
    let changes = ["-C", &root, "status", "--porcelain", "--untracked-files=no"];
    let is_changed = first_line_of("git", &changes).is_ok_and(|line| !line.is_empty());
    Some(if is_changed { format!("{commit}, changed") } else { commit })
}

/// The directory of the measurements of one evaluation.
pub struct MeasurementFiles {
    dir: PathBuf,
}

impl MeasurementFiles {
    /// Uses `OUT/measurements`; creates it if it is missing.
    pub fn in_output(out: &Path) -> Result<Self, Error> {
        let dir = out.join("measurements");
        std::fs::create_dir_all(&dir).map_err(Error::io(format!("make {}", dir.display())))?;
        Ok(Self { dir })
    }

    /// Reads all measurements, in the order of their keys. Fails if a file is no measurement, or
    /// does not have the `provenance`. Without one, all files must have that of the first.
    pub fn load(&self, provenance: Option<&Provenance>) -> Result<Vec<Measurement>, Error> {
        let listed = std::fs::read_dir(&self.dir)
            .map_err(Error::io(format!("list {}", self.dir.display())))?;
        let mut paths: Vec<PathBuf> = listed
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
            .collect();
        paths.sort();
        let mut all = Vec::<Measurement>::new();
        for path in paths {
            let one = read(&path)?;
            let expected = provenance.or(all.first().map(|first| &first.provenance));
            if let Some((property, here, there)) =
                expected.and_then(|expected| expected.difference(&one.provenance))
            {
                return Err(Error::OtherMeasurement { path, property, there, here });
            }
            if path.file_name().is_none_or(|name| *name != *one.key().file()) {
                let problem = format!("it holds the measurement {} instead", one.key().file());
                return Err(Error::BadMeasurement { path, problem });
            }
            all.push(one);
        }
        all.sort_by_key(Measurement::key);
        Ok(all)
    }

    /// Writes a measurement, so that its file is there completely or not at all.
    pub fn save(&self, measurement: &Measurement) -> Result<(), Error> {
        let path = self.dir.join(measurement.key().file());
        let operation = format!("write {}", path.display());
        let text = serde_json::to_vec(measurement).map_err(|e| Error::failed(&operation, e))?;
        let write = || {
            let readable = Permissions::from_mode(0o644);
            let mut file = tempfile::Builder::new().permissions(readable).tempfile_in(&self.dir)?;
            file.write_all(&text)?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            Ok(())
        };
        write().map_err(Error::io(operation))
    }
}

fn read(path: &Path) -> Result<Measurement, Error> {
    let bad = |problem: String| Error::BadMeasurement { path: path.into(), problem };
    let io = || Error::io(format!("read {}", path.display()));
    let len_bytes = std::fs::metadata(path).map_err(io())?.len();
    if len_bytes > FILE_BYTES_MAX {
        return Err(bad(format!("it has {len_bytes} bytes; {FILE_BYTES_MAX} are the most")));
    }
    let text = std::fs::read(path).map_err(io())?;
    let found: FormatOnly = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
    if found.format != FORMAT {
        return Err(bad(format!(
            "it has format {}, and this program reads {FORMAT}",
            found.format
        )));
    }
    serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))
}

/// The part of a measurement that every format has.
#[derive(Deserialize)]
struct FormatOnly {
    format: u32,
}

#[cfg(test)]
mod tests {
    use super::super::evaluated_run::samples;
    use super::*;

    fn provenance() -> Provenance {
        let text = |text: &str| text.to_owned();
        Provenance {
            keyframe: text("keyframe 1"),
            keyframe_blake3: text("aa"),
            plan: text("a plan"),
            machine: Machine {
                processor: text("P"),
                processors: 2,
                ram_bytes: 1,
                kernel: text("Linux 1"),
                virtualisation: text("none"),
                scratch: text("ext4"),
                qemu: text("QEMU 1"),
            },
        }
    }

    #[test]
    fn measurements_come_back_in_the_order_of_rounds_and_others_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let files = MeasurementFiles::in_output(dir.path()).unwrap();
        for (every_ms, round) in [(500, 2), (2000, 1), (500, 1)] {
            let run = samples::run(every_ms, round);
            files.save(&Measurement::of(run, &provenance(), None)).unwrap();
        }
        let loaded = files.load(Some(&provenance())).unwrap();
        let keys: Vec<_> = loaded.iter().map(|one| (one.key().round, one.key().every_ms)).collect();
        assert_eq!(keys, [(1, 500), (1, 2000), (2, 500)]);
        assert_eq!(loaded[1].run.followed.as_ref().unwrap().checkpoints.len(), 3);

        let other = Provenance { keyframe_blake3: "bb".into(), ..provenance() };
        let refused = files.load(Some(&other)).unwrap_err();
        let text = format!("{refused} {}", refused.fix().unwrap_or_default());
        for part in ["small-2000ms-1.json", "build of keyframe", "it has aa, expected bb", "--out"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        // Without a call's own provenance, the files are compared with each other.
        assert!(files.load(None).is_ok());
        files.save(&Measurement::of(samples::run(1000, 1), &other, None)).unwrap();
        assert!(files.load(None).unwrap_err().to_string().contains("another build"));
    }

    #[test]
    fn damaged_and_misnamed_files_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let files = MeasurementFiles::in_output(dir.path()).unwrap();
        files.save(&Measurement::of(samples::run(500, 1), &provenance(), None)).unwrap();
        let path = |name: &str| dir.path().join("measurements").join(name);
        let good = std::fs::read_to_string(path("small-500ms-1.json")).unwrap();
        let other_format = good.replace(r#"{"format":1,"#, r#"{"format":2,"#);
        let other_workload = good.replace(r#""workload":"small""#, r#""workload":"games""#);
        for (bad, part) in [
            ("{", "EOF"),
            (other_format.as_str(), "format 2"),
            (other_workload.as_str(), "games"),
            (good.as_str(), "small-500ms-1.json instead"),
        ] {
            std::fs::write(path("bad.json"), bad).unwrap();
            let text = files.load(None).unwrap_err().to_string();
            assert!(text.contains("bad.json") && text.contains(part), "{text}");
        }
    }
}
