//! A client of the small guest's `ledger` service that checks every answer.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// The TCP port on which the guest's ledger listens.
pub const PORT: u16 = 4712;

const MAGIC: u64 = 0x7265_6764_656c_666b;
/// Longest time to wait for an answer.
const ANSWER_MAX: Duration = Duration::from_mins(2);

/// One connection to a ledger.
pub struct Ledger {
    stream: TcpStream,
    /// Entries that the guest has confirmed.
    entries: u64,
    /// Hash over the confirmed values, in their order.
    chain: u64,
}

impl Ledger {
    /// Connects to `address`. Retries until `deadline`, or until `is_over` returns true.
    pub fn connect(
        address: SocketAddr,
        deadline: Instant,
        is_over: impl Fn() -> bool,
    ) -> Result<Self, String> {
        let stream = connect(address, deadline, is_over)?;
        Ok(Self { stream, entries: 0, chain: 0 })
    }

    /// Returns the number of entries that the guest has confirmed.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Enters the next value and returns the time until its answer. Fails unless the answer follows
    /// from all earlier answers of this connection: a confirmed entry stays, none happens twice, and
    /// the connection never breaks. The ledger must have no other client.
    pub fn enter(&mut self) -> Result<Duration, String> {
        let (asked, value) = (Instant::now(), self.entries * 7 + 1);
        let [magic, entries, chain, errors] = self.ask(value)?;
        self.entries += 1;
        self.chain = mix(self.chain ^ value);
        if (magic, entries, chain) != (MAGIC, self.entries, self.chain) {
            return Err(format!("entry {} was answered as {entries}", self.entries));
        }
        if errors != 0 {
            return Err(format!("the guest's disk and memory disagree at entry {entries}"));
        }
        Ok(asked.elapsed())
    }

    /// Enters a value as one of many clients and returns the time until its answer. Fails unless the
    /// number of entries has grown.
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
        let broken = |e, entries| format!("the connection broke after entry {entries}: {e}");
        self.stream.write_all(&request).map_err(|e| broken(e, self.entries))?;
        let mut answer = [[0; 8]; 4];
        self.stream.read_exact(answer.as_flattened_mut()).map_err(|e| broken(e, self.entries))?;
        Ok(answer.map(u64::from_le_bytes))
    }
}

/// Connects to a guest. Retries until `deadline`, or until `is_over` returns true.
pub fn connect(
    address: SocketAddr,
    deadline: Instant,
    is_over: impl Fn() -> bool,
) -> Result<TcpStream, String> {
    let stream = loop {
        // The guest's answer may be held until the end of an epoch.
        match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            Ok(stream) => break stream,
            Err(_) if Instant::now() < deadline && !is_over() => {
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(e) => return Err(format!("connect to the guest: {e}")),
        }
    };
    let set = stream.set_nodelay(true).and_then(|()| stream.set_read_timeout(Some(ANSWER_MAX)));
    set.map_err(|e| format!("set an option of the connection to the guest: {e}"))?;
    Ok(stream)
}

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
