//! The pipe into which QEMU writes its device state in a one-command pause. QEMU stands still as
//! long as its last piece does not fit.
//!
//! ```text
//!   slots (one page each)   f f f f f f . . . . .      f: filler, one byte that fills a whole slot
//!                           f f f f f f 1 2 3 4 5      QEMU has written all full pages of its state,
//!                                          ▲           and waits in `write` with the last piece
//!                    as many free slots as the previous state had full pages
//! ```
//!
//! QEMU writes its state in pieces of 32 KiB and the rest as one last piece. The pipe is prepared
//! so that all but the last piece fit, if the state is as long as the previous one. If it is
//! longer, the engine frees the slots that one piece needs, and waits for the next piece. If it is
//! shorter, QEMU does not stand still, and the caller tries again.

use crate::{Error, Qmp, Result};
use keyframe_kernel::{Process, read_memory};
use keyframe_units::HostVirt;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{
    PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with, tee,
};
use serde_json::{Value, json};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// A slot of a pipe: what QEMU's write occupies at least, in bytes.
const SLOT_BYTES: usize = 4096;
/// The largest pipe that an unprivileged process may make by default.
const SLOTS_MAX: usize = 256;
/// The smallest pipe: one piece of a state (QEMU's `IO_BUF_SIZE`).
const SLOTS_MIN: usize = 8;
/// More than one piece of a state.
const PIECE_BYTES_MAX: u64 = 1 << 20;
/// More parts than a piece has (QEMU's `MAX_IOV_SIZE`).
const PARTS_MAX: u64 = 64;
/// The numbers of the system calls `write` and `writev` on x86-64.
const WRITE: u64 = 1;
const WRITEV: u64 = 20;

/// A pipe whose write end QEMU has open.
pub(crate) struct StatePipe {
    /// Does not block. The watchdog's process has it too.
    read_end: OwnedFd,
    /// The end that QEMU is given. QEMU makes each descriptor that it gets block.
    write_end: OwnedFd,
    /// The same end as another open file, which does not block and keeps each write in a slot of
    /// its own.
    filler_end: OwnedFd,
    /// A second pipe, for reading what the first one holds without emptying it.
    copy: (OwnedFd, OwnedFd),
    /// The device and inode number of the pipe.
    inode: (u64, u64),
    /// Where QEMU has it: the descriptor set and the number of the descriptor.
    passed: Option<(u32, u64)>,
    /// The full pages of the previous state, in whole pieces.
    full_pages: usize,
    /// Slots with filler at the head of the pipe.
    fillers: usize,
}

/// A `write` of QEMU's main thread into the pipe that waits for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockedWrite {
    call: u64,
    descriptor: u64,
    buffer: u64,
    count: u64,
}

impl StatePipe {
    /// Creates a pipe for device states. Error: [`Error::Io`] if the kernel refuses.
    pub fn new() -> Result<Self> {
        let operation = "make a pipe for device state";
        let flags = PipeFlags::CLOEXEC | PipeFlags::NONBLOCK | PipeFlags::DIRECT;
        let (read_end, write_end) = pipe_with(flags).map_err(Error::io(operation))?;
        let copy = pipe_with(flags).map_err(Error::io(operation))?;
        let path = format!("/proc/self/fd/{}", crate::spawn::number(&write_end));
        let modes = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let filler_end =
            rustix::fs::open(path, modes, Mode::empty()).map_err(Error::io(operation))?;
        // The kernel refuses this mode in `open`.
        rustix::fs::fcntl_setfl(&filler_end, OFlags::NONBLOCK | OFlags::DIRECT)
            .map_err(Error::io(operation))?;
        // QEMU opens its end once more by its name in /proc, perhaps as another user.
        rustix::fs::fchmod(&write_end, Mode::from_raw_mode(0o622)).map_err(Error::io(operation))?;
        let stat = rustix::fs::fstat(&write_end).map_err(Error::io(operation))?;
        let inode = (stat.st_dev, stat.st_ino);
        let (passed, full_pages, fillers) = (None, 0, 0);
        Ok(Self { read_end, write_end, filler_end, copy, inode, passed, full_pages, fillers })
    }

    /// Returns the end that QEMU is given.
    pub fn write_end(&self) -> &OwnedFd {
        &self.write_end
    }

    /// Returns the end from which the state comes. It is readable when QEMU has written.
    pub fn read_end(&self) -> &OwnedFd {
        &self.read_end
    }

    /// Returns a second descriptor of the read end, for the watchdog's process. Error:
    /// [`Error::Io`] if this process has no free descriptor.
    pub fn duplicate(&self) -> Result<OwnedFd> {
        rustix::io::fcntl_dupfd_cloexec(&self.read_end, 3)
            .map_err(Error::io("duplicate the pipe for device state"))
    }

