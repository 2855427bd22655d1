//! The userfaultfd of a Firecracker that loads a VM by the backend `Uffd`.
//!
//! ```text
//!   Firecracker ── connects to our socket ──▶ its mappings as JSON, and the descriptor
//!               ── waits for a page ─────────▶ served by Keyframe (crate `ram-loading`)
//! ```
//!
//! Firecracker registers its RAM for missing pages itself, before it touches any. It keeps a copy of
//! the descriptor. If Keyframe ends before all pages are there, the VM would wait for ever, so the
//! kernel ends it then.

use crate::{Error, Result};
use keyframe_kernel::Process;
use keyframe_kernel::missing_pages::MissingPages;
use keyframe_ram_loading::Place;
use keyframe_units::{HostRange, HostVirt, PAGE_BYTES, PageIndex, PageRange, RamLayout};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::IoSliceMut;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde::Deserialize;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest list of mappings.
const MAPPINGS_BYTES_MAX: usize = 64 << 10;
/// How long Firecracker may take from its connection to the message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often it is looked whether the load has failed.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// A part of the RAM in Firecracker's memory, as it tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
struct Told {
    base_host_virt_addr: u64,
    size: u64,
    /// Where its contents are in a file of RAM.
    offset: u64,
}

/// A socket to which a Firecracker that loads a VM connects.
#[derive(Debug)]
pub(crate) struct Receiver {
    listener: UnixListener,
}

impl Receiver {
    /// Listens at `socket`. Error: the socket cannot be made.
    pub fn listen(socket: &Path) -> Result<Self> {
        let listener = UnixListener::bind(socket)
            .map_err(Error::io(format!("listen at {}", socket.display())))?;
        Ok(Self { listener })
    }

    /// Waits for Firecracker's mappings until `given_up`. Returns its missing pages, and where the
    /// RAM of `layout` is. Errors: Firecracker connects and sends something else; [`Error::Uffd`]
    /// if it was given up.
    pub fn receive(
        &self,
        process: &Process,
        layout: &RamLayout,
        given_up: &AtomicBool,
    ) -> Result<(MissingPages, Vec<Place>)> {
        let bad = |problem: String| Error::Uffd { problem };
        loop {
            let mut looked = [PollFd::new(&self.listener, PollFlags::IN)];
            match poll(&mut looked, Some(&LOOK_EVERY)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => break,
                Err(e) => return Err(Error::io("wait for Firecracker's userfaultfd")(e)),
            }
            if given_up.load(Ordering::Relaxed) || !process.is_alive() {
                return Err(bad("it has not passed any".into()));
            }
        }
        let (stream, _) = self.listener.accept().map_err(Error::io("accept Firecracker"))?;
        let (told, uffd) = message(&stream)?;
        let places = places(&told, layout).map_err(bad)?;
        let ranges = places.iter().map(|place| place.host).collect();
        Ok((MissingPages::passed(process, uffd, ranges)?, places))
    }
}

/// Receives the mappings and the descriptor.
fn message(stream: &UnixStream) -> Result<(Vec<Told>, OwnedFd)> {
    let operation = "receive Firecracker's userfaultfd";
    let bad = |problem: &str| Error::Uffd { problem: problem.into() };
    let until = Instant::now() + MESSAGE_TIMEOUT;
    let (mut text, mut passed) = (Vec::new(), None);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || text.len() > MAPPINGS_BYTES_MAX {
            return Err(bad("its message is not whole"));
        }
        stream.set_read_timeout(Some(left)).map_err(Error::io(operation))?;
        let mut chunk = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(
            stream,
            &mut [IoSliceMut::new(&mut chunk)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        );
        let len = match received {
            Ok(received) => received.bytes,
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(Error::io(operation)(e)),
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                passed = descriptors.last().or(passed);
            }
        }
        text.extend_from_slice(chunk.get(..len).unwrap_or_default());
        if let Ok(told) = serde_json::from_slice(&text) {
            let uffd = passed.ok_or_else(|| bad("it has sent no descriptor"))?;
            return Ok((told, uffd));
        }
        if len == 0 {
            return Err(bad("its mappings cannot be read"));
        }
    }
}

/// Where the pages of `layout` are. Error: the mappings do not cover them exactly.
fn places(told: &[Told], layout: &RamLayout) -> Result<Vec<Place>, String> {
    let mut told = told.to_vec();
    told.sort_by_key(|mapping| mapping.offset);
    let page = PAGE_BYTES as u64;
    let (mut places, mut next) = (Vec::with_capacity(told.len()), 0);
    for Told { base_host_virt_addr, size, offset } in told {
        if offset != next || size == 0 || size % page != 0 || base_host_virt_addr % page != 0 {
            return Err(format!("it maps {size} bytes of RAM from byte {offset}, after {next}"));
        }
        next = offset.checked_add(size).ok_or("its RAM is too large")?;
        places.push(Place {
            name: "ram".into(),
            pages: PageRange::new(PageIndex(offset / page), size / page),
            host: HostRange { start: HostVirt(base_host_virt_addr), len_bytes: size },
        });
    }
    if next != layout.len_bytes() {
        return Err(format!(
            "it maps {next} bytes of RAM, and the checkpoint has {}",
            layout.len_bytes()
        ));
    }
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ram;

    fn told(base_host_virt_addr: u64, size: u64, offset: u64) -> Told {
        Told { base_host_virt_addr, size, offset }
    }

    #[test]
    fn mappings_cover_the_ram_exactly_or_are_refused() {
        let layout = RamLayout::new(ram::regions(1).iter().map(ram::block).collect()).unwrap();
        let half = 512 << 10;
        let whole = places(&[told(1 << 30, half, half), told(2 << 30, half, 0)], &layout).unwrap();
        assert_eq!(
            (whole[0].host.start, whole[1].host.start),
            (HostVirt(2 << 30), HostVirt(1 << 30))
        );
        assert_eq!(whole[1].pages, PageRange::new(PageIndex(128), 128));
        for bad in [
            &[][..],
            &[told(1 << 30, half, 0)],
            &[told(1 << 30, half, 0), told(2 << 30, half, 0)],
            &[told(1 << 30, half, 0), told(2 << 30, half + 1, half)],
            &[told(1 << 30, 2 * half, 4096)],
            &[told(7, 2 * half, 0)],
            &[told(0, !4095, 0), told(0, 4096, !4095)],
        ] {
            assert!(places(bad, &layout).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn one_that_sends_no_descriptor_is_refused() {
        use std::io::Write;
        for text in [&b"[]"[..], b"nonsense"] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(text).unwrap();
            drop(theirs);
            assert!(matches!(message(&ours), Err(Error::Uffd { .. })));
        }
    }
}
