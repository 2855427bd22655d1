//! A signal that asks to end, for benchmarks that have to clear up behind themselves.

use crate::Error;
use std::time::{Duration, Instant};

/// Set by a signal that asks to end.
#[derive(Clone)]
pub struct Interrupt(keyframe_kernel::Interrupt);

impl Interrupt {
    /// Begins to listen.
    pub fn listen() -> Result<Self, Error> {
        keyframe_kernel::Interrupt::on(&keyframe_kernel::END_SIGNALS)
            .map(Self)
            .map_err(Error::io("listen to signals"))
    }

    /// Whether to end.
    pub fn is_set(&self) -> bool {
        self.0.is_set()
    }

    /// Fails once it is set.
    pub fn check(&self) -> Result<(), Error> {
        if self.is_set() { Err(Error::failed("measure", "interrupted")) } else { Ok(()) }
    }

    /// Waits until `probe` answers, `seconds` at most, or fails as it does.
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

    /// Sleeps, unless it is set.
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
