//! The user's migration settings, which QEMU obeys as it loads a snapshot too: with `multifd` it
//! crashes, with `mapped-ram` and `x-ignore-shared` it refuses the state.

use crate::{Qmp, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The mode in which a state is loaded.
const NORMAL: &str = "normal";

/// The user's settings that are switched off for a load.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MigrationSettings {
    capabilities: Vec<String>,
    mode: Option<String>,
}

impl MigrationSettings {
    /// Asks QEMU for the settings of the user.
    pub(super) fn of_user(qmp: &mut Qmp) -> Result<Self> {
        let [capabilities, parameters] = qmp.ask_all([
            ("query-migrate-capabilities", json!({})),
            ("query-migrate-parameters", json!({})),
        ])?;
        let is_on = |entry: &&Value| entry.get("state").and_then(Value::as_bool) == Some(true);
        let name = |entry: &Value| Some(entry.get("capability")?.as_str()?.to_owned());
        let entries = capabilities.as_array().into_iter().flatten();
        let mode = parameters.get("mode").and_then(Value::as_str).filter(|mode| *mode != NORMAL);
        Ok(Self {
            capabilities: entries.filter(is_on).filter_map(name).collect(),
            mode: mode.map(str::to_owned),
        })
    }

    /// Switches them off. If this fails, they are as they were.
    pub(super) fn suspend(&self, qmp: &mut Qmp) -> Result<()> {
        self.switch(qmp, false).inspect_err(|_| {
            let _ = self.switch(qmp, true);
        })
    }

    /// Sets them as the user had them.
    pub(super) fn resume(&self, qmp: &mut Qmp) -> Result<()> {
        self.switch(qmp, true)
    }

    fn switch(&self, qmp: &mut Qmp, on: bool) -> Result<()> {
        // At once, since some need others.
        if !self.capabilities.is_empty() {
            let states: Vec<_> = self
                .capabilities
                .iter()
                .map(|name| json!({ "capability": name, "state": on }))
                .collect();
            let arguments = json!({ "capabilities": states });
            qmp.execute("migrate-set-capabilities", Some(arguments))?;
        }
        if let Some(mode) = &self.mode {
            let mode = if on { mode } else { NORMAL };
            qmp.execute("migrate-set-parameters", Some(json!({ "mode": mode })))?;
        }
        Ok(())
    }
}
