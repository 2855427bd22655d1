//! Pages of 2 MiB for one test; the pool shrinks again when the test ends.

use crate::{Scope, Slot, record_skip};

const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// Reserved pages of 2 MiB. The pool belongs to the whole machine, so the test runs alone. Dropping
/// this restores the pool's size.
pub struct HugePages {
    before: u64,
    _turn: Slot,
}

impl HugePages {
    /// Reserves until `pages` are free. If that fails, counts the running test as skipped and
    /// returns `None`.
    pub fn reserve(pages: u64) -> Option<Self> {
        let turn = Slot::exclusive();
        let before = std::fs::read_to_string(POOL).unwrap_or_default().trim().parse().unwrap_or(0);
        let reserved = Self { before, _turn: turn };
        if free() < pages && std::fs::write(POOL, (before + pages).to_string()).is_err() {
            record_skip(Scope::Test, format!("no permission to reserve 2 MiB pages in {POOL}"));
            return None;
        }
        if free() < pages {
            record_skip(Scope::Test, "the kernel cannot reserve enough pages of 2 MiB");
            return None;
        }
        Some(reserved)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(POOL, self.before.to_string());
    }
}

fn free() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("HugePages_Free:")).unwrap_or("0");
    line.trim().parse().unwrap_or(0)
}
