//! A minimal HTTP client for servers on this machine.

use crate::PATIENCE;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

/// A response.
#[derive(Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The header lines.
    pub head: String,
    /// The content as text; bytes that are not UTF-8 become U+FFFD.
    pub body: String,
    /// The content.
    pub bytes: Vec<u8>,
}

impl Answer {
    /// The value of the header `name`; case does not matter.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (known, value) = line.split_once(": ")?;
            known.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    /// The content, parsed as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e} in {self:?}"))
    }
}

/// A server, by its URL.
#[derive(Clone, Debug)]
pub struct Http(String);

impl Http {
    /// The server at `http://HOST:PORT/`.
    pub fn at(url: &str) -> Self {
        Self(url.trim_start_matches("http://").trim_end_matches('/').into())
    }

    /// Sends `GET`, which must be answered with status 200.
    pub fn get(&self, path: &str) -> Answer {
        let answer = self.send("GET", path, &[]);
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        answer
    }

    /// Sends a request with these header lines. `Host` is the server's, unless one of them sets it.
    pub fn send(&self, method: &str, path: &str, lines: &[&str]) -> Answer {
        let (mut reader, status, head) = self.begin(method, path, lines);
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).expect("read the answer");
        Answer { status, head, body: String::from_utf8_lossy(&bytes).into_owned(), bytes }
    }

    /// Reads an event stream until `is_last` returns true; returns the names and data of the events.
    pub fn events(
        &self,
        path: &str,
        mut is_last: impl FnMut(&str, &Value) -> bool,
    ) -> Vec<(String, Value)> {
        let (reader, status, _) = self.begin("GET", path, &[]);
        assert_eq!(status, 200);
        let (mut found, mut name) = (Vec::new(), String::new());
        // The answer comes in chunks, whose lengths are lines of their own.
        for line in reader.lines().map(|line| line.expect("an event")) {
            if let Some(event) = line.strip_prefix("event: ") {
                name = event.into();
            } else if let Some(data) = line.strip_prefix("data: ") {
                let data = serde_json::from_str(data).expect("JSON");
                let ends = is_last(&name, &data);
                found.push((name.clone(), data));
                if ends {
                    break;
                }
            }
        }
        found
    }

    fn begin(
        &self,
        method: &str,
        path: &str,
        lines: &[&str],
    ) -> (BufReader<TcpStream>, u16, String) {
        let mut stream = TcpStream::connect(&self.0).expect("connect to the server");
        stream.set_read_timeout(Some(PATIENCE)).expect("bound the wait");
        let names_host = lines.iter().any(|line| line.to_ascii_lowercase().starts_with("host:"));
        let host = if names_host { String::new() } else { format!("Host: {}\r\n", self.0) };
        let more: String = lines.iter().flat_map(|line| [*line, "\r\n"]).collect();
        // HTTP/1.1, because HTTP/1.0 has no `Host`.
        let text = format!("{method} {path} HTTP/1.1\r\n{host}{more}Connection: close\r\n\r\n");
        stream.write_all(text.as_bytes()).expect("ask");
        let mut reader = BufReader::new(stream);
        let (mut head, mut line) = (String::new(), String::new());
        while reader.read_line(&mut line).expect("read the head") > 2 {
            head.push_str(&std::mem::take(&mut line));
        }
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        (reader, status.unwrap_or_else(|| panic!("no status in {head:?}")), head)
    }
}
