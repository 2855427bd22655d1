//! Clients on their own host: each asks, waits for the answer, thinks, and asks again.
//!
//! An answer counts for the time in which it came. One that is still awaited at the end counts by
//! how long it is awaited, so that answers that never come are not those that never were late.

use super::workload::Done;
use crate::Error;
use crate::interrupt::Interrupt;
use keyframe_test_hosts::Host;
use keyframe_test_hosts::ledger::{self, Ledger};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const GUEST: [u8; 4] = [10, 78, 0, 15];
const CONNECT_MAX: Duration = Duration::from_secs(30);
const WEB_PORT: u16 = 4713;
const WEB_MAGIC: u64 = 0x0000_0062_6577_6b66;
/// Of an answer: as the workload's kf.web.bytes says, and its head.
const WEB_BYTES: usize = 16384;
const WEB_HEAD: usize = 24;

/// SPECweb2005 counts a page of its banking part as good within 2 s and as tolerable within 4 s;
/// ours is one answer of a few milliseconds, so these are a fortieth of that.
pub const GOOD: Duration = Duration::from_millis(50);
pub const TOLERABLE: Duration = Duration::from_millis(100);

/// Who asks.
pub struct Clients {
    number: u16,
    think: Duration,
    /// Times between them vary, as people do; workers do not.
    varies: bool,
    connect: fn(&AtomicBool) -> Result<Box<dyn Asks>, String>,
}

/// People with a browser.
pub const WEB: Clients =
    Clients { number: 16, think: Duration::from_millis(200), varies: true, connect: Web::connect };
/// Workers that report and get the next task.
pub const COORDINATOR: Clients =
    Clients { number: 8, think: Duration::from_millis(100), varies: false, connect: worker };

trait Asks {
    fn ask(&mut self, id: u64) -> Result<(), String>;
}

impl Asks for Ledger {
    fn ask(&mut self, _: u64) -> Result<(), String> {
        self.report().map(drop)
    }
}

fn worker(over: &AtomicBool) -> Result<Box<dyn Asks>, String> {
    let is_over = || over.load(Ordering::Relaxed);
    let ledger = Ledger::connect(address(ledger::PORT), Instant::now() + CONNECT_MAX, is_over)?;
    Ok(Box::new(ledger))
}

fn address(port: u16) -> SocketAddr {
    SocketAddr::from((GUEST, port))
}

/// A client of the small guest's `web`.
struct Web {
    stream: TcpStream,
    answer: Vec<u8>,
}

impl Web {
    fn connect(over: &AtomicBool) -> Result<Box<dyn Asks>, String> {
        let is_over = || over.load(Ordering::Relaxed);
        let stream = ledger::connect(address(WEB_PORT), Instant::now() + CONNECT_MAX, is_over)?;
        Ok(Box::new(Self { stream, answer: vec![0; WEB_HEAD + WEB_BYTES] }))
    }
}

impl Asks for Web {
    fn ask(&mut self, id: u64) -> Result<(), String> {
        let request = [WEB_MAGIC.to_le_bytes(), id.to_le_bytes()].concat();
        let broke = |e| format!("the connection broke at request {id}: {e}");
        self.stream.write_all(&request).map_err(broke)?;
        self.stream.read_exact(&mut self.answer).map_err(broke)?;
        if self.answer.starts_with(&request) {
            return Ok(());
        }
        Err(format!("request {id} has another one's answer"))
    }
}

/// One answer.
#[derive(Clone, Copy)]
struct Answer {
    at: Instant,
    took: Duration,
}

/// Of one client; or what it was answered wrongly.
type Answers = Result<Vec<Answer>, String>;

/// Clients at work.
pub struct Asking {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<std::io::Result<Answers>>>,
}

