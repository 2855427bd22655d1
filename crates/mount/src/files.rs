//! The tree as FUSE asks for it.

use super::disks::OpenDisk;
use super::node::{MountNode, MountedFile, NodeDirectory};
use super::tree::{CheckpointTree, NodeAttributes, NodeError};
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, Request,
};
use keyframe_locks::IgnorePoison;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// How long the kernel may cache names and sizes: a forgotten checkpoint is gone after that.
const TRUSTED: Duration = Duration::from_secs(1);
/// The most that one read gives.
const READ_BYTES_MAX: u32 = 1 << 20;
/// Directories that are being listed at once.
const LISTINGS_MAX: usize = 1024;
/// Files of disks that are open at once.
const DISKS_OPEN_MAX: usize = 1024;

/// The FUSE file system that shows a [`CheckpointTree`].
pub struct MountedFiles {
    tree: CheckpointTree,
    /// The names of directories that are being listed, each as it was when it was opened.
    listings: Mutex<HashMap<u64, Vec<(String, MountNode)>>>,
    /// Disks that are open, by their handles.
    disks: Mutex<HashMap<u64, Arc<OpenDisk>>>,
    owner: (u32, u32),
}

impl MountedFiles {
    /// Makes the file system of a tree. All files belong to the calling user.
    pub fn new(tree: CheckpointTree) -> Self {
        let owner = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        Self { tree, listings: Mutex::default(), disks: Mutex::default(), owner }
    }

    fn listings(&self) -> MutexGuard<'_, HashMap<u64, Vec<(String, MountNode)>>> {
        self.listings.lock().ignore_poison()
    }

    fn disks(&self) -> MutexGuard<'_, HashMap<u64, Arc<OpenDisk>>> {
        self.disks.lock().ignore_poison()
    }

    fn open_disk(&self, place: NodeDirectory, disk: u8) -> Result<u64, Errno> {
        let opened = self.tree.open_disk(place, disk).map_err(errno)?;
        keep(&mut self.disks(), Arc::new(opened), DISKS_OPEN_MAX)
    }

    fn attributes(&self, node: MountNode) -> Result<(FileAttr, Duration), Errno> {
        let NodeAttributes { len_bytes, time, lasts } = self.tree.look(node).map_err(errno)?;
        let (kind, perm) =
            (kind(node), if kind(node) == FileType::RegularFile { 0o400 } else { 0o500 });
        let attributes = FileAttr {
            ino: INodeNo(node.number()),
            size: len_bytes,
            blocks: len_bytes.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm,
            nlink: if kind == FileType::Directory { 2 } else { 1 },
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        };
        Ok((attributes, if lasts { TRUSTED } else { Duration::ZERO }))
    }

    fn list(&self, node: MountNode) -> Result<u64, Errno> {
        let names = self.tree.list(node).map_err(errno)?;
        let above = match node {
            MountNode::Directory(NodeDirectory { id, member }) if member > 0 => {
                MountNode::Directory(NodeDirectory::of(id))
            }
            _ => MountNode::Root,
        };
        let around = [(".".to_owned(), node), ("..".to_owned(), above)];
        keep(&mut self.listings(), around.into_iter().chain(names).collect(), LISTINGS_MAX)
    }
}

/// Gives what is opened a handle, of at most `max`.
fn keep<T>(open: &mut HashMap<u64, T>, opened: T, max: usize) -> Result<u64, Errno> {
    let free = (1..=max as u64).find(|handle| !open.contains_key(handle)).ok_or(Errno::EMFILE)?;
    open.insert(free, opened);
    Ok(free)
}

fn node(number: INodeNo) -> Result<MountNode, Errno> {
    MountNode::of(number.0).ok_or(Errno::ENOENT)
}

fn kind(node: MountNode) -> FileType {
    match node {
        MountNode::Root | MountNode::Directory(_) => FileType::Directory,
        MountNode::File(..) | MountNode::Disk(..) => FileType::RegularFile,
        MountNode::Link(_) => FileType::Symlink,
    }
}

fn errno(denied: NodeError) -> Errno {
    match denied {
        NodeError::Absent => Errno::ENOENT,
        NodeError::Unreadable => Errno::EIO,
    }
}

impl Filesystem for MountedFiles {
    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = node(parent).and_then(|parent| {
            let name = name.to_str().ok_or(Errno::ENOENT)?;
            let found = self.tree.find(parent, name).map_err(errno)?;
            self.attributes(found)
        });
        match found {
            Ok((attributes, trusted)) => reply.entry(&trusted, &attributes, Generation(0)),
            Err(errno) => reply.error(errno),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match node(ino).and_then(|node| self.attributes(node)) {
            Ok((attributes, trusted)) => reply.attr(&trusted, &attributes),
            Err(errno) => reply.error(errno),
        }
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        match MountNode::of(ino.0) {
            Some(MountNode::Link(link)) => match self.tree.target(link) {
                Ok(target) => reply.data(target.as_bytes()),
                Err(denied) => reply.error(errno(denied)),
            },
            _ => reply.error(Errno::EINVAL),
        }
    }

    fn open(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match MountNode::of(ino.0) {
            // Tags come and go, and with them its length.
            Some(MountNode::File(_, MountedFile::Info)) => {
                reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
            }
            Some(MountNode::File(..)) => reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE),
            Some(MountNode::Disk(place, disk)) => match self.open_disk(place, disk) {
                Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::empty()),
                Err(errno) => reply.error(errno),
            },
            _ => reply.error(Errno::EISDIR),
        }
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match MountNode::of(ino.0) {
            Some(MountNode::File(place, kind)) => {
                match self.tree.read(place, kind, offset, size.min(READ_BYTES_MAX) as usize) {
                    Ok(bytes) => reply.data(&bytes),
                    Err(denied) => reply.error(errno(denied)),
                }
            }
            Some(MountNode::Disk(..)) => {
                let disk = self.disks().get(&fh.0).cloned();
                let len = size.min(READ_BYTES_MAX) as usize;
                let read = disk
                    .ok_or(Errno::EBADF)
                    .and_then(|disk| self.tree.read_disk(&disk, offset, len).map_err(errno));
                match read {
                    Ok(bytes) => reply.data(&bytes),
                    Err(errno) => reply.error(errno),
                }
            }
            _ => reply.error(Errno::EISDIR),
        }
    }

    fn release(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        if let Some(MountNode::Disk(..)) = MountNode::of(ino.0) {
            self.disks().remove(&fh.0);
        }
        reply.ok();
    }

    fn opendir(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match node(ino).and_then(|node| self.list(node)) {
            Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::empty()),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listings = self.listings();
        let Some(names) = listings.get(&fh.0) else { return reply.error(Errno::EBADF) };
        for (next, (name, node)) in
            (1..).zip(names).skip(usize::try_from(offset).unwrap_or(usize::MAX))
        {
            if reply.add(INodeNo(node.number()), next, kind(*node), name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.listings().remove(&fh.0);
        reply.ok();
    }
}
