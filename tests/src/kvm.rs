//! Tests that need KVM.

use std::fs::OpenOptions;

/// Why KVM cannot be used here; `None` if `/dev/kvm` can be opened.
pub fn missing_kvm() -> Option<String> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/kvm");
    device.err().map(|error| format!("no KVM: /dev/kvm: {error}"))
}

/// Skips the running test if KVM cannot be used here.
#[macro_export]
macro_rules! needs_kvm {
    () => {
        if let Some(reason) = $crate::missing_kvm() {
            $crate::skip!("{reason}");
        }
    };
}
