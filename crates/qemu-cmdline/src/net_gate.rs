//! Adds a packet gate to a command line: packets that the guest sends pass through two sockets of
//! Keyframe.
//!
//! ```text
//!   user's   -netdev tap,id=n,...                       -device virtio-net-pci,netdev=n
//!   run      the same, and for each netdev
//!            -chardev socket,id=keyframe-net-0-out,path=F/net-0-out.sock   guest's frames leave
//!            -chardev socket,id=keyframe-net-0-in,path=F/net-0-in.sock     and come back
//!            -object filter-redirector,netdev=n,queue=rx,indev=keyframe-net-0-in
//!            -object filter-redirector,netdev=n,queue=rx,outdev=keyframe-net-0-out
//! ```
//!
//! `queue=rx` are the frames that the netdev receives, which are those that the guest sends.
//! Filters there run from the last one to the first, so that a frame that comes back does not leave
//! again. Frames to the guest do not pass through the gate.
//!
//! Invariants: the machine is the user's; a line with a NIC whose frames could leave another way is
//! refused.
//!
//! Not handled here: the process at the other end of the sockets (`keyframe_net::GateRemote`).

use crate::options::{self, Argument, escape, is_on, properties, value_of};
use crate::{CommandLineError, Result};
use std::path::{Path, PathBuf};

/// The paths of the sockets of one NIC. The gate must listen at both before QEMU starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicSockets {
    /// The socket to which QEMU sends the guest's frames.
    pub out: PathBuf,
    /// The socket from which QEMU receives the released frames.
    pub back: PathBuf,
}

/// The words that put a gate before a VM's network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetGate {
    /// The words to append to the command line.
    pub words: Vec<String>,
    /// The sockets that the words name, two for each NIC.
    pub nics: Vec<NicSockets>,
}

/// Makes the words for a gate with its sockets in the directory `folder` before the network of the
/// command line `words`, without the binary.
///
/// Error: [`CommandLineError::Argument`] if frames of the guest could leave another way.
pub fn net_gate(words: &[String], folder: &Path) -> Result<NetGate> {
    let mut gate = NetGate::default();
    let arguments = options::parse(words)?;
    let mut names_network = false;
    for argument in &arguments {
        names_network |= matches!(argument.name(), "netdev" | "nic" | "net" | "nodefaults");
        let Some(id) = netdev(argument)? else { continue };
        gate.add(&id, folder);
    }
    if !names_network {
        return Err(refused(
            "-net",
            "the command line names no network, so QEMU adds a default one, whose frames do not \
             pass the gate",
            "name it (-netdev user,id=n0 -device e1000,netdev=n0), or give the VM no network: -nic \
             none",
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

/// Id of the netdev that `argument` makes, if it makes one.
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
        let reason = "another process sends the guest's packets, so Keyframe cannot hold them";
        return Err(refused(
            &display,
            reason,
            "use -netdev tap or another netdev that QEMU itself drives",
        ));
    }
    if is_on(&keys, "vhost") {
        let reason = "the kernel sends the guest's packets (vhost), so Keyframe cannot hold them";
        return Err(refused(&display, reason, "remove vhost=on"));
    }
    match value_of(&keys, "id") {
        Some(id) => Ok(Some(id.into())),
        None => Err(refused(
            &display,
            "it has no id, which the gate needs",
            "give it one: -nic ...,id=n0, or -netdev ...,id=n0 with -device ...,netdev=n0",
        )),
    }
}

fn refused(argument: &str, reason: &str, fix: &str) -> CommandLineError {
    CommandLineError::argument(argument, reason, fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(line: &str) -> Result<NetGate> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        net_gate(&words, Path::new("/run/a,b"))
    }

    #[test]
    fn each_netdev_gets_a_pair_of_sockets() {
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
        // A frame that comes back enters after the filter through which frames leave.
        assert!(
            text.find("keyframe-gate-0-in").unwrap() < text.find("keyframe-gate-0-out").unwrap()
        );
        let json = r#"-netdev {"type":"tap","id":"j"}"#;
        assert_eq!(gate(json).unwrap().nics.len(), 1);
    }

    #[test]
    fn a_line_without_a_network_is_refused() {
        assert_eq!(gate("-nic none -m 64").unwrap(), NetGate::default());
        assert_eq!(gate("-nodefaults -m 64").unwrap(), NetGate::default());
        assert!(gate("-m 64").unwrap_err().fix().is_some_and(|fix| fix.contains("-nic none")));
    }

    #[test]
    fn networks_that_bypass_the_gate_are_refused() {
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
