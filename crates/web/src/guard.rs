//! Who may ask for what: the `Host` that a request names, the token that it shows, and what each
//! answer tells the browser.
//!
//! ```text
//!                   the page's files    reading (API, metrics)         changing
//!   on loopback     host of this one    host of this one               and the token
//!   elsewhere       anybody             the token                      the token
//! ```
//!
//! The token comes in `Authorization: Bearer` and never in a cookie: no other site's page can make
//! a browser send it.

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use std::net::IpAddr;
use zeroize::Zeroizing;

/// Nothing from anywhere else, no frames, no forms; scripts and styles are files of ours.
const CSP: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
                   base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// What every answer has.
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

/// Why a request is refused: a status, what is wrong, and what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    pub status: StatusCode,
    pub error: &'static str,
    pub fix: &'static str,
}

/// Decides about requests.
pub struct Guard {
    is_loopback: bool,
    /// Compared as hashes, which takes the same time whatever differs.
    token: Option<blake3::Hash>,
}

impl Guard {
    pub fn new(listens_at: IpAddr, token: Option<&Zeroizing<Vec<u8>>>) -> Self {
        Self {
            is_loopback: listens_at.is_loopback(),
            token: token.map(|token| blake3::hash(token)),
        }
    }

    /// Whether reading needs the token.
    pub fn reading_needs_token(&self) -> bool {
        !self.is_loopback
    }

    /// Whether there is a token with which something can be changed.
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Whether a request for `path` goes through.
    pub fn check(&self, method: &Method, path: &str, headers: &HeaderMap) -> Result<(), Refused> {
        if self.is_loopback && !names_this_machine(headers) {
            return Err(Refused {
                status: StatusCode::MISDIRECTED_REQUEST,
                error: "the request names another host than this machine",
                fix: "open http://127.0.0.1:PORT or http://localhost:PORT",
            });
        }
        let reads = method == Method::GET || method == Method::HEAD;
        if reads && (self.is_loopback || is_public(path)) {
            return Ok(());
        }
        if !reads && self.token.is_none() {
            return Err(Refused {
                status: StatusCode::FORBIDDEN,
                error: "the dashboard is read-only: it was started without a token",
                fix: "start it with --token-file TOKEN, or run the command that is shown",
            });
        }
        if self.shows_token(headers) {
            return Ok(());
        }
        Err(Refused {
            status: StatusCode::UNAUTHORIZED,
            error: "the token is missing or not the one of this server",
            fix: "send it as Authorization: Bearer TOKEN",
        })
    }

    fn shows_token(&self, headers: &HeaderMap) -> bool {
        let shown = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let shown = shown.and_then(|value| value.strip_prefix(b"Bearer "));
        shown.is_some_and(|shown| self.token == Some(blake3::hash(shown.trim_ascii())))
    }
}

/// The page without anything in it.
fn is_public(path: &str) -> bool {
    crate::page::file(path).is_some()
}

/// Whether `Host` is a name of this machine's loopback, with any port. Every HTTP/1.1 request has
/// one.
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
