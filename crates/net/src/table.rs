//! Which address was last seen at which port, bounded: the one seen longest ago goes first.

use crate::fabric::PortKey;
use crate::frame::Mac;
use std::collections::{BTreeMap, HashMap};

/// Addresses remembered for one LAN.
pub const ADDRESSES_MAX: usize = 4096;

/// What a LAN has learnt.
#[derive(Default)]
pub struct MacTable {
    seen: HashMap<Mac, (PortKey, u64)>,
    /// The addresses by when they were last seen.
    by_age: BTreeMap<u64, Mac>,
    clock: u64,
}

impl MacTable {
    /// `mac` was seen at `port` just now.
    pub fn learn(&mut self, mac: Mac, port: PortKey) {
        if self.seen.get(&mac) == Some(&(port, self.clock)) {
            return;
        }
        self.clock += 1;
        if let Some((_, before)) = self.seen.insert(mac, (port, self.clock)) {
            self.by_age.remove(&before);
        }
        self.by_age.insert(self.clock, mac);
        if self.seen.len() > ADDRESSES_MAX
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.seen.remove(&oldest);
        }
    }

    /// Where `mac` was last seen.
    pub fn port_of(&self, mac: Mac) -> Option<PortKey> {
        self.seen.get(&mac).map(|(port, _)| *port)
    }

    /// Nothing is at `port` any more.
    pub fn forget(&mut self, port: PortKey) {
        self.seen.retain(|_, (at, _)| *at != port);
        self.by_age.retain(|_, mac| self.seen.contains_key(mac));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mac(n: u32) -> Mac {
        let mut bytes = [2; 6];
        bytes[2..].copy_from_slice(&n.to_be_bytes());
        Mac(bytes)
    }

    #[test]
    fn a_guest_with_endless_addresses_displaces_the_oldest_only() {
        let (mut table, guest, hostile) = (MacTable::default(), PortKey(1), PortKey(2));
        table.learn(mac(0), guest);
        for n in 1..20_000 {
            table.learn(mac(n), hostile);
            // One that goes on talking stays known.
            table.learn(mac(0), guest);
        }
        assert_eq!((table.seen.len(), table.by_age.len()), (ADDRESSES_MAX, ADDRESSES_MAX));
        assert_eq!(table.port_of(mac(0)), Some(guest));
        assert_eq!(table.port_of(mac(1)), None);
        assert_eq!(table.port_of(mac(19_999)), Some(hostile));
        table.forget(hostile);
        assert_eq!((table.seen.len(), table.by_age.len()), (1, 1));
        table.learn(mac(0), hostile);
        assert_eq!(table.port_of(mac(0)), Some(hostile));
    }
}
