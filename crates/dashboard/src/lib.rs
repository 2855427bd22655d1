//! The data of the dashboard: running VMs, stores, recordings and analyses.
//!
//! ```text
//!   engines' control sockets ──▶ vms ──which stores──▶ stores ──▶ listed (one a store): what is new since the last look
//!   --recordings, --analysis ──▶ recordings               ├────▶ details: one checkpoint, commands
//!                                                         ├────▶ differences: heat, diff; the last few are kept
//!                                                         └────▶ screens: pictures of displays; likewise
//! ```
//!
//! Invariants: answers are cached for a while, and read anew when a directory's times say that it
//! changed; a store, recording or engine that cannot be read is shown with the reason and hides no
//! other; the dashboard itself writes nothing but pins and tags.

pub mod actions;
pub mod details;
pub mod differences;
mod error;
mod growth_figure;
pub mod listed;
pub mod recordings;
pub mod reporting;
pub mod screens;
pub mod starting;
pub mod stores;
pub mod vms;

pub use error::{Error, Result};
pub use growth_figure::growth_figure;
pub use listed::as_shown;

use keyframe_locks::IgnorePoison;
use keyframe_store::CheckpointId;
use keyframe_store_keys::KeyArg;
use keyframe_web::{
    ApiError, CheckpointListing, DashboardAction, DashboardSource, HeatMap, StoreHead, StoreSizes,
    VmState,
};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// The options of the dashboard: what it shows, and what its users may start.
#[derive(Debug)]
pub struct DashboardSources {
    /// A store to show besides those that running VMs write to; `None` for no other.
    pub store: Option<PathBuf>,
    /// The key of encrypted stores.
    pub key: KeyArg,
    /// Directories of recordings, or directories that hold some.
    pub recordings: Vec<PathBuf>,
    /// Directories of analyses, or directories that hold some.
    pub analyses: Vec<PathBuf>,
    /// Whether clones may be started.
    pub starts: bool,
    /// Returns the fix that the dashboard shows with an error of a store.
    pub store_fix: StoreFix,
}

/// A function that returns what a user can do about an error of the store at a path; `None` if the
/// function knows no fix.
pub type StoreFix = fn(&keyframe_store::Error, &Path) -> Option<String>;

/// The data of the dashboard: a [`DashboardSource`] over running VMs, stores, recordings and
/// analyses.
pub struct DashboardData {
    vms: vms::Vms,
    stores: stores::Stores,
    recordings: recordings::Recordings,
    differences: differences::Differences,
    screens: screens::Screens,
    starts: bool,
}

impl DashboardData {
    /// Creates the data source of a dashboard that shows what `shown` names. Reads nothing yet.
    pub fn new(shown: DashboardSources) -> Self {
        let DashboardSources { store, key, recordings, analyses, starts, store_fix } = shown;
        Self {
            vms: vms::Vms::default(),
            stores: stores::Stores::new(store, key, store_fix),
            recordings: recordings::Recordings::new(recordings, analyses),
            differences: differences::Differences::default(),
            screens: screens::Screens::default(),
            starts,
        }
    }

    /// The shown store with this id.
    fn store(&self, id: &str) -> Result<Arc<listed::ListedStore>, ApiError> {
        // A VM may have begun to write to it since the last look.
        self.stores
            .get(id)
            .or_else(|| {
                self.vms();
                self.stores.get(id)
            })
            .ok_or_else(|| ApiError::Unknown(format!("no store {id} is shown here")))
    }
}

impl DashboardSource for DashboardData {
    fn vms(&self) -> Vec<VmState> {
        self.vms.all(&self.stores)
    }

    fn stores(&self) -> Vec<StoreHead> {
        // The running VMs name the stores.
        self.vms();
        self.stores.heads()
    }

    fn listing(&self, store: &str) -> Result<Arc<CheckpointListing>, ApiError> {
        self.store(store)?.listing()
    }

    fn checkpoint(&self, store: &str, id: u64) -> Result<Value, ApiError> {
        let runs = self.vms().into_iter().map(|vm| vm.name).collect();
        details::of(&*self.store(store)?, id, &runs, self.starts)
    }

    fn heat(&self, store: &str, id: u64, pieces: u64) -> Result<HeatMap, ApiError> {
        self.differences.heat(&*self.store(store)?, id, pieces)
    }

    fn diff(&self, store: &str, id: u64) -> Result<Value, ApiError> {
        self.differences.diff(&*self.store(store)?, id)
    }

    fn screen(&self, store: &str, id: u64, member: Option<&str>) -> Result<Arc<[u8]>, ApiError> {
        self.screens.of(&*self.store(store)?, id, member)
    }

    fn sizes(&self, store: &str) -> Result<StoreSizes, ApiError> {
        self.store(store)?.sizes()
    }

    fn recordings(&self) -> Value {
        self.recordings.all(&self.stores)
    }

    fn act(&self, store: &str, action: &DashboardAction) -> Result<String, ApiError> {
        let listed = self.store(store)?;
        let store = listed.store();
        let done = match action {
            DashboardAction::Rollback(id) => return actions::roll_back(&listed, *id),
            DashboardAction::Branch(_) | DashboardAction::Restore(_) if !self.starts => {
                return Err(ApiError::Bad(
                    "this server starts no VMs; start it with --allow-start, or run the command"
                        .into(),
                ));
            }
            DashboardAction::Branch(id) => return starting::branch(&listed, *id),
            DashboardAction::Restore(id) => return starting::restore(&listed, *id),
            DashboardAction::Pin(id) => {
                store.pin(CheckpointId(*id)).map(|()| format!("checkpoint {id} is pinned"))
            }
            DashboardAction::Unpin(id) => store.unpin(CheckpointId(*id)).map(|was| {
                if was {
                    format!("checkpoint {id} is not pinned any more")
                } else {
                    format!("checkpoint {id} was not pinned")
                }
            }),
            DashboardAction::Tag(id, tag) => {
                store.set_tag(tag, CheckpointId(*id)).map(|_| format!("{tag} is checkpoint {id}"))
            }
            DashboardAction::Untag(tag) => {
                store.remove_tag(tag).map(|_| format!("tag {tag} is removed"))
            }
        };
        listed.look_again();
        done.map_err(|e| listed.error(&e))
    }
}

/// An error in one line, with what to do about it.
fn said(error: &dyn std::error::Error, fix: Option<String>) -> String {
    let text = keyframe_units::error_chain(error);
    match fix {
        Some(fix) => format!("{text}; {fix}"),
        None => text,
    }
}

/// Locks a cache. A thread that panicked left it valid.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().ignore_poison()
}
