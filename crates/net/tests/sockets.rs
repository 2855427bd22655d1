//! The switch with peers that speak QEMU's protocol, through its control connection.

mod support;

use keyframe_net::{
    Error, InFlight, PortId, StandInPort, Switch, SwitchLimits, SwitchRemote, serve, serve_until,
};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::thread::JoinHandle;
use std::time::Duration;
use support::{Peer, frame, until};

const LIMIT: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(20);

/// A switch in a thread, its control, and the socket of its LAN.
struct Bench {
    remote: SwitchRemote,
    thread: JoinHandle<Result<(), Error>>,
    lan: PathBuf,
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || serve(theirs));
        let mut remote = SwitchRemote::over(ours).unwrap();
        let dir = tempfile::Builder::new().prefix("keyframe-test-").tempdir().unwrap();
        let lan = dir.path().join("lan");
        remote.listen(&lan).unwrap();
        Self { remote, thread, lan, dir }
    }

    /// Peers with the addresses 0, 1, ..., in the order of their ports. The switch knows them.
    fn peers<const N: usize>(&mut self) -> [Peer; N] {
        self.peers_one_deaf(N)
    }

    /// As [`Self::peers`]. The peer with the address `deaf` reads only on demand.
    fn peers_one_deaf<const N: usize>(&mut self, deaf: usize) -> [Peer; N] {
        let mut peers = std::array::from_fn(|n| self.peer(n == deaf));
        for from in 0..N {
            peers[from].send(&frame(from as u8, 255, 0));
            for (to, peer) in peers.iter_mut().enumerate() {
                if to != from {
                    assert_eq!(peer.receive(), frame(from as u8, 255, 0));
                }
            }
        }
        peers
    }

    fn peer(&mut self, deaf: bool) -> Peer {
        let before = self.remote.ports().unwrap().ports.len();
        let peer = if deaf { Peer::deaf(&self.lan) } else { Peer::connect(&self.lan) };
        until("the port", || self.remote.ports().unwrap().ports.len() > before);
        peer
    }

    /// Quiesces until `port` is the one named as not quiet, with a problem that contains `what`:
    /// other peers take a moment to read their frames.
    fn names(&mut self, port: &PortId, what: &str) {
        until("its name", || match self.remote.quiesce(Duration::from_millis(50)) {
            Err(Error::NotQuiet { port: named, problem, .. }) => {
                named == *port && problem.contains(what)
            }
            other => panic!("{other:?}"),
        });
    }

    fn port(&self, number: u32) -> PortId {
        PortId { lan: self.lan.display().to_string(), pid: std::process::id(), number }
    }

    fn end(self) {
        drop(self.remote);
        until("the end of the switch", || self.thread.is_finished());
        self.thread.join().unwrap().unwrap();
        assert!(!self.lan.exists());
    }
}

fn numbers(in_flight: &InFlight, port: &PortId) -> Vec<Vec<u8>> {
    let found = in_flight.ports.iter().find(|p| p.port == *port).unwrap();
    found.frames.iter().map(|f| f.bytes().to_vec()).collect()
}

#[test]
fn known_addresses_go_to_one_port_and_all_others_to_all() {
    let mut bench = Bench::new();
    let [mut a, mut b, mut c] = bench.peers();
    a.send(&frame(0, 1, 1));
    a.send(&frame(0, 77, 2));
    assert_eq!([b.receive(), b.receive()], [frame(0, 1, 1), frame(0, 77, 2)]);
    assert_eq!(c.receive(), frame(0, 77, 2));
    // The other LAN receives nothing.
    let other = bench.dir.path().join("other");
    bench.remote.listen(&other).unwrap();
    let far = Peer::connect(&other);
    until("its port", || bench.remote.ports().unwrap().ports.len() == 4);
    a.send(&frame(0, 255, 3));
    assert_eq!([b.receive(), c.receive()], [frame(0, 255, 3), frame(0, 255, 3)]);
    assert!(far.has_nothing());
    drop((a, b, c, far));
    bench.end();
}

