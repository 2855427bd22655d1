//! A debugger that speaks GDB's remote protocol, as far as the tests need it.

use keyframe_gdb::{GdbConnection, GdbMessage};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

/// How long an answer may take: each step back is a replay.
const WAIT: Duration = Duration::from_mins(3);

/// A debugger that is attached to a paused VM.
pub struct Debugger(GdbConnection<TcpStream>);

impl Debugger {
    /// Attaches to a port of the loopback device.
    pub fn attach(port: u16) -> Self {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("attach to the VM");
        let mut debugger = Self(GdbConnection::new(stream, "keyframe goto"));
        let features = debugger.ask("qSupported:multiprocess+;swbreak+;hwbreak+");
        assert!(
            features.contains("ReverseStep+") && features.contains("ReverseContinue+"),
            "{features}"
        );
        assert!(debugger.ask("?").starts_with('T'));
        debugger
    }

    /// Sends a packet and returns the answer.
    pub fn ask(&mut self, payload: &str) -> String {
        self.0.send(payload.as_bytes()).expect("send a packet");
        match self.0.receive(WAIT).expect("receive its answer") {
            Some(GdbMessage::Packet(answer)) => String::from_utf8_lossy(&answer).into_owned(),
            other => panic!("no answer to {payload}: {other:?}"),
        }
    }

    /// All registers, in the hexadecimal form of the `g` packet.
    pub fn registers(&mut self) -> String {
        self.ask("g")
    }

    /// Register `number`: 7 is the stack pointer, 16 the instruction pointer.
    pub fn register(&mut self, number: usize) -> u64 {
        let all = self.registers();
        let hex = all.get(number * 16..number * 16 + 16).expect("its digits");
        u64::from_str_radix(hex, 16).expect("hexadecimal").swap_bytes()
    }

    /// The number of the next instruction, from QEMU's monitor.
    pub fn icount(&mut self) -> u64 {
        // `info replay`, in hexadecimal.
        let mut answer = self.ask("qRcmd,696e666f207265706c6179");
        let mut output = String::new();
        while let Some(hex) = answer.strip_prefix('O').filter(|hex| *hex != "K") {
            let bytes = (0..hex.len() / 2)
                .filter_map(|n| u8::from_str_radix(&hex[2 * n..2 * n + 2], 16).ok());
            output.push_str(&String::from_utf8_lossy(&bytes.collect::<Vec<_>>()));
            answer = match self.0.receive(WAIT).expect("the rest of an answer") {
                Some(GdbMessage::Packet(rest)) => String::from_utf8_lossy(&rest).into_owned(),
                other => panic!("no end of an answer: {other:?}"),
            };
        }
        let count = output.rsplit_once("count = ").and_then(|(_, count)| count.trim().parse().ok());
        count.unwrap_or_else(|| panic!("no instruction in {output:?}"))
    }
}
