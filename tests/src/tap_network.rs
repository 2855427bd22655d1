//! A network namespace with tap devices, and frames for the guests behind them.
//!
//! `guests/firecracker/net.h` checks the frames, and sends some itself.

use keyframe_test_hosts::Host;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The port and the number of words that `net.h` expects.
const PORT: u16 = 0x4b46;
const WORDS_SENT: u64 = 32;
/// How many frames are sent at once, and the time between.
const BURST: u32 = 2;
const BURST_EVERY: Duration = Duration::from_millis(8);

/// The network of one test. The test's own thread is in it, and so is what that thread starts.
pub struct TapNetwork {
    host: Host,
    /// The number of the last frame, of all taps: a guest refuses one that is older than its last.
    last_frame: Arc<AtomicU64>,
}

impl TapNetwork {
    /// Makes a network, and moves the calling thread into it. Error: why this machine cannot.
    pub fn enter() -> Result<Self, String> {
        if !Path::new("/dev/net/tun").exists() {
            return Err("there is no /dev/net/tun".into());
        }
        if let Err(error) = Command::new("ip").arg("-V").output() {
            return Err(format!("there is no program ip: {error}"));
        }
        let host = Host::new().map_err(|error| error.to_string())?;
        let network = format!("/proc/{}/ns/net", host.holder_pid());
        let network = std::fs::File::open(network).map_err(|error| error.to_string())?;
        let kind = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(network.as_fd(), kind)
            .map_err(|error| format!("enter a network namespace: {error}"))?;
        let made = Self { host, last_frame: Arc::default() };
        made.make_tap("kfprobe").map_err(|error| error.to_string())?;
        Ok(made)
    }

    fn make_tap(&self, name: &str) -> std::io::Result<()> {
        self.host.ok(&format!("ip tuntap add {name} mode tap"))?;
        self.host.ok(&format!("ip link set {name} up"))
    }

    /// Makes the tap device `name` with the network 10.9.`number`.0/24.
    pub fn tap(&self, name: &str, number: u8) {
        self.make_tap(name).expect("make a tap");
        let address = format!("ip addr add 10.9.{number}.1/24 brd + dev {name}");
        self.host.ok(&address).expect("give the tap an address");
    }

    /// Sends hundreds of frames a second into the tap of the network 10.9.`number`.0/24, until the
    /// returned value is dropped.
    pub fn flood(&self, number: u8) -> Flood {
        let last_frame = Arc::clone(&self.last_frame);
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        let sending = self.host.inside(move || {
            let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
            socket.set_broadcast(true).expect("broadcasts");
            while !ends.load(Ordering::Relaxed) {
                for _ in 0..BURST {
                    let frame = frame(last_frame.fetch_add(1, Ordering::Relaxed) + 1);
                    // The queue of the tap may be full.
                    let _ = socket.send_to(&frame, (format!("10.9.{number}.255"), PORT));
                }
                std::thread::sleep(BURST_EVERY);
            }
        });
        Flood { is_over, sending: Some(sending.expect("a thread in the network")) }
    }

    /// How many frames have come from the guest at the tap `name`.
    pub fn frames_from(&self, name: &str) -> u64 {
        let text = std::fs::read_to_string("/proc/thread-self/net/dev").expect("the devices");
        let line = text.lines().find_map(|line| line.trim().strip_prefix(&format!("{name}:")));
        let packets = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
        packets.unwrap_or_else(|| panic!("no tap {name}: {text}"))
    }
}

/// Frames on their way to a guest.
pub struct Flood {
    is_over: Arc<AtomicBool>,
    sending: Option<JoinHandle<std::io::Result<()>>>,
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(sending) = self.sending.take() {
            let _ = sending.join();
        }
    }
}

/// The function of the same name in `guests/firecracker/payload.c`.
fn mix(mut x: u64) -> u64 {
    x ^= x >> 31;
    x = x.wrapping_mul(0x7fb5_d329_728e_a185);
    x ^= x >> 27;
    x = x.wrapping_mul(0x81da_def4_bc2d_d44d);
    x ^ x >> 33
}

/// The contents of the frame `number`.
fn frame(number: u64) -> Vec<u8> {
    let words = (0..WORDS_SENT).map(|at| mix(number.wrapping_mul(WORDS_SENT).wrapping_add(at)));
    std::iter::once(number).chain(words).flat_map(u64::to_le_bytes).collect()
}

/// How many frames the guest had received at each line of `output` that tells it.
pub fn frames_received(output: &str) -> Vec<u64> {
    let count = |line: &str| {
        let (_, count) = line.strip_prefix("kf net ")?.split_once(' ')?;
        u64::from_str_radix(count, 16).ok()
    };
    output.lines().filter_map(count).collect()
}

/// The running test's network; skips the test if this machine has none.
#[macro_export]
macro_rules! needs_taps {
    () => {
        match $crate::tap_network::TapNetwork::enter() {
            Ok(network) => network,
            Err(reason) => $crate::skip!("no tap devices: {reason}"),
        }
    };
}
