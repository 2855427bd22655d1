//! Access control.

use super::{Served, TOKEN};
use crate::synthetic::{STORE, SyntheticSource};
use crate::{DashboardAction, DashboardOptions, DashboardServer, Error};
use keyframe_locks::IgnorePoison;

const HERE: &str = "host: localhost:7421";
const BEARER: &str = "authorization: Bearer a token";

#[test]
fn on_loopback_other_host_names_are_refused() {
    let served = Served::on_loopback();
    let hosts = [
        ("127.0.0.1", 200),
        ("127.0.0.1:7421", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:7421", 200),
        ("[::ffff:127.0.0.1]:9", 200),
    ];
    let others = [
        "evil.example",
        "evil.example:7421",
        "127.0.0.1.evil.example",
        "localhost.evil.example:7421",
        "192.168.0.7",
        "[::2]:7421",
        "",
        ":7421",
        "[",
        "[]",
    ];
    for (host, status) in hosts.into_iter().chain(others.map(|host| (host, 421))) {
        for path in ["/", "/api/v1/vms", "/metrics", "/api/v1/events"] {
            let answer = served.send(&format!("GET {path}"), &[&format!("host: {host}")]);
            assert_eq!(answer.status, status, "{host:?} {path}");
        }
        // Even with the token: another site's page might know it.
        let answer = served.send("GET /api/v1/vms", &[&format!("host: {host}"), BEARER]);
        assert_eq!(answer.status, status, "{host:?} with a token");
    }
    assert_eq!(served.send("GET /api/v1/vms", &[]).status, 421, "no host at all");
}

#[test]
fn elsewhere_everything_but_the_page_needs_the_token() {
    let served = Served::at("0.0.0.0", Some(TOKEN), SyntheticSource::new(1, 3));
    let there = "host: head:7421";
    for (path, ..) in crate::page::FILES {
        assert_eq!(served.send(&format!("GET {path}"), &[there]).status, 200, "{path}");
    }
    let paths = [
        "/metrics",
        "/api/v1/vms",
        "/api/v1/stores",
        "/api/v1/events",
        "/api/v1/openapi.json",
        "/api/v1/server",
        "/nothing",
    ];
    for path in paths {
        let get = format!("GET {path}");
        for wrong in [
            &[there][..],
            &[there, "authorization: Bearer wrong"],
            &[there, "authorization: a token"],
            &[there, "authorization: Basic a token"],
        ] {
            let answer = served.send(&get, wrong);
            assert_eq!(answer.status, 401, "{path} {wrong:?}");
            assert_eq!(answer.headers["www-authenticate"], "Bearer");
        }
        let right = if path == "/nothing" { 404 } else { 200 };
        assert_eq!(served.send(&get, &[there, BEARER]).status, right, "{path}");
    }
    assert_eq!(
        served.send("GET /api/v1/vms?token=a%20token", &[there]).status,
        401,
        "a token in the query does not count"
    );
}

#[test]
fn changes_need_the_token_even_on_loopback() {
    let pin = format!("/api/v1/stores/{STORE}/checkpoints/7/pin");
    let tag = format!("/api/v1/stores/{STORE}/checkpoints/7/tags/good");
    let untag = format!("/api/v1/stores/{STORE}/tags/good");
    let all = [
        format!("POST {pin}"),
        format!("DELETE {pin}"),
        format!("POST {tag}"),
        format!("DELETE {untag}"),
    ];
    let without = Served::at("127.0.0.1", None, SyntheticSource::new(1, 9));
    let served = Served::at("127.0.0.1", Some(TOKEN), SyntheticSource::new(1, 9));
    for one in &all {
        let answer = without.send(one, &[HERE, BEARER]);
        assert_eq!(
            (answer.status.as_u16(), answer.json()["fix"].is_string()),
            (403, true),
            "{one}"
        );
        assert_eq!(served.send(one, &[HERE]).status, 401, "{one}");
        assert_eq!(served.send(one, &[HERE, "authorization: Bearer "]).status, 401, "{one}");
        assert_eq!(served.send(one, &[HERE, "cookie: token=a token"]).status, 401, "{one}");
        let answer = served.send(one, &[HERE, BEARER]);
        assert_eq!(
            (answer.status.as_u16(), answer.json()["done"].as_str()),
            (200, Some("done")),
            "{one}"
        );
    }
    let acted = |served: &Served| served.source.acted.lock().ignore_poison().clone();
    assert_eq!(acted(&without), []);
    let expected = [
        DashboardAction::Pin(7),
        DashboardAction::Unpin(7),
        DashboardAction::Tag(7, "good".into()),
        DashboardAction::Untag("good".into()),
    ];
    assert_eq!(acted(&served), expected);
    assert_eq!(served.send(&format!("GET {pin}"), &[HERE]).status, 405, "reading changes nothing");
    assert_eq!(served.send("POST /api/v1/vms", &[HERE, BEARER]).status, 405);
}

#[test]
fn answers_have_security_headers() {
    let served = Served::on_loopback();
    for path in ["/", "/app.js", "/api/v1/vms", "/nothing", "/metrics"] {
        let headers = served.get(path).headers;
        let policy = headers["content-security-policy"].to_str().unwrap();
        assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        assert!(headers.get("access-control-allow-origin").is_none(), "{path}");
        assert_eq!(
            (&headers["x-content-type-options"], &headers["cache-control"]),
            (&"nosniff".parse().unwrap(), &"no-store".parse().unwrap())
        );
    }
    let preflight = served.send("OPTIONS /api/v1/vms", &[HERE, "origin: http://evil.example"]);
    assert!(!preflight.status.is_success());
}

#[test]
fn without_a_token_the_server_listens_on_loopback_only() {
    let at = |listen: &str| {
        DashboardServer::bind(DashboardOptions {
            listen: listen.parse().unwrap(),
            token: None,
            connections_max: 1,
            log: None,
        })
    };
    let refused = at("0.0.0.0:0").err().unwrap();
    assert!(
        matches!(refused, Error::NoToken(_)) && refused.fix().unwrap().contains("--token-file")
    );
    let first = at("127.0.0.1:0").unwrap();
    let second = at(&first.address().to_string()).err().unwrap();
    assert!(second.is_taken() && second.fix().unwrap().contains("--http"));
}
