//! The errors for refusals and missing answers of an S3 server, with their fixes.

use super::client::{ANSWER_BYTES_MAX, S3Client};
use crate::Error;
use crate::RemoteFailure;
use std::io;
use ureq::Body;
use ureq::http::{Response, StatusCode};

impl S3Client {
    /// The error for a refusal.
    pub(super) fn refused(
        &self,
        operation: &'static str,
        name: &str,
        answer: Response<Body>,
    ) -> Error {
        let status = answer.status();
        let text = answer
            .into_body()
            .with_config()
            .limit(ANSWER_BYTES_MAX)
            .read_to_string()
            .unwrap_or_default();
        let code = between(&text, "<Code>", "</Code>").unwrap_or_default().to_owned();
        let kind = match status {
            StatusCode::NOT_FOUND if code != "NoSuchBucket" => io::ErrorKind::NotFound,
            StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED => io::ErrorKind::PermissionDenied,
            StatusCode::INSUFFICIENT_STORAGE => io::ErrorKind::StorageFull,
            _ if code.contains("Quota") || code.contains("StorageFull") => {
                io::ErrorKind::QuotaExceeded
            }
            _ => io::ErrorKind::Other,
        };
        let said = summary(&text);
        let problem =
            format!("HTTP {}{}{said}", status.as_u16(), if said.is_empty() { "" } else { " " });
        self.error(operation, name, kind, problem, self.fix(status, &code))
    }

    fn fix(&self, status: StatusCode, code: &str) -> Option<String> {
        Some(match status {
            StatusCode::NOT_FOUND if code == "NoSuchBucket" => {
                format!(
                    "create the bucket {} first, or name another one",
                    self.location.bucket.name()
                )
            }
            StatusCode::NOT_FOUND => return None,
            StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED => {
                "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the clock of this machine, and \
                 that the key may list, get, put and delete objects in the bucket"
                    .into()
            }
            StatusCode::MOVED_PERMANENTLY
            | StatusCode::BAD_REQUEST
            | StatusCode::TEMPORARY_REDIRECT => format!(
                "check AWS_REGION (now {}) and AWS_ENDPOINT_URL (now {})",
                self.location.bucket.region(),
                self.location.endpoint
            ),
            StatusCode::NOT_IMPLEMENTED => {
                "use a server that supports conditional puts (If-None-Match)".into()
            }
            status if status.is_server_error() => {
                "the server has a problem: try again later; sealed checkpoints are safe".into()
            }
            _ => return None,
        })
    }

    /// The error if no answer came.
    pub(super) fn unreached(
        &self,
        operation: &'static str,
        name: &str,
        error: &ureq::Error,
    ) -> Error {
        let fix =
            format!("check AWS_ENDPOINT_URL (now {}) and the network", self.location.endpoint);
        let kind = match error {
            ureq::Error::Timeout(_) => io::ErrorKind::TimedOut,
            _ => io::ErrorKind::ConnectionAborted,
        };
        let problem = format!("no answer from {}: {error}", self.location.endpoint);
        self.error(operation, name, kind, problem, Some(fix))
    }

    pub(super) fn strange(&self, operation: &'static str, name: &str, problem: &str) -> Error {
        let fix =
            Some(format!("check AWS_ENDPOINT_URL: is {} an S3 server?", self.location.endpoint));
        self.error(
            operation,
            name,
            io::ErrorKind::InvalidData,
            format!("invalid answer: {problem}"),
            fix,
        )
    }

    fn error(
        &self,
        operation: &'static str,
        name: &str,
        kind: io::ErrorKind,
        problem: String,
        fix: Option<String>,
    ) -> Error {
        let source = io::Error::new(kind, RemoteFailure { problem, fix });
        Error::Io { object: self.describe(name), operation, source }
    }
}

/// Returns the code and the message of an error document of S3, in one line.
pub fn summary(text: &str) -> String {
    let code = between(text, "<Code>", "</Code>").unwrap_or_default();
    let message = between(text, "<Message>", "</Message>").unwrap_or_default();
    let said = if code.is_empty() { message.to_owned() } else { format!("{code}: {message}") };
    said.trim_end_matches([':', ' ']).chars().filter(|c| !c.is_control()).take(300).collect()
}

/// Returns the text between `before` and `behind`; `None` if one of them is missing.
pub fn between<'a>(text: &'a str, before: &str, behind: &str) -> Option<&'a str> {
    let rest = text.get(text.find(before)? + before.len()..)?;
    rest.get(..rest.find(behind)?)
}
