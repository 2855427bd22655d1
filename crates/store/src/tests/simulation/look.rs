//! Comparing the facts with the store: each checkpoint that must exist does, with its content.

use super::super::layout;
use super::super::{TINY, deltas, on, request};
use super::world::{Image, RAM_PAGES, World, page_of};
use crate::{BlockContent, CheckOptions, CheckReport, Damage, Error, Result, Store};
use keyframe_store_backend::testing::FaultyBackend;
use keyframe_units::{CheckpointId, PageIndex, PageRange, ZERO_PAGE};
use std::collections::{BTreeMap, BTreeSet};

impl World {
    /// After power loss: what was durable can be read at once. What was not is there or not, as the
    /// next writer says.
    pub fn settle(&mut self) {
        let store = on(&self.medium).unwrap();
        for (id, fact) in self.facts.iter().filter(|(_, fact)| fact.durable && !fact.going) {
            assert_fact(&store, *id, &fact.image);
        }
        let next = self.medium.copy_with_same_durability();
        drop(on(&next).unwrap().lock_writer_tuned("simulation", TINY).unwrap());
        let left: BTreeSet<CheckpointId> = on(&next).unwrap().ids().unwrap().into_iter().collect();
        let before = self.facts.len();
        self.facts.retain(|id, fact| fact.durable || left.contains(id));
        self.came("taken by power loss", (before - self.facts.len()) as u64);
        self.facts.values_mut().for_each(|fact| fact.durable = true);
        // What is torn is set aside from here on.
        if self.below(2) == 0 {
            self.medium = next;
        } else {
            drop(on(&self.medium).unwrap().lock_writer_tuned("simulation", TINY).unwrap());
        }
    }

    /// Holds the facts against the store.
    pub fn look(&mut self) {
        let store = on(&self.medium).unwrap();
        let ids: BTreeSet<CheckpointId> = store.ids().unwrap().into_iter().collect();
        // Its removal may not be durable: with the next power loss it may be there again.
        let gone = self.facts.extract_if(.., |id, fact| fact.going && !ids.contains(id));
        self.strangers.extend(gone.map(|(_, fact)| fact.image));
        for id in &ids {
            if let Some(fact) = self.facts.get(id) {
                assert_fact(&store, *id, &fact.image);
                continue;
            }
            let is = |image: &&Image| {
                matches(&store, *id, image).unwrap_or_else(|e| panic!("{id}: {e}"))
            };
            let image = self.strangers.iter().find(is).cloned();
            let image = image.unwrap_or_else(|| panic!("checkpoint {id} is none that was put"));
            self.know(*id, image, false);
        }
        for id in self.facts.keys() {
            assert!(ids.contains(id), "checkpoint {id} is gone");
        }
    }

    pub fn look_closely(&mut self) {
        self.look();
        self.look_at_copies();
        let check = |medium: &FaultyBackend| {
            on(medium).unwrap().check(&CheckOptions { read_data: true }, &mut |_| {}).unwrap()
        };
        let (report, of_copies) = (check(&self.medium), check(&self.other));
        assert!(self.is_clean(&report), "{report:#?}");
        assert!(of_copies.is_clean(), "{of_copies:#?}");
        let kinds = deltas::kinds(&on(&self.medium).unwrap());
        self.came("deltas", kinds.get(&'D').map_or(0, |n| *n as u64));
        self.came("composed", kinds.get(&'C').map_or(0, |n| *n as u64));
    }

    /// Nothing is damaged that a checkpoint needs; and nothing else, unless power loss took what
    /// had not waited for a sync: then a checkpoint that lives may have a map below that mentions,
    /// in places that are written over above, what was lost.
    pub fn is_clean(&self, report: &CheckReport) -> bool {
        let of_nobody = |damage: &Damage| {
            damage.checkpoints.is_empty() && damage.problem.contains("no checkpoint needs it")
        };
        let may_mention_lost =
            self.tally.contains_key("did not wait") && self.tally.contains_key("power loss");
        report.is_clean() || may_mention_lost && report.damages.iter().all(of_nobody)
    }

    /// All that was copied is there; and what is there is what its origin was at some time.
    pub fn look_at_copies(&mut self) {
        let store = on(&self.other).unwrap();
        let listed = store.checkpoints().unwrap();
        assert!(listed.unreadable.is_empty(), "{:?}", listed.unreadable);
        for sealed in listed.sealed {
            let of = sealed.meta.origin.expect("a copy says what it is a copy of");
            if let Some(image) = self.copies.get(&sealed.id) {
                assert_fact(&store, sealed.id, image);
                continue;
            }
            let is = |image: &&Image| {
                matches(&store, sealed.id, image).unwrap_or_else(|e| panic!("copy: {e}"))
            };
            let image =
                self.history.get(&of.checkpoint).and_then(|images| images.iter().find(is)).cloned();
            let image =
                image.unwrap_or_else(|| panic!("copy {} is none of {}", sealed.id, of.checkpoint));
            self.copies.insert(sealed.id, image);
        }
        let ids = store.ids().unwrap();
        assert!(self.copies.keys().all(|id| ids.contains(id)), "a copy is gone");
    }

