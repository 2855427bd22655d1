//! A lock in object storage: an object that expires unless its holder renews it.
//!
//! ```text
//!             put, if absent                 every quarter of the lease: put, if unchanged
//!   free ────────────────────▶ held ─────────────────────┐
//!     ▲                         │ ▲──────────────────────┘
//!     │ removed                 │ not renewed for 2/3 of the lease, or changed: lost,
//!     └─────────────────────────┤ the holder writes nothing more
//!                               └─ not renewed for the lease, by the server's clock: another one
//!                                  may replace it, if it is unchanged
//! ```
//!
//! Invariant: two processes never hold the lock, if the server honours conditional puts and no
//! request arrives later than a third of a lease after its sender gave it up. The holder's clock
//! also counts while the machine sleeps.

use super::client::{Precondition, S3Client, S3PutOutcome};
use crate::LockGuard;
use crate::random_bytes;
use crate::{Error, Result};
use keyframe_bytes::hex::to_hex;
use keyframe_locks::IgnorePoison;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The contents of a lock object, as JSON.
#[derive(Serialize, Deserialize)]
struct LockText {
    holder: String,
    /// A random value of this holder.
    token: String,
    lease_s: u64,
    renewed: u64,
}

/// A lock in object storage: an object that its holder renews until it releases the lock.
#[derive(Debug)]
pub struct Lease {
    client: Arc<S3Client>,
    name: &'static str,
    lost: AtomicBool,
    /// The time of the last renewal, by this machine's clock.
    renewed_ms: AtomicU64,
}

/// Holds a lock in object storage until it is dropped.
#[derive(Debug)]
pub struct LeaseGuard {
    lease: Arc<Lease>,
    over: Arc<(Mutex<bool>, Condvar)>,
    renewing: Option<JoinHandle<()>>,
}

impl LockGuard for LeaseGuard {}

impl Lease {
    /// Takes the lock `name`, described by `holder`. Returns the lock, and the guard that holds it
    /// until it is dropped. Errors: [`Error::Locked`] with the holder's text if it is taken; the
    /// service refuses or cannot be reached.
    pub fn take(
        client: &Arc<S3Client>,
        name: &'static str,
        holder: &str,
    ) -> Result<(Arc<Self>, LeaseGuard)> {
        let lease_s = client.location.lease.as_secs();
        let mut text = LockText {
            holder: holder.into(),
            token: to_hex(&random_bytes::<16>()?),
            lease_s,
            renewed: 0,
        };
        let begun_ms = now_ms();
        let tag = take(client, name, &encode(&text))?;
        let lease = Arc::new(Self {
            client: client.clone(),
            name,
            lost: AtomicBool::new(false),
            renewed_ms: AtomicU64::new(begun_ms),
        });
        let over = Arc::new((Mutex::new(false), Condvar::new()));
        let (theirs, ends) = (lease.clone(), over.clone());
        let renewing = std::thread::Builder::new().name("keyframe-lease".into()).spawn(move || {
            let mut tag = tag;
            while !wait(&ends, theirs.client.location.lease / 4) && theirs.check().is_ok() {
                text.renewed += 1;
                theirs.renew(&encode(&text), &mut tag);
            }
        });
        let renewing = renewing.map_err(|source| Error::Io {
            object: client.describe(name),
            operation: "start the thread that renews it",
            source,
        })?;
        Ok((lease.clone(), LeaseGuard { lease, over, renewing: Some(renewing) }))
    }

    /// Checks that the lock is still held. Error: it may have been lost.
    pub fn check(&self) -> Result<()> {
        let since_ms = now_ms().saturating_sub(self.renewed_ms.load(Ordering::Acquire));
        let lease_ms = self.client.location.lease.as_millis() as u64;
        if !self.lost.load(Ordering::Acquire) && since_ms < lease_ms * 2 / 3 {
            return Ok(());
        }
        // The lock stays lost even if a renewal would succeed now: another process may have written
        // meanwhile.
        self.lost.store(true, Ordering::Release);
        let said =
            self.client.get_if_there(self.name).ok().flatten().and_then(|o| decode(&o.bytes));
        let holder = said.map_or_else(|| "perhaps another process".into(), |text| text.holder);
        Err(Error::Locked { holder })
    }

