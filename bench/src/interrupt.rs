//! Signals that ask the program to end, for benchmarks that must clean up.

use crate::Error;
use std::time::{Duration, Instant};

/// A flag that SIGINT, SIGTERM and SIGHUP set.
#[derive(Clone)]
pub struct Interrupt(keyframe_kernel::Interrupt);

impl Interrupt {
    /// Begins to listen for the signals.
    pub fn listen() -> Result<Self, Error> {
        keyframe_kernel::Interrupt::on(&keyframe_kernel::END_SIGNALS)
            .map(Self)
            .map_err(Error::io("listen to signals"))
    }

    /// Returns whether the program was asked to end.
    pub fn is_set(&self) -> bool {
        self.0.is_set()
    }

    /// Fails if the flag is set.
    pub fn check(&self) -> Result<(), Error> {
        if self.is_set() { Err(Error::failed("measure", "interrupted")) } else { Ok(()) }
    }

    /// Waits at most `seconds` until `probe` returns a value. Fails if `probe` fails or the flag is
    /// set.
    pub fn wait<T>(
        &self,
        what: &str,
        seconds: f64,
        mut probe: impl FnMut() -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        let deadline = Instant::now() + Duration::from_secs_f64(seconds);
        loop {
            self.check()?;
            if let Some(found) = probe()? {
                return Ok(found);
            }
            if Instant::now() > deadline {
                return Err(Error::failed(
                    format!("wait until {what}"),
                    format!("not within {seconds} s"),
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sleeps. Fails as soon as the flag is set.
    pub fn sleep(&self, time: Duration) -> Result<(), Error> {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            std::thread::sleep(left.min(Duration::from_millis(50)));
        }
        Ok(())
    }
}
