//! The primary's connections with its standby. They are made again after each break.
//!
//! ```text
//!   connector   control ─▶ Greeting, Machine ─▶ Ready ─▶ data 0..n ─▶ linked ──broken──▶ again
//!   beater      beat ────▶ Greeting ────────────────────────────────▶ beating ─broken──▶ again
//!   readers     a thread for control and one for beat: messages ─▶ the protocol's inbox
//! ```

use super::frames::{
    FrameKind, Greeting, MachineFrame, Purpose, ReadyFrame, VERSION, parse, text, unmarked,
};
use super::sending::Link;
use crate::error::{Error, Result};
use keyframe_link::{Channel, FrameBuffer, Party};
use keyframe_locks::IgnorePoison;
use keyframe_replication::PeerMessage;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The time limit of one attempt to connect.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest time until the standby answers: it starts QEMU first.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// The wait between two attempts to connect.
const RECONNECT: Duration = Duration::from_millis(300);
const READ_WAIT: Duration = Duration::from_millis(200);
/// The shortest silence that ends a connection: lost packets are sent again within it.
const SILENCE_MIN: Duration = Duration::from_secs(5);

/// An event of the connections to the standby, for the thread of the protocol.
pub enum LinkEvent {
    /// Control and data connections with this number are made.
    Connected(u64, Arc<Link>),
    /// The second path is connected, by the connection with this number.
    BeatConnected(u64, Arc<Channel>),
    /// A message arrived on connection `number` of path `path`.
    Received {
        /// The path: 0 for control, 1 for messages alone.
        path: u8,
        /// The number of the connection, counted from the first one.
        number: u64,
        /// The message.
        message: PeerMessage,
    },
    /// The standby sends hashes of the pages that it holds, from page `first` on.
    PageHashes {
        /// The number of the connection, counted from the first one.
        number: u64,
        /// The number of the session for which the standby made the hashes.
        session: u64,
        /// The number of the page of the first hash; [`u64::MAX`] for the frame that ends the list.
        first: u64,
        /// The hashes, 16 bytes each, end to end.
        hashes: Vec<u8>,
    },
    /// Connection `number` of path `path` has ended.
    Broken {
        /// The path: 0 for control, 1 for messages alone.
        path: u8,
        /// The number of the connection, counted from the first one.
        number: u64,
    },
    /// The standby could not be connected.
    ConnectFailed(Error),
}

/// The addresses at which a primary connects to its standby.
#[derive(Clone, Copy)]
pub struct StandbyAddresses {
    /// The address for control and data connections.
    pub control: SocketAddr,
    /// The address of the second path, for messages alone. `None` if there is one path.
    pub beat: Option<SocketAddr>,
}

/// The description of the machine that the primary sends at its next connection.
pub type SharedMachineFrame = Arc<Mutex<MachineFrame>>;

/// Flags of the connections to the standby, which the threads that connect share with the
/// protocol's thread.
#[derive(Clone, Debug, Default)]
pub struct ConnectionFlags {
    /// True while the control and data connections are established.
    pub linked: Arc<AtomicBool>,
    /// True while the second path is connected.
    pub beating: Arc<AtomicBool>,
    /// Set to end the threads.
    pub ends: Arc<AtomicBool>,
}

/// Starts the threads that connect to the standby at `addresses`. They connect whenever
/// `flags.linked` or `flags.beating` is false, until `flags.ends` is set, and pass events to
/// `tell`. At each connection they send `frame` to the standby. Error: a thread cannot be
/// started.
pub fn start(
    party: &Party,
    addresses: StandbyAddresses,
    frame: &SharedMachineFrame,
    tell: impl Fn(LinkEvent) + Clone + Send + 'static,
    flags: &ConnectionFlags,
) -> Result<()> {
    let started = |e| Error::io("start a thread", e);
    let (own_party, machine, tell_control) = (party.clone(), Arc::clone(frame), tell.clone());
    let (linked, ending) = (Arc::clone(&flags.linked), Arc::clone(&flags.ends));
    let control = move || {
        let mut number = 0;
        while !ending.load(Ordering::Relaxed) {
            if !linked.load(Ordering::Relaxed) {
                number += 1;
                // Set before the event: the receiver of a break clears it.
                linked.store(true, Ordering::Relaxed);
                let machine = machine.lock().ignore_poison().clone();
                let made = connect(
                    &own_party,
                    addresses.control,
                    &machine,
                    number,
                    &tell_control,
                    &ending,
                );
                if made.is_none() {
                    linked.store(false, Ordering::Relaxed);
                }
            }
            std::thread::sleep(RECONNECT);
        }
    };
    std::thread::Builder::new().name("connect".into()).spawn(control).map_err(started)?;
    let Some(address) = addresses.beat else { return Ok(()) };
    let detection_ns = frame.lock().ignore_poison().detection_ns;
    let (party, beating, ending) =
        (party.clone(), Arc::clone(&flags.beating), Arc::clone(&flags.ends));
    let beat = move || {
        let mut number = 0;
        while !ending.load(Ordering::Relaxed) {
            if !beating.load(Ordering::Relaxed) {
                number += 1;
                if let Ok(channel) = open_channel(&party, address, Purpose::Beat, number) {
                    limit_silence(&channel, detection_ns);
                    beating.store(true, Ordering::Relaxed);
                    tell(LinkEvent::BeatConnected(number, Arc::clone(&channel)));
                    read(channel, 1, number, tell.clone(), Arc::clone(&ending), || ());
                }
            }
            std::thread::sleep(RECONNECT);
        }
    };
    std::thread::Builder::new().name("beat".into()).spawn(beat).map(drop).map_err(started)
}

