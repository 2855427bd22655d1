//! The user's migration settings, which QEMU obeys as it loads a snapshot too: with `multifd` it
//! crashes, with `mapped-ram` and `x-ignore-shared` it refuses the state.

use crate::{Qmp, Result};
use serde_json::{Value, json};

/// The mode in which a state is loaded.
const NORMAL: &str = "normal";

/// Settings that are switched off for a load.
pub(super) struct SuspendedSettings {
    capabilities: Vec<String>,
    mode: Option<String>,
}

impl SuspendedSettings {
    /// Switches off the settings of the user. If this fails, they are as they were.
    pub(super) fn suspend(qmp: &mut Qmp) -> Result<Self> {
        let [capabilities, parameters] = qmp.ask_all([
            ("query-migrate-capabilities", json!({})),
            ("query-migrate-parameters", json!({})),
        ])?;
        let is_on = |entry: &&Value| entry.get("state").and_then(Value::as_bool) == Some(true);
        let name = |entry: &Value| Some(entry.get("capability")?.as_str()?.to_owned());
        let entries = capabilities.as_array().into_iter().flatten();
        let mode = parameters.get("mode").and_then(Value::as_str).filter(|mode| *mode != NORMAL);
        let settings = Self {
            capabilities: entries.filter(is_on).filter_map(name).collect(),
            mode: mode.map(str::to_owned),
        };
        if let Err(error) = settings.switch(qmp, false) {
            let _ = settings.switch(qmp, true);
            return Err(error);
        }
        Ok(settings)
    }

    /// Sets them as the user had them.
    pub(super) fn resume(self, qmp: &mut Qmp) -> Result<()> {
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