    /// Gives the write end to the QEMU behind `qmp`, in descriptor set `set` with the text `mark`.
    /// Error: QEMU refuses or does not answer.
    pub fn pass(&mut self, qmp: &mut Qmp, set: u32, mark: &str) -> Result<()> {
        let arguments = json!({ "fdset-id": set, "opaque": mark });
        let answer = qmp.execute_passing("add-fd", arguments, self.write_end.as_fd())?;
        match answer.get("fd").and_then(Value::as_u64) {
            Some(descriptor) => self.passed = Some((set, descriptor)),
            None => return Err(qmp.unexpected("add-fd", &answer)),
        }
        Ok(())
    }

    /// Has QEMU forget the pipe. A QEMU that does not answer is ignored.
    pub fn take_back(&self, qmp: &mut Qmp) {
        if let Some((set, _)) = self.passed {
            let _ = qmp.execute("remove-fd", Some(json!({ "fdset-id": set })));
        }
    }

    /// Returns QEMU's name of the pipe; `None` if QEMU, process `pid`, does not have it. It is not
    /// the name of the descriptor set, because QEMU would truncate that file, which a pipe refuses.
    pub fn target(&self, pid: u32) -> Option<String> {
        let (_, descriptor) = self.passed?;
        // Another file of QEMU's under this number would be truncated.
        let is_ours = self.is_at(&format!("/proc/{pid}/fd/{descriptor}")).unwrap_or(false);
        is_ours.then(|| format!("/proc/self/fd/{descriptor}"))
    }

