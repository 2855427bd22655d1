//! Clients on their own host. Each client asks, waits for the answer, thinks, and asks again.
//!
//! An answer counts if it came in the counted time. An answer that is missing at the end counts as
//! late by the time it is awaited, so that missing answers are no advantage.

use super::workload::RunResult;
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
/// The size of an answer's body, as in the workload's parameter `kf.web.bytes`.
const WEB_BYTES: usize = 16384;
/// The size of an answer's head.
const WEB_HEAD: usize = 24;

/// The time within which an answer is good. SPECweb2005 counts a page of its banking part as good
/// within 2 s and as tolerable within 4 s. An answer here takes a few milliseconds, so the limits are
/// a fortieth of these.
pub const GOOD: Duration = Duration::from_millis(50);
/// The time within which an answer is tolerable.
pub const TOLERABLE: Duration = Duration::from_millis(100);

/// A group of equal clients.
pub struct ClientGroup {
    number: u16,
    think: Duration,
    /// Whether the thinking times vary, as those of people do.
    varies: bool,
    connect: fn(&AtomicBool) -> Result<Box<dyn Client>, String>,
}

/// People with a browser.
pub const WEB: ClientGroup = ClientGroup {
    number: 16,
    think: Duration::from_millis(200),
    varies: true,
    connect: Web::connect,
};
/// Workers that report and get the next task.
pub const COORDINATOR: ClientGroup =
    ClientGroup { number: 8, think: Duration::from_millis(100), varies: false, connect: worker };

/// A connection of one client.
trait Client {
    /// Sends request `id` and waits for its answer. Fails if the answer is wrong.
    fn ask(&mut self, id: u64) -> Result<(), String>;
}

impl Client for Ledger {
    fn ask(&mut self, _: u64) -> Result<(), String> {
        self.report().map(drop)
    }
}

fn worker(over: &AtomicBool) -> Result<Box<dyn Client>, String> {
    let is_over = || over.load(Ordering::Relaxed);
    let ledger = Ledger::connect(address(ledger::PORT), Instant::now() + CONNECT_MAX, is_over)?;
    Ok(Box::new(ledger))
}

fn address(port: u16) -> SocketAddr {
    SocketAddr::from((GUEST, port))
}

/// A client of the small guest's `web` service.
struct Web {
    stream: TcpStream,
    answer: Vec<u8>,
}

impl Web {
    fn connect(over: &AtomicBool) -> Result<Box<dyn Client>, String> {
        let is_over = || over.load(Ordering::Relaxed);
        let stream = ledger::connect(address(WEB_PORT), Instant::now() + CONNECT_MAX, is_over)?;
        Ok(Box::new(Self { stream, answer: vec![0; WEB_HEAD + WEB_BYTES] }))
    }
}

impl Client for Web {
    fn ask(&mut self, id: u64) -> Result<(), String> {
        let request = [WEB_MAGIC.to_le_bytes(), id.to_le_bytes()].concat();
        let broke = |e| format!("the connection broke at request {id}: {e}");
        self.stream.write_all(&request).map_err(broke)?;
        self.stream.read_exact(&mut self.answer).map_err(broke)?;
        if self.answer.starts_with(&request) {
            return Ok(());
        }
        Err(format!("request {id} got the answer to another request"))
    }
}

/// The arrival and the duration of one answer.
#[derive(Clone, Copy)]
struct Answer {
    at: Instant,
    took: Duration,
}

/// The answers of one client, or the first error.
type Answers = Result<Vec<Answer>, String>;

/// Running clients. Dropping it ends them.
pub struct RunningClients {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<std::io::Result<Answers>>>,
}

impl ClientGroup {
    /// Starts the clients on `host`.
    pub fn start(&self, host: &Host, interrupt: &Interrupt) -> Result<RunningClients, Error> {
        interrupt.check()?;
        let mut asking = RunningClients { over: Arc::default(), threads: Vec::new() };
        for client in 0..self.number {
            let (over, connect) = (Arc::clone(&asking.over), self.connect);
            let think = ThinkTimes::new(self.think, self.varies, client);
            let thread = host.inside(move || ask(&over, connect, think, client));
            asking.threads.push(thread.map_err(Error::io("start a client"))?);
        }
        Ok(asking)
    }
}

impl RunningClients {
    /// Ends the clients, and counts the answers between `from` and `to`.
    pub fn end(mut self, from: Instant, to: Instant) -> Result<RunResult, Error> {
        self.over.store(true, Ordering::Relaxed);
        let mut done = RunResult::default();
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
            // The answer that was missing at the end.
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
            0 => Err(Error::failed("ask the guest", "it gave no answer in the counted time")),
            _ => Ok(done),
        }
    }
}

impl Drop for RunningClients {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

fn ask(
    over: &AtomicBool,
    connect: fn(&AtomicBool) -> Result<Box<dyn Client>, String>,
    mut think: ThinkTimes,
    client: u16,
) -> Answers {
    let mut connection = connect(over)?;
    let mut answers = Vec::new();
    let mut id = u64::from(client) << 32;
    // The clients begin at different times.
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

/// The times between an answer and the next request, equal in each run.
struct ThinkTimes {
    mean: Duration,
    varies: bool,
    state: u64,
}

impl ThinkTimes {
    fn new(mean: Duration, varies: bool, client: u16) -> Self {
        Self { mean, varies, state: u64::from(client) * 2 + 1 }
    }

    /// Returns a number that is uniform in 0..1.
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
        // Exponentially distributed, and limited so that each client takes part in a short run.
        if self.varies { self.mean.mul_f64((-self.part().ln()).min(4.0)) } else { self.mean }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinking_times_have_the_given_mean() {
        let mut think = ThinkTimes::new(Duration::from_millis(200), true, 3);
        let all: Duration = (0..10_000).map(|_| think.next()).sum();
        assert!((1900..2050).contains(&all.as_secs()), "{all:?}");
        let mut worker = ThinkTimes::new(Duration::from_millis(100), false, 3);
        assert_eq!(worker.next(), Duration::from_millis(100));
        assert!(worker.first() < Duration::from_millis(100));
    }
}
