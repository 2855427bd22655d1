//! Faults on purpose: what the engine can be told to suffer, so that tests prove that nothing is lost.

use keyframe_capture::Phase;
use std::str::FromStr;
use std::time::Duration;

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The engine dies, as by `kill -9`.
    Kill,
    /// The engine hangs for a minute: the watchdog must step in.
    Stall,
    /// The engine is late by a second, once, and goes on as if nothing had been.
    Pause,
}

/// A fault and where it strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    kind: Kind,
    phase: Phase,
    /// How many times the phase is reached before it strikes.
    left: u32,
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':');
        let kind = match parts.next() {
            Some("kill") => Kind::Kill,
            Some("stall") => Kind::Stall,
            Some("pause") => Kind::Pause,
            _ => return Err("write kill:PHASE[:N], stall:PHASE[:N] or pause:PHASE[:N]".into()),
        };
        let name = parts.next().unwrap_or_default();
        let phase = Phase::ALL
            .into_iter()
            .find(|p| p.name() == name)
            .ok_or_else(|| format!("phases: {}", Phase::ALL.map(Phase::name).join(", ")))?;
        let nth: u32 = match parts.next() {
            Some(n) => n.parse().ok().filter(|n| *n > 0).ok_or("N counts from 1")?,
            None => 1,
        };
        Ok(Self { kind, phase, left: nth - 1 })
    }
}

impl Fault {
    /// Strikes where it is due.
    pub fn reached(&mut self, phase: Phase) {
        if phase != self.phase {
            return;
        }
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        match self.kind {
            Kind::Kill => {
                let _ =
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
                // SIGKILL takes effect before this thread runs on; the sleep is for the compiler's peace.
                std::thread::sleep(Duration::from_secs(60));
            }
            Kind::Stall | Kind::Pause => {
                self.left = u32::MAX;
                let seconds = if self.kind == Kind::Stall { 60 } else { 1 };
                std::thread::sleep(Duration::from_secs(seconds));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_and_refused() {
        let fault: Fault = "kill:device-state:3".parse().unwrap();
        assert_eq!(fault, Fault { kind: Kind::Kill, phase: Phase::DeviceState, left: 2 });
        assert!("kill:nowhere".parse::<Fault>().unwrap_err().contains("precopy"));
        assert!("hug".parse::<Fault>().is_err());
        assert!("kill:paused:0".parse::<Fault>().is_err());
    }
}
