//! What the engine knows before a load: how long QEMU may take, and what must be set back after it.

use super::migration_settings::MigrationSettings;
use super::reset::{LineActions, Reset};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A load that is about to begin.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LoadPlan {
    /// The longest time that QEMU may take.
    pub patience: Duration,
    /// The reset before the load, if there is one.
    pub reset: Option<Reset>,
    /// QEMU's actions as its command line says.
    pub actions: LineActions,
    /// The settings that are switched off for the load.
    pub settings: MigrationSettings,
}

impl LoadPlan {
    /// One line that [`LoadPlan::parse`] reads.
    pub fn words(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads [`LoadPlan::words`]; `None` if they are malformed.
    pub fn parse(words: &str) -> Option<Self> {
        serde_json::from_str(words).ok()
    }
}
