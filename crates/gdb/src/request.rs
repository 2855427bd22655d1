//! The packets that the proxy interprets.

/// A request of GDB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GdbRequest {
    /// Continue, or step one instruction (`c`, `s`, `vCont`).
    Run,
    /// Step one instruction back (`bs`).
    StepBack,
    /// Continue backwards (`bc`).
    RunBack,
    /// Set a breakpoint or watchpoint (`Z`).
    SetBreakpoint(Breakpoint),
    /// Remove a breakpoint or watchpoint (`z`).
    RemoveBreakpoint(Breakpoint),
    /// Write registers or memory (`M`, `G`, `P`).
    Write,
    /// Ask why the target is stopped (`?`). It begins a session; a stub drops all breakpoints.
    StopReason,
    /// Exchange the features of GDB and the stub (`qSupported`).
    Supported,
    /// A request that the proxy does not support, such as `QStartNoAckMode`.
    Unsupported,
    /// Choose the thread of the next requests (`H`).
    Thread,
    /// Detach from the target (`D`).
    Detach,
    /// End the target (`k`, `vKill`).
    Kill,
    /// A command for the stub's monitor (`qRcmd`), which answers in several packets.
    Monitor,
    /// Any other request.
    Other,
}

/// A breakpoint or watchpoint: `TYPE,ADDRESS,KIND`, as in its packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Breakpoint(Vec<u8>);

impl Breakpoint {
    /// Returns true for a watchpoint, which stops the target when it accesses memory. False for a
    /// breakpoint, which stops the target at an instruction.
    pub fn is_watch(&self) -> bool {
        matches!(self.0.first(), Some(b'2'..=b'4'))
    }

    /// Returns the payload of the packet with which GDB sets this breakpoint: `ZTYPE,ADDRESS,KIND`.
    pub fn packet(&self) -> Vec<u8> {
        [b"Z", &self.0[..]].concat()
    }
}

impl GdbRequest {
    /// Returns the request in the payload of a packet; [`GdbRequest::Other`] if it is none of the
    /// others.
    pub fn parse(payload: &[u8]) -> Self {
        let starts = |text: &str| payload.starts_with(text.as_bytes());
        match payload {
            b"bs" => GdbRequest::StepBack,
            b"bc" => GdbRequest::RunBack,
            b"?" => GdbRequest::StopReason,
            [b'c' | b's' | b'C' | b'S', ..] => GdbRequest::Run,
            [b'Z', rest @ ..] => GdbRequest::SetBreakpoint(Breakpoint(rest.to_vec())),
            [b'z', rest @ ..] => GdbRequest::RemoveBreakpoint(Breakpoint(rest.to_vec())),
            [b'M' | b'G' | b'P', ..] => GdbRequest::Write,
            [b'H', ..] => GdbRequest::Thread,
            [b'D', ..] => GdbRequest::Detach,
            [b'k', ..] => GdbRequest::Kill,
            // GDB first sends `X` without bytes, to learn whether the stub supports it.
            [b'X' | b'!' | b'R' | b'r', ..] => GdbRequest::Unsupported,
            _ if starts("vCont;") => GdbRequest::Run,
            _ if starts("vKill") => GdbRequest::Kill,
            _ if starts("vRun")
                || starts("vAttach")
                || starts("QStartNoAckMode")
                || starts("QNonStop") =>
            {
                GdbRequest::Unsupported
            }
            _ if starts("qRcmd,") => GdbRequest::Monitor,
            _ if starts("qSupported") => GdbRequest::Supported,
            _ => GdbRequest::Other,
        }
    }
}

/// A stop reply: why the target is stopped, such as `T05watch:ADDRESS;thread:p1.1;`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopReply {
    /// GDB's number of the signal.
    pub signal: u8,
    /// The field of the watchpoint that was hit: `watch:ADDRESS;`, `rwatch:...` or `awatch:...`.
    /// `None` if the target stopped for another reason.
    pub watch: Option<String>,
    /// The field of the thread, `thread:ID;`; empty if the reply names no thread.
    pub thread: String,
}

impl StopReply {
    /// Parses the payload of a packet; `None` if it is not a stop reply.
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

    /// Returns the payload of the packet with this stop reply. `reason` is a further field, such as
    /// `replaylog:begin;`, or empty. It is placed before the thread.
    pub fn packet(&self, reason: &str) -> Vec<u8> {
        let watch = self.watch.as_deref().unwrap_or_default();
        format!("T{:02x}{watch}{reason}{}", self.signal, self.thread).into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_parsed() {
        let all = [
            (&b"vCont;c:p1.-1"[..], GdbRequest::Run),
            (b"vCont?", GdbRequest::Other),
            (b"bc", GdbRequest::RunBack),
            (b"X0,0:", GdbRequest::Unsupported),
            (b"Mffff,1:00", GdbRequest::Write),
            (b"mffff,1", GdbRequest::Other),
            (b"qSupported:multiprocess+", GdbRequest::Supported),
            (b"D;1", GdbRequest::Detach),
            (b"qRcmd,696e666f", GdbRequest::Monitor),
            (b"", GdbRequest::Other),
        ];
        for (payload, expected) in all {
            assert_eq!(
                GdbRequest::parse(payload),
                expected,
                "{}",
                String::from_utf8_lossy(payload)
            );
        }
        let GdbRequest::SetBreakpoint(point) = GdbRequest::parse(b"Z2,ffff,8") else {
            panic!("a watchpoint")
        };
        assert!(point.is_watch());
        assert_eq!(point.packet(), b"Z2,ffff,8");
    }

    #[test]
    fn stop_replies_are_parsed_and_built() {
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
