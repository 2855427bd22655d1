//! Addresses in values of options: forwarded ports, displays, hosts with ports.

use crate::options::{self, escape, value_of};
use serde_json::Value;

/// The port of QEMU's gdbstub with `-s`.
pub(super) const GDB_PORT: u16 = 1234;
/// The port of display 0 of VNC.
const VNC_PORT: u16 = 5900;

/// A port of the host that leads to the guest.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Forward {
    pub host: String,
    pub port: u16,
    pub udp: bool,
}

/// The forwarded ports of a user network. Leaves out those that this function cannot read.
pub(super) fn forwards(keys: &[(String, String)]) -> Vec<Forward> {
    let rules = keys.iter().filter(|(key, _)| key == "hostfwd");
    rules.flat_map(|(_, rule)| texts(rule)).filter_map(|rule| forward(&rule)).collect()
}

/// The rules of a value: itself, or the strings of a JSON array.
fn texts(value: &str) -> Vec<String> {
    let Ok(Value::Array(all)) = serde_json::from_str(value) else { return vec![value.to_owned()] };
    let text = |rule: Value| match rule {
        Value::String(text) => Some(text),
        Value::Object(rule) => rule.get("str").and_then(Value::as_str).map(str::to_owned),
        _ => None,
    };
    all.into_iter().filter_map(text).collect()
}

/// Reads `[tcp|udp]:[HOST]:PORT-...`.
fn forward(rule: &str) -> Option<Forward> {
    let (protocol, rest) = rule.split_once(':')?;
    let udp = protocol == "udp";
    if !udp && !matches!(protocol, "tcp" | "") {
        return None;
    }
    let (host, after) = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once("]:")?,
        None => rest.split_once(':')?,
    };
    let port = after.split('-').next()?.parse().ok()?;
    Some(Forward { host: host.into(), port, udp })
}

/// Where a VNC server listens.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DisplayAddress {
    /// At a unix socket; `rest` is the text after the path.
    Socket { path: String, rest: String },
    /// At a port.
    Port { host: String, port: u16 },
    /// Nowhere, or QEMU looks for a free port.
    Other,
}

impl DisplayAddress {
    /// Reads the value of `-vnc`.
    pub fn parse(value: &str) -> Self {
        let keys = options::keys(value, "vnc");
        let Some(("vnc", address)) = keys.first().map(|(key, value)| (key.as_str(), value)) else {
            return Self::Other;
        };
        if let Some(path) = address.strip_prefix("unix:") {
            let rest = value.get(escape(address).len()..).unwrap_or_default();
            return Self::Socket { path: path.into(), rest: rest.into() };
        }
        let searches = value_of(&keys, "to").is_some() || options::is_on(&keys, "reverse");
        let display = address.rsplit_once(':').filter(|_| !searches);
        let found = display.and_then(|(host, number)| {
            let port = number.parse::<u16>().ok()?.checked_add(VNC_PORT)?;
            Some((bare(host).to_owned(), port))
        });
        found.map_or(Self::Other, |(host, port)| Self::Port { host, port })
    }
}

/// Host and port of `HOST:PORT`, of which the host may be missing.
pub(super) fn host_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    Some((bare(host), port.parse().ok()?))
}

/// A host without the brackets around an IPv6 address.
fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_ports_are_read_in_each_form() {
        let of = |value: &str| forwards(&options::keys(value, "type"));
        let tcp = |host: &str, port| Forward { host: host.into(), port, udp: false };
        assert_eq!(
            of("user,id=n,hostfwd=tcp:127.0.0.1:5555-:22,hostfwd=:[::1]:80-10.0.2.15:80"),
            [tcp("127.0.0.1", 5555), tcp("::1", 80)]
        );
        assert_eq!(
            of("user,hostfwd=udp::53-:53"),
            [Forward { host: String::new(), port: 53, udp: true }]
        );
        assert_eq!(of("user,hostfwd=unix:/a-:22,hostfwd=tcp"), []);
        let json = r#"{"type":"user","id":"n","hostfwd":[{"str":"tcp::2222-:22"}]}"#;
        assert_eq!(forwards(&options::properties(json, "type").unwrap()), [tcp("", 2222)]);
    }

    #[test]
    fn displays_are_at_a_port_or_a_socket() {
        let port = |host: &str, port| DisplayAddress::Port { host: host.into(), port };
        assert_eq!(DisplayAddress::parse(":1,password=on"), port("", 5901));
        assert_eq!(DisplayAddress::parse("[::1]:0"), port("::1", 5900));
        assert_eq!(
            DisplayAddress::parse("unix:/a,,b,share=ignore"),
            DisplayAddress::Socket { path: "/a,b".into(), rest: ",share=ignore".into() }
        );
        for other in ["none", ":0,to=9", "host:1,reverse=on", ":70000", "", "to=3"] {
            assert_eq!(DisplayAddress::parse(other), DisplayAddress::Other, "{other}");
        }
    }
}
