//! A tap interface that leads nowhere: it is in a network namespace that no process can enter.
//!
//! A guest's network card that was connected to a tap has agreed with it on offloads, and no other
//! kind of network offers them. A clone's card thus needs a tap, too.
//!
//! ```text
//!   child of a fork: unshare(net) ─▶ open /dev/net/tun, one queue each ─▶ descriptors to the parent ─▶ end
//! ```
//!
//! The descriptors keep the namespace. The interface stays down: what the guest sends is dropped.
//!
//! A VMM that opens its taps by their names itself can be started in such a namespace
//! ([`start_among_isolated_taps`]). The namespace and its taps end with that process. They are made
//! by the same kind of child, because the VMM must keep its user and its rights.

use crate::child_setup::start_in_network;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The largest number of queues of one tap.
pub const QUEUES_MAX: usize = 64;
const IFF_TAP: libc::c_short = 0x0002;
const IFF_MULTI_QUEUE: libc::c_short = 0x0100;
const IFF_NO_PI: libc::c_short = 0x1000;
const IFF_VNET_HDR: libc::c_short = 0x4000;
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETPERSIST: libc::c_ulong = 0x4004_54cb;
const TUNGETIFF: libc::c_ulong = 0x8004_54d2;
const IFF_PERSIST: libc::c_short = 0x0800;

/// `struct ifreq`, with the flags that `TUNSETIFF` reads.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: libc::c_short,
    rest: [u8; 22],
}

/// Makes a tap with `queues` queues (1 to [`QUEUES_MAX`]) and headers for offloads, and returns a
/// descriptor for each queue.
///
/// Needs no rights if the kernel lets users have namespaces, and else `CAP_SYS_ADMIN`.
///
/// Errors: the kernel refuses the namespace, or has no tap interfaces; `InvalidInput` for the
/// number of queues.
pub fn isolated_tap(queues: usize) -> io::Result<Vec<OwnedFd>> {
    if !(1..=QUEUES_MAX).contains(&queues) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    from_namespace(queues, move |socket| {
        for _ in 0..queues {
            send(socket, &open_queue(queues > 1)?)?;
        }
        Ok(())
    })
}

/// Has a child of this process enter a network namespace of its own and call `make`, which sends
/// `count` descriptors through the socket that it gets. Returns the descriptors.
///
/// `make` runs between fork and exec. It may make system calls, but neither allocate nor lock.
fn from_namespace(
    count: usize,
    make: impl Fn(BorrowedFd<'_>) -> io::Result<()> + Send + Sync + 'static,
) -> io::Result<Vec<OwnedFd>> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut command = Command::new("/proc/self/exe");
    let work = move || {
        let done = unshare(libc::CLONE_NEWNET).and_then(|()| make(theirs.as_fd()));
        match done {
            // A user of its own has all rights in a namespace of its own.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNET)?;
                make(theirs.as_fd())?;
            }
            done => done?,
        }
        // The program is never executed: all is done.
        Err(io::Error::from_raw_os_error(libc::ECANCELED))
    };
    // SAFETY: between fork and exec only what is async-signal-safe may be done: `work` makes system
    // calls alone, and neither allocates nor locks; an error from a system call's number allocates
    // nothing either.
    unsafe { command.pre_exec(work) };
    let ended = command.spawn();
    // The command holds the child's end of the socket.
    drop(command);
    match ended {
        Err(error) if error.raw_os_error() == Some(libc::ECANCELED) => {}
        Err(error) => return Err(error),
        Ok(_) => return Err(io::Error::other("a process was started that should not be")),
    }
    (0..count).map(|_| receive(ours.as_fd())).collect()
}

