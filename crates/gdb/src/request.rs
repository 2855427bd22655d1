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

    /// Returns the watchpoint for writes to memory, or for all accesses; `None` for others.
    pub fn write_watch(&self) -> Option<WriteWatch> {
        let field = match self.0.first()? {
            b'2' => "watch",
            b'4' => "awatch",
            _ => return None,
        };
        let (address, bytes) = self.range()?;
        Some(WriteWatch { field, address, bytes })
    }

    /// Returns the instruction's address of a breakpoint; `None` for a watchpoint.
    pub fn instruction(&self) -> Option<u64> {
        if self.is_watch() { None } else { self.range().map(|(address, _)| address) }
    }

    /// Returns the address and the kind, which is the number of bytes for a watchpoint.
    fn range(&self) -> Option<(u64, u64)> {
        let text = std::str::from_utf8(&self.0).ok()?;
        // Conditions may follow.
        let text = text.split(';').next()?;
        let mut numbers = text.split(',').skip(1).map(|hex| u64::from_str_radix(hex, 16).ok());
        Some((numbers.next()??, numbers.next()??))
    }

    /// Returns the payload of the packet with which GDB sets this breakpoint: `ZTYPE,ADDRESS,KIND`.
    pub fn packet(&self) -> Vec<u8> {
        [b"Z", &self.0[..]].concat()
    }

    /// Returns the payload of the packet with which GDB removes this breakpoint:
    /// `zTYPE,ADDRESS,KIND`.
    pub fn removal_packet(&self) -> Vec<u8> {
        [b"z", &self.0[..]].concat()
    }
}

/// A watchpoint that stops the target when it writes to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteWatch {
    /// The name of its field in a stop reply: `watch`, or `awatch` if reads stop the target, too.
    field: &'static str,
    /// The address of the memory.
    pub address: u64,
    /// The number of bytes.
    pub bytes: u64,
}

impl WriteWatch {
    /// Returns the field of a stop reply after a write, as QEMU writes it: `watch:ADDRESS;`.
    pub fn stop_field(&self) -> String {
        format!("{}:{:016x};", self.field, self.address)
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
        assert_eq!(point.removal_packet(), b"z2,ffff,8");
    }

    #[test]
    fn breakpoints_know_what_they_watch() {
        let point = |text: &str| Breakpoint(text.into());
        let watch = point("4,ff00,8;X1,0").write_watch().unwrap();
        assert_eq!((watch.address, watch.bytes), (0xff00, 8));
        assert_eq!(watch.stop_field(), "awatch:000000000000ff00;");
        assert_eq!(point("2,1,1").write_watch().unwrap().stop_field(), "watch:0000000000000001;");
        assert_eq!(point("2,ff00,8").instruction(), None);
        assert_eq!(point("1,ff00,1").instruction(), Some(0xff00));
        // A read watchpoint sees no write; bad numbers name no memory.
        for bad in ["3,ff00,8", "1,ff00,8", "2,ff00", "2,xx,8", "2", ""] {
            assert_eq!(point(bad).write_watch(), None, "{bad}");
        }
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
