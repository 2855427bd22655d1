//! Signals that ask the process to end.

use rustix::process::Signal;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Signals that ask a foreground command to end: Ctrl-C, `kill`, and the loss of its terminal.
pub const END_SIGNALS: [Signal; 3] = [Signal::INT, Signal::TERM, Signal::HUP];

/// A flag that a signal sets. Clones share the flag, and it stays set.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Returns a flag that only [`Interrupt::set`] sets.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a flag that each of `signals` sets from now on.
    ///
    /// The signals lose their default action for the life of the process.
    ///
    /// Error: the kernel refuses the handler.
    pub fn on(signals: &[Signal]) -> io::Result<Self> {
        let interrupt = Self::default();
        interrupt.also_on(signals)?;
        Ok(interrupt)
    }

    /// Makes each of `signals` set this flag, too. Error: the kernel refuses the handler.
    pub fn also_on(&self, signals: &[Signal]) -> io::Result<()> {
        for signal in signals {
            signal_hook::flag::register(signal.as_raw(), Arc::clone(&self.0))?;
        }
        Ok(())
    }

    /// Returns true after a signal, or [`Interrupt::set`], has set the flag.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets the flag, as a signal does.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns the flag itself, for code that polls an [`AtomicBool`].
    pub fn into_flag(self) -> Arc<AtomicBool> {
        self.0
    }
}

/// Returns a socket that becomes readable when one of `signals` arrives, for loops that poll.
///
/// The signals lose their default action for the life of the process.
///
/// Error: the kernel refuses the handler.
pub fn signal_socket(signals: &[Signal]) -> io::Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair()?;
    for signal in signals {
        signal_hook::low_level::pipe::register(signal.as_raw(), theirs.try_clone()?)?;
    }
    Ok(ours)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{getpid, kill_process};
    use std::io::Read;

    #[test]
    fn a_signal_sets_the_flag_and_its_clones_and_wakes_the_socket() {
        let interrupt = Interrupt::on(&[Signal::USR1]).unwrap();
        let mut socket = signal_socket(&[Signal::USR1]).unwrap();
        let (clone, other) = (interrupt.clone(), Interrupt::new());
        assert!(!interrupt.is_set());
        kill_process(getpid(), Signal::USR1).unwrap();
        socket.read_exact(&mut [0]).unwrap();
        assert!(interrupt.is_set() && clone.is_set() && !other.is_set());
        other.set();
        assert!(other.is_set());
    }
}
