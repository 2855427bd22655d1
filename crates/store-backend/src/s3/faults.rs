//! Object storage in tests: a bucket on a server of this host, whose requests fail on command.

use super::client::S3Client;
use super::location::S3Location;
use super::part_cache::PartCache;
use super::{LOCK, PRUNE_LOCK, S3Backend, lease};
use crate::Result;
use crate::testing::s3_server::{KEY, S3Server};
use keyframe_locks::IgnorePoison;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use ureq::Body;
use ureq::http::Response;

pub use crate::testing::s3_server::BUCKET;

/// Makes requests fail on command, for tests.
#[derive(Debug, Default)]
pub struct S3Faults {
    sent: AtomicU64,
    /// All requests from this one on fail; 0: none does.
    from: AtomicU64,
    /// The first failing request is executed, and only its answer is lost.
    is_answer_lost: AtomicBool,
    /// The first attempt of each request fails, alternately before and after it is executed.
    every_other: AtomicBool,
}

impl S3Faults {
    /// Makes request number `request` and all after it fail. With `is_answer_lost` the server
    /// executes the first of them, and its answer is lost.
    pub fn fail_from(&self, request: u64, is_answer_lost: bool) {
        self.from.store(request, Ordering::Relaxed);
        self.is_answer_lost.store(is_answer_lost, Ordering::Relaxed);
    }

    /// Makes the first attempt of each request fail.
    pub fn fail_every_other(&self) {
        self.every_other.store(true, Ordering::Relaxed);
    }

    pub(super) fn send(
        &self,
        send: &dyn Fn() -> Result<Response<Body>, ureq::Error>,
    ) -> Result<Response<Body>, ureq::Error> {
        let number = self.sent.fetch_add(1, Ordering::Relaxed) + 1;
        let from = self.from.load(Ordering::Relaxed);
        let fails = from > 0 && number >= from;
        if fails && !self.is_answer_lost.load(Ordering::Relaxed) {
            return Err(ureq::Error::ConnectionFailed);
        }
        let by_turns = self.every_other.load(Ordering::Relaxed);
        match number % 4 {
            1 if by_turns => return Err(ureq::Error::ConnectionFailed),
            3 if by_turns => {
                drop(send());
                return Err(ureq::Error::ConnectionFailed);
            }
            _ => {}
        }
        let answer = send();
        // Only the first failing request reached the server.
        if fails {
            self.is_answer_lost.store(false, Ordering::Relaxed);
            return Err(ureq::Error::ConnectionFailed);
        }
        answer
    }
}

/// The differences of a test's backend from an ordinary one.
#[derive(Clone, Debug)]
pub struct S3TestOptions {
    /// The number of seconds for which a lock holds unless it is renewed.
    pub lease_s: u64,
    /// The number of attempts of a request, and of keys in a page of a listing; `None` for those of
    /// ordinary use.
    pub haste: Option<(u32, usize)>,
    /// The directory of the cache; `None` for no cache.
    pub cache: Option<PathBuf>,
}

impl Default for S3TestOptions {
    fn default() -> Self {
        Self { lease_s: 60, haste: None, cache: None }
    }
}

/// Returns a server that all running tests share; it ends with the last of them. `None` if this
/// host has no S3 server.
pub fn running_server() -> Option<Arc<S3Server>> {
    static RUNNING: Mutex<Weak<S3Server>> = Mutex::new(Weak::new());
    let mut running = RUNNING.lock().ignore_poison();
    if let Some(server) = running.upgrade() {
        return Some(server);
    }
    let server = Arc::new(S3Server::start()?);
    *running = Arc::downgrade(&server);
    Some(server)
}

/// The location `prefix` in the test bucket.
pub(super) fn test_location(endpoint: &str, prefix: &str, lease_s: u64) -> S3Location {
    let url = format!("s3://{BUCKET}/{prefix}?endpoint={endpoint}&lease={lease_s}");
    let environment = |name: &str| match name {
        "AWS_ACCESS_KEY_ID" => Some(KEY.0.to_owned()),
        "AWS_SECRET_ACCESS_KEY" => Some(KEY.1.to_owned()),
        _ => None,
    };
    S3Location::parse(Path::new(&url), &environment).expect("a URL of the test's own")
}

/// Returns a backend at `prefix` in the test bucket.
pub fn test_backend(endpoint: &str, prefix: &str, options: S3TestOptions) -> S3Backend {
    let location = test_location(endpoint, prefix, options.lease_s);
    let cache = PartCache::new(options.cache, &location.name);
    let mut client = S3Client::new(location);
    if let Some((attempts, page_keys)) = options.haste {
        client.hasten(attempts, page_keys);
    }
    S3Backend::over(client, cache)
}

impl S3Backend {
    /// Returns the faults of this backend's requests.
    pub fn faults(&self) -> &S3Faults {
        &self.shared.client.faults
    }

    /// Removes the locks of a dead writer and of a dead prune before their leases end. Error: the
    /// server does not answer.
    pub fn break_locks(&self) -> Result<()> {
        for name in [LOCK, PRUNE_LOCK] {
            lease::break_lease(&self.shared.client, name, &|_| true)?;
        }
        Ok(())
    }
}
