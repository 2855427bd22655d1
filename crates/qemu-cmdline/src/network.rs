//! Reads a command line's networks: which of them lead to a virtual LAN whose packets a checkpoint
//! can hold.

use crate::options::{self, Argument, escape, is_on, value_of};
use crate::{CommandLineError, Result};
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

/// Returns the user networks of a command line, in the order in which QEMU makes them: the ids of
/// `-netdev`, and `-nic 0`, `-nic 1` and so on.
pub fn user_networks(line: &[Argument]) -> Vec<String> {
    let is_json = |argument: &&Argument| argument.value().trim_start().starts_with('{');
    let named = |name: &'static str| line.iter().filter(move |a| a.name() == name);
    let json = named("netdev").filter(is_json);
    let plain = named("netdev").filter(|argument| !is_json(argument));
    let of_user = |argument: &Argument| keys_of_kind(argument, "user");
    let ids = json.chain(plain).filter_map(of_user).map(|keys| id_of(&keys));
    let cards = named("nic").enumerate();
    let cards = cards.filter_map(|(at, card)| of_user(card).map(|_| format!("-nic {at}")));
    ids.chain(cards).collect()
}

/// Returns, for each user network of the command line `kept`, its number in the line `now`; an
/// inner `None` stands for one that `now` lacks. Returns `None` if both lines have the same ones.
pub fn moved_user_networks(kept: &[Argument], now: &[Argument]) -> Option<Vec<Option<u32>>> {
    let now = user_networks(now);
    let number = |name: &String| now.iter().position(|other| other == name).map(|n| n as u32);
    let moved: Vec<_> = user_networks(kept).iter().map(number).collect();
    let same = moved.iter().enumerate().all(|(at, number)| *number == Some(at as u32));
    (!same).then_some(moved)
}

/// Start of the value that stands for the descriptors of an isolated tap.
const ISOLATED: &str = "/keyframe-tap-";

/// The backend `id`, on a tap that leads nowhere, with `queues` queues. [`isolated_tap`] reads it.
pub(crate) fn isolated_netdev(id: &str, queues: usize) -> Argument {
    Argument::Option("netdev".into(), format!("tap,id={},fds={ISOLATED}{queues}", escape(id)))
}

/// Returns the number of queues of an isolated tap, if `value` is the value of such a `-netdev`.
pub fn isolated_tap(value: &str) -> Option<usize> {
    value.split_once(&format!(",fds={ISOLATED}"))?.1.parse().ok()
}

/// Returns the value of a `-netdev` of an isolated tap, whose queues are the descriptors `numbers`.
pub fn with_tap_descriptors(value: &str, numbers: &[i32]) -> String {
    let (start, _) = value.split_once(",fds=").unwrap_or((value, ""));
    match numbers {
        [one] => format!("{start},fd={one}"),
        many => {
            let many: Vec<_> = many.iter().map(i32::to_string).collect();
            format!("{start},fds={}", many.join(":"))
        }
    }
}

/// The number of queues of the tap of `keys`.
pub(crate) fn tap_queues(keys: &[(String, String)]) -> usize {
    let descriptors = value_of(keys, "fds").map(|fds| fds.split(':').count());
    let named = value_of(keys, "queues").and_then(|queues| queues.parse().ok());
    descriptors.or(named).unwrap_or(1).clamp(1, 64)
}

/// True if the tap of `keys` offers a guest's card offloads.
pub(crate) fn offers_offloads(keys: &[(String, String)]) -> bool {
    value_of(keys, "type") == Some("tap") && value_of(keys, "vnet_hdr") != Some("off")
}

