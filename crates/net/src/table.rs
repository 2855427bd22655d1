//! The port at which each address was last seen. The table is bounded: the address that was seen
//! longest ago goes first.

use crate::fabric::PortKey;
use crate::frame::Mac;
use std::collections::{BTreeMap, HashMap};

/// The largest number of Ethernet addresses that a LAN remembers.
pub const ADDRESSES_MAX: usize = 4096;

/// The Ethernet addresses that a LAN has learnt, each with its port.
#[derive(Default)]
pub struct MacTable {
    seen: HashMap<Mac, (PortKey, u64)>,
    /// The addresses, ordered by the time when they were last seen.
    by_age: BTreeMap<u64, Mac>,
    clock: u64,
}

impl MacTable {
    /// Records that `mac` was seen at `port` just now.
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

    /// Returns the port at which `mac` was last seen. Returns `None` if the address is not known.
    pub fn port_of(&self, mac: Mac) -> Option<PortKey> {
        self.seen.get(&mac).map(|(port, _)| *port)
    }

    /// Forgets all addresses at `port`.
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
    fn a_guest_with_endless_addresses_displaces_only_the_oldest() {
        let (mut table, guest, hostile) = (MacTable::default(), PortKey(1), PortKey(2));
        table.learn(mac(0), guest);
        for n in 1..20_000 {
            table.learn(mac(n), hostile);
            // An address that is seen again and again stays known.
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
