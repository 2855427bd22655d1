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

    /// Memory at `address`, `len` bytes of it.
    pub fn memory(&mut self, address: u64, len: usize) -> Vec<u8> {
        let hex = self.ask(&format!("m{address:x},{len:x}"));
        assert_eq!(hex.len(), 2 * len, "memory at {address:#x}: {hex}");
        from_hex(&hex)
    }

    /// The first instruction of the handler of an interrupt or exception.
    pub fn interrupt_handler(&mut self, vector: u64) -> u64 {
        let registers = self.monitor("info registers");
        let table = registers
            .split_once("IDT=")
            .and_then(|(_, rest)| rest.split(' ').find(|word| !word.is_empty()));
        let table =
            table.and_then(|hex| u64::from_str_radix(hex, 16).ok()).expect("the table's address");
        let gate = self.memory(table + 16 * vector, 16);
        let bytes = [gate[0], gate[1], gate[6], gate[7], gate[8], gate[9], gate[10], gate[11]];
        u64::from_le_bytes(bytes)
    }

    /// Gives QEMU's monitor a line, and returns what it prints.
    fn monitor(&mut self, line: &str) -> String {
        let hex = line.bytes().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
        let mut answer = self.ask(&format!("qRcmd,{hex}"));
        let mut output = String::new();
        while let Some(hex) = answer.strip_prefix('O').filter(|hex| *hex != "K") {
            output.push_str(&String::from_utf8_lossy(&from_hex(hex)));
            answer = match self.0.receive(WAIT).expect("the rest of an answer") {
                Some(GdbMessage::Packet(rest)) => String::from_utf8_lossy(&rest).into_owned(),
                other => panic!("no end of an answer: {other:?}"),
            };
        }
        output
    }

    /// The number of the next instruction, from QEMU's monitor.
    pub fn icount(&mut self) -> u64 {
        let output = self.monitor("info replay");
        let count = output.rsplit_once("count = ").and_then(|(_, count)| count.trim().parse().ok());
        count.unwrap_or_else(|| panic!("no instruction in {output:?}"))
    }
}

fn from_hex(hex: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
    (0..hex.len()).step_by(2).map_while(byte).collect()
}
