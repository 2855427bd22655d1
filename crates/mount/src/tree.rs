//! The store as directories and files, without FUSE: names, sizes, bytes.

use super::disks::{self, OpenDisk};
use super::node::{MountNode, MountedFile, NodeDirectory};
use crate::error::Error;
use keyframe_image::Image;
use keyframe_inspect::display_picture::{self as screens, DrawableDisplay, NoPicture};
use keyframe_inspect::guest_memory::{Guest, StoredPages};
use keyframe_inspect::show;
use keyframe_locks::IgnorePoison;
use keyframe_store::{LoadedCheckpoint, LoadedDisks, Store};
use keyframe_units::{CheckpointId, error_chain};
use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

/// The largest number of checkpoints that are kept loaded. A further one replaces the one that was
/// unused for longest.
pub const LOADED_MAX: usize = 8;
/// Different errors that are reported.
const MESSAGES_MAX: usize = 1000;
/// Members of a group that have inodes.
const MEMBERS_MAX: usize = u16::MAX as usize;
/// The longest name that a file may have.
const NAME_BYTES_MAX: usize = 255;
const LATEST: &str = "latest";

/// The reason why a node of the tree (a directory, a file or a link) cannot be shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeError {
    /// The node does not exist, or no longer.
    Absent,
    /// The node cannot be read; the reason was reported.
    Unreadable,
}

/// The attributes of a directory, a file or a link of the tree.
#[derive(Clone, Copy, Debug)]
pub struct NodeAttributes {
    /// The length of the file, or of the link's target, in bytes.
    pub len_bytes: u64,
    /// The time at which the checkpoint was taken, or at which the store was created.
    pub time: SystemTime,
    /// True if the node never changes, so that it may be cached.
    pub lasts: bool,
}

/// A checkpoint in use.
struct Opened {
    loaded: LoadedCheckpoint,
    /// Its VM, or those of its group.
    vms: Vec<OpenedVm>,
    /// Its disks, once one of them was opened.
    disks: Mutex<Option<Arc<LoadedDisks>>>,
}

/// A VM of it.
struct OpenedVm {
    guest: Guest,
    /// The name of its directory, if it is one of a group.
    directory: Option<String>,
    raw: Option<Image>,
    core: Option<Image>,
    screen: Option<DrawableDisplay>,
    /// The picture as a PNG file, once it was read.
    png: Mutex<Option<Arc<[u8]>>>,
}

/// The checkpoints and tags of a store as a tree of directories and files.
pub struct CheckpointTree {
    store: Store,
    opened: Mutex<VecDeque<Arc<Opened>>>,
    links: Mutex<Vec<String>>,
    said: Mutex<BTreeSet<String>>,
    report: ErrorReporter,
}

/// A function that receives each different error once.
pub type ErrorReporter = Box<dyn Fn(&Error) + Send + Sync>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().ignore_poison()
}

impl CheckpointTree {
    /// Creates the tree of the checkpoints of `store`. `report` receives the error behind each
    /// [`NodeError::Unreadable`].
    pub fn new(store: Store, report: ErrorReporter) -> Self {
        Self {
            store,
            opened: Mutex::default(),
            links: Mutex::default(),
            said: Mutex::default(),
            report,
        }
    }

    /// Returns the names in a directory, each with its node. Error: the node does not exist any
    /// more, or the store cannot be read.
    pub fn list(&self, directory: MountNode) -> Result<Vec<(String, MountNode)>, NodeError> {
        match directory {
            MountNode::Root => {
                let ids = self.store.ids().map_err(|e| self.denied(e))?;
                let tags = self.store.tags().map_err(|e| self.denied(e))?;
                let latest = ids.last().map(|_| LATEST.to_owned());
                let links = latest.into_iter().chain(tags.into_keys()).map(|name| {
                    let link = self.link(&name);
                    (name, link)
                });
                let numbered = ids.iter().filter(|id| MountNode::has_inodes(**id));
                let checkpoints = numbered
                    .map(|id| (id.to_string(), MountNode::Directory(NodeDirectory::of(*id))));
                Ok(links.chain(checkpoints).collect())
            }
            MountNode::Directory(place) => {
                let opened = self.open(place.id)?;
                let files = MountedFile::ALL.into_iter().filter(|kind| opened.has(place, *kind));
                let files =
                    files.map(|kind| (kind.name().to_owned(), MountNode::File(place, kind)));
                let disks = opened
                    .disks(place)
                    .into_iter()
                    .map(|(disk, name)| (name, MountNode::Disk(place, disk)));
                Ok(files.chain(disks).chain(opened.directories(place)).collect())
            }
            MountNode::File(..) | MountNode::Disk(..) | MountNode::Link(_) => {
                Err(NodeError::Absent)
            }
        }
    }