    fn renew(&self, bytes: &[u8], tag: &mut String) {
        let begun_ms = now_ms();
        match self.client.put(self.name, bytes, Precondition::Matches(tag)) {
            Ok(S3PutOutcome::Done(next)) => {
                *tag = next;
                self.renewed_ms.store(begun_ms, Ordering::Release);
            }
            Ok(S3PutOutcome::Refused) => self.lost.store(true, Ordering::Release),
            // The next renewal tries again, until `check` finds that the last one is too old.
            Err(_) => {}
        }
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        *self.over.0.lock().ignore_poison() = true;
        self.over.1.notify_all();
        if let Some(renewing) = self.renewing.take() {
            // The thread ends soon: its waits and requests are bounded.
            let _ = renewing.join();
        }
        if self.lease.check().is_ok() {
            // If this fails, the lock expires with its lease.
            let _ = self.lease.client.delete(self.lease.name);
        }
        self.lease.lost.store(true, Ordering::Release);
    }
}

/// Returns the text of the process that holds the lock `name`. Returns `None` if the lock is free
/// or has expired. Errors: the service refuses or cannot be reached.
pub fn holder(client: &S3Client, name: &str) -> Result<Option<String>> {
    let Some(object) = client.get_if_there(name)? else { return Ok(None) };
    let over = is_over(&object.bytes, object.age);
    Ok((!over).then(|| decode(&object.bytes).map_or_else(String::new, |text| text.holder)))
}

/// Removes the lock `name` of any holder, and returns the holder's text. Returns `None` if the lock
/// was free. Errors: the service refuses or cannot be reached.
pub fn break_lease(client: &S3Client, name: &str) -> Result<Option<String>> {
    let Some(object) = client.get_if_there(name)? else { return Ok(None) };
    client.delete(name)?;
    Ok(Some(decode(&object.bytes).map_or_else(String::new, |text| text.holder)))
}

/// Puts the lock object; returns its entity tag.
fn take(client: &S3Client, name: &str, bytes: &[u8]) -> Result<String> {
    if let S3PutOutcome::Done(tag) = client.put(name, bytes, Precondition::Absent)? {
        return Ok(tag);
    }
    let locked =
        |text: &[u8]| Error::Locked { holder: decode(text).map_or_else(String::new, |t| t.holder) };
    let Some(there) = client.get_if_there(name)? else {
        // The holder has just removed it: one more attempt.
        return match client.put(name, bytes, Precondition::Absent)? {
            S3PutOutcome::Done(tag) => Ok(tag),
            S3PutOutcome::Refused => Err(locked(b"")),
        };
    };
    if !is_over(&there.bytes, there.age) {
        return Err(locked(&there.bytes));
    }
    match client.put(name, bytes, Precondition::Matches(&there.tag))? {
        S3PutOutcome::Done(tag) => Ok(tag),
        S3PutOutcome::Refused => Err(locked(&there.bytes)),
    }
}

/// True if the holder has not renewed the lock for the duration of its lease. An object that cannot
/// be parsed, or whose age is unknown, counts as held.
fn is_over(bytes: &[u8], age: Option<Duration>) -> bool {
    match (decode(bytes), age) {
        // The server's times are whole seconds.
        (Some(text), Some(age)) => age > Duration::from_secs(text.lease_s.saturating_add(1)),
        _ => false,
    }
}

fn encode(text: &LockText) -> Vec<u8> {
    serde_json::to_vec(text).unwrap_or_default()
}

fn decode(bytes: &[u8]) -> Option<LockText> {
    serde_json::from_slice(bytes).ok()
}

/// Waits for `time`; returns true at once if the lock is being dropped.
fn wait(over: &(Mutex<bool>, Condvar), time: Duration) -> bool {
    let guard = over.0.lock().ignore_poison();
    let waited = over.1.wait_timeout_while(guard, time, |over| !*over);
    *waited.ignore_poison().0
}

/// Milliseconds of a clock that also counts while the machine sleeps.
fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000
}
