//! A client of the small guest's `ledger`: believes nothing.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Where a ledger listens.
pub const PORT: u16 = 4712;

const MAGIC: u64 = 0x7265_6764_656c_666b;
/// How long an answer may take.
const ANSWER_MAX: Duration = Duration::from_mins(2);

/// One connection, and what was confirmed over it.
pub struct Ledger {
    stream: TcpStream,
    entries: u64,
    chain: u64,
}

impl Ledger {
    /// Connects, and tries again until `deadline`, or until `is_over`.
    pub fn connect(
        address: SocketAddr,
        deadline: Instant,
        is_over: impl Fn() -> bool,
    ) -> Result<Self, String> {
        let stream = connect(address, deadline, is_over)?;
        Ok(Self { stream, entries: 0, chain: 0 })
    }

    /// Entries that the guest has confirmed.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Enters the next value. Its answer has to be the one that follows from the one before:
    /// nothing that was confirmed is ever taken back, nothing happens twice, and no connection
    /// breaks. For this it is the only client.
    pub fn enter(&mut self) -> Result<Duration, String> {
        let (asked, value) = (Instant::now(), self.entries * 7 + 1);
        let [magic, entries, chain, errors] = self.ask(value)?;
        self.entries += 1;
        self.chain = mix(self.chain ^ value);
        if (magic, entries, chain) != (MAGIC, self.entries, self.chain) {
            return Err(format!("entry {} was answered as {entries}", self.entries));
        }
        if errors != 0 {
            return Err(format!(
                "the guest's disk is not of its memory's instant at entry {entries}"
            ));
        }
        Ok(asked.elapsed())
    }

    /// Enters a value, one of many clients.
    pub fn report(&mut self) -> Result<Duration, String> {
        let asked = Instant::now();
        let [magic, entries, _, errors] = self.ask(1)?;
        let grown = entries > self.entries;
        self.entries = entries;
        if magic == MAGIC && grown && errors == 0 {
            Ok(asked.elapsed())
        } else {
            Err(format!("entry {entries} was answered wrongly, with {errors} errors"))
        }
    }

    fn ask(&mut self, value: u64) -> Result<[u64; 4], String> {
        let request = [MAGIC.to_le_bytes(), value.to_le_bytes()].concat();
        let behind = |e, entries| format!("the connection broke behind entry {entries}: {e}");
        self.stream.write_all(&request).map_err(|e| behind(e, self.entries))?;
        let mut answer = [[0; 8]; 4];
        self.stream.read_exact(answer.as_flattened_mut()).map_err(|e| behind(e, self.entries))?;
        Ok(answer.map(u64::from_le_bytes))
    }
}

/// Connects to a guest, and tries again until `deadline`, or until `is_over`.
pub fn connect(
    address: SocketAddr,
    deadline: Instant,
    is_over: impl Fn() -> bool,
) -> Result<TcpStream, String> {
    let stream = loop {
        // What the guest answers may be held for an epoch.
        match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            Ok(stream) => break stream,
            Err(_) if Instant::now() < deadline && !is_over() => {
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(e) => return Err(format!("connect to the guest: {e}")),
        }
    };
    let set = stream.set_nodelay(true).and_then(|()| stream.set_read_timeout(Some(ANSWER_MAX)));
    set.map_err(|e| format!("set an option: {e}"))?;
    Ok(stream)
}

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
