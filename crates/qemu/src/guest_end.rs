//! A QEMU that stands still when its guest ends, so that a last checkpoint can be taken of it.
//!
//! ```text
//!   guest ends ─▶ SHUTDOWN, run state `shutdown` or `guest-panicked` ─▶ last checkpoint ─▶ `quit`
//!                      without Keyframe: QEMU ends here ─────────────────────────────────────▲
//! ```
//!
//! `set-action` makes QEMU stand still (`shutdown=pause`, and `watchdog=pause` if the line says
//! `poweroff`). Requests of the host to end (`quit`, a signal, a closed window) end QEMU at once
//! all the same. The setting goes back to what the line says when the engine leaves the VM. If the
//! engine dies, the watchdog sets it back, and ends a QEMU whose guest has ended meanwhile.
//!
//! QEMU cannot be asked for its present actions, so those of its command line count.
//!
//! Left out: a line under which QEMU stays when the guest ends (`-no-shutdown`, libvirt): it stands
//! still by itself. A line with `-action panic=exit-failure`: `quit` ends QEMU with another code.

use crate::vm::Origin;
use crate::{Error, Qmp, Result, RunStatus, Vm};
use keyframe_qemu_cmdline::options::{self, Argument, value_of};
use serde_json::json;

/// The kinds of ends of the guest (shutdown, panic, expired watchdog) at which a QEMU would end by
/// its command line, and at which Keyframe makes it stand still instead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndHold {
    /// QEMU ends if the guest panics.
    panic_ends: bool,
    /// QEMU ends if the guest's watchdog expires, without a shutdown.
    watchdog_ends: bool,
}

impl EndHold {
    /// Returns the kinds of ends at which a QEMU with these arguments can be held; `None` if it
    /// cannot be held.
    pub fn of_arguments(arguments: &[Argument]) -> Option<Self> {
        let [shutdown, panic, watchdog] =
            ["shutdown", "panic", "watchdog"].map(|event| action_at(arguments, event));
        let hold = Self { panic_ends: panic == "shutdown", watchdog_ends: watchdog == "poweroff" };
        (shutdown == "poweroff" && panic != "exit-failure").then_some(hold)
    }

    /// The word that [`EndHold::parse`] reads.
    pub(crate) fn word(self) -> &'static str {
        match (self.panic_ends, self.watchdog_ends) {
            (false, false) => "shutdown",
            (true, false) => "shutdown,panic",
            (false, true) => "shutdown,watchdog",
            (true, true) => "shutdown,panic,watchdog",
        }
    }

    /// Reads a word of [`EndHold::word`].
    pub(crate) fn parse(word: &str) -> Option<Self> {
        let all = [(false, false), (true, false), (false, true), (true, true)];
        let mut holds =
            all.map(|(panic_ends, watchdog_ends)| Self { panic_ends, watchdog_ends }).into_iter();
        holds.find(|hold| hold.word() == word)
    }

    /// Has QEMU stand still at these ends.
    fn set(self, qmp: &mut Qmp) -> Result<()> {
        self.set_action(qmp, "pause")
    }

    /// Has QEMU end at them again, as its command line says. Ends a QEMU whose guest has ended
    /// meanwhile.
    pub(crate) fn release(self, qmp: &mut Qmp) -> Result<()> {
        self.set_action(qmp, "poweroff")?;
        // QEMU handles the guest's end and this query in one thread. So the query shows an earlier
        // end, and a later end ends QEMU.
        if self.is_end(&qmp.status()?) { qmp.quit() } else { Ok(()) }
    }

    fn set_action(self, qmp: &mut Qmp, action: &str) -> Result<()> {
        let mut actions = json!({ "shutdown": action });
        if self.watchdog_ends
            && let Some(actions) = actions.as_object_mut()
        {
            actions.insert("watchdog".into(), action.into());
        }
        qmp.execute("set-action", Some(actions)).map(drop)
    }

    /// True if a QEMU that is held stands in this state because its guest has ended.
    fn is_end(self, status: &RunStatus) -> bool {
        match status.name() {
            "shutdown" => true,
            "guest-panicked" => self.panic_ends,
            "watchdog" => self.watchdog_ends,
            _ => false,
        }
    }
}

