//! With real QEMUs: that a packet which waits in QEMU is seen, and that a group of VMs goes on after a hold.

mod support;

use keyframe_net::{Error, PortId, Switch};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use support::{Peer, frame};

const LIMIT: Duration = Duration::from_secs(120);
const BRIEFLY: Duration = Duration::from_millis(300);

/// The distribution's QEMU, and QEMU 10 where `KEYFRAME_QEMU10` names one.
fn qemus() -> Vec<String> {
    let mut all = vec!["qemu-system-x86_64".to_owned()];
    match std::env::var("KEYFRAME_QEMU10") {
        Ok(path) => all.push(path),
        Err(_) => {
            println!("skipped for QEMU 10: KEYFRAME_QEMU10 names none (guests/build qemu10 builds one)")
        }
    }
    all
}

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
            .args(["-machine", "pc", "-m", "128", "-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-serial", "stdio", "-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .args(["-netdev", &format!("stream,id=n0,server=off,addr.type=unix,addr.path={}", lan.display())])
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
    fn boot(program: &str, dir: &Path, lan: &Path, mac: &str, workload: &str) -> Option<Self> {
        let Some(guest) = std::env::var_os("KEYFRAME_GUEST").map(std::path::PathBuf::from) else {
            println!("skipped: KEYFRAME_GUEST names no guest (guests/build small builds one)");
            return None;
        };
        let file = |name: &str| guest.join(name).display().to_string();
        let (kernel, initrd) = (file("vmlinux"), file("initramfs.cpio.gz"));
        let append = format!("console=ttyS0 quiet panic=-1 tsc=unstable {workload}");
        let nic = format!("virtio-net-pci,netdev=n0,romfile=,mac={mac}");
        Some(Self::start(
            program,
            dir,
            lan,
            &nic,
            &["-kernel", &kernel, "-initrd", &initrd, "-append", &append],
        ))
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

    /// Waits for a console line, with the switch running meanwhile.
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

/// QEMU stops; a NIC without a driver takes no packets. Each with more frames than one, sent at once: QEMU without our
/// marks would read them all with one read.
#[test]
fn a_packet_that_waits_in_qemu_is_seen_before_it_is_lost() {
    for program in qemus() {
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
            switch.quiesce(BRIEFLY).unwrap();
            switch.release();
            for number in 0..3 {
                peer.send(&frame(9, 255, number));
            }
            switch.run_for(BRIEFLY).unwrap();
            for round in 0..2 {
                switch.hold(LIMIT);
                let Err(Error::NotQuiet { port: named, .. }) = switch.quiesce(BRIEFLY) else {
                    panic!("a NIC that takes nothing is quiet, round {round}");
                };
                assert_eq!(named, port);
                assert!(switch.collect().is_err());
                switch.release();
            }
            // An e1000 in a VM that runs takes and drops what its guest has no room for; virtio without driver does not.
            qemu.monitor("cont");
            switch.hold(LIMIT);
            let quiet = switch.quiesce(Duration::from_secs(2));
            println!("{nic}: running, without driver: {quiet:?}");
            assert_eq!(quiet.is_err(), nic.starts_with("virtio"));
        }
    }
}

/// The guest sends self-checking blocks to an echo peer of ours over TCP, through holds in which it is stopped.
#[test]
fn a_guest_comes_to_rest_and_what_it_sent_before_its_stop_is_collected() {
    for program in qemus() {
        let dir = tempfile::Builder::new().prefix("keyframe-test-").tempdir().unwrap();
        let lan = dir.path().join("lan");
        let mut switch = Switch::new().unwrap();
        switch.listen(&lan).unwrap();
        // It calls out for its server by ARP, for ever.
        let workload = "kf.work=net kf.net=10.0.2.3:7";
        let Some(mut qemu) = Qemu::boot(&program, dir.path(), &lan, "02:00:00:00:00:01", workload) else {
            return;
        };
        connected(&mut switch, 1);
        let peer = Peer::connect(&lan);
        let ports = connected(&mut switch, 2);
        qemu.wait_for(&mut switch, "KF READY");
        let calls = std::iter::from_fn(|| {
            switch.run_for(Duration::from_millis(50)).unwrap();
            Some(peer.received())
        });
        assert!(calls.take(2000).any(|frame| frame.is_some()), "no call");
        let mine = ports.into_iter().find(|p| p.pid == std::process::id()).unwrap();
        let mut sender = Peer::connect(&lan);
        connected(&mut switch, 3);
        let mut in_flight = 0;
        for round in 0..40 {
            // Towards the guest, too: a burst that it has to take before it counts as quiet.
            for number in 0..20 {
                sender.send(&frame(9, 1, number));
            }
            switch.hold(LIMIT);
            switch.run_for(Duration::from_millis(30)).unwrap();
            switch.quiesce(Duration::from_secs(20)).unwrap_or_else(|e| panic!("round {round}: {e}"));
            qemu.monitor("stop");
            let collected = switch.collect().unwrap();
            in_flight +=
                collected.ports.iter().filter(|p| p.port == mine).map(|p| p.frames.len()).sum::<usize>();
            // Stopped, it sends nothing more.
            switch.run_for(Duration::from_millis(5)).unwrap();
            assert_eq!(switch.collect().unwrap(), collected);
            qemu.monitor("cont");
            switch.release();
            switch.run_for(Duration::from_millis(100)).unwrap();
        }
        println!("{program}: {in_flight} frames of the guest were in flight");
        assert!(in_flight > 0);
    }
}