#[test]
fn a_hold_keeps_everything_in_order_and_a_fresh_switch_delivers_it_again() {
    let mut bench = Bench::new();
    let [mut a, mut b] = bench.peers();
    a.send(&frame(0, 1, 1));
    assert_eq!(b.receive(), frame(0, 1, 1));
    bench.remote.hold(LIMIT).unwrap();
    for n in 2..50 {
        a.send(&frame(0, 1, n));
    }
    b.send(&frame(1, 0, 1000));
    bench.remote.quiesce(SOON).unwrap();
    // Sent after the quiesce, before the stop.
    b.send(&frame(1, 255, 1001));
    let in_flight = bench.remote.collect().unwrap();
    assert!(a.has_nothing() && b.has_nothing());
    let for_b: Vec<_> = (2..50).map(|n| frame(0, 1, n)).collect();
    let for_a = vec![frame(1, 0, 1000), frame(1, 255, 1001)];
    assert_eq!(numbers(&in_flight, &bench.port(1)), for_b);
    assert_eq!(numbers(&in_flight, &bench.port(0)), for_a);
    bench.remote.release().unwrap();
    assert_eq!(b.receive_some(for_b.len()), for_b);
    assert_eq!(a.receive_some(for_a.len()), for_a);

    let mut fresh = Bench::new();
    let [mut b2, mut a2] = fresh.peers();
    let stand_in = |recorded, present| StandInPort { recorded, present };
    let stand_ins =
        [stand_in(bench.port(0), fresh.port(1)), stand_in(bench.port(1), fresh.port(0))];
    assert!(matches!(fresh.remote.restore(&in_flight, &stand_ins), Err(Error::NotHeld { .. })));
    fresh.remote.hold(LIMIT).unwrap();
    assert!(matches!(
        fresh.remote.restore(&in_flight, &stand_ins[..1]),
        Err(Error::Unmapped { .. })
    ));
    let unknown = [stand_in(bench.port(0), fresh.port(1)), stand_in(bench.port(1), fresh.port(7))];
    assert!(matches!(fresh.remote.restore(&in_flight, &unknown), Err(Error::UnknownPort { .. })));
    fresh.remote.restore(&in_flight, &stand_ins).unwrap();
    b2.send(&frame(0, 1, 1002));
    fresh.remote.release().unwrap();
    assert_eq!(b2.receive_some(for_b.len()), for_b);
    assert_eq!(a2.receive_some(2), for_a);
    // If the failed restore had queued frames, they would arrive twice.
    b2.send(&frame(0, 1, 1003));
    assert_eq!([a2.receive(), a2.receive()], [frame(0, 1, 1002), frame(0, 1, 1003)]);
    drop((a, b, a2, b2));
    bench.end();
    fresh.end();
}

#[test]
fn a_peer_that_does_not_take_its_packets_is_named_and_nothing_is_collected() {
    let mut bench = Bench::new();
    let [mut a, mut b] = bench.peers_one_deaf(1);
    let deaf = bench.port(1);
    bench.remote.hold(LIMIT).unwrap();
    // The peer has read all frames and does not read on, as QEMU does with a frame that its NIC
    // does not take.
    bench.names(&deaf, "waits in QEMU");
    b.take_probe();
    bench.remote.quiesce(SOON).unwrap();
    bench.remote.collect().unwrap();
    bench.remote.release().unwrap();
    a.send(&frame(0, 1, 1));
    until("its arrival", || b.waits_bytes() > 3);
    bench.remote.hold(LIMIT).unwrap();
    bench.names(&deaf, "");
    assert!(matches!(bench.remote.collect(), Err(Error::NotQuiet { .. })));
    bench.remote.release().unwrap();
    assert_eq!(b.receive(), frame(0, 1, 1));
    drop((a, b));
    bench.end();
}

