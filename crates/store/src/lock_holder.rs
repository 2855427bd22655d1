//! The text in a lock file: the process that holds the lock.

use crate::config::now;
use crate::open_store::OpenStore;
use crate::{Error, Result, Store};
use keyframe_store_backend::LockGuard;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};
use std::os::unix::fs::MetadataExt;

/// The most processes that a message names.
const NAMED_MAX: usize = 8;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const PID_NAMESPACE: &str = "/proc/self/ns/pid";

#[derive(Serialize, Deserialize)]
struct Holder {
    pid: u32,
    host: String,
    /// The boot of the holder's kernel; absent if the kernel did not tell it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot: Option<String>,
    /// The inode number of the PID namespace that `pid` belongs to; absent if the kernel did not
    /// tell it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pid_namespace: Option<u64>,
    since: jiff::Timestamp,
    owner: String,
}

impl Holder {
    fn this_process(owner: &str) -> Self {
        Self {
            pid: std::process::id(),
            host: this_host(),
            boot: this_boot(),
            pid_namespace: this_pid_namespace(),
            since: now(),
            owner: owner.into(),
        }
    }

    /// True if this process can look for the holder by its number. A number of another host, of an
    /// earlier boot or of another container says nothing about the processes here.
    fn is_in_this_namespace(&self) -> bool {
        self.host == this_host()
            && self.boot.is_some()
            && self.boot == this_boot()
            && self.pid_namespace.is_some()
            && self.pid_namespace == this_pid_namespace()
    }

    /// True if no process has its number.
    fn has_ended(&self) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        pid.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
    }
}

impl OpenStore {
    /// Takes the prunes' lock of the store, and returns a guard that holds it. Errors: another
    /// prune holds the lock; the backend fails.
    pub fn lock_prune(&self) -> Result<Box<dyn LockGuard>> {
        self.backend.lock_prune(&encode_holder("keyframe prune")).map_err(with_named_holder)
    }

    /// Returns the descriptions of the processes that write, for messages. Returns `None` if none
    /// does. Error: the backend fails.
    pub fn lock_holder(&self) -> Result<Option<String>> {
        Ok(self.backend.lock_holder()?.map(|text| describe_holder(&text)))
    }
}

impl Store {
    /// Checks that a process on this host can prune the store. Error: the store is behind a
    /// checkpoint server.
    pub fn require_prunable(&self) -> Result<()> {
        if keyframe_store_backend::served::is_url(self.path()) {
            return self.inner().lock_prune().map(drop);
        }
        Ok(())
    }

    /// Returns the descriptions of the processes that write to the store, for messages. Returns
    /// `None` if none does. Error: the locks cannot be read.
    pub fn lock_holder(&self) -> Result<Option<String>> {
        self.inner().lock_holder()
    }
}

/// Returns the text that describes this process in a lock file. `owner` says what it does.
pub fn encode_holder(owner: &str) -> String {
    serde_json::to_string(&Holder::this_process(owner)).unwrap_or_default()
}

fn this_host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn this_boot() -> Option<String> {
    std::fs::read_to_string(BOOT_ID).ok().map(|id| id.trim_end().to_owned())
}

fn this_pid_namespace() -> Option<u64> {
    std::fs::metadata(PID_NAMESPACE).ok().map(|namespace| namespace.ino())
}

/// Replaces the holder in an [`Error::Locked`] by its description for users. Returns other errors
/// unchanged.
pub fn with_named_holder(error: Error) -> Error {
    match error {
        Error::Locked { holder } => Error::Locked { holder: describe_holder(&holder) },
        other => other,
    }
}

/// Returns true if `holder`, the text of a lock file, describes a process that has ended for
/// certain: one of this host, this boot and this PID namespace.
pub fn is_dead(holder: &str) -> bool {
    serde_json::from_str::<Holder>(holder)
        .is_ok_and(|holder| holder.is_in_this_namespace() && holder.has_ended())
}

/// Returns a description for users of the processes that `text` names, the contents of lock files,
/// one a line.
pub fn describe_holder(text: &str) -> String {
    let mut described: Vec<String> = text.lines().take(NAMED_MAX).map(describe_one).collect();
    let more = text.lines().count().saturating_sub(NAMED_MAX);
    if described.is_empty() {
        described.push(describe_one(text));
    }
    if more > 0 {
        described.push(format!("{more} others"));
    }
    described.join("; ")
}

fn describe_one(text: &str) -> String {
    match serde_json::from_str::<Holder>(text) {
        Ok(Holder { pid, host, since, owner, .. }) => {
            format!("{owner} (process {pid} on {host}, since {since})")
        }
        Err(_) => "another process".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// The holder of a lock that has ended in the namespace of this process.
    fn ended() -> Holder {
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        Holder { pid, ..Holder::this_process("test") }
    }

    fn is_dead(holder: &Holder) -> bool {
        super::is_dead(&serde_json::to_string(holder).unwrap())
    }

    #[test]
    fn only_a_holder_of_this_boot_and_pid_namespace_is_known_to_be_dead() {
        assert!(is_dead(&ended()));
        assert!(!is_dead(&Holder::this_process("test")));
        let elsewhere = [
            Holder { host: "another".into(), ..ended() },
            Holder { boot: Some("another".into()), ..ended() },
            Holder { boot: None, ..ended() },
            Holder { pid_namespace: ended().pid_namespace.map(|inode| inode + 1), ..ended() },
            Holder { pid_namespace: None, ..ended() },
        ];
        assert!(!elsewhere.iter().any(is_dead));
        assert!(!super::is_dead("not JSON"));
    }

    #[test]
    fn a_lock_without_boot_and_namespace_is_described_but_not_known_to_be_dead() {
        let text =
            r#"{"pid":2147483647,"host":"h","since":"2026-11-01T00:00:00Z","owner":"a run"}"#;
        let old = Holder { host: this_host(), ..serde_json::from_str(text).unwrap() };
        assert!(!is_dead(&old));
        let described = describe_holder(text);
        assert!(described.contains("a run (process 2147483647 on h"), "{described}");
    }
}
