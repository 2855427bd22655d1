//! Accepts connections of hosts with the key, and reads the purpose of each.

use super::super::frames::{FrameKind, Greeting, MachineFrame, Purpose, VERSION, parse};
use super::super::settings::FailoverSetup;
use super::{Refusals, StandbyEngineEvent};
use crate::error::{Error, Result};
use crate::event::FailoverEvent;
use crate::links::limit_silence;
use keyframe_link::{Channel, FrameBuffer};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// The longest time until a host has sent its greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections whose greeting has not come yet.
const STRANGERS_MAX: usize = 32;
const REBIND_TIMEOUT: Duration = Duration::from_secs(2);

/// Listens at `address` and returns the socket. If another process still listens there, tries for
/// 2 s. Error: [`Error::Listen`] if this host cannot listen there.
pub fn bound(address: SocketAddr) -> Result<TcpListener> {
    let deadline = Instant::now() + REBIND_TIMEOUT;
    loop {
        match TcpListener::bind(address) {
            Err(e) if e.kind() == std::io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            bound => {
                return bound.map_err(|source| Error::Listen { address, source });
            }
        }
    }
}

/// Starts a thread that accepts connections from `listener` until `ends` is set. The greeting of
/// each is read in another thread, and the connection goes to `sender`. Error: the thread cannot be
/// started.
pub fn admit(
    listener: TcpListener,
    setup: &FailoverSetup,
    sender: &Sender<StandbyEngineEvent>,
    ends: &Arc<AtomicBool>,
) -> Result<()> {
    let failed = |e| Error::io("listen", e);
    listener.set_nonblocking(true).map_err(failed)?;
    let (setup, sender, ends) = (setup.clone(), sender.clone(), Arc::clone(ends));
    let (strangers, refusals) = (Arc::new(()), Arc::new(Refusals::default()));
    let work = move || {
        while !ends.load(Ordering::Relaxed) {
            let Ok((stream, _)) = listener.accept() else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            if Arc::strong_count(&strangers) > STRANGERS_MAX {
                continue;
            }
            let (setup, sender, stranger) = (setup.clone(), sender.clone(), Arc::clone(&strangers));
            let refusals = Arc::clone(&refusals);
            let greet = move || {
                match accepted(stream, &setup) {
                    Ok(event) => {
                        refusals.forget();
                        drop(sender.send(event));
                    }
                    Err(error) => {
                        refusals.tell(&*setup.events, error, FailoverEvent::ConnectionRefused);
                    }
                }
                drop(stranger);
            };
            let _ = std::thread::Builder::new().name("greet".into()).spawn(greet);
        }
    };
    std::thread::Builder::new().name("admit".into()).spawn(work).map(drop).map_err(failed)
}

fn accepted(stream: TcpStream, setup: &FailoverSetup) -> Result<StandbyEngineEvent> {
    stream.set_nonblocking(false).map_err(|e| Error::io("listen", e))?;
    greeted(setup.party.accept(stream, GREETING_TIMEOUT)?)
}

fn greeted(channel: Channel) -> Result<StandbyEngineEvent> {
    let mut input = FrameBuffer::default();
    let mut next = |what: FrameKind| {
        let frame = channel.receive(&mut input, GREETING_TIMEOUT)?;
        let frame = frame.filter(|frame| FrameKind::of(frame.kind) == Some(what));
        frame.map(|frame| frame.payload).ok_or(Error::NoPurpose)
    };
    let greeting: Greeting = parse(&next(FrameKind::Greeting)?)?;
    if greeting.version != VERSION {
        return Err(Error::OtherVersion(greeting.version));
    }
    let number = greeting.connection;
    Ok(match greeting.purpose {
        Purpose::Control => {
            let machine = Box::new(parse::<MachineFrame>(&next(FrameKind::Machine)?)?);
            limit_silence(&channel, machine.detection_ns);
            StandbyEngineEvent::Control { number, machine, channel: Arc::new(channel) }
        }
        Purpose::Beat => StandbyEngineEvent::Beat { number, channel: Arc::new(channel) },
        Purpose::Data { stream } => {
            StandbyEngineEvent::Data { stream, number, channel: Box::new(channel) }
        }
    })
}
