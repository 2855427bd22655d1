//! Live events: the changes since the last reading of the source.
//!
//! ```text
//!   read every second ──▶ compare ──▶ events: vm, vm_gone, store, ... ──▶ each listener's queue
//! ```
//!
//! A listener that is too slow loses events and gets the event `reload`, after which it reads
//! everything again. Without a listener, the source is not read.

use crate::source::{DashboardSource, StoreHead, VmState};
use keyframe_locks::IgnorePoison;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Mutex;
use tokio::sync::broadcast;

/// The most events that wait for a listener.
const WAITING_MAX: usize = 256;
/// The largest number of listeners of an event hub at a time.
pub const LISTENERS_MAX: usize = 64;

/// An event for listeners: its name, and its data as JSON.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveEvent {
    pub name: &'static str,
    pub data: String,
}

impl LiveEvent {
    fn new(name: &'static str, data: &Value) -> Self {
        Self { name, data: data.to_string() }
    }
}

/// Distributes events to listeners, such as open pages of the dashboard.
pub struct EventHub {
    events: broadcast::Sender<LiveEvent>,
    last: Mutex<Snapshot>,
}

impl Default for EventHub {
    fn default() -> Self {
        Self { events: broadcast::channel(WAITING_MAX).0, last: Mutex::default() }
    }
}

/// The state of the source at the last reading.
#[derive(Default)]
struct Snapshot {
    vms: BTreeMap<String, VmState>,
    stores: BTreeMap<String, StoreHead>,
    recordings: Value,
}

impl EventHub {
    /// Adds a listener and returns its receiver. Returns `None` if there are [`LISTENERS_MAX`]
    /// already.
    pub fn listen(&self) -> Option<broadcast::Receiver<LiveEvent>> {
        (self.listeners() < LISTENERS_MAX).then(|| self.events.subscribe())
    }

    /// Returns the number of listeners.
    pub fn listeners(&self) -> usize {
        self.events.receiver_count()
    }

    /// Reads the data of `source`, and sends what has changed since the last call to all listeners.
    pub fn refresh(&self, source: &dyn DashboardSource) {
        let (vms, stores, recordings) = (source.vms(), source.stores(), source.recordings());
        let mut last = self.last.lock().ignore_poison();
        for event in last.replace(vms, stores, recordings) {
            // The last listener may have gone just now.
            let _ = self.events.send(event);
        }
    }
}

impl Snapshot {
    /// Replaces the state and returns the changes as events.
    fn replace(
        &mut self,
        vms: Vec<VmState>,
        stores: Vec<StoreHead>,
        recordings: Value,
    ) -> Vec<LiveEvent> {
        let mut events = Vec::new();
        let vms: BTreeMap<String, VmState> =
            vms.into_iter().map(|vm| (vm.name.clone(), vm)).collect();
        let stores: BTreeMap<String, StoreHead> =
            stores.into_iter().map(|store| (store.id.clone(), store)).collect();
        for (name, vm) in &vms {
            if self.vms.get(name).is_none_or(|before| has_changed(before, vm)) {
                events.push(LiveEvent::new("vm", &json!(vm)));
            }
        }
        let gone = self.vms.keys().filter(|name| !vms.contains_key(*name));
        events.extend(gone.map(|name| LiveEvent::new("vm_gone", &json!({ "name": name }))));
        for (id, store) in &stores {
            if self.stores.get(id) != Some(store) {
                events.push(LiveEvent::new("store", &json!(store)));
            }
        }
        let gone = self.stores.keys().filter(|id| !stores.contains_key(*id));
        events.extend(gone.map(|id| LiveEvent::new("store_gone", &json!({ "id": id }))));
        if self.recordings != recordings {
            events.push(LiveEvent::new("recordings", &json!({})));
        }
        *self = Self { vms, stores, recordings };
        events
    }
}

/// Whether a VM has changed, apart from the age of its last checkpoint, which always grows.
fn has_changed(before: &VmState, now: &VmState) -> bool {
    let without_age = |vm: &VmState| {
        let mut vm = vm.clone();
        if let Some(status) = vm.status.as_object_mut() {
            status.remove("last_age_ns");
        }
        vm
    };
    without_age(before) != without_age(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(name: &str, sealed: u64, age_ns: u64) -> VmState {
        let status = json!({ "sealed": sealed, "last_age_ns": age_ns });
        VmState { name: name.into(), store: None, problem: None, status }
    }

    #[test]
    fn only_changes_are_sent() {
        let mut last = Snapshot::default();
        let mut look = |vms: Vec<VmState>, generation| {
            let store = StoreHead { id: "s".into(), generation, ..StoreHead::default() };
            let events = last.replace(vms, vec![store], json!([]));
            events.into_iter().map(|event| event.name).collect::<Vec<_>>()
        };
        assert_eq!(
            look(vec![vm("a", 1, 5), vm("b", 1, 5)], 1),
            ["vm", "vm", "store", "recordings"]
        );
        assert_eq!(look(vec![vm("a", 1, 6), vm("b", 1, 6)], 1), [""; 0], "only ages");
        assert_eq!(look(vec![vm("a", 2, 0), vm("b", 1, 7)], 2), ["vm", "store"]);
        assert_eq!(look(vec![vm("a", 2, 1)], 2), ["vm_gone"]);
    }
}
