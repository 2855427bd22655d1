//! What a remote writer may do to which files: it adds to the store, and takes back only what it
//! has added itself.
//!
//! | file | a remote writer may |
//! |---|---|
//! | pack | create it, append to it, remove it again |
//! | map | put it if it does not exist, remove it again |
//! | checkpoint | put it if it has put the map of this number, remove it again |
//! | tag | put it, except a pin; remove one that it has put |
//! | working set | remove that of a checkpoint that it has put |
//! | mark of its own slot | put it, remove it |
//! | anything else | nothing |
//!
//! Invariant: no sealed checkpoint of another writer, and nothing that one needs, can be removed or
//! replaced by a remote writer.

use crate::files::Refusal;
use keyframe_store_backend::layout::{self, CHECKPOINTS, MAPS, PACKS, PIN_PREFIX, TAGS, WORKSETS};
use keyframe_store_backend::served::wire::RefusalCode;
use std::collections::{BTreeSet, VecDeque};

/// The most files of a writer that it may still take back. A writer removes what a failed
/// checkpoint has left, so only the last ones matter.
const REMEMBERED_MAX: usize = 8192;
/// How far a number may lie above all that the store has. So many numbers are taken at most while a
/// writer takes one.
pub const NUMBERS_AHEAD_MAX: u64 = 1 << 17;

/// The files of one remote writer.
#[derive(Debug)]
pub struct WriteRules {
    slot: u32,
    own: BTreeSet<String>,
    /// The same files, the oldest first.
    order: VecDeque<String>,
}

impl WriteRules {
    /// Creates the rules for the writer in slot number `slot`.
    pub fn new(slot: u32) -> Self {
        Self { slot, own: BTreeSet::new(), order: VecDeque::new() }
    }

    /// Notes that the writer has made the file `name`, or may have.
    pub fn made(&mut self, name: &str) {
        if self.own.insert(name.to_owned()) {
            self.order.push_back(name.to_owned());
        }
        if self.order.len() > REMEMBERED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.own.remove(&oldest);
        }
    }

    /// Checks that a writer may create the growing file `name`, a pack. Returns its number.
    pub fn pack(name: &str) -> Result<u64, Refusal> {
        match name.split_once('/') {
            Some((PACKS, file)) => {
                layout::parse_pack(file).map(u64::from).ok_or_else(|| denied(name))
            }
            _ => Err(denied(name)),
        }
    }

    /// Checks that the writer may put the file `name`. `is_new` tells that it must not exist.
    /// Returns the number of a map.
    pub fn put(&self, name: &str, is_new: bool) -> Result<Option<u64>, Refusal> {
        let allowed = match name.split_once('/') {
            Some((MAPS, file)) if is_new => {
                return layout::parse_map(file).map(Some).ok_or_else(|| denied(name));
            }
            Some((CHECKPOINTS, file)) => layout::parse_checkpoint(file)
                .is_some_and(|id| self.own.contains(&layout::map(id.0))),
            Some((TAGS, file)) => layout::is_tag(file) && !file.starts_with(PIN_PREFIX),
            _ => self.is_own_mark(name),
        };
        if allowed { Ok(None) } else { Err(denied(name)) }
    }

    /// Checks that the writer may remove the file `name`.
    pub fn remove(&self, name: &str) -> Result<(), Refusal> {
        let allowed = match name.split_once('/') {
            Some((WORKSETS, file)) => layout::parse_workset(file)
                .is_some_and(|id| self.own.contains(&layout::checkpoint(id))),
            _ => self.own.contains(name) || self.is_own_mark(name),
        };
        if allowed { Ok(()) } else { Err(denied(name)) }
    }

    /// Checks that the writer may make changes of the folder `folder` durable, and remove `names`
    /// there. Returns the names with the folder.
    pub fn remove_all(&self, folder: &str, names: &[String]) -> Result<Vec<String>, Refusal> {
        if ![PACKS, MAPS, CHECKPOINTS, TAGS, WORKSETS].contains(&folder) {
            return Err(denied(folder));
        }
        let names: Vec<String> = names.iter().map(|name| format!("{folder}/{name}")).collect();
        names.iter().try_for_each(|name| self.remove(name))?;
        Ok(names)
    }

    /// Checks that the writer may make the file `name` durable.
    pub fn sync(name: &str) -> Result<(), Refusal> {
        if layout::is_file(name) && name.contains('/') { Ok(()) } else { Err(denied(name)) }
    }

    fn is_own_mark(&self, name: &str) -> bool {
        layout::parse_mark(name) == Some(self.slot)
    }
}

/// The refusal of something that the rules do not allow.
pub fn denied(name: &str) -> Refusal {
    let name: String = name.chars().take(80).collect();
    Refusal(RefusalCode::Denied, format!("a remote writer may not do this to {name:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_takes_back_what_it_made_and_nothing_else() {
        let mut rules = WriteRules::new(7);
        let (map, checkpoint) = ("maps/0000000012.map", "checkpoints/0000000012.ckpt");
        assert_eq!(rules.put(map, true).unwrap(), Some(12));
        for (name, is_new) in [
            (map, false),
            (checkpoint, false),
            ("store.json", false),
            ("tags/pin.12", false),
            ("tags/../lock", false),
            ("maps/../lock", true),
            ("packs/00000001.pack", true),
            ("lock", true),
            ("moves", false),
            ("unsynced", false),
            ("writers/08.packs", false),
            ("worksets/0000000012.wset", false),
            ("../x", true),
            ("", true),
        ] {
            assert!(rules.put(name, is_new).is_err(), "{name}");
            assert!(rules.remove(name).is_err(), "{name}");
        }
        rules.made(map);
        assert!(rules.put(checkpoint, false).is_ok() && rules.put("tags/mine", false).is_ok());
        assert!(rules.remove("tags/mine").is_err());
        rules.made(checkpoint);
        rules.made("tags/mine");
        for name in [map, checkpoint, "tags/mine", "worksets/0000000012.wset", "writers/07.packs"] {
            assert!(rules.remove(name).is_ok(), "{name}");
        }
        assert!(rules.remove("checkpoints/0000000011.ckpt").is_err());
        assert_eq!(WriteRules::pack("packs/00000003.pack").unwrap(), 3);
        assert!(WriteRules::pack("packs/3.pack").is_err() && WriteRules::pack(map).is_err());
        let names = |name: &str| vec![name.to_owned()];
        assert!(rules.remove_all(CHECKPOINTS, &[]).is_ok());
        assert!(rules.remove_all(CHECKPOINTS, &names("0000000012.ckpt")).is_ok());
        assert!(rules.remove_all(CHECKPOINTS, &names("0000000011.ckpt")).is_err());
        assert!(rules.remove_all(MAPS, &names("../lock")).is_err());
        assert!(rules.remove_all("writers", &[]).is_err());
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut rules = WriteRules::new(0);
        let map = |id: usize| layout::map(id as u64);
        (1..=REMEMBERED_MAX + 9).for_each(|id| rules.made(&map(id)));
        assert_eq!((rules.own.len(), rules.order.len()), (REMEMBERED_MAX, REMEMBERED_MAX));
        assert!(rules.remove(&map(9)).is_err() && rules.remove(&map(10)).is_ok());
    }
}