    /// Returns the node with a name in a directory. Fails with [`NodeError`] if there is none or if
    /// the store cannot be read.
    pub fn find(&self, directory: MountNode, name: &str) -> Result<MountNode, NodeError> {
        match directory {
            MountNode::Root => {
                // A link's target must exist too.
                let id = self.store.resolve(name).map_err(|e| self.denied(e))?;
                match MountNode::Directory(NodeDirectory::of(id)) {
                    _ if !MountNode::has_inodes(id) => Err(NodeError::Absent),
                    checkpoint if name == id.to_string() => Ok(checkpoint),
                    // 007 is no name of 7.
                    _ if name.bytes().all(|c| c.is_ascii_digit()) => Err(NodeError::Absent),
                    _ => Ok(self.link(name)),
                }
            }
            MountNode::Directory(place) => {
                let opened = self.open(place.id)?;
                let Some(kind) = MountedFile::ALL.into_iter().find(|k| k.name() == name) else {
                    if let Some((disk, _)) =
                        opened.disks(place).into_iter().find(|(_, file)| file == name)
                    {
                        return Ok(MountNode::Disk(place, disk));
                    }
                    let found = opened.directories(place).find(|(directory, _)| directory == name);
                    return found.map(|(_, node)| node).ok_or(NodeError::Absent);
                };
                if opened.has(place, kind) {
                    Ok(MountNode::File(place, kind))
                } else {
                    Err(NodeError::Absent)
                }
            }
            MountNode::File(..) | MountNode::Disk(..) | MountNode::Link(_) => {
                Err(NodeError::Absent)
            }
        }
    }

    /// Returns the size, the time and the cacheability of a node. Error: the node does not exist
    /// any more, or the store cannot be read.
    pub fn look(&self, node: MountNode) -> Result<NodeAttributes, NodeError> {
        match node {
            MountNode::Root => {
                Ok(NodeAttributes { len_bytes: 0, time: self.store.created().into(), lasts: false })
            }
            MountNode::Link(n) => {
                let target = self.target(n)?;
                Ok(NodeAttributes {
                    len_bytes: target.len() as u64,
                    time: self.store.created().into(),
                    lasts: false,
                })
            }
            MountNode::Directory(place) => self.look_at(place, None),
            MountNode::File(place, kind) => self.look_at(place, Some(kind)),
            MountNode::Disk(place, disk) => {
                let look = self.look_at(place, None)?;
                let opened = self.open(place.id)?;
                let known = opened.loaded.meta.disks.get(usize::from(disk));
                Ok(NodeAttributes { len_bytes: known.ok_or(NodeError::Absent)?.disk_bytes, ..look })
            }
        }
    }

    /// Opens disk number `disk` of the checkpoint or member whose directory is `place`. Error: the
    /// node does not exist any more, or the store cannot be read.
    pub fn open_disk(&self, place: NodeDirectory, disk: u8) -> Result<OpenDisk, NodeError> {
        let opened = self.open(place.id)?;
        let (_, name) = opened
            .disks(place)
            .into_iter()
            .find(|(number, _)| *number == disk)
            .ok_or(NodeError::Absent)?;
        let loaded = {
            let mut loaded = lock(&opened.disks);
            if let Some(disks) = &*loaded {
                Arc::clone(disks)
            } else {
                let disks = self.store.load_disks(place.id).map_err(|e| self.denied(e))?;
                Arc::clone(loaded.insert(Arc::new(disks)))
            }
        };
        OpenDisk::new(loaded, disk, format!("{name} of checkpoint {}", place.id))
            .map_err(|error| self.unreadable(&error))
    }

    /// Reads up to `len` bytes of a disk from byte `offset` on; fewer at its end. Error:
    /// [`NodeError::Unreadable`] if an image or the store cannot be read, or the image has changed.
    pub fn read_disk(
        &self,
        disk: &OpenDisk,
        offset: u64,
        len: usize,
    ) -> Result<Vec<u8>, NodeError> {
        disk.read(offset, len).map_err(|error| self.unreadable(&error))
    }