/// Refuses a network of `added` for a virtio card of `kept` that was connected to a tap: the guest
/// has agreed with the tap on offloads, which QEMU's other networks do not have.
///
/// Error: [`CommandLineError::Argument`].
pub(crate) fn check_offloads(kept: &[Argument], added: &[Argument]) -> Result<()> {
    const WITH_OFFLOADS: &[&str] = &["tap", "bridge", "netmap", "vhost-user", "vhost-vdpa"];
    for new in added.iter().filter(|argument| argument.name() == "netdev") {
        let keys = options::properties(new.value(), "type").unwrap_or_default();
        let (id, kind) = (id_of(&keys), value_of(&keys, "type").unwrap_or_default());
        let was = kept.iter().filter(|argument| argument.name() == "netdev");
        let was = was.filter_map(|argument| options::properties(argument.value(), "type"));
        let had = was.filter(|keys| id_of(keys) == id).any(|keys| offers_offloads(&keys));
        let on_virtio = options::devices(kept).any(|device| {
            value_of(&device, "netdev") == Some(&id)
                && value_of(&device, "driver").is_some_and(|d| d.starts_with("virtio-net"))
        });
        if had && on_virtio && !WITH_OFFLOADS.contains(&kind) {
            return Err(CommandLineError::argument(
                new.display(),
                format!(
                    "the guest's card {id} was connected to a tap, and has agreed with it on \
                     offloads that a network of type {kind} does not have"
                ),
                format!(
                    "give it a tap: `ip tuntap add dev tap9 mode tap`, and after -- the words \
                     `-netdev tap,id={id},ifname=tap9,script=no,downscript=no`; to choose freely, \
                     start the VM with `-netdev tap,...,vnet_hdr=off`"
                ),
            ));
        }
    }
    Ok(())
}

fn keys_of_kind(argument: &Argument, kind: &str) -> Option<Vec<(String, String)>> {
    let keys = options::properties(argument.value(), "type")?;
    (value_of(&keys, "type") == Some(kind)).then_some(keys)
}

fn id_of(keys: &[(String, String)]) -> String {
    value_of(keys, "id").unwrap_or_default().to_owned()
}

/// Returns `words` with each link to socket `from` leading to socket `to` instead. Relative paths
/// in `words` start from `directory`.
pub fn replace_lan(words: &[String], directory: &Path, from: &Path, to: &str) -> Vec<String> {
    let key = |path: &str| format!("addr.path={}", escape(path));
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
    fn user_networks_keep_their_state_by_name() {
        let line = |text: &str| {
            options::parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>()).unwrap()
        };
        let kept =
            line(r#"-netdev user,id=a -nic user -netdev {"type":"user","id":"b"} -nic none"#);
        assert_eq!(user_networks(&kept), ["b", "a", "-nic 0"]);
        assert_eq!(moved_user_networks(&kept, &kept), None);
        let now = line("-nic user -netdev tap,id=b -netdev user,id=a");
        assert_eq!(moved_user_networks(&kept, &now), Some(vec![None, Some(0), Some(1)]));
    }

    #[test]
    fn a_card_keeps_the_offloads_of_its_tap() {
        let line = |text: &str| {
            options::parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>()).unwrap()
        };
        let kept = line("-netdev tap,id=n -device virtio-net-pci,netdev=n");
        let error = check_offloads(&kept, &line("-netdev user,id=n")).unwrap_err();
        assert!(error.fix().unwrap().contains("-netdev tap,id=n"), "{error}");
        check_offloads(&kept, &line("-netdev tap,id=n,ifname=x")).unwrap();
        check_offloads(&kept, &line("-netdev user,id=m")).unwrap();
        for other in [
            "-netdev tap,id=n -device e1000,netdev=n",
            "-netdev tap,id=n,vnet_hdr=off -device virtio-net-pci,netdev=n",
            "-netdev user,id=n -device virtio-net-pci,netdev=n",
        ] {
            check_offloads(&line(other), &line("-netdev user,id=n")).unwrap();
        }
    }

    #[test]
    fn an_isolated_tap_gets_its_descriptors() {
        let one = isolated_netdev("a,b", 1);
        assert_eq!(isolated_tap(one.value()), Some(1));
        assert_eq!(with_tap_descriptors(one.value(), &[7]), "tap,id=a,,b,fd=7");
        let two = isolated_netdev("n", 2);
        assert_eq!(isolated_tap(two.value()), Some(2));
        assert_eq!(with_tap_descriptors(two.value(), &[7, 8]), "tap,id=n,fds=7:8");
        assert_eq!(isolated_tap("tap,id=n,fds=7:8"), None);
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
