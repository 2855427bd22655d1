//! The names that libvirt's users know disks by.
//!
//! ```text
//!   <target dev='vda' .../>  <alias name='virtio-disk0'/>   ──▶ target vda is QEMU's device virtio-disk0
//! ```

use crate::qmp::domain_xml;
use crate::vm::Origin;
use crate::{Result, Vm};

/// A disk of a libvirt domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibvirtDisk {
    /// The name that the domain's description gives it (`vda`).
    pub target: String,
    /// The id of QEMU's device.
    pub device: String,
}

impl Vm {
    /// Returns the disks of the VM's domain, if libvirt runs the VM; otherwise none. Error: libvirt
    /// does not answer.
    pub fn libvirt_disks(&self) -> Result<Vec<LibvirtDisk>> {
        match self.origin_detail() {
            Origin::Libvirt { domain, uri } => Ok(disks_of(&domain_xml(domain, uri.as_deref())?)),
            _ => Ok(Vec::new()),
        }
    }
}

/// The disks in a domain's description.
fn disks_of(xml: &str) -> Vec<LibvirtDisk> {
    // Metadata of other programs stands before the devices.
    let Some((_, devices)) = xml.split_once("<devices>") else { return Vec::new() };
    let disks = devices.split("<disk ").skip(1).filter_map(|rest| rest.split("</disk>").next());
    let disk = |text: &str| {
        Some(LibvirtDisk {
            target: attribute(text, "target", "dev")?,
            device: attribute(text, "alias", "name")?,
        })
    };
    disks.filter_map(disk).collect()
}

/// The value of an attribute of the first element `element` in `xml`.
fn attribute(xml: &str, element: &str, name: &str) -> Option<String> {
    let tag = xml.split(&format!("<{element} ")).nth(1)?.split('>').next()?;
    let value = format!(" {tag}").split(&format!(" {name}=")).nth(1)?.to_owned();
    let quote = value.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    value.split(quote).nth(1).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_and_aliases_of_disks_are_found() {
        let xml = "<domain><metadata><disk ><target dev='no'/><alias name='no'/></disk></metadata>
            <devices><disk type='file' device='disk'><driver name='qemu'/><source file='/a b'/>
              <backingStore/><target dev='vda' bus='virtio'/><alias name='virtio-disk0'/></disk>
            <disk type='file'><target bus=\"scsi\" dev=\"sda\"/><alias name=\"ua-x\"/></disk>
            <disk type='file'><target dev='vdz'/></disk>
            <interface><target dev='vnet0'/><alias name='net0'/></interface></devices></domain>";
        let disk = |target: &str, device: &str| LibvirtDisk {
            target: target.into(),
            device: device.into(),
        };
        assert_eq!(disks_of(xml), [disk("vda", "virtio-disk0"), disk("sda", "ua-x")]);
        for text in ["", "<devices>", "<devices><disk <target dev", "<devices><disk <target dev='"]
        {
            assert_eq!(disks_of(text), []);
        }
    }
}
