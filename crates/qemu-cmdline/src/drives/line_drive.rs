//! The disks of a line by their names, whether or not they can be served.

use super::{Drive, DriveKeys};
use crate::CommandLineError;
use crate::options::{self, Argument, value_of};
use std::collections::BTreeSet;

/// A set of disks of a command line, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DiskNames {
    /// No disk.
    #[default]
    None,
    /// The disks with these names.
    Named(BTreeSet<String>),
    /// All disks.
    All,
}

impl DiskNames {
    /// Returns the set of these names.
    pub fn of<N: Into<String>>(names: impl IntoIterator<Item = N>) -> Self {
        let names: BTreeSet<String> = names.into_iter().map(Into::into).collect();
        if names.is_empty() { Self::None } else { Self::Named(names) }
    }

    /// Returns true if the set is empty.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// Returns true if a disk with the name `name` is in the set.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::None => false,
            Self::Named(names) => names.contains(name),
            Self::All => true,
        }
    }
}

/// A disk of a command line that the guest can write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineDrive {
    /// The id or node name; if it has neither, a generated name that is unique in the command line.
    pub name: String,
    /// Its other names: those of the filters above it, and the node name of a drive with an id.
    pub aliases: Vec<String>,
    /// The ids of the devices of the line that use it.
    pub devices: Vec<String>,
    /// What a server would open; the reason why the disk cannot be served.
    pub drive: Result<Drive, CommandLineError>,
}

impl LineDrive {
    /// Returns true if `names` has one of the disk's names.
    pub fn is_in(&self, names: &DiskNames) -> bool {
        names.has(&self.name) || self.aliases.iter().any(|alias| names.has(alias))
    }

    /// Returns true if a device with the id `id` uses the disk.
    pub fn is_of_device(&self, id: &str) -> bool {
        self.devices.iter().any(|device| device == id)
    }

    /// Finds the devices of the line `arguments` that use the disk.
    pub(super) fn with_devices(self, arguments: &[Argument]) -> Self {
        let uses = |keys: &DriveKeys| {
            let drive = value_of(keys, "drive");
            drive.is_some_and(|drive| self.is_in(&DiskNames::of([drive])))
        };
        let id = |keys: DriveKeys| value_of(&keys, "id").map(str::to_owned);
        let devices = options::devices(arguments).filter(uses).filter_map(id).collect();
        Self { devices, ..self }
    }
}
