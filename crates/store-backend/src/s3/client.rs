//! Requests to an S3 server: signed, bounded in time, and retried.
//!
//! ```text
//!   request ─▶ status below 500 ─▶ success, or an error that names the fix
//!      ▲         └─ 5xx, 408, 429, or no answer: wait 0.1, 0.2, ... 3 s
//!      └──────────────┘  at most 8 attempts, none after 45 s
//! ```
//!
//! Invariants:
//! - A request whose answer was lost may still arrive. It is repeated only with the same bytes
//!   under the same key, so the order of arrival does not matter.
//! - A conditional put that was sent twice reads the object before it reports that another process
//!   was faster.
//! - A writer's request is sent, and sent again, only while its lock is held ([`MaySend`]): another
//!   process may have written the object meanwhile.

use super::failure::{between, summary};
use super::location::S3Location;
use crate::{Error, Result};
use rusty_s3::actions::{
    CompleteMultipartUpload, CreateMultipartUpload, DeleteObject, GetObject, ListObjectsV2,
    PutObject, S3Action, UploadPart,
};
use std::ops::Range;
use std::time::{Duration, Instant};
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body};

const ATTEMPTS: u32 = 8;
const NO_ATTEMPT_AFTER: Duration = Duration::from_secs(45);
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(3);
const CONNECT_MAX: Duration = Duration::from_secs(5);
const CALL_MAX: Duration = Duration::from_secs(20);
/// Reading may take long, as long as bytes arrive.
const READ_MAX: Duration = Duration::from_secs(600);
/// The time for which a signature is valid.
const SIGNED_FOR: Duration = Duration::from_secs(900);
/// The longest answer that is accepted in bytes, apart from objects: more than a listing of 1,000
/// keys.
pub const ANSWER_BYTES_MAX: u64 = 16 << 20;
/// Larger objects are uploaded in pieces of this size.
const PIECE_BYTES: usize = 8 << 20;
/// More pages of a listing than the largest store has.
const PAGES_MAX: u32 = 100_000;

/// A client of an S3 server, for the bucket of one store.
#[derive(Debug)]
pub struct S3Client {
    pub location: S3Location,
    agent: Agent,
    /// The agent for requests that only read.
    reading: Agent,
    attempts: u32,
    pause: Duration,
    /// Keys in a page of a listing; none: the server decides.
    page_keys: Option<usize>,
    #[cfg(any(test, feature = "testing"))]
    pub faults: super::faults::S3Faults,
}

/// Asked before each time that a request is sent. Error: the request must not be sent any more.
pub type MaySend<'a> = &'a dyn Fn() -> Result<()>;

/// The condition under which an object is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precondition<'a> {
    /// No condition.
    Always,
    /// No object has the name.
    Absent,
    /// The object of that name has this entity tag.
    Matches(&'a str),
}

/// The outcome of writing an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum S3PutOutcome {
    /// The object is stored, with this entity tag.
    Done(String),
    /// The condition does not hold.
    Refused,
}

/// The content of an object, or of a range of one.
#[derive(Debug)]
pub struct ReadObject {
    pub bytes: Vec<u8>,
    /// The length of the whole object, in bytes.
    pub len_bytes: u64,
    pub tag: String,
    /// The time since the object was put, by the clock of the server. `None` if the server does not
    /// tell.
    pub age: Option<Duration>,
}

/// An object in a listing of object storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Its key, without the store's prefix.
    pub name: String,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// Its entity tag, which another content does not have; empty if the server gave none.
    pub tag: String,
}

/// The depth of a listing of object storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListDepth {
    /// The objects directly in the folder.
    Here,
    /// The objects in the folder and in all folders below it.
    Below,
}

/// The answer of an attempt.
enum Answer {
    Some(Response<Body>),
    None(ureq::Error),
}

impl S3Client {
    /// Makes a client of the bucket at `location`. It does not connect yet.
    pub fn new(location: S3Location) -> Self {
        // A request that is sent while the lease holds must arrive or fail before the lease ends.
        let call = (location.lease / 3).min(CALL_MAX);
        let config = || {
            Agent::config_builder()
                .http_status_as_error(false)
                .max_redirects(0)
                .timeout_connect(Some(CONNECT_MAX.min(call)))
                .user_agent(concat!("keyframe/", env!("CARGO_PKG_VERSION")))
        };
        let writing = config().timeout_global(Some(call)).build();
        let reading = config()
            .timeout_global(Some(READ_MAX))
            .timeout_recv_response(Some(call))
            .timeout_per_read(Some(call))
            .build();
        Self {
            location,
            agent: writing.new_agent(),
            reading: reading.new_agent(),
            attempts: ATTEMPTS,
            pause: PAUSE_FIRST,
            page_keys: None,
            #[cfg(any(test, feature = "testing"))]
            faults: super::faults::S3Faults::default(),
        }
    }