/// Connects control and data, and starts a thread that reads. Returns `None` after an error, which
/// it has emitted as an event.
fn connect(
    party: &Party,
    address: SocketAddr,
    machine: &MachineFrame,
    number: u64,
    tell: &(impl Fn(LinkEvent) + Clone + Send + 'static),
    ends: &Arc<AtomicBool>,
) -> Option<Arc<Link>> {
    match open_link(party, address, machine, number) {
        Ok(link) => {
            let link = Arc::new(link);
            tell(LinkEvent::Connected(number, Arc::clone(&link)));
            let closing = Arc::clone(&link);
            read(Arc::clone(&link.control), 0, number, tell.clone(), Arc::clone(ends), move || {
                closing.close();
            });
            Some(link)
        }
        Err(error) => {
            tell(LinkEvent::ConnectFailed(error));
            None
        }
    }
}

fn open_link(
    party: &Party,
    address: SocketAddr,
    machine: &MachineFrame,
    number: u64,
) -> Result<Link> {
    let control = open_channel(party, address, Purpose::Control, number)?;
    limit_silence(&control, machine.detection_ns);
    control.send(FrameKind::Machine as u8, &[&text(machine)?])?;
    let ready = control.receive(&mut FrameBuffer::default(), READY_TIMEOUT)?;
    let ready = ready.filter(|frame| FrameKind::of(frame.kind) == Some(FrameKind::Ready));
    let ready = ready.ok_or(Error::StandbySilent(address))?;
    if let ReadyFrame::Refused { problem, fix } = parse(&ready.payload)? {
        return Err(Error::StandbyRefuses { address, problem, fix });
    }
    let data = (0..machine.streams)
        .map(|stream| open_channel(party, address, Purpose::Data { stream }, number))
        .collect::<Result<_>>()?;
    Ok(Link { control, data })
}

/// Connects to `address` within [`CONNECT_TIMEOUT`], sends a greeting with `purpose` and the
/// connection's number `connection`, and returns the connection. Error: [`Error::Link`] if the
/// connection cannot be made, or if the other host does not have the key.
pub fn open_channel(
    party: &Party,
    address: SocketAddr,
    purpose: Purpose,
    connection: u64,
) -> Result<Arc<Channel>> {
    let channel = party.connect(address, CONNECT_TIMEOUT)?;
    let greeting = Greeting { version: VERSION, purpose, connection };
    channel.send(FrameKind::Greeting as u8, &[&text(&greeting)?])?;
    Ok(Arc::new(channel))
}

/// Has a connection for messages end if the other host acknowledges nothing for four times the
/// detection time, which is `detection_ns` nanoseconds, and at least for 5 s. Heartbeats are sent
/// on it all the time, so the end of a path that falls silent is seen, and the path is made again.
/// Connections for pages have no such limit: a standby that applies an epoch takes no bytes.
pub fn limit_silence(channel: &Channel, detection_ns: u64) {
    let limit = Duration::from_nanos(detection_ns.saturating_mul(4)).max(SILENCE_MIN);
    // Without the limit, the kernel takes minutes to find a silent path broken.
    let _ = channel.set_silence_limit(limit);
}

/// Starts a thread that reads messages from `channel` and passes them to `tell`, as messages of
/// connection `number` on path `path` (0 for control, 1 for messages alone). It reads until the
/// connection breaks or `ends` is set. Then it calls `broken`, and passes [`LinkEvent::Broken`]. A
/// connection whose thread cannot be started is closed, and counts as broken.
pub fn read(
    channel: Arc<Channel>,
    path: u8,
    number: u64,
    tell: impl Fn(LinkEvent) + Clone + Send + 'static,
    ends: Arc<AtomicBool>,
    broken: impl FnOnce() + Send + 'static,
) {
    let (unread, tell_unread) = (Arc::clone(&channel), tell.clone());
    let work = move || {
        let mut input = FrameBuffer::default();
        while !ends.load(Ordering::Relaxed) {
            match channel.receive(&mut input, READ_WAIT) {
                Ok(None) => {}
                Ok(Some(frame)) => {
                    let said = match FrameKind::of(frame.kind) {
                        Some(FrameKind::Core) => PeerMessage::decode(&frame.payload)
                            .ok()
                            .map(|message| LinkEvent::Received { path, number, message }),
                        Some(FrameKind::PageHashes) => {
                            unmarked(&frame.payload).map(|(session, first, hashes)| {
                                LinkEvent::PageHashes {
                                    number,
                                    session,
                                    first,
                                    hashes: hashes.to_vec(),
                                }
                            })
                        }
                        _ => None,
                    };
                    // A host that sends malformed messages is no peer.
                    let Some(said) = said else { break };
                    tell(said);
                }
                Err(_) => break,
            }
        }
        channel.close();
        broken();
        tell(LinkEvent::Broken { path, number });
    };
    if std::thread::Builder::new().name("link".into()).spawn(work).is_err() {
        unread.close();
        tell_unread(LinkEvent::Broken { path, number });
    }
}

/// Sends a message of the protocol. Waits while another thread sends a frame on the connection, and
/// for up to 30 s while the other host takes no bytes. Returns false if the connection is broken.
pub fn send_message(channel: &Channel, message: &PeerMessage) -> bool {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    channel.send(FrameKind::Core as u8, &[&bytes]).is_ok()
}
