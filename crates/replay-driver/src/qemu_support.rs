//! What Keyframe can do with a QEMU, as far as the binary itself tells.

use crate::error::Result;
use crate::log_version_of;
use crate::qemu_probe::require_plugin;
use keyframe_qemu::QemuIdentity;
use std::fmt;

/// The first version of QEMU whose VMs can be checkpointed.
const CAPTURED_FROM: (u32, u32) = (7, 2);

/// What Keyframe can do with a QEMU. Each is the reason why not, if it cannot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuSupport {
    /// The version with the distributor's part.
    pub version: String,
    /// Take checkpoints and restore them.
    pub capture: Option<String>,
    /// Record runs and replay them.
    pub record: Option<String>,
    /// Analyse recordings.
    pub analysis: Option<String>,
}

impl QemuSupport {
    /// Asks the QEMU `name`: a path, or a name that `PATH` resolves. It is run without a
    /// guest for that.
    ///
    /// Errors: there is no such program, or it is no QEMU.
    pub fn of(name: &str) -> Result<Self> {
        let qemu = QemuIdentity::named(name)?;
        let is_new = qemu.series().is_some_and(|series| series >= CAPTURED_FROM);
        let record = log_version_of(&qemu).err().map(|error| error.to_string());
        let analysis = match record {
            Some(_) => Some("needs a recording".to_owned()),
            None => require_plugin(&qemu).err().map(|error| error.to_string()),
        };
        let capture = (!is_new).then(|| "needs QEMU 7.2 or later".to_owned());
        Ok(Self { version: qemu.version, capture, record, analysis })
    }

    /// Returns true if nothing is missing.
    pub fn is_complete(&self) -> bool {
        [&self.capture, &self.record, &self.analysis].into_iter().all(Option::is_none)
    }
}

impl fmt::Display for QemuSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QEMU {}", self.version)?;
        let all = [
            ("capture", &self.capture),
            ("restore", &self.capture),
            ("record", &self.record),
            ("analysis", &self.analysis),
        ];
        for (number, (name, problem)) in all.into_iter().enumerate() {
            f.write_str(if number == 0 { ": " } else { ", " })?;
            match problem {
                None => write!(f, "{name} yes")?,
                Some(problem) => write!(f, "{name} no ({problem})")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_installed_qemu_does_all_and_another_program_is_none() {
        let installed = QemuSupport::of("qemu-system-x86_64").unwrap();
        assert!(installed.is_complete(), "{installed}");
        assert!(
            installed.to_string().ends_with(": capture yes, restore yes, record yes, analysis yes")
        );
        assert!(QemuSupport::of("/bin/true").is_err());
        assert!(QemuSupport::of("/nowhere/qemu").is_err());
    }

    #[test]
    fn each_reason_is_named() {
        let support = QemuSupport {
            version: "6.2.0".into(),
            capture: Some("needs QEMU 7.2 or later".into()),
            record: None,
            analysis: Some("its plugin interface is not known".into()),
        };
        assert_eq!(
            support.to_string(),
            "QEMU 6.2.0: capture no (needs QEMU 7.2 or later), restore no (needs QEMU 7.2 or later), \
             record yes, analysis no (its plugin interface is not known)"
        );
        assert!(!support.is_complete());
    }
}