impl Clients {
    /// Lets them ask from `host`.
    pub fn start(&self, host: &Host, interrupt: &Interrupt) -> Result<Asking, Error> {
        interrupt.check()?;
        let mut asking = Asking { over: Arc::default(), threads: Vec::new() };
        for client in 0..self.number {
            let (over, connect) = (Arc::clone(&asking.over), self.connect);
            let think = Think::new(self.think, self.varies, client);
            let thread = host.inside(move || ask(&over, connect, think, client));
            asking.threads.push(thread.map_err(Error::io("start a client"))?);
        }
        Ok(asking)
    }
}

impl Asking {
    /// Ends them, and counts what came in the time.
    pub fn end(mut self, from: Instant, to: Instant) -> Result<Done, Error> {
        self.over.store(true, Ordering::Relaxed);
        let mut done = Done::default();
        let seconds = to.duration_since(from).as_secs_f64();
        for thread in self.threads.drain(..) {
            let answers = match thread.join() {
                Ok(Ok(answers)) => answers.map_err(|e| Error::failed("ask the guest", e))?,
                Ok(Err(e)) => return Err(Error::io("enter a namespace")(e)),
                Err(_) => return Err(Error::failed("ask the guest", "a client's thread panicked")),
            };
            for answer in answers.iter().filter(|answer| answer.at >= from && answer.at < to) {
                done.took_ns.push(answer.took.as_nanos() as f64);
                done.per_s += 1.0 / seconds;
                if answer.took <= GOOD {
                    done.good_per_s += 1.0 / seconds;
                }
                if answer.took <= TOLERABLE {
                    done.tolerable_per_s += 1.0 / seconds;
                }
            }
            // What was awaited when the time was over.
            let late = answers
                .iter()
                .find(|answer| answer.at >= to && answer.at.checked_sub(answer.took) < Some(to));
            if let Some(waited) = late
                .and_then(|answer| to.checked_duration_since(answer.at.checked_sub(answer.took)?))
                && waited > TOLERABLE
            {
                done.took_ns.push(waited.as_nanos() as f64);
            }
        }
        match done.took_ns.len() {
            0 => Err(Error::failed("ask the guest", "it answered nothing in the time")),
            _ => Ok(done),
        }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

fn ask(
    over: &AtomicBool,
    connect: fn(&AtomicBool) -> Result<Box<dyn Asks>, String>,
    mut think: Think,
    client: u16,
) -> Answers {
    let mut connection = connect(over)?;
    let mut answers = Vec::new();
    let mut id = u64::from(client) << 32;
    // Not all at once.
    std::thread::sleep(think.first());
    while !over.load(Ordering::Relaxed) {
        let asked = Instant::now();
        connection.ask(id)?;
        answers.push(Answer { at: Instant::now(), took: asked.elapsed() });
        id += 1;
        std::thread::sleep(think.next());
    }
    Ok(answers)
}

/// Times between an answer and the next question; the same ones in each run.
struct Think {
    mean: Duration,
    varies: bool,
    state: u64,
}

impl Think {
    fn new(mean: Duration, varies: bool, client: u16) -> Self {
        Self { mean, varies, state: u64::from(client) * 2 + 1 }
    }

    /// Evenly in 0..1.
    fn part(&mut self) -> f64 {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.state >> 33) as f64 + 0.5) / f64::from(1u32 << 31)
    }

    fn first(&mut self) -> Duration {
        self.part();
        self.mean.mul_f64(self.part())
    }

    fn next(&mut self) -> Duration {
        // Exponentially distributed; cut where a client would be missing from a short run.
        if self.varies { self.mean.mul_f64((-self.part().ln()).min(4.0)) } else { self.mean }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_think_as_long_as_they_are_told_on_average() {
        let mut think = Think::new(Duration::from_millis(200), true, 3);
        let all: Duration = (0..10_000).map(|_| think.next()).sum();
        assert!((1900..2050).contains(&all.as_secs()), "{all:?}");
        let mut worker = Think::new(Duration::from_millis(100), false, 3);
        assert_eq!(worker.next(), Duration::from_millis(100));
        assert!(worker.first() < Duration::from_millis(100));
    }
}
