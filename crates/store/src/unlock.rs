//! Removing the lock of a writer in object storage that is dead. The backend decides whether it is.
//! In a directory there is nothing to remove: the locks of its writers end with them.

use crate::lock_holder::describe_holder;
use crate::lock_holder::is_dead;
use crate::{Result, Store};
use keyframe_store_backend::UnlockOutcome;

impl Store {
    /// Removes a stale lock of the writer. If `force` is true, also removes one whose holder cannot
    /// be checked. Returns what it did, with a description of the holder. Error: the lock cannot be
    /// read or removed.
    pub fn unlock(&self, force: bool) -> Result<UnlockOutcome> {
        let backend = &self.inner().backend;
        Ok(match backend.unlock(&|holder| force || is_dead(holder))? {
            UnlockOutcome::Nothing => UnlockOutcome::Nothing,
            UnlockOutcome::Removed(holder) => UnlockOutcome::Removed(describe_holder(&holder)),
            UnlockOutcome::Held(holder) => UnlockOutcome::Held(describe_holder(&holder)),
        })
    }
}
