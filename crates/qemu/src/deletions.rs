//! The devices that QEMU has reported as unplugged.

use serde_json::Value;
use std::collections::BTreeMap;

/// The most devices that are told apart. A user who unplugs more gives them new names each time.
const PATHS_MAX: usize = 4096;

/// How often QEMU has reported each device as unplugged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Deletions {
    all: u64,
    by_path: BTreeMap<String, u64>,
}

impl Deletions {
    /// Counts the event `DEVICE_DELETED` in `message`.
    pub fn note(&mut self, message: &Value) {
        self.all += 1;
        let path = message.pointer("/data/path").and_then(Value::as_str).unwrap_or_default();
        if self.by_path.len() < PATHS_MAX || self.by_path.contains_key(path) {
            *self.by_path.entry(path.to_owned()).or_default() += 1;
        }
    }

    /// Returns how often the device at the QOM path `path` was unplugged. After too many devices
    /// this is the number of all, which is never too small a change.
    pub fn of(&self, path: &str) -> u64 {
        let known = self.by_path.get(path).copied();
        known.unwrap_or(if self.by_path.len() < PATHS_MAX { 0 } else { self.all })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_device_among_too_many_counts_as_unplugged() {
        let mut deletions = Deletions::default();
        let event = |path: &str| json!({ "event": "DEVICE_DELETED", "data": { "path": path } });
        deletions.note(&event("/a"));
        deletions.note(&event("/a"));
        assert_eq!((deletions.of("/a"), deletions.of("/b")), (2, 0));
        for number in 0..PATHS_MAX {
            deletions.note(&event(&format!("/{number}")));
        }
        assert!(deletions.by_path.len() <= PATHS_MAX);
        let before = deletions.of("/b");
        deletions.note(&event("/b"));
        assert_ne!(deletions.of("/b"), before);
    }
}
