//! A line for each request, on standard error: for a person, or as JSON for what gathers logs.
//!
//! Of a request its path is told, never its query or headers: the token is not in a log.

use keyframe_units::duration_ns;
use serde::Serialize;
use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

/// How lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// `GET /metrics 200 1.2 ms 127.0.0.1`.
    Text,
    /// One JSON object.
    Json,
}

/// What a line says.
#[derive(Serialize)]
pub struct Line<'a> {
    pub time: jiff::Timestamp,
    pub level: &'static str,
    pub message: &'static str,
    pub method: &'a str,
    pub path: &'a str,
    pub status: u16,
    pub duration_ns: u64,
    pub peer: SocketAddr,
}

impl<'a> Line<'a> {
    /// One about a request that was answered.
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

    /// As it is written.
    pub fn text(&self, format: LogFormat) -> String {
        match format {
            // A path has no control characters: HTTP does not let them through.
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

    /// Writes it; who does not read standard error misses it.
    pub fn write(&self, format: LogFormat) {
        let _ = writeln!(std::io::stderr().lock(), "{}", self.text(format));
    }
}
