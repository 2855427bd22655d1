//! Looks at the store of a fleet: what must be there is there, and nothing else.

use super::super::super::TINY;
use super::super::super::on;
use super::super::look::{assert_fact, matches};
use super::super::world::{Fact, Image};
use super::{Fleet, Known, locked};
use keyframe_store_backend::testing::FaultyBackend;
use keyframe_units::CheckpointId;
use std::collections::BTreeSet;

impl Fleet {
    /// Asserts that everything sealed can be read now, and could be read if all processes died now, or
    /// if power was lost.
    pub(super) fn look_into_the_future(&self) {
        let medium = locked(&self.medium).clone();
        self.look_at(&medium.copy_with_same_durability(), &|_| true);
        let after = medium.after_power_loss(self.below(u64::MAX));
        self.came("power loss in the middle", 1);
        self.look_after_power_loss(&after);
    }

    pub(super) fn look_after_power_loss(&self, after: &FaultyBackend) -> BTreeSet<CheckpointId> {
        self.look_at_facts(after, &|fact| fact.durable);
        // What is torn is set aside.
        drop(on(after).unwrap().lock_writer_tuned("fleet", TINY).unwrap());
        self.look_at(after, &|fact| fact.durable)
    }

    fn look_at_facts(&self, medium: &FaultyBackend, must: &dyn Fn(&Fact) -> bool) {
        let store = on(medium).unwrap();
        for (id, fact) in &locked(&self.known).facts {
            if must(fact) && !fact.going {
                assert_fact(&store, *id, &fact.image);
            }
        }
    }

    /// Asserts that the store has each fact of which `must` is true, and nothing that no writer put.
    /// Returns the checkpoints.
    fn look_at(
        &self,
        medium: &FaultyBackend,
        must: &dyn Fn(&Fact) -> bool,
    ) -> BTreeSet<CheckpointId> {
        self.look_at_facts(medium, must);
        let store = on(medium).unwrap();
        let ids: BTreeSet<CheckpointId> = store.ids().unwrap().into_iter().collect();
        let known = locked(&self.known);
        for id in &ids {
            if let Some(fact) = known.facts.get(id) {
                assert_fact(&store, *id, &fact.image);
                continue;
            }
            let is =
                |image: &Image| matches(&store, *id, image).unwrap_or_else(|e| panic!("{id}: {e}"));
            assert!(known.strangers.iter().any(is), "checkpoint {id} is none that was put");
        }
        ids
    }

    /// Between two acts: nothing is at work. What a dead writer sealed becomes a fact.
    pub(super) fn look(&self) {
        let medium = locked(&self.medium).clone();
        let ids = self.look_at(&medium, &|_| true);
        let store = on(&medium).unwrap();
        let mut known = locked(&self.known);
        let Known { facts, strangers, numbers, .. } = &mut *known;
        let gone = facts.extract_if(.., |id, fact| fact.going && !ids.contains(id));
        strangers.extend(gone.map(|(_, fact)| fact.image));
        for id in ids {
            if facts.contains_key(&id) {
                continue;
            }
            let is = |image: &&Image| matches(&store, id, image).is_ok_and(|same| same);
            let image = strangers.iter().find(is).cloned();
            let image = image.unwrap_or_else(|| panic!("checkpoint {id} is none that was put"));
            numbers.insert(id);
            facts.insert(id, Fact { image, durable: false, going: false });
        }
    }
}
