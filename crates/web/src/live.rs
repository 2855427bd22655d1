//! What has changed since the last look, for those who listen.
//!
//! ```text
//!   a look a second ──▶ compare with the last ──▶ events: vm, vm_gone, store, recordings ──▶ each listener's queue
//! ```
//!
//! Only what is new is sent. A listener that is too slow loses events and is told so (`reload`): it
//! asks for everything again. Invariant: nobody looks while nobody listens.

use crate::source::{Source, StoreHead, VmState};
use keyframe_locks::IgnorePoison;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Mutex;
use tokio::sync::broadcast;

/// Events that wait for a listener at most.
const WAITING_MAX: usize = 256;
/// Listeners at the same time.
pub const LISTENERS_MAX: usize = 64;

/// One event: its name, and its data as JSON.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub name: &'static str,
    pub data: String,
}

impl Event {
    fn new(name: &'static str, data: &Value) -> Self {
        Self { name, data: data.to_string() }
    }
}

/// Those who listen, and what they were told.
pub struct Live {
    events: broadcast::Sender<Event>,
    told: Mutex<Told>,
}

impl Default for Live {
    fn default() -> Self {
        Self { events: broadcast::channel(WAITING_MAX).0, told: Mutex::default() }
    }
}

/// What was there at the last look.
#[derive(Default)]
struct Told {
    vms: BTreeMap<String, VmState>,
    stores: BTreeMap<String, StoreHead>,
    recordings: Value,
}

impl Live {
    /// Begins to listen; none where too many do.
    pub fn listen(&self) -> Option<broadcast::Receiver<Event>> {
        (self.listeners() < LISTENERS_MAX).then(|| self.events.subscribe())
    }

    /// How many listen.
    pub fn listeners(&self) -> usize {
        self.events.receiver_count()
    }

    /// Looks, and tells what is new.
    pub fn look(&self, source: &dyn Source) {
        let (vms, stores, recordings) = (source.vms(), source.stores(), source.recordings());
        let mut told = self.told.lock().ignore_poison();
        for event in told.renew(vms, stores, recordings) {
            // Whoever listened may just have gone.
            let _ = self.events.send(event);
        }
    }
}

impl Told {
    fn renew(
        &mut self,
        vms: Vec<VmState>,
        stores: Vec<StoreHead>,
        recordings: Value,
    ) -> Vec<Event> {
        let mut events = Vec::new();
        let vms: BTreeMap<String, VmState> =
            vms.into_iter().map(|vm| (vm.name.clone(), vm)).collect();
        let stores: BTreeMap<String, StoreHead> =
            stores.into_iter().map(|store| (store.id.clone(), store)).collect();
        for (name, vm) in &vms {
            if self.vms.get(name).is_none_or(|before| is_new(before, vm)) {
                events.push(Event::new("vm", &json!(vm)));
            }
        }
        let gone = self.vms.keys().filter(|name| !vms.contains_key(*name));
        events.extend(gone.map(|name| Event::new("vm_gone", &json!({ "name": name }))));
        for (id, store) in &stores {
            if self.stores.get(id) != Some(store) {
                events.push(Event::new("store", &json!(store)));
            }
        }
        let gone = self.stores.keys().filter(|id| !stores.contains_key(*id));
        events.extend(gone.map(|id| Event::new("store_gone", &json!({ "id": id }))));
        if self.recordings != recordings {
            events.push(Event::new("recordings", &json!({})));
        }
        *self = Self { vms, stores, recordings };
        events
    }
}

/// Whether there is more to say than that time has passed: the age of a checkpoint always grows.
fn is_new(before: &VmState, now: &VmState) -> bool {
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
    fn only_what_is_new_is_told() {
        let mut told = Told::default();
        let mut look = |vms: Vec<VmState>, generation| {
            let store = StoreHead { id: "s".into(), generation, ..StoreHead::default() };
            let events = told.renew(vms, vec![store], json!([]));
            events.into_iter().map(|event| event.name).collect::<Vec<_>>()
        };
        assert_eq!(
            look(vec![vm("a", 1, 5), vm("b", 1, 5)], 1),
            ["vm", "vm", "store", "recordings"]
        );
        assert_eq!(look(vec![vm("a", 1, 6), vm("b", 1, 6)], 1), [""; 0], "an age alone");
        assert_eq!(look(vec![vm("a", 2, 0), vm("b", 1, 7)], 2), ["vm", "store"]);
        assert_eq!(look(vec![vm("a", 2, 1)], 2), ["vm_gone"]);
    }
}