#[test]
fn a_hold_that_lasts_too_long_or_loses_its_controller_ends_by_itself() {
    let mut bench = Bench::new();
    let [mut a, mut b] = bench.peers();
    bench.remote.hold(Duration::from_millis(30)).unwrap();
    a.send(&frame(0, 1, 1));
    assert_eq!(b.receive(), frame(0, 1, 1));
    let Err(Error::Torn { reason }) = bench.remote.collect() else { panic!("not torn") };
    assert!(reason.contains("time limit"), "{reason}");
    bench.remote.release().unwrap();
    assert!(matches!(bench.remote.collect(), Err(Error::NotHeld { .. })));
    bench.remote.hold(LIMIT).unwrap();
    a.send(&frame(0, 1, 2));
    let Bench { remote, thread, lan, dir: _dir } = bench;
    assert!(!remote.end().unwrap());
    assert_eq!(b.receive(), frame(0, 1, 2));
    // The switch goes on, also for its last port.
    b.send(&frame(1, 0, 3));
    assert_eq!(a.receive(), frame(1, 0, 3));
    let mut late = Peer::connect(&lan);
    late.send(&frame(2, 0, 4));
    assert_eq!(a.receive(), frame(2, 0, 4));
    assert!(!thread.is_finished());
    drop((a, b, late));
    until("the end of the switch", || thread.is_finished());
    thread.join().unwrap().unwrap();
}

#[test]
#[ignore = "a role of another test"]
fn switch_process() {
    if std::env::var_os("KEYFRAME_PART").is_some() {
        let control = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        serve(UnixStream::from(control)).unwrap();
    }
}

#[test]
fn a_switch_in_its_own_process_outlives_its_engine_and_not_its_last_vm() {
    let dir = tempfile::Builder::new().prefix("keyframe-test-").tempdir().unwrap();
    let lan = dir.path().join("lan");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "switch_process", "--ignored", "--nocapture"])
        .env("KEYFRAME_PART", "switch");
    let mut remote = SwitchRemote::spawn(&mut command).unwrap();
    let pid = remote.pid().unwrap();
    remote.listen(&lan).unwrap();
    let (mut a, b) = (Peer::connect(&lan), Peer::connect(&lan));
    until("both ports", || remote.ports().unwrap().ports.len() == 2);
    remote.hold(LIMIT).unwrap();
    a.send(&frame(0, 255, 1));
    assert!(b.has_nothing());
    // The engine dies.
    drop(remote);
    let mut b = b;
    assert_eq!(b.receive(), frame(0, 255, 1));
    drop((a, b));
    let stat = format!("/proc/{pid}/stat");
    until("its end", || std::fs::read_to_string(&stat).is_ok_and(|text| text.contains(") Z ")));
    assert!(!lan.exists());
    // A switch without a VM ends with its engine.
    assert!(SwitchRemote::spawn(&mut command).unwrap().end().unwrap());
    // A program that is not a switch is an error.
    assert!(SwitchRemote::spawn(&mut Command::new("true")).is_err());
}

#[test]
fn a_guest_whose_socket_was_full_makes_the_collection_torn() {
    let dir = tempfile::tempdir().unwrap();
    let lan = dir.path().join("lan");
    let mut switch = Switch::new().unwrap();
    switch.listen(&lan).unwrap();
    let mut a = Peer::connect(&lan);
    switch.hold(LIMIT);
    // The peer has connected and is not accepted yet, but the frames that it sent are in flight.
    switch.quiesce(SOON).unwrap();
    let mut blocked = false;
    while !blocked {
        blocked = a.try_send(&frame(0, 1, 1)).is_err();
    }
    let Err(Error::Torn { reason }) = switch.collect() else { panic!("not torn") };
    assert!(reason.contains("full"), "{reason}");
    switch.release();
    // The next hold must not suffer from it.
    switch.hold(LIMIT);
    switch.collect().unwrap();
}

