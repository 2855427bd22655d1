//! Reads a command line's networks: which of them lead to a virtual LAN whose packets a checkpoint
//! can hold.

use crate::options::{self, Argument, is_on, value_of};
use serde_json::Value;
use std::path::Path;

/// A network backend of the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkLink {
    /// QEMU's name of the backend (`user`, `tap`, `stream`).
    pub kind: String,
    /// The whole option, as one line of text.
    pub option: String,
    /// The unix socket that the backend connects to as a client; `None` if it does not connect to
    /// one. On this socket each frame follows its length.
    pub lan: Option<String>,
}

impl NetworkLink {
    /// Returns true if the link may lead to another VM of a group. QEMU's user network does not.
    pub fn may_meet_others(&self) -> bool {
        !matches!(self.kind.as_str(), "none" | "user" | "nic" | "hubport")
    }
}

/// Returns the network links of the machine that `words`, without the binary, describe.
pub fn network_links(words: &[String]) -> Vec<NetworkLink> {
    options::parse(words).unwrap_or_default().iter().filter_map(link).collect()
}

/// Returns the options that keep packets inside QEMU on their way: filters that hold or redirect,
/// and hubs.
pub fn packet_holders(words: &[String]) -> Vec<String> {
    let is_holder = |argument: &&Argument| {
        let key = if argument.name() == "object" { "qom-type" } else { "type" };
        let kind = options::properties(argument.value(), key)
            .and_then(|keys| value_of(&keys, key).map(str::to_owned));
        let Some(kind) = kind else { return false };
        match argument.name() {
            // filter-dump only writes the passing packets to a file.
            "object" => {
                kind.starts_with("filter-") && kind != "filter-dump" || kind == "colo-compare"
            }
            "netdev" | "net" => kind == "hubport",
            _ => false,
        }
    };
    options::parse(words)
        .unwrap_or_default()
        .iter()
        .filter(is_holder)
        .map(Argument::display)
        .collect()
}

fn link(argument: &Argument) -> Option<NetworkLink> {
    if !matches!(argument.name(), "netdev" | "nic" | "net") {
        return None;
    }
    let keys = options::properties(argument.value(), "type")?;
    let kind = value_of(&keys, "type")?.to_owned();
    let nested = |name: &str| {
        // In JSON the address is an object of its own.
        let address: Value = serde_json::from_str(value_of(&keys, "addr")?).ok()?;
        address.get(name)?.as_str().map(str::to_owned)
    };
    let address = |name: &str| {
        value_of(&keys, &format!("addr.{name}")).map(str::to_owned).or_else(|| nested(name))
    };
    let is_client = !is_on(&keys, "server");
    let leads_to_socket =
        kind == "stream" && is_client && address("type").as_deref() == Some("unix");
    let lan = if leads_to_socket { address("path") } else { None };
    Some(NetworkLink { kind, option: argument.display(), lan })
}

/// Returns `words` with each link to socket `from` leading to socket `to` instead. Relative paths
/// in `words` start from `directory`.
pub fn replace_lan(words: &[String], directory: &Path, from: &Path, to: &str) -> Vec<String> {
    let key = |path: &str| format!("addr.path={}", options::escape(path));
    let json = |path: &str| Value::from(path).to_string();
    let lan_of = |word: &String| network_links(&["-netdev".to_owned(), word.clone()]).pop()?.lan;
    let changed = |word: &String| match lan_of(word).filter(|lan| directory.join(lan) == from) {
        Some(lan) if word.starts_with('{') => word.replace(&json(&lan), &json(to)),
        Some(lan) => word.replace(&key(&lan), &key(to)),
        None => word.clone(),
    };
    words.iter().map(changed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &[&str]) -> Vec<String> {
        line.iter().map(|w| (*w).to_owned()).collect()
    }

    #[test]
    fn only_clients_of_unix_sockets_lead_to_a_lan() {
        let line = words(&[
            "-netdev",
            "stream,id=a,server=off,addr.type=unix,addr.path=/run/lan,,1.sock",
            "-netdev",
            r#"{"type": "stream", "id": "b", "server": false, "addr": {"type": "unix", "path": "/run/lan2"}}"#,
            "-netdev",
            "stream,id=c,server=on,addr.type=unix,addr.path=/run/own",
            "-netdev",
            "stream,id=d,addr.type=inet,addr.host=h,addr.port=1",
            "-nic",
            "user,model=e1000",
            "-netdev",
            "tap,id=t",
            "-device",
            "virtio-net-pci,netdev=a",
        ]);
        let found = network_links(&line);
        let lans: Vec<_> = found.iter().map(|l| l.lan.as_deref()).collect();
        assert_eq!(lans, [Some("/run/lan,1.sock"), Some("/run/lan2"), None, None, None, None]);
        let meets: Vec<_> = found.iter().map(NetworkLink::may_meet_others).collect();
        assert_eq!(meets, [true, true, true, true, false, true]);
    }

    #[test]
    fn filters_and_hubs_are_found() {
        let line = words(&[
            "-object",
            "filter-buffer,id=f,netdev=a,interval=1000",
            "-object",
            r#"{"qom-type":"filter-redirector","id":"r","netdev":"a"}"#,
            "-object",
            "filter-dump,id=d,netdev=a,file=x",
            "-object",
            "memory-backend-ram,id=m,size=1G",
            "-netdev",
            "hubport,id=h,hubid=0",
            "-netdev",
            "user,id=u",
        ]);
        let found = packet_holders(&line);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].contains("filter-buffer") && found[2].contains("hubport"), "{found:?}");
    }

    #[test]
    fn a_lan_is_replaced_where_a_link_leads_to_it_and_nowhere_else() {
        let line = words(&[
            "-name",
            "/run/lan",
            "-netdev",
            "stream,id=a,server=off,addr.type=unix,addr.path=lan",
            "-netdev",
            r#"{"type":"stream","id":"b","server":false,"addr":{"type":"unix","path":"/run/lan"}}"#,
            "-netdev",
            "stream,id=c,server=off,addr.type=unix,addr.path=/run/lan2",
        ]);
        let changed = replace_lan(&line, Path::new("/run"), Path::new("/run/lan"), "/tmp/x,y");
        let lans: Vec<_> = network_links(&changed).into_iter().map(|l| l.lan.unwrap()).collect();
        assert_eq!(lans, ["/tmp/x,y", "/tmp/x,y", "/run/lan2"]);
        assert_eq!((&changed[0], &changed[1]), (&line[0], &line[1]));
    }
}
