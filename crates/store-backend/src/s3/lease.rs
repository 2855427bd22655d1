//! A lock in object storage: an object that expires unless its holder renews it.
//!
//! ```text
//!     put, if absent or unchanged            every quarter of the lease: put, if unchanged
//!   free ────────────────────▶ held ─────────────────────┐
//!     ▲                         │ ▲──────────────────────┘
//!     │ released, or broken:    │ not renewed for 2/3 of the lease, or changed: lost,
//!     │ put, if unchanged       │ the holder writes nothing more
//!     └─────────────────────────┤
//!                               └─ not renewed for the lease, by the server's clock: another one
//!                                  may replace it, if it is unchanged
//! ```
//!
//! Invariant: two processes never hold the lock, if the server honours conditional puts and no
//! request arrives later than a third of a lease after its sender gave it up. The holder's clock
//! also counts while the machine sleeps.
//!
//! A lock is never removed. A free one has a lease of 0 s, so a request that frees it and arrives
//! late finds another object and changes nothing.

use super::client::{Precondition, S3Client, S3PutOutcome};
use crate::random_bytes;
use crate::{Error, Result};
use crate::{LockGuard, UnlockOutcome};
use keyframe_bytes::hex::to_hex;
use keyframe_locks::IgnorePoison;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often a lock is read again that changes while it is being broken.
const BREAKS_MAX: u32 = 3;

/// The contents of a lock object, as JSON.
#[derive(Default, Serialize, Deserialize)]
struct LockText {
    holder: String,
    /// A random value of this holder.
    token: String,
    /// 0 if the lock is free.
    lease_s: u64,
    renewed: u64,
}

/// A lock object as this process has put it last.
struct OwnLock {
    text: LockText,
    tag: String,
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
    renewing: Option<JoinHandle<OwnLock>>,
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
        let text = LockText {
            holder: holder.into(),
            token: to_hex(&random_bytes::<16>()?),
            lease_s,
            renewed: 0,
        };
        let begun_ms = now_ms();
        let tag = take(client, name, &encode(&text))?;
        let mut own = OwnLock { text, tag };
        let lease = Arc::new(Self {
            client: client.clone(),
            name,
            lost: AtomicBool::new(false),
            renewed_ms: AtomicU64::new(begun_ms),
        });
        let over = Arc::new((Mutex::new(false), Condvar::new()));
        let (theirs, ends) = (lease.clone(), over.clone());
        let renewing = std::thread::Builder::new().name("keyframe-lease".into()).spawn(move || {
            while !wait(&ends, theirs.client.location.lease / 4) && theirs.check().is_ok() {
                own.text.renewed += 1;
                theirs.renew(&mut own);
            }
            own
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

    fn renew(&self, own: &mut OwnLock) {
        let begun_ms = now_ms();
        match self.client.put(self.name, &encode(&own.text), Precondition::Matches(&own.tag)) {
            Ok(S3PutOutcome::Done(next)) => {
                own.tag = next;
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
        // The thread ends soon: its waits and requests are bounded.
        let own = self.renewing.take().and_then(|renewing| renewing.join().ok());
        if let Some(own) = own.filter(|_| self.lease.check().is_ok()) {
            // If this fails, the lock expires with its lease.
            let _ = release(&self.lease.client, self.lease.name, own);
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

/// Frees the lock `name` if its lease has ended. Also frees the lock of a holder that may live if
/// `may_break` returns true for its text; that holder then can write nothing more. Frees only the
/// object that it has read. Looks again if its holder has renewed it meanwhile; a lock that another
/// process has taken stays. Returns what it did, with the holder's text. Errors: the service refuses
/// or cannot be reached.
pub fn break_lease(
    client: &S3Client,
    name: &str,
    may_break: &dyn Fn(&str) -> bool,
) -> Result<UnlockOutcome> {
    let mut outcome = UnlockOutcome::Nothing;
    for _ in 0..BREAKS_MAX {
        let Some(object) = client.get_if_there(name)? else { return Ok(UnlockOutcome::Nothing) };
        let text = decode(&object.bytes);
        if text.as_ref().is_some_and(|text| text.lease_s == 0) {
            return Ok(UnlockOutcome::Nothing);
        }
        let is_held = !is_over(&object.bytes, object.age);
        let own = OwnLock { text: text.unwrap_or_default(), tag: object.tag };
        let holder = own.text.holder.clone();
        let is_taken = matches!(&outcome, UnlockOutcome::Held(first) if *first != holder);
        if is_taken || is_held && !may_break(&holder) {
            return Ok(UnlockOutcome::Held(holder));
        }
        if release(client, name, own)? != S3PutOutcome::Refused {
            return Ok(UnlockOutcome::Removed(holder));
        }
        outcome = UnlockOutcome::Held(holder);
    }
    Ok(outcome)
}

/// Frees the lock `name` if it still is the object `own`.
fn release(client: &S3Client, name: &str, own: OwnLock) -> Result<S3PutOutcome> {
    let OwnLock { text, tag } = own;
    client.put(name, &encode(&LockText { lease_s: 0, ..text }), Precondition::Matches(&tag))
}

/// Puts the lock object; returns its entity tag.
fn take(client: &S3Client, name: &str, bytes: &[u8]) -> Result<String> {
    if let S3PutOutcome::Done(tag) = client.put(name, bytes, Precondition::Absent)? {
        return Ok(tag);
    }
    let locked =
        |text: &[u8]| Error::Locked { holder: decode(text).map_or_else(String::new, |t| t.holder) };
    let Some(there) = client.get_if_there(name)? else {
        // The object was removed just now, which Keyframe does not do: one more attempt.
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
        S3PutOutcome::Refused => {
            // Another process was faster.
            let now = client.get_if_there(name)?;
            Err(locked(&now.map_or_else(Vec::new, |now| now.bytes)))
        }
    }
}

/// True if the lock is free, or its holder has not renewed it for the duration of its lease. An
/// object that cannot be parsed, or whose age is unknown, counts as held.
fn is_over(bytes: &[u8], age: Option<Duration>) -> bool {
    match (decode(bytes), age) {
        (Some(LockText { lease_s: 0, .. }), _) => true,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_lock_is_over_at_once_and_a_held_one_after_its_lease() {
        let text = |lease_s| encode(&LockText { lease_s, ..LockText::default() });
        let after = |age_s| Some(Duration::from_secs(age_s));
        assert!(is_over(&text(0), after(0)) && is_over(&text(0), None));
        assert!(!is_over(&text(5), after(6)) && is_over(&text(5), after(7)));
        assert!(!is_over(&text(5), None));
        assert!(!is_over(b"no text of a lock", after(9999)));
    }
}
