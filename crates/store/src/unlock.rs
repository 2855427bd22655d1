//! Removing the lock of a writer that is dead. How that is told, the backend knows.

use crate::backend::Unlocked;
use crate::writer::describe_holder;
use crate::{Result, Store};

impl Store {
    /// Removes a stale lock of the writer ([`crate::backend::Backend::unlock`]); holders are described for messages.
    pub fn unlock(&self, force: bool) -> Result<Unlocked> {
        Ok(match self.inner().backend.unlock(force)? {
            Unlocked::Nothing => Unlocked::Nothing,
            Unlocked::Removed(holder) => Unlocked::Removed(describe_holder(&holder)),
            Unlocked::Held(holder) => Unlocked::Held(describe_holder(&holder)),
        })
    }
}