    fn look_at(
        &self,
        place: NodeDirectory,
        kind: Option<MountedFile>,
    ) -> Result<NodeAttributes, NodeError> {
        let id = place.id;
        // It may have been forgotten since.
        self.store.resolve(&id.to_string()).map_err(|e| self.denied(e))?;
        let opened = self.open(id)?;
        let vm = || opened.vm(place).ok_or(NodeError::Absent);
        let len_bytes = match kind {
            None => 0,
            Some(MountedFile::Info) => self.info(id)?.len() as u64,
            Some(MountedFile::Devices) => vm()?.guest.device_state.len() as u64,
            Some(MountedFile::Screen) => self.png(&opened, vm()?)?.len() as u64,
            Some(kind) => vm()?.image(kind).ok_or(NodeError::Absent)?.len_bytes(),
        };
        let time = opened.loaded.meta.taken_at.into();
        Ok(NodeAttributes { len_bytes, time, lasts: kind != Some(MountedFile::Info) })
    }

    /// Returns the target of a link: the number of the checkpoint. Error: the link does not exist
    /// any more, or the store cannot be read.
    pub fn target(&self, link: u64) -> Result<String, NodeError> {
        let name = usize::try_from(link).ok().and_then(|n| lock(&self.links).get(n).cloned());
        let id = self.store.resolve(&name.ok_or(NodeError::Absent)?).map_err(|e| self.denied(e))?;
        Ok(id.to_string())
    }

    /// Reads up to `len` bytes of the file `kind` in the directory `place`, from byte `offset` on;
    /// fewer at its end. Error: the file does not exist any more, or the store cannot be read.
    pub fn read(
        &self,
        place: NodeDirectory,
        kind: MountedFile,
        offset: u64,
        len: usize,
    ) -> Result<Vec<u8>, NodeError> {
        let id = place.id;
        let part = |bytes: &[u8]| {
            let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
            let end = start.saturating_add(len).min(bytes.len());
            bytes.get(start..end).unwrap_or_default().to_vec()
        };
        if kind == MountedFile::Info {
            return Ok(part(self.info(id)?.as_bytes()));
        }
        let opened = self.open(id)?;
        let vm = opened.vm(place).ok_or(NodeError::Absent)?;
        if kind == MountedFile::Screen {
            return Ok(part(&self.png(&opened, vm)?));
        }
        let Some(image) = vm.image(kind) else { return Ok(part(&vm.guest.device_state)) };
        let mut bytes = vec![0; len];
        let read = image.read_at(&StoredPages::new(&opened.loaded, &vm.guest), offset, &mut bytes);
        let read = read.map_err(|source| {
            let file = kind.name();
            self.unreadable(&Error::Read { checkpoint: id, file, offset, source })
        })?;
        bytes.truncate(read);
        Ok(bytes)
    }

    /// What the display of a VM showed, as a file.
    fn png(&self, opened: &Opened, vm: &OpenedVm) -> Result<Arc<[u8]>, NodeError> {
        let shown = vm.screen.as_ref().ok_or(NodeError::Absent)?;
        let mut png = lock(&vm.png);
        if let Some(png) = &*png {
            return Ok(Arc::clone(png));
        }
        let made =
            shown.picture(&opened.loaded, &vm.guest).and_then(|picture| screens::png(&picture));
        let made = made.map_err(|source| {
            let (checkpoint, file) = (opened.loaded.id, MountedFile::Screen.name());
            self.unreadable(&Error::Make { checkpoint, file, source })
        })?;
        Ok(Arc::clone(png.insert(made.into())))
    }

    fn lacks(&self, id: CheckpointId, kind: MountedFile, source: keyframe_inspect::Error) {
        self.tell(&Error::NoFile { checkpoint: id, file: kind.name(), source });
    }

    fn info(&self, id: CheckpointId) -> Result<String, NodeError> {
        let sealed = self.store.sealed(id).map_err(|e| self.denied(e))?;
        let text = serde_json::to_string_pretty(&show::shown(&sealed));
        text.map(|text| text + "\n")
            .map_err(|source| self.unreadable(&Error::Info { checkpoint: id, source }))
    }

