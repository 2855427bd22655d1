//! The text in a lock file: the process that holds the lock.

use crate::config::now;
use crate::open_store::OpenStore;
use crate::{Error, Result, Store};
use keyframe_store_backend::LockGuard;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Holder {
    pid: u32,
    host: String,
    since: jiff::Timestamp,
    owner: String,
}

impl OpenStore {
    /// Takes the prunes' lock of the store, and returns a guard that holds it. Errors: another
    /// prune holds the lock; the backend fails.
    pub fn lock_prune(&self) -> Result<Box<dyn LockGuard>> {
        self.backend.lock_prune(&encode_holder("keyframe prune")).map_err(with_named_holder)
    }

    /// Returns the description of the process that holds the writer's lock, for messages. Returns
    /// `None` if the lock is free. Error: the backend fails.
    pub fn lock_holder(&self) -> Result<Option<String>> {
        Ok(self.backend.lock_holder()?.map(|text| describe_holder(&text)))
    }
}

impl Store {
    /// Returns the description of the process that writes to the store, for messages. Returns `None`
    /// if no process does. Error: the lock cannot be read.
    pub fn lock_holder(&self) -> Result<Option<String>> {
        self.inner().lock_holder()
    }
}

/// Returns the text that describes this process in a lock file. `owner` says what it does.
pub fn encode_holder(owner: &str) -> String {
    let holder =
        Holder { pid: std::process::id(), host: this_host(), since: now(), owner: owner.into() };
    serde_json::to_string(&holder).unwrap_or_default()
}

fn this_host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Replaces the holder in an [`Error::Locked`] by its description for users. Returns other errors
/// unchanged.
pub fn with_named_holder(error: Error) -> Error {
    match error {
        Error::Locked { holder } => Error::Locked { holder: describe_holder(&holder) },
        other => other,
    }
}

/// Returns true if `holder`, the text of a lock file, describes a process of this host that has
/// ended.
pub fn is_dead(holder: &str) -> bool {
    serde_json::from_str::<Holder>(holder).is_ok_and(|holder| {
        holder.host == this_host()
            && !std::path::Path::new("/proc").join(holder.pid.to_string()).exists()
    })
}

/// Returns a description for users of the process that `text`, the content of a lock file, names.
pub fn describe_holder(text: &str) -> String {
    match serde_json::from_str::<Holder>(text) {
        Ok(Holder { pid, host, since, owner }) => {
            format!("{owner} (process {pid} on {host}, since {since})")
        }
        Err(_) => "another process".into(),
    }
}