/// Makes the child of `command` start in a network namespace of its own, which has a tap of each
/// name in `taps`. Any user may open them.
///
/// Needs `CAP_SYS_ADMIN`; without it the child does not start. Errors: those of [`isolated_tap`];
/// `InvalidInput` for a name that no interface can have.
pub fn start_among_isolated_taps(command: &mut Command, taps: &[&str]) -> io::Result<()> {
    let names = taps.iter().map(|tap| name_of(tap)).collect::<io::Result<Vec<_>>>()?;
    let made = from_namespace(1, move |socket| {
        names.iter().try_for_each(|name| keep(&open_tap(*name, 0)?))?;
        send(socket, &open(c"/proc/self/ns/net", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    })?;
    let network = made.into_iter().next().ok_or(io::ErrorKind::UnexpectedEof)?;
    start_in_network(command, network);
    Ok(())
}

/// Returns whether the tap that `tap` has open stays when no process has it open. Error: it is none.
pub fn is_persistent(tap: impl AsFd) -> io::Result<bool> {
    let mut request = InterfaceRequest { name: [0; 16], flags: 0, rest: [0; 22] };
    // SAFETY: the pointer is to a live request, as large as the kernel's, which the kernel fills.
    let done = unsafe { libc::ioctl(tap.as_fd().as_raw_fd(), TUNGETIFF, &raw mut request) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(request.flags & IFF_PERSIST != 0) }
}

/// The name as the kernel takes it. Error: it is empty, too long, or has a zero byte.
fn name_of(tap: &str) -> io::Result<[u8; 16]> {
    let mut name = [0; 16];
    if tap.is_empty() || tap.len() >= name.len() || tap.contains('\0') {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    name[..tap.len()].copy_from_slice(tap.as_bytes());
    Ok(name)
}

/// Lets a tap stay in its namespace after its descriptor is closed.
fn keep(tap: &OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor is open; TUNSETPERSIST takes a number, and no pointer.
    let done = unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETPERSIST, 1) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives the calling process the namespaces of `flags`.
fn unshare(flags: libc::c_int) -> io::Result<()> {
    // SAFETY: the call takes no pointer; the process has this thread alone.
    if unsafe { libc::unshare(flags) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn open_queue(many: bool) -> io::Result<OwnedFd> {
    let mut name = [0; 16];
    name[..3].copy_from_slice(b"kf0");
    open_tap(name, if many { IFF_MULTI_QUEUE } else { 0 })
}

fn open_tap(name: [u8; 16], more_flags: libc::c_short) -> io::Result<OwnedFd> {
    let tap =
        open(c"/dev/net/tun", OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?;
    let flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | more_flags;
    let request = InterfaceRequest { name, flags, rest: [0; 22] };
    // SAFETY: the descriptor is open; TUNSETIFF reads and writes one `struct ifreq`, whose size is
    // that of `request`, which lives on.
    let done = unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETIFF, &raw const request) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(tap) }
}

fn send(socket: BorrowedFd<'_>, tap: &OwnedFd) -> io::Result<()> {
    let taps = [tap.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&taps)) {
        return Err(Errno::NOBUFS.into());
    }
    sendmsg(socket, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8];
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let rights = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut taps) => taps.next(),
        _ => None,
    });
    rights.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tap_has_its_queues_and_is_seen_by_no_one() {
        for queues in [1, 3] {
            match isolated_tap(queues) {
                Ok(taps) => {
                    assert_eq!(taps.len(), queues);
                    assert!(!std::path::Path::new("/sys/class/net/kf0").exists());
                }
                Err(error) => {
                    let known = [libc::EPERM, libc::ENOENT, libc::ENODEV, libc::ENOSPC];
                    assert!(known.contains(&error.raw_os_error().unwrap_or(0)), "{error}");
                    eprintln!("skipped: this host has no taps for us: {error}");
                }
            }
        }
        assert!(isolated_tap(0).is_err() && isolated_tap(QUEUES_MAX + 1).is_err());
    }

    #[test]
    fn a_child_starts_among_taps_of_its_own() {
        let mut child = Command::new("cat");
        child.arg("/proc/net/dev");
        start_among_isolated_taps(&mut child, &["kfown0", "kfown1"]).unwrap();
        match child.output() {
            Ok(said) => {
                let said = String::from_utf8(said.stdout).unwrap();
                assert!(said.contains("kfown0:") && said.contains("kfown1:"), "{said}");
                assert!(!std::fs::read_to_string("/proc/net/dev").unwrap().contains("kfown"));
            }
            Err(error) => eprintln!("skipped: this host has no taps for us: {error}"),
        }
        let mut child = Command::new("true");
        for bad in ["", "a-name-of-16-byte", "a\0"] {
            assert!(start_among_isolated_taps(&mut child, &[bad]).is_err(), "{bad:?}");
        }
    }
}
