//! The answers of the API, and their bounded size.

use super::Served;
use crate::synthetic::{self, HOSTILE, STORE, SyntheticSource};
use std::collections::BTreeSet;

/// Encodes a part of a path or query.
fn encoded(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
}

#[test]
fn answers_do_not_grow_with_the_number_of_checkpoints() {
    let served = Served::at("127.0.0.1", None, SyntheticSource::new(20, 10_000));
    let store = format!("/api/v1/stores/{STORE}");
    for (path, bytes_max) in [
        ("/api/v1/vms".to_owned(), 40_000),
        ("/api/v1/stores".into(), 2_000),
        (format!("{store}/timeline"), 150_000),
        (format!("{store}/timeline?points=1000000"), 600_000),
        (format!("{store}/checkpoints"), 50_000),
        (format!("{store}/checkpoints?limit=1000000"), 450_000),
        (format!("{store}/growth"), 60_000),
        (format!("{store}/checkpoints/9999/heat?pieces=100000000"), 50_000),
        ("/metrics".into(), 60_000),
    ] {
        let answer = served.get(&path);
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        assert!(answer.body.len() < bytes_max, "{path}: {} bytes", answer.body.len());
    }
}

#[test]
fn a_timeline_has_every_checkpoint_once_and_every_long_pause() {
    let served = Served::at("127.0.0.1", None, SyntheticSource::new(20, 10_000));
    let vm = synthetic::name(17);
    for (range, points, shown) in [
        ("", 300, 500),
        ("&from=5000", 50, 250),
        ("&from=101&to=140", 300, 2),
        ("&from=20000", 10, 0),
    ] {
        let path = format!("/api/v1/stores/{STORE}/timeline?vm={vm}&points={points}{range}");
        let timeline = served.get(&path).json();
        let buckets = timeline["buckets"].as_array().unwrap();
        let sum =
            |field: &str| buckets.iter().map(|bucket| bucket[field].as_u64().unwrap()).sum::<u64>();
        assert_eq!(
            (timeline["total"].as_u64(), timeline["shown"].as_u64()),
            (Some(500), Some(shown)),
            "{range}"
        );
        assert!(
            buckets.len() <= points && sum("count") == shown && sum("dirty_pages") == shown * 1000,
            "{range}"
        );
        for pair in buckets.windows(2) {
            assert!(pair[0]["last_id"].as_u64() < pair[1]["first_id"].as_u64());
        }
        if range.is_empty() {
            // 997 * 1 = 20 * 49 + 17 is this VM's.
            assert!(
                buckets.iter().any(
                    |bucket| bucket["worst_id"] == 997 && bucket["pause"]["copy"] == 40_000_000
                )
            );
        }
    }
}

#[test]
fn pages_of_a_list_have_every_checkpoint_once() {
    let served = Served::on_loopback();
    let (mut before, mut found) = (String::new(), Vec::new());
    for _ in 0..10 {
        let page =
            served.get(&format!("/api/v1/stores/{STORE}/checkpoints?limit=7{before}")).json();
        found.extend(
            page["checkpoints"].as_array().unwrap().iter().map(|one| one["id"].as_u64().unwrap()),
        );
        let Some(next) = page["next_before"].as_u64() else { break };
        before = format!("&before={next}");
    }
    assert_eq!(found, (1..=20).rev().collect::<Vec<_>>());
    let hostile = format!("/api/v1/stores/{STORE}/checkpoints?vm={}", encoded(HOSTILE));
    let ids: Vec<u64> = served.get(&hostile).json()["checkpoints"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["id"].as_u64().unwrap())
        .collect();
    assert_eq!(ids, [18, 15, 12, 9, 6, 3]);
}

