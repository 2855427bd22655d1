//! The packets that are looked into.

/// What a debugger asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Run on, or one instruction (`c`, `s`, `vCont`).
    Run,
    /// One instruction back (`bs`).
    StepBack,
    /// Run back (`bc`).
    RunBack,
    /// A breakpoint or watchpoint, to be set (true) or removed.
    Point(bool, Point),
    /// Registers or memory are to be written.
    Write,
    /// Why does it stand? At the beginning of a session; a stub drops all breakpoints.
    Why,
    /// What the debugger can, and what the stub can (`qSupported`).
    Supported,
    /// No acknowledgements from now on, or other things that are not to be had.
    Unsupported,
    /// Which thread the next packets are about.
    Thread,
    /// The debugger lets go (`D`).
    Detach,
    /// The target is to end (`k`, `vKill`).
    Kill,
    /// A line for the stub's monitor (`qRcmd`), which answers in several packets.
    Monitor,
    /// Any other.
    Other,
}

/// A breakpoint or a watchpoint: `TYPE,ADDRESS,KIND`, as its packet has it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point(Vec<u8>);

impl Point {
    /// Whether memory is watched, not an instruction.
    pub fn is_watch(&self) -> bool {
        matches!(self.0.first(), Some(b'2'..=b'4'))
    }

    /// The packet that sets it.
    pub fn packet(&self) -> Vec<u8> {
        [b"Z", &self.0[..]].concat()
    }
}

/// What `payload` asks for.
pub fn command(payload: &[u8]) -> Command {
    let starts = |text: &str| payload.starts_with(text.as_bytes());
    match payload {
        b"bs" => Command::StepBack,
        b"bc" => Command::RunBack,
        b"?" => Command::Why,
        [b'c' | b's' | b'C' | b'S', ..] => Command::Run,
        [b'Z', rest @ ..] => Command::Point(true, Point(rest.to_vec())),
        [b'z', rest @ ..] => Command::Point(false, Point(rest.to_vec())),
        [b'M' | b'G' | b'P', ..] => Command::Write,
        [b'H', ..] => Command::Thread,
        [b'D', ..] => Command::Detach,
        [b'k', ..] => Command::Kill,
        // `X` is asked for with no bytes first, to see whether it is there.
        [b'X' | b'!' | b'R' | b'r', ..] => Command::Unsupported,
        _ if starts("vCont;") => Command::Run,
        _ if starts("vKill") => Command::Kill,
        _ if starts("vRun")
            || starts("vAttach")
            || starts("QStartNoAckMode")
            || starts("QNonStop") =>
        {
            Command::Unsupported
        }
        _ if starts("qRcmd,") => Command::Monitor,
        _ if starts("qSupported") => Command::Supported,
        _ => Command::Other,
    }
}

/// Why a target stands: `T05watch:ADDRESS;thread:p1.1;`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopReply {
    /// The signal.
    pub signal: u8,
    /// `watch:ADDRESS;`, also of reads and of both, where memory was touched.
    pub watch: Option<String>,
    /// `thread:ID;`.
    pub thread: String,
}

impl StopReply {
    /// Reads one; none where `payload` is none.
    pub fn parse(payload: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(payload).ok()?;
        let rest = text.strip_prefix('T').or_else(|| text.strip_prefix('S'))?;
        let signal = u8::from_str_radix(rest.get(..2)?, 16).ok()?;
        let fields = || rest.get(2..).unwrap_or_default().split(';');
        let field = |names: &[&str]| {
            let is_it = |field: &&str| names.iter().any(|name| field.starts_with(name));
            fields().find(is_it).map(|field| format!("{field};"))
        };
        let thread = field(&["thread:"]).unwrap_or_default();
        Some(Self { signal, watch: field(&["watch:", "rwatch:", "awatch:"]), thread })
    }

    /// The packet; `why` stands before the thread: `replaylog:begin;`.
    pub fn packet(&self, why: &str) -> Vec<u8> {
        let watch = self.watch.as_deref().unwrap_or_default();
        format!("T{:02x}{watch}{why}{}", self.signal, self.thread).into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_told_apart() {
        let all = [
            (&b"vCont;c:p1.-1"[..], Command::Run),
            (b"vCont?", Command::Other),
            (b"bc", Command::RunBack),
            (b"X0,0:", Command::Unsupported),
            (b"Mffff,1:00", Command::Write),
            (b"mffff,1", Command::Other),
            (b"qSupported:multiprocess+", Command::Supported),
            (b"D;1", Command::Detach),
            (b"qRcmd,696e666f", Command::Monitor),
            (b"", Command::Other),
        ];
        for (payload, expected) in all {
            assert_eq!(command(payload), expected, "{}", String::from_utf8_lossy(payload));
        }
        let Command::Point(true, point) = command(b"Z2,ffff,8") else { panic!("a watchpoint") };
        assert!(point.is_watch());
        assert_eq!(point.packet(), b"Z2,ffff,8");
    }

    #[test]
    fn stop_replies_are_read_and_made() {
        let reply = StopReply::parse(b"T05watch:ff00;thread:p01.01;").unwrap();
        assert_eq!((reply.signal, reply.watch.as_deref()), (5, Some("watch:ff00;")));
        assert_eq!(reply.packet(""), b"T05watch:ff00;thread:p01.01;");
        let plain = StopReply::parse(b"S02").unwrap();
        assert_eq!(plain.packet("replaylog:begin;"), b"T02replaylog:begin;");
        for bad in [&b"OK"[..], b"", b"T", b"Tzz", b"T\xff\xff"] {
            assert_eq!(StopReply::parse(bad), None);
        }
    }
}
