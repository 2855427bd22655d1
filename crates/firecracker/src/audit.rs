//! What prevents exact checkpoints of a VM.
//!
//! | device | why |
//! |---|---|
//! | vsock | Firecracker closes the guest's connections at each save |
//! | vhost-user drive | another process writes to RAM, which is not tracked |
//! | balloon | it discards RAM unseen |
//! | `Async` engine of a drive | the kernel carries out requests in a pause |
//! | huge pages | a page of 4 KiB cannot be write-protected |
//!
//! Network cards and rate limiters are admitted: in a pause they handle neither packets nor timers
//! ([`event_loop`](crate::event_loop)).

use crate::config::VmConfig;
use keyframe_vmm::{AuditFinding, Severity};

/// The series of Firecracker that Keyframe is tested with.
pub const TESTED: [&str; 1] = ["1.12."];

/// Returns everything about the VM that prevents exact checkpoints, or may do so. `version` is that
/// of its Firecracker.
pub fn audit(config: &VmConfig, version: &str) -> Vec<AuditFinding> {
    let mut findings = Vec::new();
    let mut refuse = |subject: String, reason: &str, fix: &str| {
        findings.push(AuditFinding {
            subject,
            reason: reason.into(),
            fix: fix.into(),
            severity: Severity::Refused,
        });
    };
    for section in &config.unknown {
        refuse(
            format!("the section {section} of the configuration"),
            "Keyframe does not know it; a device of it may write to RAM unseen",
            "start the VM without it",
        );
    }
    if config.vsock.is_some() {
        refuse(
            "the vsock device".into(),
            "Firecracker closes the guest's connections at each save of its devices",
            "start the VM without it",
        );
    }
    if config.balloon.is_some() {
        refuse("the balloon".into(), "it discards RAM unseen", "start the VM without it");
    }
    if config.machine.huge_pages.as_deref().is_some_and(|size| size != "None") {
        refuse(
            "huge pages".into(),
            "a page of 4 KiB in them cannot be write-protected",
            "start the VM with huge_pages: None",
        );
    }
    for drive in &config.drives {
        let subject = format!("drive {}", drive.drive_id);
        if drive.socket.is_some() || drive.path_on_host.is_none() {
            refuse(
                subject,
                "another process (vhost-user) writes to RAM, and its writes are not tracked",
                "give the drive a file: path_on_host",
            );
        } else if drive.io_engine.as_deref() == Some("Async") {
            refuse(
                subject,
                "the kernel carries out requests of the Async engine in a pause",
                "give the drive the engine Sync",
            );
        }
    }
    findings.extend(warnings(config, version));
    findings
}

/// What may prevent exact checkpoints, or restores.
fn warnings(config: &VmConfig, version: &str) -> Vec<AuditFinding> {
    let mut findings = Vec::new();
    if config.mmds.is_some() {
        findings.push(AuditFinding {
            subject: "the metadata service (MMDS)".into(),
            reason: "Firecracker does not save its contents: those of a restored VM are empty"
                .into(),
            fix: "fill it again after a restore (PUT /mmds)".into(),
            severity: Severity::Warning,
        });
    }
    if !TESTED.iter().any(|series| version.starts_with(series)) {
        findings.push(AuditFinding {
            subject: format!("Firecracker {version}"),
            reason: format!(
                "Keyframe is tested with the series {}",
                TESTED.map(|series| series.trim_end_matches('.')).join(", ")
            ),
            fix: "try a restore before you rely on its checkpoints".into(),
            severity: Severity::Warning,
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn refused(section: &str, value: &Value) -> Vec<String> {
        let config = VmConfig::of(&json!({ section: value })).unwrap();
        let found = audit(&config, "1.12.1").into_iter();
        found.filter(|f| f.severity == Severity::Refused).map(|f| f.subject).collect()
    }

    #[test]
    fn devices_that_cannot_be_exact_are_refused() {
        assert_eq!(
            refused("vsock", &json!({ "guest_cid": 3, "uds_path": "v" })),
            ["the vsock device"]
        );
        assert_eq!(refused("balloon", &json!({ "amount_mib": 1 })), ["the balloon"]);
        assert_eq!(
            refused(
                "machine-config",
                &json!({
                    "vcpu_count": 1, "mem_size_mib": 128, "huge_pages": "2M",
                })
            ),
            ["huge pages"]
        );
        assert_eq!(refused("unheard-of", &json!({ "a": 1 })).len(), 1);
    }

    #[test]
    fn devices_that_stand_still_in_a_pause_are_admitted() {
        let limit = json!({ "bandwidth": { "size": 1, "refill_time": 1 } });
        let card =
            json!([{ "iface_id": "eth0", "host_dev_name": "tap0", "rx_rate_limiter": limit }]);
        assert!(refused("network-interfaces", &card).is_empty());
        assert!(refused("entropy", &json!({ "rate_limiter": limit })).is_empty());
    }

    #[test]
    fn a_drive_is_admitted_if_it_is_a_file_that_firecracker_reads_and_writes_at_once() {
        let drive = |more: Value| {
            let mut drive = json!({ "drive_id": "d", "path_on_host": "/i", "is_read_only": true });
            for (name, value) in more.as_object().unwrap() {
                drive[name] = value.clone();
            }
            refused("drives", &json!([drive])).len()
        };
        assert_eq!(drive(json!({})), 0);
        assert_eq!(drive(json!({ "is_read_only": false })), 0);
        assert_eq!(drive(json!({ "is_read_only": null })), 0);
        assert_eq!(drive(json!({ "rate_limiter": { "ops": { "size": 1 } } })), 0);
        for bad in
            [json!({ "io_engine": "Async" }), json!({ "socket": "/s", "path_on_host": null })]
        {
            assert_eq!(drive(bad.clone()), 1, "{bad}");
        }
    }

    #[test]
    fn another_series_is_a_warning() {
        let config = VmConfig::of(&json!({})).unwrap();
        assert!(audit(&config, "1.12.9").is_empty());
        let found = audit(&config, "1.13.0");
        assert_eq!((found.len(), found[0].severity), (1, Severity::Warning));
    }
}