    /// Damages a byte of some file, and repairs that, with a crash in between: what could be read
    /// before can be read after.
    pub fn damage(&mut self) {
        let files = self.medium.files();
        let in_store = |name: &&String| name.contains('/') && !name.starts_with("tmp/");
        let names: Vec<&String> =
            files.keys().filter(in_store).filter(|name| !files[*name].is_empty()).collect();
        if names.is_empty() {
            return;
        }
        let name = names[self.below(names.len() as u64) as usize].clone();
        let mut bytes = files[&name].clone();
        let at = self.below(bytes.len() as u64) as usize;
        if self.below(4) == 0 {
            bytes.truncate(at);
        } else {
            bytes[at] ^= 1 << self.below(8);
        }
        let medium = self.medium.copy();
        medium.overwrite(&name, Some(bytes));
        self.medium = medium.copy();
        let store = on(&self.medium).unwrap();
        let facts = std::mem::take(&mut self.facts);
        self.facts = facts
            .into_iter()
            .filter(|(id, fact)| match matches(&store, *id, &fact.image) {
                Ok(same) => {
                    assert!(
                        same,
                        "checkpoint {id} was read without an error and is wrong: {name}, byte {at}"
                    );
                    true
                }
                Err(_) => false,
            })
            .collect();
        self.strangers.clear();
        for attempt in 0..4 {
            if attempt < 3 {
                let at = self.medium.operations() + 1 + self.below(40);
                self.medium.crash_at(at);
            }
            let report = on(&self.medium).unwrap().repair(&mut |_| {});
            self.tell(format!("repair of {name}, byte {at}: {report:?}"));
            assert!(report.is_ok() || self.medium.has_crashed(), "{name}, byte {at}: {report:?}");
            self.medium.calm();
            let crashed = self.medium.has_crashed();
            if crashed {
                self.came("repair cut off", 1);
                let seed = self.chance.next_u64();
                self.medium = if self.below(2) == 0 {
                    self.medium.after_power_loss(seed)
                } else {
                    self.medium.copy_with_same_durability()
                };
            }
            let store = on(&self.medium).unwrap();
            for (id, fact) in &self.facts {
                assert_fact(&store, *id, &fact.image);
            }
            if !crashed {
                let after = store.check(&CheckOptions { read_data: true }, &mut |_| {}).unwrap();
                assert!(after.is_clean(), "{name}, byte {at}: {after:#?}");
                let store = on(&self.medium.after_power_loss(self.chance.next_u64())).unwrap();
                for (id, fact) in &self.facts {
                    assert_fact(&store, *id, &fact.image);
                }
                return;
            }
        }
    }
}

pub fn assert_fact(store: &Store, id: CheckpointId, image: &Image) {
    match matches(store, id, image) {
        Ok(same) => assert!(same, "checkpoint {id} is not what was put"),
        Err(error) => panic!("checkpoint {id}: {error}"),
    }
}

pub fn matches(store: &Store, id: CheckpointId, image: &Image) -> Result<bool> {
    let loaded = store.load(id)?;
    let mut left: BTreeMap<u64, u64> = (0u64..)
        .zip(&image[..RAM_PAGES])
        .filter_map(|(page, n)| n.filter(|n| *n > 0).map(|n| (page, n)))
        .collect();
    let mut same = loaded.meta.disks.len() == usize::from(image.len() > RAM_PAGES)
        && loaded.device_state == request(&layout(1)).device_state;
    loaded.read_pages(PageRange::new(PageIndex(0), RAM_PAGES as u64), &mut |page, content| {
        same &= left.remove(&page.0).is_some_and(|number| page_of(number) == *content);
        Ok::<_, Error>(())
    })?;
    if !same || !left.is_empty() {
        return Ok(false);
    }
    if image.len() > RAM_PAGES {
        let disks = store.load_disks(id)?;
        let first = disks.meta.blocks_of(0).map_or(PageIndex(0), |blocks| blocks.first);
        for (block, number) in (first.0..).map(PageIndex).zip(&image[RAM_PAGES..]) {
            let mut page = ZERO_PAGE;
            let found = match disks.read_block(block, &mut page)? {
                BlockContent::Base => None,
                BlockContent::Zero | BlockContent::Data => Some(page),
            };
            same &= found == number.map(page_of);
        }
    }
    Ok(same)
}
