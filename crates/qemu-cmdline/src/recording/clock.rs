//! The guest's real-time clock in a recording: it follows the guest's time unless the user chose
//! otherwise.
//!
//! ```text
//!   user      -rtc base=localtime,driftfix=slew
//!   record    -rtc base=2026-11-24T21:02:00,clock=vm,driftfix=slew
//!   replay    the words of the recorded line
//! ```
//!
//! With the host's clock, QEMU's default, each turn of the main loop reads the host's clock and
//! logs the value; a replayed guest waits at each value for the main loop. The start value is given
//! explicitly because QEMU 10 does not record it.
//!
use crate::options::{Argument, keys, value_of};
use jiff::Zoned;
use jiff::tz::TimeZone;

/// The real-time clock of a recording or a replay.
#[derive(Clone, Copy, Debug)]
pub enum RecordingClock<'a> {
    /// A recording whose clock begins at this time.
    StartAt(&'a Zoned),
    /// A replay with the clock of this recorded command line (the binary first).
    Same(&'a [String]),
}

impl RecordingClock<'_> {
    /// The values of `-rtc` of the new command line, from the user's line.
    pub(crate) fn values(self, user: &[Argument]) -> Vec<String> {
        let given = of(user);
        match self {
            Self::StartAt(now) => vec![from(&given.join(","), now)],
            Self::Same(words) => {
                let recorded: Vec<_> = words.windows(2).filter(|pair| pair[0] == "-rtc").collect();
                recorded.iter().map(|pair| pair[1].clone()).collect()
            }
        }
    }
}

/// The values of all `-rtc` of a command line, which QEMU merges.
fn of(line: &[Argument]) -> Vec<&str> {
    line.iter().filter(|a| a.name() == "rtc").map(Argument::value).collect()
}

fn has_network(line: &[Argument]) -> bool {
    line.iter().any(|a| a.name() == "netdev")
}

/// Returns true if the main loop of a QEMU with this command line may run late without effect on
/// the guest: the clock follows the guest's time, and no network waits for the main loop. With
/// `network_may_be_late`, a network is no obstacle.
pub fn may_run_late(line: &[Argument], network_may_be_late: bool) -> bool {
    let follows_guest = value_of(&keys(&of(line).join(","), "base"), "clock") == Some("vm");
    follows_guest && (network_may_be_late || !has_network(line))
}

/// True if the user chose the host's clock.
pub(crate) fn follows_host(user: &[Argument]) -> bool {
    value_of(&keys(&of(user).join(","), "base"), "clock") == Some("host")
}

fn from(given: &str, now: &Zoned) -> String {
    let given = keys(given, "base");
    let clock = value_of(&given, "clock").unwrap_or("vm");
    let base = match (value_of(&given, "base"), clock) {
        (None | Some("utc"), "vm") => Some(date(&now.with_time_zone(TimeZone::UTC))),
        (Some("localtime"), "vm") => Some(date(now)),
        (base, _) => base.map(str::to_owned),
    };
    let base = base.map(|base| ("base".to_owned(), base));
    let others = given.iter().filter(|(key, _)| key != "base" && key != "clock").cloned();
    let keys = base.into_iter().chain([("clock".to_owned(), clock.to_owned())]).chain(others);
    keys.map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

fn date(at: &Zoned) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%S").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::parse;

    fn line(text: &str) -> Vec<Argument> {
        parse(&words(text)).unwrap()
    }

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn the_clock_follows_guest_time_unless_the_user_chose_otherwise() {
        let now: Zoned = "2026-11-24T21:02:00.7+02:00[+02:00]".parse().unwrap();
        for (user, recorded) in [
            ("-m 64", "base=2026-11-24T19:02:00,clock=vm"),
            ("-rtc utc", "base=2026-11-24T19:02:00,clock=vm"),
            (
                "-rtc base=localtime,driftfix=slew",
                "base=2026-11-24T21:02:00,clock=vm,driftfix=slew",
            ),
            ("-rtc driftfix=slew -rtc base=2001-01-01", "base=2001-01-01,clock=vm,driftfix=slew"),
            ("-rtc clock=host", "clock=host"),
            ("-rtc base=utc,clock=host", "base=utc,clock=host"),
        ] {
            let user = line(user);
            assert_eq!(RecordingClock::StartAt(&now).values(&user), [recorded]);
            let made = line(&format!("-rtc {recorded}"));
            assert_eq!(
                (may_run_late(&made, false), follows_host(&made)),
                (!follows_host(&user), follows_host(&user))
            );
        }
        let with_network = line("-netdev user,id=n -rtc clock=vm");
        assert!(!may_run_late(&with_network, false) && may_run_late(&with_network, true));
        assert!(!may_run_late(&line("-netdev user,id=n -rtc clock=host"), true));
    }

    #[test]
    fn a_replay_has_the_clock_of_the_recorded_line() {
        let user = line("-rtc base=localtime");
        let recorded = words("qemu -rtc base=2026-11-24T21:02:00,clock=vm -m 64");
        assert_eq!(
            RecordingClock::Same(&recorded).values(&user),
            ["base=2026-11-24T21:02:00,clock=vm"]
        );
        // An earlier version left the clock of a machine with a network as it was.
        let own = words("qemu -m 64 -rtc base=localtime");
        assert_eq!(RecordingClock::Same(&own).values(&user), ["base=localtime"]);
        assert!(!may_run_late(&user, true) && !follows_host(&user));
        assert!(RecordingClock::Same(&words("qemu -m 64")).values(&line("-m 64")).is_empty());
    }
}
