//! The request log on standard error, a line for each request: as text or as JSON.
//!
//! A line has the request's path, never its query or headers, which might contain the token.

use keyframe_units::duration_ns;
use serde::Serialize;
use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

/// The format of the request log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// `GET /metrics 200 1.2 ms 127.0.0.1`.
    Text,
    /// One JSON object.
    Json,
}

/// A line of the request log: one answered request.
#[derive(Serialize)]
pub struct RequestLogLine<'a> {
    pub time: jiff::Timestamp,
    pub level: &'static str,
    pub message: &'static str,
    /// The HTTP method.
    pub method: &'a str,
    /// The path of the request.
    pub path: &'a str,
    /// The HTTP status of the answer.
    pub status: u16,
    /// The time from the request to its answer, in nanoseconds.
    pub duration_ns: u64,
    /// The address of the client.
    pub peer: SocketAddr,
}

impl<'a> RequestLogLine<'a> {
    /// Returns the line of a request that was answered with the HTTP status `status` after the time
    /// `took`.
    pub fn of(
        method: &'a str,
        path: &'a str,
        status: u16,
        took: Duration,
        peer: SocketAddr,
    ) -> Self {
        let level = if status >= 500 { "error" } else { "info" };
        let duration_ns = duration_ns(took);
        let time = jiff::Timestamp::now();
        Self { time, level, message: "request", method, path, status, duration_ns, peer }
    }

    /// Returns the line as text.
    pub fn text(&self, format: LogFormat) -> String {
        match format {
            // HTTP allows no control characters in a path.
            LogFormat::Text => format!(
                "keyframe: {} {} {} {:.1} ms {}",
                self.method,
                self.path,
                self.status,
                self.duration_ns as f64 / 1e6,
                self.peer.ip()
            ),
            LogFormat::Json => serde_json::to_string(self).unwrap_or_default(),
        }
    }

    /// Writes the line to standard error in `format`. Ignores errors.
    pub fn write(&self, format: LogFormat) {
        let _ = writeln!(std::io::stderr().lock(), "{}", self.text(format));
    }
}
