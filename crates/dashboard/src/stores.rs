//! The stores that are shown: the one that was named, those that running VMs write to, and those of
//! recordings.
//!
//! A store that was shown once stays: its checkpoints outlive the VM. A store that cannot be opened
//! is tried again after a while.

use super::listed::ListedStore;
use super::{StoreFix, locked, said};
use keyframe_store::{Error, Store};
use keyframe_store_keys::KeyArg;
use keyframe_web::StoreHead;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The wait before a store that could not be opened is tried again.
const AGAIN: Duration = Duration::from_secs(10);
/// The most stores that are kept: runs that make a store each would fill the page.
const STORES_MAX: usize = 64;

/// All stores that the dashboard shows.
pub struct Stores {
    key: KeyArg,
    known: Mutex<BTreeMap<PathBuf, Known>>,
    fix: StoreFix,
}

enum Known {
    Open(Arc<ListedStore>),
    Closed { tried_at: Instant, why: String },
}

impl Stores {
    /// Creates the list with the store `named`, if there is one. `key` opens encrypted stores;
    /// `fix` finds the fix for an error.
    pub fn new(named: Option<PathBuf>, key: KeyArg, fix: StoreFix) -> Self {
        let stores = Self { key, known: Mutex::default(), fix };
        if let Some(place) = named {
            stores.name(BTreeSet::from([place]));
        }
        stores
    }

    /// Adds the stores at the paths or addresses `places`. Returns the id of each that could be
    /// opened.
    pub fn name(&self, places: BTreeSet<PathBuf>) -> BTreeMap<PathBuf, String> {
        let mut known = locked(&self.known);
        let mut ids = BTreeMap::new();
        for place in places {
            let again = match known.get(&place) {
                Some(Known::Open(_)) => false,
                Some(Known::Closed { tried_at, .. }) => tried_at.elapsed() > AGAIN,
                None => known.len() < STORES_MAX,
            };
            if again {
                let opened = match self.open(&place) {
                    Ok(store) => Known::Open(Arc::new(ListedStore::new(store, self.fix))),
                    Err(e) => Known::Closed {
                        tried_at: Instant::now(),
                        why: said(&e, (self.fix)(&e, &place)),
                    },
                };
                known.insert(place.clone(), opened);
            }
            if let Some(Known::Open(listed)) = known.get(&place) {
                ids.insert(place, listed.id().to_owned());
            }
        }
        ids
    }

    /// Opens a store, without a question at the terminal that a dashboard would wait for.
    fn open(&self, place: &Path) -> Result<Store, Error> {
        match Store::open(place) {
            Err(Error::KeyNeeded { .. }) if self.key.is_given() => self.key.open(place),
            other => other,
        }
    }

    /// Returns the store with this id; `None` if the dashboard does not show such a store.
    pub fn get(&self, id: &str) -> Option<Arc<ListedStore>> {
        let known = locked(&self.known);
        known.values().find_map(|one| match one {
            Known::Open(listed) if listed.id() == id => Some(Arc::clone(listed)),
            _ => None,
        })
    }

    /// Returns the heads of all stores: each store once, even if several paths lead to it.
    pub fn heads(&self) -> Vec<StoreHead> {
        let mut open = BTreeMap::<String, Arc<ListedStore>>::new();
        let mut heads = Vec::new();
        for (place, one) in &*locked(&self.known) {
            match one {
                Known::Open(listed) => drop(open.insert(listed.id().into(), Arc::clone(listed))),
                Known::Closed { why, .. } => {
                    let place = place.display().to_string();
                    let problem = Some(why.clone());
                    heads.push(StoreHead {
                        id: format!("closed:{place}"),
                        place,
                        problem,
                        ..StoreHead::default()
                    });
                }
            }
        }
        heads.extend(open.values().map(|listed| listed.head()));
        heads
    }
}
