//! The guest's real-time clock, which goes by the guest's own time unless the user says otherwise.
//!
//! ```text
//!   user      -rtc base=localtime,driftfix=slew
//!   record    -rtc base=2026-11-24T21:02:00,clock=vm,driftfix=slew
//!   replay    the words of the recorded line
//! ```
//!
//! By the host's, as QEMU has it, each turn of its main loop reads the host's clock, and all of
//! these are in the log: a replay's guest stands at each until the main loop has come by. And it is
//! given what it begins with: QEMU 10 does not record that.
//!
//! A machine with a network keeps the clock that it has: its replays stand where they send packets
//! when their main loop is late (docs/design/record-replay.md).
//!
//! Lines that were recorded before have no such words, and their replays none either.

use crate::options::{Argument, keys, value_of};
use jiff::Zoned;
use jiff::tz::TimeZone;

/// What becomes of `-rtc`.
#[derive(Clone, Copy, Debug)]
pub enum Clock<'a> {
    /// It is recorded from now on.
    From(&'a Zoned),
    /// It is as in this line, which was recorded.
    As(&'a [String]),
}

impl Clock<'_> {
    /// The values of `-rtc` of the new line, from the user's.
    pub(super) fn values(self, user: &[Argument]) -> Vec<String> {
        let given = of(user);
        match self {
            Self::From(_) if has_network(user) => given.into_iter().map(str::to_owned).collect(),
            Self::From(now) => vec![from(&given.join(","), now)],
            Self::As(words) => {
                let recorded: Vec<_> = words.windows(2).filter(|pair| pair[0] == "-rtc").collect();
                recorded.iter().map(|pair| pair[1].clone()).collect()
            }
        }
    }
}

/// The values of a line's `-rtc`, which QEMU takes for one.
fn of(line: &[Argument]) -> Vec<&str> {
    line.iter().filter(|a| a.name() == "rtc").map(Argument::value).collect()
}

fn has_network(line: &[Argument]) -> bool {
    line.iter().any(|a| a.name() == "netdev")
}

/// Whether the main loop of a QEMU with this line may be late: its clock goes by the guest's time,
/// and it has no network.
pub fn may_be_late(line: &[Argument]) -> bool {
    value_of(&keys(&of(line).join(","), "base"), "clock") == Some("vm") && !has_network(line)
}

/// Whether the user has it go by the host's.
pub(super) fn is_hosts(user: &[Argument]) -> bool {
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
    fn it_goes_by_the_guests_time_from_now_on_unless_the_user_says_otherwise() {
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
            assert_eq!(Clock::From(&now).values(&user), [recorded]);
            let made = line(&format!("-rtc {recorded}"));
            assert_eq!((may_be_late(&made), is_hosts(&made)), (!is_hosts(&user), is_hosts(&user)));
        }
        let user = line("-netdev user,id=n -rtc base=localtime");
        assert_eq!(Clock::From(&now).values(&user), ["base=localtime"]);
        assert!(Clock::From(&now).values(&line("-netdev user,id=n")).is_empty());
        assert!(!may_be_late(&line("-netdev user,id=n -rtc clock=vm")));
    }

    #[test]
    fn a_replays_is_that_of_the_recorded_line() {
        let user = line("-rtc base=localtime");
        let recorded = words("qemu -rtc base=2026-11-24T21:02:00,clock=vm -m 64");
        assert_eq!(Clock::As(&recorded).values(&user), ["base=2026-11-24T21:02:00,clock=vm"]);
        // Recorded before there were such words.
        let early = words("qemu -m 64 -rtc base=localtime");
        assert_eq!(Clock::As(&early).values(&user), ["base=localtime"]);
        assert!(!may_be_late(&user) && !is_hosts(&user));
        assert!(Clock::As(&words("qemu -m 64")).values(&line("-m 64")).is_empty());
    }
}