    /// Returns the name of the object `name` in messages.
    pub fn describe(&self, name: &str) -> String {
        format!("{}/{name}", self.location.name)
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.location.prefix)
    }

    /// Writes the object `name` with content `bytes`, atomically and durably, if `condition` holds.
    /// Returns whether the object was written. Errors: the service refuses or cannot be reached.
    pub fn put(
        &self,
        name: &str,
        bytes: &[u8],
        condition: Precondition<'_>,
    ) -> Result<S3PutOutcome> {
        self.put_while(&|| Ok(()), name, bytes, condition)
    }

    /// Writes an object as [`Self::put`] does, as long as `may_send` allows. Errors: that of
    /// `may_send`; the service refuses or cannot be reached.
    pub fn put_while(
        &self,
        may_send: MaySend<'_>,
        name: &str,
        bytes: &[u8],
        condition: Precondition<'_>,
    ) -> Result<S3PutOutcome> {
        if bytes.len() > PIECE_BYTES && condition == Precondition::Always {
            return self.put_in_pieces(may_send, name, bytes);
        }
        let key = self.key(name);
        let mut action =
            PutObject::new(&self.location.bucket, Some(&self.location.credentials), &key);
        let header = match condition {
            Precondition::Always => None,
            Precondition::Absent => Some(("if-none-match", "*")),
            Precondition::Matches(tag) => Some(("if-match", tag)),
        };
        if let Some((name, value)) = header {
            action.headers_mut().insert(name, value);
        }
        let send = || {
            let mut request = self.agent.put(action.sign(SIGNED_FOR).as_str());
            if let Some((name, value)) = header {
                request = request.header(name, value);
            }
            request.send(bytes)
        };
        let (answer, attempts) = self.attempt("put", name, may_send, &send)?;
        match answer.status() {
            StatusCode::PRECONDITION_FAILED | StatusCode::NOT_FOUND
                if condition != Precondition::Always =>
            {
                // An earlier attempt whose answer was lost may have stored it.
                let there = if attempts > 1 { self.get_if_there(name)? } else { None };
                Ok(there
                    .filter(|there| there.bytes == bytes)
                    .map_or(S3PutOutcome::Refused, |there| S3PutOutcome::Done(there.tag)))
            }
            status if status.is_success() => Ok(S3PutOutcome::Done(tag_of(&answer))),
            _ => Err(self.refused("put", name, answer)),
        }
    }

    /// Uploads a large object in pieces. It appears whole when the last piece has arrived.
    fn put_in_pieces(
        &self,
        may_send: MaySend<'_>,
        name: &str,
        bytes: &[u8],
    ) -> Result<S3PutOutcome> {
        let key = self.key(name);
        let (bucket, credentials) = (&self.location.bucket, Some(&self.location.credentials));
        let create = CreateMultipartUpload::new(bucket, credentials, &key);
        let begun = self.text("begin an upload", name, may_send, &|| {
            self.agent.post(create.sign(SIGNED_FOR).as_str()).send_empty()
        })?;
        let upload = CreateMultipartUpload::parse_response(&begun)
            .map_err(|e| self.strange("begin an upload", name, &e.to_string()))?;
        let mut tags = Vec::new();
        for (number, piece) in (1u16..).zip(bytes.chunks(PIECE_BYTES)) {
            let part = UploadPart::new(bucket, credentials, &key, number, upload.upload_id());
            let send = || self.agent.put(part.sign(SIGNED_FOR).as_str()).send(piece);
            let (answer, _) = self.attempt("upload a part of", name, may_send, &send)?;
            if !answer.status().is_success() {
                return Err(self.refused("upload a part of", name, answer));
            }
            tags.push(tag_of(&answer));
        }
        let all = tags.iter().map(String::as_str);
        let complete =
            CompleteMultipartUpload::new(bucket, credentials, &key, upload.upload_id(), all);
        let url = complete.sign(SIGNED_FOR);
        let body = complete.body();
        let done = self.text("complete the upload of", name, may_send, &|| {
            self.agent.post(url.as_str()).send(body.as_str())
        })?;
        // The server sends this status before it knows the outcome: the body can be an error.
        if done.contains("<Error>") {
            return Err(self.strange("complete the upload of", name, &summary(&done)));
        }
        Ok(S3PutOutcome::Done(between(&done, "<ETag>", "</ETag>").unwrap_or_default().to_owned()))
    }

    /// Reads the object `name`, or the byte range `range` of it (`None` for all): at most
    /// `len_bytes_max` bytes. Errors: kind `NotFound` if it does not exist; the service refuses or
    /// cannot be reached.
    pub fn get(
        &self,
        name: &str,
        range: Option<&Range<u64>>,
        len_bytes_max: u64,
    ) -> Result<ReadObject> {
        let key = self.key(name);
        let action = GetObject::new(&self.location.bucket, Some(&self.location.credentials), &key);
        let wanted = range.map(|r| format!("bytes={}-{}", r.start, r.end.saturating_sub(1)));
        let send = || {
            let request = self.reading.get(action.sign(SIGNED_FOR).as_str());
            match &wanted {
                Some(wanted) => request.header("range", wanted).call(),
                None => request.call(),
            }
        };
        let mut left = self.attempts;
        loop {
            let (answer, attempts) = self.attempt("get", name, &|| Ok(()), &send)?;
            if answer.status() == StatusCode::RANGE_NOT_SATISFIABLE
                && range.is_some_and(|r| r.start == 0)
            {
                return Ok(ReadObject {
                    bytes: Vec::new(),
                    len_bytes: 0,
                    tag: tag_of(&answer),
                    age: None,
                });
            }
            if !answer.status().is_success() {
                return Err(self.refused("get", name, answer));
            }
            let (tag, age) = (tag_of(&answer), age_of(&answer));
            let total = header(&answer, "content-range")
                .and_then(|text| text.rsplit('/').next()?.parse().ok());
            let promised: Option<u64> =
                header(&answer, "content-length").and_then(|text| text.parse().ok());
            if promised.is_some_and(|promised| promised > len_bytes_max) {
                let problem =
                    format!("{promised:?} bytes long; at most {len_bytes_max} make sense");
                return Err(Error::damaged(self.describe(name), problem));
            }
            match answer.into_body().with_config().limit(len_bytes_max + 1).read_to_vec() {
                Ok(bytes) if bytes.len() as u64 > len_bytes_max => {
                    let problem = format!("more than the {len_bytes_max} bytes that make sense");
                    return Err(Error::damaged(self.describe(name), problem));
                }
                Ok(bytes) => {
                    let len_bytes = total.unwrap_or(bytes.len() as u64);
                    return Ok(ReadObject { bytes, len_bytes, tag, age });
                }
                // The connection broke during the answer.
                Err(_) if left > attempts => {
                    left -= attempts;
                    std::thread::sleep(PAUSE_FIRST);
                }
                Err(error) => return Err(self.unreached("get", name, &error)),
            }
        }
    }

    /// Returns a small object. Returns `None` if it does not exist. Errors: the service refuses or
    /// cannot be reached.
    pub fn get_if_there(&self, name: &str) -> Result<Option<ReadObject>> {
        match self.get(name, None, ANSWER_BYTES_MAX) {
            Err(error) if error.is_not_found() => Ok(None),
            other => other.map(Some),
        }
    }

    /// Removes the object `name`. It is no error if it does not exist. Errors: the service refuses
    /// or cannot be reached.
    pub fn delete(&self, name: &str) -> Result<()> {
        self.delete_while(&|| Ok(()), name)
    }

    /// Removes an object as [`Self::delete`] does, as long as `may_send` allows. Errors: that of
    /// `may_send`; the service refuses or cannot be reached.
    pub fn delete_while(&self, may_send: MaySend<'_>, name: &str) -> Result<()> {
        let key = self.key(name);
        let action =
            DeleteObject::new(&self.location.bucket, Some(&self.location.credentials), &key);
        let (answer, _) = self.attempt("remove", name, may_send, &|| {
            self.agent.delete(action.sign(SIGNED_FOR).as_str()).call()
        })?;
        if answer.status().is_success() {
            return Ok(());
        }
        match self.refused("remove", name, answer) {
            error if error.is_not_found() => Ok(()),
            error => Err(error),
        }
    }

    /// Returns the objects whose names begin with `folder`, in rising order of names: at most
    /// `keys_max`, if given. Errors: the service refuses, cannot be reached, or sends an invalid
    /// answer.
    pub fn list(
        &self,
        folder: &str,
        depth: ListDepth,
        keys_max: Option<usize>,
    ) -> Result<Vec<ListedObject>> {
        let prefix = self.key(folder);
        let mut objects = Vec::new();
        let mut token: Option<String> = None;
        for _ in 0..PAGES_MAX {
            let mut action =
                ListObjectsV2::new(&self.location.bucket, Some(&self.location.credentials));
            action.with_prefix(prefix.as_str());
            if depth == ListDepth::Here {
                action.with_delimiter("/");
            }
            if let Some(max) = keys_max.or(self.page_keys) {
                action.with_max_keys(max);
            }
            if let Some(token) = &token {
                action.with_continuation_token(token.as_str());
            }
            let text = self.text("list", folder, &|| Ok(()), &|| {
                self.agent.get(action.sign(SIGNED_FOR).as_str()).call()
            })?;
            let page = ListObjectsV2::parse_response(&text)
                .map_err(|e| self.strange("list", folder, &e.to_string()))?;
            objects.extend(page.contents.into_iter().filter_map(|object| {
                let name = object.key.strip_prefix(&prefix).filter(|name| !name.is_empty())?;
                Some(ListedObject {
                    name: name.to_owned(),
                    len_bytes: object.size?,
                    tag: object.etag.unwrap_or_default(),
                })
            }));
            token = page.next_continuation_token;
            if token.is_none() || keys_max.is_some() {
                return Ok(objects);
            }
        }
        Err(self.strange("list", folder, "the listing does not end"))
    }

    /// Sends a request and returns the answer as text.
    fn text(
        &self,
        operation: &'static str,
        name: &str,
        may_send: MaySend<'_>,
        send: &dyn Fn() -> Result<Response<Body>, ureq::Error>,
    ) -> Result<String> {
        let (answer, _) = self.attempt(operation, name, may_send, send)?;
        if !answer.status().is_success() {
            return Err(self.refused(operation, name, answer));
        }
        let text = answer.into_body().with_config().limit(ANSWER_BYTES_MAX).read_to_string();
        text.map_err(|e| self.unreached(operation, name, &e))
    }

    /// Sends a request until it is answered, as long as `may_send` allows; returns the answer and
    /// the number of attempts.
    fn attempt(
        &self,
        operation: &'static str,
        name: &str,
        may_send: MaySend<'_>,
        send: &dyn Fn() -> Result<Response<Body>, ureq::Error>,
    ) -> Result<(Response<Body>, u32)> {
        let begun = Instant::now();
        let mut pause = self.pause;
        for attempt in 1.. {
            may_send()?;
            #[cfg(any(test, feature = "testing"))]
            let send = || self.faults.send(send);
            let answer = match send() {
                Ok(answer) if !is_passing(answer.status()) => return Ok((answer, attempt)),
                Ok(answer) => Answer::Some(answer),
                Err(error) => Answer::None(error),
            };
            if attempt >= self.attempts || begun.elapsed() + pause > NO_ATTEMPT_AFTER {
                return Err(match answer {
                    Answer::Some(answer) => self.refused(operation, name, answer),
                    Answer::None(error) => self.unreached(operation, name, &error),
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
        unreachable!("the last attempt returns")
    }
}

/// True for a status that another attempt may change.
fn is_passing(status: StatusCode) -> bool {
    let never = [StatusCode::NOT_IMPLEMENTED, StatusCode::INSUFFICIENT_STORAGE];
    let again = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS, StatusCode::CONFLICT];
    status.is_server_error() && !never.contains(&status) || again.contains(&status)
}

fn header<'a>(answer: &'a Response<Body>, name: &str) -> Option<&'a str> {
    answer.headers().get(name)?.to_str().ok()
}

fn tag_of(answer: &Response<Body>) -> String {
    header(answer, "etag").unwrap_or_default().to_owned()
}

/// The time since an object was put, by the server's clock alone.
fn age_of(answer: &Response<Body>) -> Option<Duration> {
    let moment = |name| {
        jiff::fmt::rfc2822::parse(header(answer, name)?).ok().map(|t| t.timestamp().as_second())
    };
    let age_s = moment("date")? - moment("last-modified")?;
    Some(Duration::from_secs(age_s.max(0).unsigned_abs()))
}

#[cfg(any(test, feature = "testing"))]
impl S3Client {
    /// Reduces the number of attempts and removes their pauses, for tests.
    pub fn hasten(&mut self, attempts: u32, page_keys: usize) {
        self.attempts = attempts;
        self.pause = Duration::from_millis(1);
        self.page_keys = Some(page_keys);
    }
}
