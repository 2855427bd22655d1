//! Removing the lock of a writer that is dead. How that is told, the backend knows.

use crate::backend::Unlocked;
use crate::writer::{describe_holder, is_dead};
use crate::{Result, Store};

impl Store {
    /// Removes a stale lock of the writer ([`crate::backend::Backend::unlock`]); holders are
    /// described for messages.
    pub fn unlock(&self, force: bool) -> Result<Unlocked> {
        let backend = &self.inner().backend;
        let unlocked = match backend.unlock(force)? {
            Unlocked::Held(holder) if is_dead(&holder) => backend.unlock(true)?,
            other => other,
        };
        Ok(match unlocked {
            Unlocked::Nothing => Unlocked::Nothing,
            Unlocked::Removed(holder) => Unlocked::Removed(describe_holder(&holder)),
            Unlocked::Held(holder) => Unlocked::Held(describe_holder(&holder)),
        })
    }
}
