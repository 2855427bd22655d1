//! The line of a VM whose network goes through a gate: what the guest sends takes a way around,
//! through two sockets of ours.
//!
//! ```text
//!   user's   -netdev tap,id=n,...                       -device virtio-net-pci,netdev=n
//!   run      the same, and for each netdev
//!            -chardev socket,id=keyframe-net-0-out,path=F/net-0-out.sock      where the guest's frames go
//!            -chardev socket,id=keyframe-net-0-in,path=F/net-0-in.sock        where they come back
//!            -object filter-redirector,netdev=n,queue=rx,indev=keyframe-net-0-in
//!            -object filter-redirector,netdev=n,queue=rx,outdev=keyframe-net-0-out
//! ```
//!
//! `queue=rx` is what the netdev receives, which is what the guest sends; filters there take their
//! turns from the last one to the first, so that what comes back does not go around again. What is
//! sent to the guest takes no way around.
//!
//! Invariants: the machine is the user's; a line with a NIC whose frames could leave another way is
//! refused.
//!
//! Left out: who listens at the sockets (`keyframe_net::GateRemote`).

use crate::options::{self, Argument, escape, is_on, properties, value_of};
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// The sockets of one NIC, which somebody has to listen at before QEMU starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicSockets {
    /// Where the guest's frames go.
    pub out: PathBuf,
    /// Where they come back.
    pub back: PathBuf,
}

/// What is added to a line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetGate {
    /// The words, behind all others.
    pub words: Vec<String>,
    /// The sockets that they name.
    pub nics: Vec<NicSockets>,
}

/// What is to be added to the line `words` (without the binary) for a gate with its sockets in
/// `folder`.
///
/// Errors: [`Error::CommandLine`] where frames of the guest could leave another way.
pub fn net_gate(words: &[String], folder: &Path) -> Result<NetGate> {
    let mut gate = NetGate::default();
    let arguments = options::parse(words)?;
    let mut says_network = false;
    for argument in &arguments {
        says_network |= matches!(argument.name(), "netdev" | "nic" | "net" | "nodefaults");
        let Some(id) = netdev(argument)? else { continue };
        gate.add(&id, folder);
    }
    if !says_network {
        return Err(refused(
            "-net",
            "the line names no network, so that QEMU adds one of its own, whose frames would leave before they may",
            "name it: -netdev user,id=n0 -device e1000,netdev=n0; or leave the VM without: -nic none",
        ));
    }
    Ok(gate)
}

impl NetGate {
    fn add(&mut self, netdev: &str, folder: &Path) {
        let number = self.nics.len();
        let sockets = NicSockets {
            out: folder.join(format!("net-{number}-out.sock")),
            back: folder.join(format!("net-{number}-in.sock")),
        };
        let chardev = |way: &str, path: &Path| {
            let path = escape(&path.to_string_lossy());
            ["-chardev".into(), format!("socket,id=keyframe-net-{number}-{way},path={path}")]
        };
        let filter = |way: &str, end: &str| {
            let (id, netdev) = (format!("keyframe-gate-{number}-{way}"), escape(netdev));
            let device = format!("{end}=keyframe-net-{number}-{way}");
            [
                "-object".into(),
                format!("filter-redirector,id={id},netdev={netdev},queue=rx,{device}"),
            ]
        };
        self.words.extend(chardev("out", &sockets.out));
        self.words.extend(chardev("in", &sockets.back));
        self.words.extend(filter("in", "indev"));
        self.words.extend(filter("out", "outdev"));
        self.nics.push(sockets);
    }
}

/// The id of the netdev that `argument` makes, if it makes one.
fn netdev(argument: &Argument) -> Result<Option<String>> {
    if !matches!(argument.name(), "netdev" | "nic" | "net") {
        return Ok(None);
    }
    let display = argument.display();
    let keys = properties(argument.value(), "type").unwrap_or_default();
    let kind = value_of(&keys, "type").unwrap_or_default();
    if matches!(kind, "none" | "nic") {
        return Ok(None);
    }
    if kind.starts_with("vhost-") {
        let reason = "another process has the guest's packets, so that they cannot be held";
        return Err(refused(&display, reason, "use -netdev tap or another netdev of QEMU's own"));
    }
    if is_on(&keys, "vhost") {
        let reason = "the kernel has the guest's packets (vhost), so that they cannot be held";
        return Err(refused(&display, reason, "leave vhost=on out"));
    }
    match value_of(&keys, "id") {
        Some(id) => Ok(Some(id.into())),
        None => Err(refused(
            &display,
            "it has no id by which its packets can be held",
            "give it one: -nic ...,id=n0, or -netdev ...,id=n0 with -device ...,netdev=n0",
        )),
    }
}

fn refused(argument: &str, reason: &str, fix: &str) -> Error {
    Error::CommandLine { argument: argument.into(), reason: reason.into(), fix: fix.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(line: &str) -> Result<NetGate> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        net_gate(&words, Path::new("/run/a,b"))
    }

    #[test]
    fn each_netdev_gets_a_way_around() {
        let made =
            gate("-netdev tap,id=n0,ifname=t -device e1000,netdev=n0 -nic user,id=n1,model=e1000")
                .unwrap();
        assert_eq!(made.nics.len(), 2);
        assert_eq!(made.nics[1].out, Path::new("/run/a,b/net-1-out.sock"));
        let text = made.words.join(" ");
        assert!(text.contains("path=/run/a,,b/net-0-out.sock"), "{text}");
        assert!(text.contains(
            "filter-redirector,id=keyframe-gate-1-out,netdev=n1,queue=rx,outdev=keyframe-net-1-out"
        ));
        // What comes back enters before the place where frames leave.
        assert!(
            text.find("keyframe-gate-0-in").unwrap() < text.find("keyframe-gate-0-out").unwrap()
        );
        let json = r#"-netdev {"type":"tap","id":"j"}"#;
        assert_eq!(gate(json).unwrap().nics.len(), 1);
    }

    #[test]
    fn a_line_without_a_network_of_its_own_is_told_to_say_so() {
        assert_eq!(gate("-nic none -m 64").unwrap(), NetGate::default());
        assert_eq!(gate("-nodefaults -m 64").unwrap(), NetGate::default());
        assert!(gate("-m 64").unwrap_err().fix().is_some_and(|fix| fix.contains("-nic none")));
    }

    #[test]
    fn what_would_leave_another_way_is_refused() {
        for line in [
            "-netdev tap,id=a,vhost=on",
            "-netdev vhost-user,id=a,chardev=c",
            "-nic user,model=e1000",
            "-net user",
        ] {
            let error = gate(line).unwrap_err();
            assert!(
                error.fix().is_some() && error.to_string().contains(&line[1..4]),
                "{line}: {error}"
            );
        }
    }
}