#[test]
fn too_much_for_one_port_ends_the_hold_and_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let lan = dir.path().join("lan");
    let stop = UnixStream::pair().unwrap();
    let control = dir.path().join("ctl");
    let (at, ctl) = (lan.clone(), control.clone());
    let thread = std::thread::spawn(move || {
        let limits = SwitchLimits { port_bytes_max: 10_000, ..SwitchLimits::default() };
        let mut switch = Switch::with_limits(limits)?;
        switch.listen(&at)?;
        serve_until(switch, Some(&ctl), stop.1.into())
    });
    until("the control socket", || SwitchRemote::connect(&control).is_ok());
    let mut remote = SwitchRemote::connect(&control).unwrap();
    assert!(matches!(SwitchRemote::connect(&control), Err(Error::Busy)));
    let mut a = Peer::connect(&lan);
    let mut b = Peer::connect(&lan);
    until("both ports", || remote.ports().unwrap().ports.len() == 2);
    b.send(&frame(1, 255, 0));
    assert_eq!(a.receive(), frame(1, 255, 0));
    remote.hold(LIMIT).unwrap();
    let sent: Vec<_> = (0..500).map(|n| frame(0, 1, n)).collect();
    for frame in &sent {
        a.send(frame);
    }
    assert_eq!(b.receive_some(sent.len()), sent);
    let Err(Error::Torn { reason }) = remote.collect() else { panic!("not torn") };
    assert!(reason.contains("too much waits for port"), "{reason}");
    // The switch accepts the next controller after this one has gone.
    drop(remote);
    until("control", || SwitchRemote::connect(&control).is_ok());
    (&stop.0).write_all(b"x").unwrap();
    until("the end of the switch", || thread.is_finished());
    thread.join().unwrap().unwrap();
    assert!(!lan.exists() && !control.exists());
}

#[test]
fn a_hostile_peer_is_closed_with_a_reason_and_others_come_and_go() {
    let mut bench = Bench::new();
    let [mut a, mut b] = bench.peers();
    for header in [0u32, 70_000, u32::MAX] {
        let mut hostile = UnixStream::connect(&bench.lan).unwrap();
        hostile.write_all(&header.to_be_bytes()).unwrap();
        until("its end", || {
            let closed = bench.remote.ports().unwrap().closed;
            closed.iter().any(|c| c.reason.contains(&format!("a frame of {header} bytes")))
        });
    }
    bench.remote.hold(LIMIT).unwrap();
    a.send(&frame(0, 1, 1));
    a.send(&frame(0, 255, 2));
    // Frames that the peer sent before its end are delivered. Frames that waited for it are
    // dropped.
    b.send(&frame(1, 0, 3));
    drop(b);
    until("its end", || bench.remote.ports().unwrap().ports.len() == 1);
    let mut b = bench.peer(false);
    assert_eq!(bench.remote.ports().unwrap().ports[1].port, bench.port(1));
    bench.remote.release().unwrap();
    assert_eq!(a.receive(), frame(1, 0, 3));
    a.send(&frame(0, 1, 4));
    assert_eq!(b.receive(), frame(0, 1, 4));
    drop((a, b));
    bench.end();
}

#[test]
fn a_deaf_peer_stalls_its_sender_and_no_other() {
    let mut bench = Bench::new();
    let [mut a, mut b, mut c, mut d] = bench.peers_one_deaf(1);
    let frames_max = (16 << 20) / 60_000 + 30;
    let (mut sent, mut idle) = (0, 0);
    while idle < 100 {
        let big = [&frame(0, 1, sent)[..], &vec![0; 60_000]].concat();
        if a.try_send(&big).is_ok() {
            (sent, idle) = (sent + 1, 0);
            assert!(sent < frames_max, "no back pressure");
        } else {
            idle += 1;
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    c.send(&frame(2, 3, 1));
    assert_eq!(d.receive(), frame(2, 3, 1));
    // The sender goes on where it was, and no frame is lost.
    for number in 0..sent {
        assert_eq!(b.receive()[..58], frame(0, 1, number));
    }
    drop((a, b, c, d));
    bench.end();
}