    /// Loads a checkpoint, or finds it among those that are.
    fn open(&self, id: CheckpointId) -> Result<Arc<Opened>, NodeError> {
        {
            let mut all = lock(&self.opened);
            if let Some(opened) =
                all.iter().position(|o| o.loaded.id == id).and_then(|at| all.remove(at))
            {
                all.push_back(Arc::clone(&opened));
                return Ok(opened);
            }
        }
        let loaded = self.store.load(id).map_err(|e| self.denied(e))?;
        let made = |image: keyframe_inspect::Result<Image>, kind: MountedFile| {
            image.map_err(|e| self.lacks(id, kind, e)).ok()
        };
        let vm = |guest: Guest| OpenedVm {
            directory: guest.member.as_deref().map(directory_name),
            raw: made(guest.raw(), MountedFile::Raw),
            core: made(guest.core(), MountedFile::Core),
            screen: match DrawableDisplay::of(&guest) {
                Ok(shown) => Some(shown),
                Err(NoPicture::NoDisplay | NoPicture::NotDrawn(_)) => None,
                Err(NoPicture::Failed(e)) => {
                    self.lacks(id, MountedFile::Screen, e);
                    None
                }
            },
            png: Mutex::default(),
            guest,
        };
        let guests = Guest::all(&loaded).unwrap_or_else(|e| {
            self.tell(&e.into());
            Vec::new()
        });
        let vms = guests.into_iter().take(MEMBERS_MAX).map(vm).collect();
        let opened = Arc::new(Opened { loaded, vms, disks: Mutex::default() });
        let mut all = lock(&self.opened);
        all.push_back(Arc::clone(&opened));
        if all.len() > LOADED_MAX {
            all.pop_front();
        }
        Ok(opened)
    }

    fn link(&self, name: &str) -> MountNode {
        let mut links = lock(&self.links);
        let at = links.iter().position(|l| l == name).unwrap_or_else(|| {
            links.push(name.to_owned());
            links.len() - 1
        });
        MountNode::Link(at as u64)
    }

    fn denied(&self, error: keyframe_store::Error) -> NodeError {
        if matches!(error, keyframe_store::Error::UnknownCheckpoint { .. }) {
            return NodeError::Absent;
        }
        self.unreadable(&error.into())
    }

    fn unreadable(&self, error: &Error) -> NodeError {
        self.tell(error);
        NodeError::Unreadable
    }

    /// Reports an error the first time.
    fn tell(&self, error: &Error) {
        let mut said = lock(&self.said);
        let text = error_chain(error);
        if said.len() < MESSAGES_MAX && !said.contains(&text) {
            (self.report)(error);
            said.insert(text);
        }
    }
}

impl Opened {
    /// The VM whose files are in a place.
    fn vm(&self, place: NodeDirectory) -> Option<&OpenedVm> {
        let is_group = !self.loaded.meta.members.is_empty();
        let at = if is_group { usize::from(place.member).checked_sub(1)? } else { 0 };
        self.vms.get(at).filter(|_| is_group || place.member == 0)
    }

    /// The directories in a place.
    fn directories(&self, place: NodeDirectory) -> impl Iterator<Item = (String, MountNode)> {
        let all = if place.member == 0 { &self.vms[..] } else { &[] };
        let named = (1..).zip(all).filter_map(|(member, vm)| Some((vm.directory.clone()?, member)));
        named.filter(|(name, _)| (1..=NAME_BYTES_MAX).contains(&name.len())).map(
            move |(name, member)| (name, MountNode::Directory(NodeDirectory { member, ..place })),
        )
    }

    /// The disks in a place: their numbers in the checkpoint, and the names of their files.
    fn disks(&self, place: NodeDirectory) -> Vec<(u8, String)> {
        let Some(vm) = self.vm(place) else { return Vec::new() };
        disks::files(&self.loaded.meta.disks, vm.guest.member.as_deref())
            .filter(|(_, name)| name.len() <= NAME_BYTES_MAX)
            .collect()
    }

    fn has(&self, place: NodeDirectory, kind: MountedFile) -> bool {
        match kind {
            MountedFile::Info => place.member == 0,
            MountedFile::Devices => self.vm(place).is_some(),
            MountedFile::Screen => self.vm(place).is_some_and(|vm| vm.screen.is_some()),
            MountedFile::Raw | MountedFile::Core => {
                self.vm(place).is_some_and(|vm| vm.image(kind).is_some())
            }
        }
    }
}

impl OpenedVm {
    fn image(&self, kind: MountedFile) -> Option<&Image> {
        match kind {
            MountedFile::Raw => self.raw.as_ref(),
            MountedFile::Core => self.core.as_ref(),
            MountedFile::Info | MountedFile::Devices | MountedFile::Screen => None,
        }
    }
}

/// Makes a directory name of a member's name: characters that no file name may hold, or that make
/// it another file's name, become `%` and two hexadecimal digits.
fn directory_name(member: &str) -> String {
    let taken =
        member.starts_with('.') || MountedFile::ALL.iter().any(|kind| kind.name() == member);
    disks::escaped(member, |c| c == '.' && taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_member_has_a_directory_of_its_own() {
        let names = ["web", "a/b", "a%2Fb", ".", "..", "info.json", "db.1"].map(directory_name);
        assert_eq!(names, ["web", "a%2Fb", "a%252Fb", "%2E", "%2E%2E", "info%2Ejson", "db.1"]);
    }
}
