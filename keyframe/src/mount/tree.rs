//! The store as directories and files, without FUSE: names, sizes, bytes.

use super::node::{Kind, Node};
use crate::commands::show;
use crate::failure::chain;
use crate::images::{self, StoredPages};
use keyframe_image::Image;
use keyframe_store::{Error, Loaded, Store};
use keyframe_units::CheckpointId;
use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Checkpoints that are held loaded; further ones push out the one unused for longest.
pub const LOADED_MAX: usize = 8;
/// Different messages that are said.
const MESSAGES_MAX: usize = 1000;
const LATEST: &str = "latest";

/// Why something cannot be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// It does not exist, or no longer.
    Absent,
    /// It cannot be read; why was said.
    Unreadable,
}

/// What a node looks like from outside.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Bytes, or those of a link's target.
    pub len_bytes: u64,
    /// When the checkpoint was taken, or the store made.
    pub time: SystemTime,
    /// False where it may look different a moment later.
    pub lasts: bool,
}

/// A checkpoint in use.
struct Opened {
    loaded: Loaded,
    raw: Option<Image>,
    core: Option<Image>,
}

/// The store.
pub struct Tree {
    store: Store,
    opened: Mutex<VecDeque<Arc<Opened>>>,
    links: Mutex<Vec<String>>,
    said: Mutex<BTreeSet<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tree {
    /// Over a store.
    pub fn new(store: Store) -> Self {
        Self { store, opened: Mutex::default(), links: Mutex::default(), said: Mutex::default() }
    }

    /// The names in a directory.
    pub fn list(&self, directory: Node) -> Result<Vec<(String, Node)>, Denied> {
        match directory {
            Node::Root => {
                let ids = self.store.ids().map_err(|e| self.denied(&e))?;
                let tags = self.store.tags().map_err(|e| self.denied(&e))?;
                let latest = ids.last().map(|_| LATEST.to_owned());
                let links = latest.into_iter().chain(tags.into_keys()).map(|name| {
                    let link = self.link(&name);
                    (name, link)
                });
                let numbered = ids.iter().filter(|id| Node::has_inodes(**id));
                let checkpoints = numbered.map(|id| (id.to_string(), Node::Checkpoint(*id)));
                Ok(links.chain(checkpoints).collect())
            }
            Node::Checkpoint(id) => {
                let opened = self.open(id)?;
                let there = Kind::ALL.into_iter().filter(|kind| opened.has(*kind));
                Ok(there.map(|kind| (kind.name().to_owned(), Node::File(id, kind))).collect())
            }
            Node::File(..) | Node::Link(_) => Err(Denied::Absent),
        }
    }

    /// What a name in a directory stands for.
    pub fn find(&self, directory: Node, name: &str) -> Result<Node, Denied> {
        match directory {
            Node::Root => {
                // A link's target must exist too.
                let id = self.store.resolve(name).map_err(|e| self.denied(&e))?;
                match Node::Checkpoint(id) {
                    _ if !Node::has_inodes(id) => Err(Denied::Absent),
                    checkpoint if name == id.to_string() => Ok(checkpoint),
                    // 007 is no name of 7.
                    _ if name.bytes().all(|c| c.is_ascii_digit()) => Err(Denied::Absent),
                    _ => Ok(self.link(name)),
                }
            }
            Node::Checkpoint(id) => {
                let kind = Kind::ALL.into_iter().find(|k| k.name() == name).ok_or(Denied::Absent)?;
                let there = self.open(id)?.has(kind);
                if there { Ok(Node::File(id, kind)) } else { Err(Denied::Absent) }
            }
            Node::File(..) | Node::Link(_) => Err(Denied::Absent),
        }
    }

    /// What a node looks like.
    pub fn look(&self, node: Node) -> Result<Look, Denied> {
        match node {
            Node::Root => Ok(Look { len_bytes: 0, time: self.store.created().into(), lasts: false }),
            Node::Link(n) => {
                let target = self.target(n)?;
                Ok(Look { len_bytes: target.len() as u64, time: self.store.created().into(), lasts: false })
            }
            Node::Checkpoint(id) => self.look_at(id, None),
            Node::File(id, kind) => self.look_at(id, Some(kind)),
        }
    }

    fn look_at(&self, id: CheckpointId, kind: Option<Kind>) -> Result<Look, Denied> {
        // It may have been forgotten since.
        self.store.resolve(&id.to_string()).map_err(|e| self.denied(&e))?;
        let opened = self.open(id)?;
        let len_bytes = match kind {
            None => 0,
            Some(Kind::Info) => self.info(id)?.len() as u64,
            Some(Kind::Devices) => opened.loaded.device_state.len() as u64,
            Some(kind) => opened.image(kind).ok_or(Denied::Absent)?.len_bytes(),
        };
        let time = opened.loaded.meta.taken_at.into();
        Ok(Look { len_bytes, time, lasts: kind != Some(Kind::Info) })
    }

    /// Where a link points.
    pub fn target(&self, link: u64) -> Result<String, Denied> {
        let name = usize::try_from(link).ok().and_then(|n| lock(&self.links).get(n).cloned());
        let id = self.store.resolve(&name.ok_or(Denied::Absent)?).map_err(|e| self.denied(&e))?;
        Ok(id.to_string())
    }

    /// Up to `len` bytes of a file from `offset` on.
    pub fn read(&self, id: CheckpointId, kind: Kind, offset: u64, len: usize) -> Result<Vec<u8>, Denied> {
        let part = |bytes: &[u8]| {
            let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
            let end = start.saturating_add(len).min(bytes.len());
            bytes.get(start..end).unwrap_or_default().to_vec()
        };
        if kind == Kind::Info {
            return Ok(part(self.info(id)?.as_bytes()));
        }
        let opened = self.open(id)?;
        let Some(image) = opened.image(kind) else { return Ok(part(&opened.loaded.device_state)) };
        let mut bytes = vec![0; len];
        let read = image.read_at(&StoredPages::new(&opened.loaded), offset, &mut bytes);
        let read = read.map_err(|e| {
            self.say(format!("read {} of checkpoint {id} at {offset:#x}: {e}", kind.name()));
            Denied::Unreadable
        })?;
        bytes.truncate(read);
        Ok(bytes)
    }

    fn info(&self, id: CheckpointId) -> Result<String, Denied> {
        let sealed = self.store.sealed(id).map_err(|e| self.denied(&e))?;
        let text = serde_json::to_string_pretty(&show::shown(&sealed));
        text.map(|text| text + "\n").map_err(|e| {
            self.say(format!("info.json of checkpoint {id}: {e}"));
            Denied::Unreadable
        })
    }

    /// Loads a checkpoint, or finds it among those that are.
    fn open(&self, id: CheckpointId) -> Result<Arc<Opened>, Denied> {
        {
            let mut all = lock(&self.opened);
            if let Some(opened) = all.iter().position(|o| o.loaded.id == id).and_then(|at| all.remove(at)) {
                all.push_back(Arc::clone(&opened));
                return Ok(opened);
            }
        }
        let loaded = self.store.load(id).map_err(|e| self.denied(&e))?;
        let made = |image: Result<Image, crate::failure::Failure>, kind: Kind| {
            image.map_err(|e| self.say(format!("checkpoint {id} has no {}: {e}", kind.name()))).ok()
        };
        let (raw, core) = (made(images::raw(&loaded), Kind::Raw), made(images::core(&loaded), Kind::Core));
        let opened = Arc::new(Opened { loaded, raw, core });
        let mut all = lock(&self.opened);
        all.push_back(Arc::clone(&opened));
        if all.len() > LOADED_MAX {
            all.pop_front();
        }
        Ok(opened)
    }

    fn link(&self, name: &str) -> Node {
        let mut links = lock(&self.links);
        let at = links.iter().position(|l| l == name).unwrap_or_else(|| {
            links.push(name.to_owned());
            links.len() - 1
        });
        Node::Link(at as u64)
    }

    fn denied(&self, error: &Error) -> Denied {
        if matches!(error, Error::UnknownCheckpoint { .. }) {
            return Denied::Absent;
        }
        self.say(chain(error));
        Denied::Unreadable
    }

    /// Says a message the first time.
    fn say(&self, message: String) {
        let mut said = lock(&self.said);
        if said.len() < MESSAGES_MAX && !said.contains(&message) {
            eprintln!("keyframe: {message}");
            said.insert(message);
        }
    }
}

impl Opened {
    fn image(&self, kind: Kind) -> Option<&Image> {
        match kind {
            Kind::Raw => self.raw.as_ref(),
            Kind::Core => self.core.as_ref(),
            Kind::Info | Kind::Devices => None,
        }
    }

    fn has(&self, kind: Kind) -> bool {
        matches!(kind, Kind::Info | Kind::Devices) || self.image(kind).is_some()
    }
}