/// Returns QEMU's action at `event` (`shutdown`, `panic`, `watchdog` or `reboot`) by its arguments:
/// the last one counts.
pub(crate) fn action_at(arguments: &[Argument], event: &str) -> String {
    let of_argument = |argument: &Argument| match (argument.name(), event) {
        ("no-shutdown", "shutdown") => Some("pause".to_owned()),
        ("no-reboot", "reboot") => Some("shutdown".to_owned()),
        ("watchdog-action", "watchdog") => Some(argument.value().to_owned()),
        ("action", _) => value_of(&options::keys(argument.value(), ""), event).map(str::to_owned),
        _ => None,
    };
    let default = match event {
        "shutdown" => "poweroff",
        "panic" => "shutdown",
        _ => "reset",
    };
    arguments.iter().rev().find_map(of_argument).unwrap_or_else(|| default.to_owned())
}

impl Vm {
    /// Returns the kinds of ends of the guest at which this QEMU can be held; `None` if it cannot
    /// be held.
    pub fn end_hold(&self) -> Option<EndHold> {
        if matches!(self.origin_detail(), Origin::Libvirt { .. })
            || self.require_whole_line().is_err()
        {
            return None;
        }
        let arguments = options::parse(self.full_command().get(1..).unwrap_or_default()).ok()?;
        EndHold::of_arguments(&arguments)
    }

    /// Has QEMU stand still when the guest ends. Returns false if QEMU cannot be held, stands still
    /// already, or has ended. Error: QEMU refuses or does not answer.
    pub fn hold_end(&mut self) -> Result<bool> {
        let Some(hold) = self.end_hold() else { return Ok(false) };
        // It stands so already: another client has changed its actions.
        if hold.is_end(&self.qmp().status()?) {
            return Ok(false);
        }
        match hold.set(self.qmp()) {
            // The setting may have been made although its answer was lost.
            Ok(()) | Err(Error::Timeout { .. }) => Ok(true),
            Err(Error::Gone { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Makes QEMU end with its guest again, as before [`Vm::hold_end`]. If the guest has ended
    /// meanwhile, QEMU ends now. Error: QEMU refuses or does not answer.
    pub fn release_end(&mut self) -> Result<()> {
        let Some(hold) = self.end_hold() else { return Ok(()) };
        match hold.release(self.qmp()) {
            Err(Error::Gone { .. }) => Ok(()),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_at_which_ends_qemu_can_be_held() {
        let of = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            EndHold::of_arguments(&options::parse(&words).unwrap())
        };
        let (plain, with_watchdog) = (
            EndHold { panic_ends: true, watchdog_ends: false },
            EndHold { panic_ends: true, watchdog_ends: true },
        );
        assert_eq!(of("-m 64"), Some(plain));
        assert_eq!(of("-no-reboot"), Some(plain));
        assert_eq!(of("-m 64 -no-shutdown"), None);
        assert_eq!(of("-action shutdown=pause,reboot=shutdown"), None);
        assert_eq!(of("-action panic=exit-failure"), None);
        assert_eq!(of("-no-shutdown -action shutdown=poweroff"), Some(plain));
        assert_eq!(of("-watchdog-action poweroff"), Some(with_watchdog));
        assert_eq!(of("-action watchdog=poweroff"), Some(with_watchdog));
        let panic_pauses = EndHold { panic_ends: false, watchdog_ends: false };
        assert_eq!(of("-action panic=pause"), Some(panic_pauses));
        for hold in [plain, with_watchdog, panic_pauses] {
            assert_eq!(EndHold::parse(hold.word()), Some(hold));
        }
        assert_eq!(EndHold::parse("panic"), None);
    }
}
