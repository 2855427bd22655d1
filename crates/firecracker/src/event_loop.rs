//! Whether Firecracker's devices stand still in a pause.
//!
//! All devices run on the first thread of the process. Outside of pauses its event loop waits for
//! what the guest asks for, for packets of tap devices, for timers of rate limiters, and for
//! requests of the API:
//!
//! ```text
//!   event loop: epoll_wait ─▶ packet, timer, guest's request ─▶ a device reads and writes RAM ─▶ epoll_wait
//!                    └──────▶ API: pause ─▶ wait for the next request (futex) ─▶ save ─▶ wait ─▶ resume ─▶ epoll_wait
//! ```
//!
//! In a pause the thread does not return to the event loop before the request that resumes the VM
//! (`ApiServerAdapter::process` of Firecracker, since version 0.24). Packets wait in the tap's queue
//! and timers stay expired. So no device writes to RAM after its state was saved.
//!
//! Nothing but the source promises that, so each pause is checked:
//!
//! 1. After the save the thread sleeps, and does not wait for events.
//! 2. Before the resumption it has not run since. In a whole pause ([`crate::whole_pause`]) it still
//!    waits to write its state.
//!
//! A VM that was loaded and has never run is paused, but its event loop is at work. One more
//! request to pause it ends that.

use crate::threads::{Reading, Threads};
use crate::{Error, Result};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

/// The system calls of x86-64 that wait for events: `epoll_wait`, `epoll_pwait`, `epoll_pwait2`.
const WAITS: [&str; 3] = ["232", "281", "441"];

/// The system calls `write` and `futex` of x86-64.
const WRITE: &str = "1";
const FUTEX: &str = "202";

/// The thread of a Firecracker that runs its devices.
#[derive(Debug)]
pub struct EventLoop {
    pid: u32,
    thread: Threads,
    /// The system call in which the thread sleeps.
    system_call: File,
}

impl EventLoop {
    /// Finds the thread of process `pid`. Error: the kernel does not show what the thread does.
    pub fn of(pid: u32) -> Result<Self> {
        let open = || -> Result<Self> {
            let system_call = File::open(format!("/proc/{pid}/task/{pid}/syscall"))
                .map_err(Error::io(operation(pid)))?;
            let event_loop = Self { pid, thread: Threads::first_of(pid)?, system_call };
            // The kernel checks the rights at each look.
            event_loop.waits_for_events()?;
            Ok(event_loop)
        };
        open().map_err(|error| Error::Attach {
            pid,
            problem: format!("{error}; a pause cannot be checked without that"),
            fix: "run keyframe as root, or with CAP_SYS_PTRACE".into(),
        })
    }

    /// Returns true if the thread sleeps until something happens that a device handles. Error: the
    /// process has ended, or this process may not look at it.
    pub fn waits_for_events(&self) -> Result<bool> {
        let call = self.system_call()?;
        Ok(call.split_whitespace().next().is_some_and(|number| WAITS.contains(&number)))
    }

    /// Returns true if the thread sleeps because what it writes to the `file`, a device and an inode
    /// number, finds no room. Error: the process has ended, or this process may not look at it.
    pub fn waits_to_write(&self, file: (u64, u64)) -> Result<bool> {
        let call = self.system_call()?;
        let mut words = call.split_whitespace();
        if words.next() != Some(WRITE) {
            return Ok(false);
        }
        let number = words.next().and_then(|number| number.strip_prefix("0x"));
        let Some(number) = number.and_then(|number| u32::from_str_radix(number, 16).ok()) else {
            return Ok(false);
        };
        let open = std::fs::metadata(format!("/proc/{}/fd/{number}", self.pid));
        // It may have been closed since.
        Ok(open.is_ok_and(|open| (open.dev(), open.ino()) == file))
    }

    /// Returns true if the thread sleeps until another thread wakes it. It does so in a pause, until
    /// the next request of the API. Error: the process has ended, or this process may not look at it.
    pub fn waits_for_request(&self) -> Result<bool> {
        Ok(self.system_call()?.split_whitespace().next() == Some(FUTEX))
    }

    /// Returns the system call in which the thread sleeps, with its arguments.
    fn system_call(&self) -> Result<String> {
        let mut bytes = [0; 256];
        let len =
            self.system_call.read_at(&mut bytes, 0).map_err(Error::io(operation(self.pid)))?;
        Ok(String::from_utf8_lossy(bytes.get(..len).unwrap_or_default()).into_owned())
    }

    /// Waits until the thread sleeps outside of the event loop, as it does in a pause. Returns what
    /// the kernel has counted then; `None` if it does not sleep. Errors: it waits for events, so a
    /// device may write to RAM at any time; the process has ended.
    pub fn at_rest(&self) -> Result<Option<Reading>> {
        let rest = self.thread.at_rest()?;
        if self.waits_for_events()? {
            return Err(Error::DevicesRun { pid: self.pid });
        }
        Ok(rest)
    }

    /// Returns what the kernel has counted so far. Error: the process has ended.
    pub fn reading(&self) -> Result<Reading> {
        self.thread.reading()
    }
}

fn operation(pid: u32) -> String {
    format!("look at the thread of the devices of process {pid}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::epoll;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn a_thread_that_sleeps_elsewhere_does_not_wait_for_events() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let looked = EventLoop::of(child.id()).and_then(|cat| Ok((cat.at_rest()?, cat.reading()?)));
        child.kill().unwrap();
        child.wait().unwrap();
        let (rest, reading) = looked.unwrap();
        assert_eq!(rest, Some(reading));
    }

    #[test]
    fn a_thread_that_waits_to_write_is_seen() {
        let mut child =
            Command::new("cat").arg("/dev/zero").stdout(Stdio::piped()).spawn().unwrap();
        let pipe = std::fs::metadata(format!("/proc/{}/fd/1", child.id())).unwrap();
        let looked = EventLoop::of(child.id()).and_then(|cat| {
            let until = Instant::now() + Duration::from_secs(20);
            while !cat.waits_to_write((pipe.dev(), pipe.ino()))? && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            let to_pipe = cat.waits_to_write((pipe.dev(), pipe.ino()))?;
            Ok((to_pipe, cat.waits_to_write((pipe.dev(), pipe.ino() + 1))?))
        });
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(looked.unwrap(), (true, false));
    }

    #[test]
    fn a_thread_that_waits_for_events_is_seen() {
        let until = Instant::now() + Duration::from_secs(20);
        let tid = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            tid.0.send(rustix::thread::gettid()).unwrap();
            let events = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            let limit = rustix::event::Timespec { tv_sec: 2, tv_nsec: 0 };
            let mut none = Vec::with_capacity(1);
            let _ = epoll::wait(&events, rustix::buffer::spare_capacity(&mut none), Some(&limit));
        });
        let tid = tid.1.recv().unwrap().as_raw_nonzero().get().cast_unsigned();
        let system_call = File::open(format!("/proc/self/task/{tid}/syscall")).unwrap();
        let thread = Threads::first_of(std::process::id()).unwrap();
        let seen = EventLoop { pid: std::process::id(), thread, system_call };
        while !seen.waits_for_events().unwrap() {
            assert!(Instant::now() < until && !waiting.is_finished(), "it is not seen");
        }
        waiting.join().unwrap();
    }
}
