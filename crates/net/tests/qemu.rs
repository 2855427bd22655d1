//! With real QEMUs: the switch detects a packet that waits in QEMU, and a group of VMs goes on
//! after a hold.

mod support;

use keyframe_net::{Error, PortId, Switch};
use keyframe_testing::{qemus, small_guest};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use support::{Peer, frame, ping};

const LIMIT: Duration = Duration::from_secs(120);
const BRIEFLY: Duration = Duration::from_millis(300);

/// A QEMU with a NIC on `lan`, ended on drop.
struct Qemu {
    child: Child,
    qmp: BufReader<UnixStream>,
    console: Receiver<String>,
}

impl Qemu {
    fn start(program: &str, dir: &Path, lan: &Path, nic: &str, arguments: &[&str]) -> Self {
        let socket = dir.join(format!("qmp-{}", dir.read_dir().unwrap().count()));
        let mut child = Command::new(program)
            .args([
                "-machine",
                "pc",
                "-m",
                "128",
                "-nodefaults",
                "-no-user-config",
                "-display",
                "none",
            ])
            .args([
                "-serial",
                "stdio",
                "-qmp",
                &format!("unix:{},server=on,wait=off", socket.display()),
            ])
            .args([
                "-netdev",
                &format!("stream,id=n0,server=off,addr.type=unix,addr.path={}", lan.display()),
            ])
            .args(["-device", nic])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("start {program}: {e}"));
        let (sender, console) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok())
        });
        let deadline = Instant::now() + LIMIT;
        let stream = loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(e) => assert!(Instant::now() < deadline, "{}: {e}", socket.display()),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut qemu = Self { child, qmp: BufReader::new(stream), console };
        qemu.monitor("qmp_capabilities");
        qemu
    }

    /// The small guest, with a static address ending in `host` and `workload`.
    fn boot(program: &str, dir: &Path, lan: &Path, mac: &str, workload: &str) -> Self {
        let guest = small_guest();
        let file = |name: &str| guest.join(name).display().to_string();
        let (kernel, initrd) = (file("vmlinux"), file("initramfs.cpio.gz"));
        let append = format!("console=ttyS0 quiet panic=-1 tsc=unstable {workload}");
        let nic = format!("virtio-net-pci,netdev=n0,romfile=,mac={mac}");
        Self::start(
            program,
            dir,
            lan,
            &nic,
            &["-kernel", &kernel, "-initrd", &initrd, "-append", &append],
        )
    }

    fn monitor(&mut self, command: &str) {
        writeln!(self.qmp.get_mut(), "{{\"execute\":\"{command}\"}}").unwrap();
        loop {
            let mut line = String::new();
            assert!(self.qmp.read_line(&mut line).unwrap() > 0, "QEMU has ended");
            assert!(!line.contains("\"error\""), "{command}: {line}");
            if line.contains("\"return\"") {
                return;
            }
        }
    }

    /// Waits for a console line while the switch runs.
    fn wait_for(&self, switch: &mut Switch, text: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(line) = self.console.try_iter().find(|line| line.contains(text)) {
                return line;
            }
            assert!(Instant::now() < deadline, "no {text:?}");
            switch.run_for(Duration::from_millis(20)).unwrap();
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connected(switch: &mut Switch, count: usize) -> Vec<PortId> {
    let deadline = Instant::now() + LIMIT;
    while switch.ports().ports.len() < count {
        assert!(Instant::now() < deadline, "{count} ports");
        switch.run_for(Duration::from_millis(5)).unwrap();
    }
    switch.ports().ports.into_iter().map(|p| p.port).collect()
}

/// A stopped VM's NIC takes no packets, and neither does a NIC without a driver. The switch sends
/// three frames at once, of which QEMU may read only one.
#[test]
fn a_packet_that_waits_in_qemu_is_seen_before_it_is_lost() {
    for keyframe_testing::Qemu { path: program, .. } in qemus() {
        for nic in ["virtio-net-pci,netdev=n0,romfile=", "e1000,netdev=n0,romfile="] {
            println!("{program} {nic}");
            let dir = tempfile::Builder::new().prefix("keyframe-test-").tempdir().unwrap();
            let lan = dir.path().join("lan");
            let mut switch = Switch::new().unwrap();
            switch.listen(&lan).unwrap();
            let mut qemu = Qemu::start(&program, dir.path(), &lan, nic, &["-S"]);
            let port = connected(&mut switch, 1).remove(0);
            assert_eq!(port.pid, qemu.child.id());
            let mut peer = Peer::connect(&lan);
            connected(&mut switch, 2);
            switch.hold(LIMIT);
            switch.quiesce(LIMIT).unwrap();
            switch.release();
            for number in 0..3 {
                peer.send(&frame(9, 255, number));
            }
            switch.run_for(BRIEFLY).unwrap();
            for round in 0..2 {
                switch.hold(LIMIT);
                let Err(Error::NotQuiet { port: named, problem, .. }) = switch.quiesce(BRIEFLY)
                else {
                    panic!("a NIC that takes nothing is quiet, round {round}");
                };
                assert_eq!(named, port);
                assert!(problem.contains("does not read its packets"), "{problem}");
                assert!(switch.collect().is_err());
                switch.release();
            }
            // The guest runs now, but its NIC has no driver yet.
            qemu.monitor("cont");
            switch.hold(LIMIT);
            assert!(switch.quiesce(BRIEFLY).is_err());
        }
    }
}

/// The test pings the guest through holds in which it is stopped. Each ping is answered once.
#[test]
fn a_guest_loses_no_packet_and_sees_none_twice_through_holds_and_stops() {
    for keyframe_testing::Qemu { path: program, .. } in qemus() {
        let dir = tempfile::Builder::new().prefix("keyframe-test-").tempdir().unwrap();
        let lan = dir.path().join("lan");
        let mut switch = Switch::new().unwrap();
        switch.listen(&lan).unwrap();
        let mut qemu = Qemu::boot(&program, dir.path(), &lan, "02:00:00:00:00:01", "kf.work=idle");
        connected(&mut switch, 1);
        let mut peer = Peer::connect(&lan);
        let ports = connected(&mut switch, 2);
        let mine = ports.into_iter().find(|p| p.pid == std::process::id()).unwrap();
        qemu.wait_for(&mut switch, "KF READY");
        let (mut sent, mut collected, mut answered) = (0u16, Vec::new(), Vec::new());
        // Until answers were in flight at a stop. A fast guest avoids that.
        for round in 0..500 {
            peer.send(&ping::who_has());
            for _ in 0..20 {
                peer.send(&ping::request(sent));
                sent += 1;
            }
            switch.run_for(Duration::from_millis(round % 5)).unwrap();
            switch.hold(LIMIT);
            switch
                .quiesce(Duration::from_secs(60))
                .unwrap_or_else(|e| panic!("round {round}: {e}"));
            qemu.monitor("stop");
            let in_flight = switch.collect().unwrap();
            // A stopped guest sends no frame.
            switch.run_for(Duration::from_millis(5)).unwrap();
            assert_eq!(switch.collect().unwrap(), in_flight);
            let frames =
                in_flight.ports.into_iter().filter(|p| p.port == mine).flat_map(|p| p.frames);
            collected.extend(frames.filter_map(|frame| ping::answer(frame.bytes())));
            qemu.monitor("cont");
            switch.release();
            if round >= 20 && !collected.is_empty() {
                break;
            }
        }
        let deadline = Instant::now() + LIMIT;
        while answered.len() < usize::from(sent) && Instant::now() < deadline {
            switch.run_for(Duration::from_millis(5)).unwrap();
            answered.extend(
                std::iter::from_fn(|| peer.received()).filter_map(|frame| ping::answer(&frame)),
            );
        }
        println!("{program}: {sent} pings, {} answers in flight", collected.len());
        assert_eq!(answered, (0..sent).collect::<Vec<_>>());
        assert!(!collected.is_empty());
        // The packets in flight are those that arrived later, in that order.
        assert!(collected.is_sorted_by(|a, b| a < b), "{collected:?}");
    }
}