#[test]
fn invalid_requests_get_errors_as_json() {
    let served = Served::on_loopback();
    for (path, status) in [
        ("/api/v1/stores/other/timeline".to_owned(), 404),
        (format!("/api/v1/stores/{STORE}/checkpoints/21"), 404),
        (format!("/api/v1/stores/{STORE}/checkpoints/x"), 400),
        (format!("/api/v1/stores/{STORE}/checkpoints/-1/heat"), 400),
        (format!("/api/v1/stores/{STORE}/timeline?points=many"), 400),
        (format!("/api/v1/stores/{STORE}/checkpoints?limit=99999999999999999999999"), 400),
        ("/api/v2/vms".into(), 404),
        ("/../../etc/passwd".into(), 404),
    ] {
        let answer = served.get(&path);
        assert_eq!(
            (answer.status.as_u16(), answer.json()["error"].is_string()),
            (status, true),
            "{path}: {}",
            answer.body
        );
    }
}

#[test]
fn a_listener_first_gets_hello() {
    let answer = Served::on_loopback().get("/api/v1/events");
    assert_eq!(answer.headers["content-type"], "text/event-stream");
    assert_eq!(answer.body, "event: hello\ndata: {}\n\n");
}

/// Parses the text format as Prometheus does.
#[test]
fn metrics_are_well_formed_for_any_vm_name() {
    let text = Served::on_loopback().get("/metrics").body;
    let (mut typed, mut seen) = (BTreeSet::new(), BTreeSet::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(
                ["gauge", "counter"].contains(&kind) && typed.insert(name.to_owned()),
                "{line}"
            );
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            continue;
        }
        if line.starts_with("# HELP ") {
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        assert!(value.parse::<f64>().is_ok_and(f64::is_finite), "{line}");
        let (name, labels) = series.split_once('{').unwrap();
        assert!(
            typed.contains(name) && name.bytes().all(|c| c.is_ascii_lowercase() || c == b'_'),
            "{line}"
        );
        assert!(seen.insert(series.to_owned()), "twice: {line}");
        // Every value ends at its only quote that is not escaped.
        let plain = labels.replace("\\\\", "").replace("\\\"", "");
        assert_eq!(plain.matches('"').count() % 2, 0, "{line}");
        assert!(labels.ends_with("\"}"), "{line}");
    }
    let line = |name: &str, labels: &str, value: &str| {
        assert!(
            text.contains(&format!("{name}{{{labels}}} {value}\n")),
            "no {name} {labels} {value} in {text}"
        );
    };
    line("keyframe_vm_up", "vm=\"silent\"", "0");
    line("keyframe_vm_up", "vm=\"vm-1\"", "1");
    line("keyframe_checkpoints_sealed_total", "vm=\"vm-1\"", "500");
    line("keyframe_checkpoints_failed_total", "vm=\"vm-1\"", "1");
    line("keyframe_last_checkpoint_age_seconds", "vm=\"vm-1\"", "0.25");
    line(
        "keyframe_last_checkpoint_pause_phase_seconds",
        "vm=\"vm-1\",phase=\"device_state\"",
        "0.00015",
    );
    line("keyframe_last_checkpoint_pages", "vm=\"vm-1\",kind=\"deduplicated\"", "250");
    assert!(
        !text.contains("keyframe_checkpoints_sealed_total{vm=\"silent\"}"),
        "an unknown number is left out"
    );
    assert!(
        text.contains(r#"{vm="<img src=x onerror=\"window.hacked=1\">\"\\\n'&amp;"}"#),
        "{text}"
    );
}

#[test]
fn a_screen_is_a_picture_or_an_error() {
    let served = Served::on_loopback();
    let screen = |rest: &str| served.get(&format!("/api/v1/stores/{STORE}/checkpoints/{rest}"));
    let shown = screen("2/screen");
    assert_eq!(
        (shown.status.as_u16(), &shown.headers["content-type"]),
        (200, &"image/png".parse().unwrap())
    );
    assert_eq!(shown.bytes, synthetic::PNG);
    let refused =
        [("3/screen", 404), ("4/screen", 422), ("2/screen?member=web", 400), ("21/screen", 404)];
    for (path, status) in refused {
        let answer = screen(path);
        assert_eq!(answer.status.as_u16(), status, "{path}");
        assert!(answer.json()["error"].is_string(), "{path}: {}", answer.body);
    }
}
