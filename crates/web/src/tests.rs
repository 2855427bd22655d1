//! Tests of the API without a network: requests go directly to the router.

mod access;
mod answers;
mod described;
mod page;

use crate::api::{self, App};
use crate::event_hub::EventHub;
use crate::guard::AccessGuard;
use crate::synthetic::SyntheticSource;
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode};
use serde_json::Value;
use std::net::IpAddr;
use std::sync::Arc;
use tower::ServiceExt;
use zeroize::Zeroizing;

const TOKEN: &str = "a token";

/// A server with a synthetic source.
struct Served {
    source: Arc<SyntheticSource>,
    router: Router,
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
    bytes: Vec<u8>,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e} in {}", self.body))
    }
}

impl Served {
    fn at(address: &str, token: Option<&str>, source: SyntheticSource) -> Self {
        let address: IpAddr = address.parse().unwrap();
        let token = token.map(|token| Zeroizing::new(token.as_bytes().to_vec()));
        let source = Arc::new(source);
        let shown: Arc<dyn crate::DashboardSource> = source.clone();
        let app =
            App::new(shown, AccessGuard::new(address, token.as_ref()), EventHub::default(), None);
        Self { source, router: api::router(&Arc::new(app)) }
    }

    fn on_loopback() -> Self {
        Self::at("127.0.0.1", Some(TOKEN), SyntheticSource::new(3, 20))
    }

    /// `METHOD PATH` with header lines `Name: value`.
    fn send(&self, what: &str, headers: &[&str]) -> Answer {
        let (method, path) = what.split_once(' ').unwrap();
        let mut request = Request::builder().method(method).uri(path);
        for line in headers {
            let (name, value) = line.split_once(": ").unwrap();
            request = request.header(name, value);
        }
        let request = request.body(Body::empty()).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let answer = self.router.clone().oneshot(request).await.unwrap();
            let (parts, body) = answer.into_parts();
            let is_stream =
                parts.headers.get("content-type").is_some_and(|kind| kind == "text/event-stream");
            let body = if is_stream {
                first_piece(body).await
            } else {
                to_bytes(body, 64 << 20).await.unwrap().to_vec()
            };
            let text = String::from_utf8_lossy(&body).into_owned();
            Answer { status: parts.status, headers: parts.headers, body: text, bytes: body }
        })
    }

    /// A `GET` as a browser on this machine sends it.
    fn get(&self, path: &str) -> Answer {
        self.send(&format!("GET {path}"), &["host: 127.0.0.1:7421"])
    }
}

/// The first piece of an endless body.
async fn first_piece(body: Body) -> Vec<u8> {
    use futures_util::StreamExt;
    body.into_data_stream().next().await.unwrap().unwrap().to_vec()
}
