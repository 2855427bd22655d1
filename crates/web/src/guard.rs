//! Access control: the `Host` of a request, its token, and the security headers of each answer.
//!
//! ```text
//!                   the page's files        reading (API, metrics)     changing
//!   on loopback     `Host` is loopback      `Host` is loopback         `Host` is loopback, token
//!   elsewhere       all requests            token                      token
//! ```
//!
//! The token comes in `Authorization: Bearer`, never in a cookie: no other site's page can make a
//! browser send it.

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use std::net::IpAddr;
use zeroize::Zeroizing;

/// The content security policy: nothing from other servers, no frames, no forms. Scripts and styles
/// are files of this server.
const CSP: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
                   connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The HTTP headers of every answer.
pub const HEADERS: [(HeaderName, HeaderValue); 6] = [
    (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CSP)),
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
    (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        HeaderValue::from_static("same-origin"),
    ),
    (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
];

/// The reason why a request is refused, as the answer tells it: status, error and fix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessRefusal {
    pub status: StatusCode,
    pub error: &'static str,
    pub fix: &'static str,
}

/// Decides which requests are served, by host name, origin and token.
pub struct AccessGuard {
    is_loopback: bool,
    /// The token's hash: comparing hashes takes the same time for any difference.
    token: Option<blake3::Hash>,
}

impl AccessGuard {
    /// Creates the guard of a server that listens at `listens_at`. Changes need `token`; without
    /// one they are refused. Reading needs it too, unless `listens_at` is a loopback address.
    pub fn new(listens_at: IpAddr, token: Option<&Zeroizing<Vec<u8>>>) -> Self {
        Self {
            is_loopback: listens_at.is_loopback(),
            token: token.map(|token| blake3::hash(token)),
        }
    }

    /// Returns true if reading needs the token.
    pub fn reading_needs_token(&self) -> bool {
        !self.is_loopback
    }

    /// Returns true if there is a token. Without one nothing can be changed.
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Checks a request for `path`. Error: the refusal to send.
    pub fn check(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<(), AccessRefusal> {
        if self.is_loopback && !names_this_machine(headers) {
            return Err(AccessRefusal {
                status: StatusCode::MISDIRECTED_REQUEST,
                error: "the request's Host is not this machine",
                fix: "open http://127.0.0.1:PORT or http://localhost:PORT",
            });
        }
        let reads = method == Method::GET || method == Method::HEAD;
        if reads && (self.is_loopback || is_public(path)) {
            return Ok(());
        }
        if !reads && self.token.is_none() {
            return Err(AccessRefusal {
                status: StatusCode::FORBIDDEN,
                error: "the dashboard is read-only: it was started without a token",
                fix: "start it with --token-file TOKEN, or run the displayed command",
            });
        }
        if self.shows_token(headers) {
            return Ok(());
        }
        Err(AccessRefusal {
            status: StatusCode::UNAUTHORIZED,
            error: "the token is missing or wrong",
            fix: "send it as Authorization: Bearer TOKEN",
        })
    }

    fn shows_token(&self, headers: &HeaderMap) -> bool {
        let shown = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let shown = shown.and_then(|value| value.strip_prefix(b"Bearer "));
        shown.is_some_and(|shown| self.token == Some(blake3::hash(shown.trim_ascii())))
    }
}

/// Whether `path` is a file of the page, which contains no data.
fn is_public(path: &str) -> bool {
    crate::page::file(path).is_some()
}

/// Whether `Host` is a name of the loopback, with any port. Every HTTP/1.1 request has the header.
fn names_this_machine(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST).and_then(|host| host.to_str().ok()) else {
        return false;
    };
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}
