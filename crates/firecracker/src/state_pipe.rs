//! The pipe to which Firecracker writes its device state in a whole pause ([`crate::whole_pause`]).
//! Firecracker waits in the middle of it until the engine reads.
//!
//! ```text
//!   slots (one page each)   f . . .    f: filler, one byte that fills a whole slot
//!                           f 1 2 3    Firecracker has written the greater part, and waits in `write`
//! ```
//!
//! Firecracker writes its state in thousands of small pieces. It does so while the engine looks at
//! the VM, as far as the pipe has room. The free slots hold at least half a slot less than the
//! previous state. For the first state one slot is free.

use crate::state_file::may_open_ours;
use crate::{Error, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// What a slot of a pipe holds.
const SLOT_BYTES: usize = 4096;
/// The largest pipe that an unprivileged process may make by default.
const SLOTS_MAX: usize = 256;
/// By how much a state may be shorter than the previous one without harm: half a slot.
const SPARE_BYTES: usize = SLOT_BYTES / 2;
/// The longest device state. Firecracker's own limit is lower.
const STATE_BYTES_MAX: usize = 64 << 20;
const MAKE: &str = "make a pipe for the device state";

/// A pipe for device states.
#[derive(Debug)]
pub struct StatePipe {
    /// Does not block.
    read_end: OwnedFd,
    /// Keeps what it is given in a slot of its own, and does not block.
    filler_end: OwnedFd,
    /// The path by which other processes open it.
    path: PathBuf,
    /// The slots that Firecracker may fill.
    free_slots: usize,
    /// The bytes of filler at the head of the pipe.
    fillers: usize,
}

impl StatePipe {
    /// Makes a pipe that the Firecracker of process `pid` can open by the descriptor of this process.
    /// `None` for a Firecracker of another user, root or namespace: a pipe with a name would hold a
    /// Firecracker that opens it after its last reader has ended. Error: the kernel refuses.
    pub fn create(pid: u32) -> Result<Option<Self>> {
        if !may_open_ours(pid)? {
            return Ok(None);
        }
        let flags = PipeFlags::CLOEXEC | PipeFlags::NONBLOCK;
        let (read_end, _) = pipe_with(flags).map_err(Error::io(MAKE))?;
        let path =
            PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), read_end.as_raw_fd()));
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let filler_end = rustix::fs::open(&path, flags, Mode::empty()).map_err(Error::io(MAKE))?;
        // The kernel refuses this mode in `open`.
        rustix::fs::fcntl_setfl(&filler_end, OFlags::NONBLOCK | OFlags::DIRECT)
            .map_err(Error::io(MAKE))?;
        Ok(Some(Self { read_end, filler_end, path, free_slots: 1, fillers: 0 }))
    }

    /// Returns the path by which Firecracker and the watchdog open it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns its device and inode number. Error: the kernel does not tell.
    pub fn identity(&self) -> Result<(u64, u64)> {
        let stat = rustix::fs::fstat(&self.read_end)
            .map_err(Error::io("look at the pipe for the device state"))?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// Empties the pipe, and leaves as much room as the next state may fill. Error: the kernel
    /// refuses.
    pub fn prepare(&mut self) -> Result<()> {
        let operation = "prepare the pipe for the device state";
        self.drain(&mut Vec::new())?;
        // The watchdog may have taken some.
        self.fillers = 0;
        let mut slots = self.free_slots.next_power_of_two();
        if fcntl_setpipe_size(&self.read_end, slots * SLOT_BYTES).is_err() {
            // This process has too many large pipes.
            (slots, self.free_slots) = (1, 1);
            fcntl_setpipe_size(&self.read_end, SLOT_BYTES).map_err(Error::io(operation))?;
        }
        for _ in self.free_slots..slots {
            rustix::io::write(&self.filler_end, &[0]).map_err(Error::io(operation))?;
            self.fillers += 1;
        }
        // Firecracker would load a state that follows another one.
        if self.has_begun()? {
            let problem = "the pipe for it holds an earlier one".into();
            return Err(Error::DeviceState { problem });
        }
        Ok(())
    }

    /// Returns true if the pipe holds bytes of a state. Error: the kernel does not tell.
    pub fn has_begun(&self) -> Result<bool> {
        let held = rustix::io::ioctl_fionread(&self.read_end)
            .map_err(Error::io("look at the pipe for the device state"))?;
        Ok(held > self.fillers as u64)
    }

    /// Makes room for the rest of the state: Firecracker goes on. Returns false if the kernel does not
    /// allow it; then Firecracker goes on with each [`StatePipe::drain`].
    pub fn open_up(&self) -> bool {
        // This process may have too many large pipes.
        fcntl_setpipe_size(&self.read_end, SLOTS_MAX * SLOT_BYTES).is_ok()
    }

    /// Reads what the pipe holds, and appends the state in it to `state`. Errors: the pipe cannot be
    /// read; the state is too long to be one.
    pub fn drain(&mut self, state: &mut Vec<u8>) -> Result<()> {
        let mut chunk = [0; 4 * SLOT_BYTES];
        loop {
            match rustix::io::read(&self.read_end, &mut chunk[..]) {
                Ok(0) | Err(Errno::AGAIN) => return Ok(()),
                Ok(len) => {
                    let filler = self.fillers.min(len);
                    self.fillers -= filler;
                    state.extend_from_slice(chunk.get(filler..len).unwrap_or_default());
                    if state.len() > STATE_BYTES_MAX {
                        let problem = format!("it is longer than {STATE_BYTES_MAX} bytes");
                        return Err(Error::DeviceState { problem });
                    }
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(Error::io("read the device state")(e)),
            }
        }
    }

    /// Notes the length of a state, for the next [`StatePipe::prepare`].
    pub fn expect(&mut self, state_bytes: usize) {
        let slots = state_bytes.saturating_sub(SPARE_BYTES) / SLOT_BYTES;
        self.free_slots = slots.clamp(1, SLOTS_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::io::Write;
    use std::time::Duration;

    /// Writes a state of `bytes` bytes to `pipe` as Firecracker does, reads it in two parts, and
    /// returns the length of the first.
    fn pass(pipe: &mut StatePipe, bytes: usize) -> usize {
        pipe.prepare().unwrap();
        assert!(!pipe.has_begun().unwrap());
        let theirs = pipe.path().to_owned();
        let writes = std::thread::spawn(move || {
            let mut file = OpenOptions::new();
            let file = file.write(true).create(true).truncate(true).open(theirs);
            let mut file = file.unwrap();
            for number in 0..bytes / 4 {
                file.write_all(&(number as u32).to_le_bytes()).unwrap();
            }
            file.sync_all().unwrap_err();
        });
        let full = (pipe.free_slots * SLOT_BYTES + pipe.fillers) as u64;
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while rustix::io::ioctl_fionread(&pipe.read_end).unwrap() < full {
            assert!(std::time::Instant::now() < until, "it is not filled");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(pipe.has_begun().unwrap() && !writes.is_finished());
        let mut state = Vec::new();
        pipe.drain(&mut state).unwrap();
        let first = state.len();
        pipe.open_up();
        while !writes.is_finished() {
            pipe.drain(&mut state).unwrap();
        }
        pipe.drain(&mut state).unwrap();
        writes.join().unwrap();
        let whole: Vec<u8> = (0..bytes / 4).flat_map(|n| (n as u32).to_le_bytes()).collect();
        assert!(state == whole, "another state");
        pipe.expect(state.len());
        first
    }

    #[test]
    fn firecracker_waits_with_ever_less_of_its_state() {
        let mut pipe = StatePipe::create(std::process::id()).unwrap().expect("this process's own");
        pass(&mut pipe, 15_776);
        assert_eq!((pipe.free_slots, pipe.fillers), (3, 0));
        pass(&mut pipe, 15_776);
        pass(&mut pipe, 400_000);
        pass(&mut pipe, 400_000);
    }
}