    /// Whether `path` names this pipe.
    fn is_at(&self, path: &str) -> Result<bool, Errno> {
        match rustix::fs::stat(path) {
            Ok(stat) => Ok((stat.st_dev, stat.st_ino) == self.inode),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Empties the pipe and fills it so that a state of the expected length stops QEMU at its last
    /// piece. Errors: [`Error::Refused`] if the user's pipes have reached their limit;
    /// [`Error::Io`].
    pub fn prepare(&mut self) -> Result<()> {
        let operation = "prepare the pipe for device state";
        self.drain(&mut Vec::new())?;
        let slots = (self.full_pages + 1).next_power_of_two().clamp(SLOTS_MIN, SLOTS_MAX);
        // A smaller pipe serves too, with more waits.
        let _ = fcntl_setpipe_size(&self.write_end, slots * SLOT_BYTES);
        let _ = fcntl_setpipe_size(&self.copy.1, slots * SLOT_BYTES);
        let size = |end: &OwnedFd| fcntl_getpipe_size(end).unwrap_or(0);
        let has = size(&self.write_end);
        if has < SLOTS_MIN * SLOT_BYTES || size(&self.copy.1) < has {
            return Err(Error::Refused {
                operation: operation.into(),
                reason: "the pipes of this user have reached fs.pipe-user-pages-soft".into(),
            });
        }
        self.fillers = 0;
        loop {
            match rustix::io::write(&self.filler_end, &[0]) {
                Ok(_) => self.fillers += 1,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(e) => return Err(Error::io(operation)(e)),
            }
        }
        let free = self.full_pages.min(self.fillers);
        self.free(free, &mut Vec::new())
    }

    /// Reads `slots` slots, and appends the device state in them to `state`.
    fn free(&mut self, slots: usize, state: &mut Vec<u8>) -> Result<()> {
        let mut page = [0; SLOT_BYTES];
        for _ in 0..slots {
            let is_filler = self.fillers > 0;
            // One byte of filler is a slot; of the state, a page is.
            match rustix::io::read(&self.read_end, &mut page[..]) {
                Ok(_) if is_filler => self.fillers -= 1,
                Ok(len) => state.extend_from_slice(page.get(..len).unwrap_or_default()),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(e) => return Err(Error::io("read the device state")(e)),
            }
        }
        Ok(())
    }

    /// Reads all that the pipe holds, and appends the device state in it to `state`. QEMU, if it
    /// waits for room, goes on. Error: [`Error::Io`] if the pipe cannot be read.
    pub fn drain(&mut self, state: &mut Vec<u8>) -> Result<()> {
        loop {
            let before = (self.fillers, state.len());
            self.free(SLOTS_MAX, state)?;
            if before == (self.fillers, state.len()) {
                return Ok(());
            }
        }
    }

    /// Makes room for `write`, which is not the last piece, and appends the bytes that it read for
    /// this to `state`. QEMU goes on, and stops at its next piece. Error: [`Error::Io`] if the pipe
    /// cannot be read.
    pub fn admit(&mut self, write: &[u8], state: &mut Vec<u8>) -> Result<()> {
        self.free(write.len().div_ceil(SLOT_BYTES), state)
    }

    /// Appends the device state that the pipe holds to `state`, and leaves it in the pipe. Error:
    /// [`Error::Io`] if the pipe cannot be read.
    pub fn peek(&mut self, state: &mut Vec<u8>) -> Result<()> {
        let operation = "copy the device state";
        let (copy_out, copy_in) = (&self.copy.0, &self.copy.1);
        let mut left = tee(&self.read_end, copy_in, usize::MAX >> 1, SpliceFlags::NONBLOCK)
            .map_err(Error::io(operation))?;
        let mut fillers = self.fillers;
        let mut page = [0; SLOT_BYTES];
        while left > 0 {
            let len = match rustix::io::read(copy_out, &mut page[..]) {
                Ok(0) | Err(Errno::AGAIN) => break,
                Ok(len) => len,
                Err(Errno::INTR) => continue,
                Err(e) => return Err(Error::io(operation)(e)),
            };
            left = left.saturating_sub(len);
            if fillers > 0 {
                fillers -= 1;
            } else {
                state.extend_from_slice(page.get(..len).unwrap_or_default());
            }
        }
        Ok(())
    }

    /// Notes the length of a state whose last piece has `last_bytes` bytes, for the next
    /// [`StatePipe::prepare`].
    pub fn expect(&mut self, state_bytes: usize, last_bytes: usize) {
        let pages = state_bytes.saturating_sub(last_bytes) / SLOT_BYTES;
        self.full_pages = (pages / SLOTS_MIN * SLOTS_MIN).min(SLOTS_MAX - SLOTS_MIN);
    }

    /// Notes the length of a state that did not stop QEMU, for the next [`StatePipe::prepare`].
    pub fn expect_length(&mut self, state_bytes: usize) {
        let piece = SLOTS_MIN * SLOT_BYTES;
        let last_bytes = (state_bytes.max(1) - 1) % piece + 1;
        self.expect(state_bytes, last_bytes);
    }

    fn is_full(&self) -> Result<bool> {
        let mut ends = [PollFd::new(&self.filler_end, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut ends, Some(&now)) {
            Ok(ready) => Ok(ready == 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(Error::io("look at the pipe for device state")(error)),
        }
    }

    /// Returns the write into this pipe for which the main thread of `process` waits, and of which
    /// the pipe holds nothing; `None` if it runs or waits for something else. `call` is the open
    /// file in `/proc` that shows the system call of this thread. Error: [`Error::Io`] if that file
    /// or the pipe cannot be looked at.
    pub fn blocked_write(&self, process: &Process, call: &File) -> Result<Option<BlockedWrite>> {
        // A thread that a read has just woken still counts as waiting, with the write that has room
        // now. When the pipe is full again, that write is complete, and the thread waits with
        // another.
        if !self.is_full()? {
            return Ok(None);
        }
        let mut text = [0; 256];
        let operation = || format!("read the system call of process {}", process.pid());
        let len = call.read_at(&mut text, 0).map_err(Error::io(operation()))?;
        let text = String::from_utf8_lossy(text.get(..len).unwrap_or_default());
        let Some(write) = BlockedWrite::parse(&text) else { return Ok(None) };
        let path = format!("/proc/{}/fd/{}", process.pid(), write.descriptor);
        Ok(self.is_at(&path).map_err(Error::io(operation()))?.then_some(write))
    }
}

impl BlockedWrite {
    /// Reads the kernel's text of a thread's system call: its number, its arguments, the stack
    /// pointer, the program counter.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_ascii_whitespace();
        let call = words.next()?.parse().ok().filter(|call| [WRITE, WRITEV].contains(call))?;
        let mut argument = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
        Some(Self { call, descriptor: argument()?, buffer: argument()?, count: argument()? })
    }

    /// Returns the bytes that QEMU writes, from the memory of `process`. Errors: its memory cannot
    /// be read; the write is larger than a piece of a device state can be.
    pub fn content(&self, process: &Process) -> Result<Vec<u8>> {
        let mut content = Vec::new();
        let mut append = |at: u64, len_bytes: u64| -> Result<()> {
            let before = content.len();
            if len_bytes > PIECE_BYTES_MAX - (before as u64).min(PIECE_BYTES_MAX) {
                let problem = format!("a piece of it has more than {PIECE_BYTES_MAX} bytes");
                return Err(crate::stream::StreamError::DeviceState { offset: 0, problem }.into());
            }
            content.resize(before + usize::try_from(len_bytes).unwrap_or(0), 0);
            let piece = content.get_mut(before..).unwrap_or_default();
            read_memory(process, HostVirt(at), piece).map_err(unreadable)
        };
        if self.call == WRITE {
            append(self.buffer, self.count)?;
            return Ok(content);
        }
        let mut parts = vec![0; 16 * usize::try_from(self.count.min(PARTS_MAX)).unwrap_or(0)];
        read_memory(process, HostVirt(self.buffer), &mut parts).map_err(unreadable)?;
        for part in parts.as_chunks::<16>().0 {
            let (at, len) = part.split_at(8);
            let number = |bytes: &[u8]| bytes.first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
            append(number(at), number(len))?;
        }
        Ok(content)
    }
}

fn unreadable(source: keyframe_kernel::Error) -> Error {
    Error::DeviceState { source }
}

#[cfg(test)]
mod tests;
