//! Tests a VM with a display on real QEMUs: a viewer that connects after the restore sees, pixel by
//! pixel, the display of the checkpoint and the guest's next output.

use keyframe_qemu::Qmp;
use keyframe_tests::disks::run_in_guest;
use keyframe_tests::{Boot, Process, Qemu, Scope, TestEnv, qemus, record_skip, restored_pid};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const WAIT: Duration = Duration::from_mins(2);
const BYTES_PER_PIXEL: usize = 4;
/// How many pictures a viewer requests until two in a row are equal.
const TRIES: usize = 50;
/// More pixels than a display of these tests has in each direction.
const SIDE_MAX: usize = 4096;

/// A connection to a display, over either kind of socket.
trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

/// A picture of a display.
#[derive(PartialEq, Eq)]
struct Picture {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
}

impl Picture {
    /// The number of its colours.
    fn colours(&self) -> usize {
        let all =
            self.pixels.chunks_exact(BYTES_PER_PIXEL).map(|pixel| [pixel[0], pixel[1], pixel[2]]);
        all.collect::<std::collections::BTreeSet<_>>().len()
    }

    /// The number of pixels that differ; all of them if the sizes differ.
    fn differing(&self, other: &Self) -> usize {
        if (self.width, self.height) != (other.width, other.height) {
            return self.width * self.height;
        }
        let pixels = |picture: &'_ Self| {
            picture.pixels.chunks_exact(BYTES_PER_PIXEL).map(<[u8]>::to_vec).collect::<Vec<_>>()
        };
        pixels(self).iter().zip(pixels(other)).filter(|(one, two)| *one != two).count()
    }
}

/// A viewer that speaks RFB 3.8 (RFC 6143) with raw encoding only.
struct Viewer {
    stream: Box<dyn Stream>,
    picture: Picture,
}

impl Viewer {
    fn connect(display: &Display) -> Self {
        let stream: Box<dyn Stream> = match display {
            Display::Port(port) => {
                let stream =
                    TcpStream::connect(("127.0.0.1", *port)).expect("connect to the display");
                stream.set_read_timeout(Some(WAIT)).expect("bound the wait");
                Box::new(stream)
            }
            Display::Socket(path) => {
                let stream = UnixStream::connect(path).expect("connect to the display");
                stream.set_read_timeout(Some(WAIT)).expect("bound the wait");
                Box::new(stream)
            }
        };
        let empty = Picture { width: 0, height: 0, pixels: Vec::new() };
        let mut viewer = Self { stream, picture: empty };
        viewer.greet();
        viewer
    }

    fn read<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).expect("read from the display");
        bytes
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("write to the display");
    }

    fn greet(&mut self) {
        assert_eq!(&self.read::<12>(), b"RFB 003.008\n");
        self.send(b"RFB 003.008\n");
        let [kinds] = self.read();
        let offered: Vec<u8> = (0..kinds).map(|_| self.read::<1>()[0]).collect();
        assert!(offered.contains(&1), "no access without a password: {offered:?}");
        self.send(&[1]);
        assert_eq!(self.read(), [0; 4], "refused");
        // Other viewers may share the display.
        self.send(&[1]);
        let [w1, w0, h1, h0] = self.read();
        let _format = self.read::<16>();
        let name = u32::from_be_bytes(self.read());
        assert!(name < 1000, "a name of {name} bytes");
        for _ in 0..name {
            self.read::<1>();
        }
        self.resize(u16::from_be_bytes([w1, w0]), u16::from_be_bytes([h1, h0]));
        // 32 bits a pixel, 8 a colour, little-endian.
        self.send(&[0, 0, 0, 0, 32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0]);
        // Raw pixels, and notes of a changed size.
        self.send(&[&[2, 0, 0, 2][..], &0i32.to_be_bytes(), &(-223i32).to_be_bytes()].concat());
    }

    fn resize(&mut self, width: u16, height: u16) {
        let (width, height) = (usize::from(width), usize::from(height));
        assert!(
            (1..=SIDE_MAX).contains(&width) && (1..=SIDE_MAX).contains(&height),
            "{width} x {height}"
        );
        self.picture = Picture { width, height, pixels: vec![0; width * height * BYTES_PER_PIXEL] };
    }

    /// Requests the whole picture once. Returns false if the size changed meanwhile.
    fn update(&mut self) -> bool {
        let (width, height) = (self.picture.width, self.picture.height);
        let side = |pixels: usize| (pixels as u16).to_be_bytes();
        self.send(&[&[3, 0, 0, 0, 0, 0][..], &side(width), &side(height)].concat());
        let mut covered = 0;
        while covered < width * height {
            let [kind, _] = self.read();
            assert_eq!(kind, 0, "a message that was not asked for");
            for _ in 0..u16::from_be_bytes(self.read()) {
                let [x, y, w, h] = [(); 4].map(|()| usize::from(u16::from_be_bytes(self.read())));
                match i32::from_be_bytes(self.read()) {
                    -223 => {
                        self.resize(w as u16, h as u16);
                        return false;
                    }
                    0 => self.rectangle(x, y, w, h),
                    other => panic!("encoding {other}, which was not offered"),
                }
                covered += w * h;
            }
        }
        true
    }

    fn rectangle(&mut self, x: usize, y: usize, width: usize, height: usize) {
        assert!(
            x + width <= self.picture.width && y + height <= self.picture.height,
            "outside of the display"
        );
        for row in y..y + height {
            let start = (row * self.picture.width + x) * BYTES_PER_PIXEL;
            let row = &mut self.picture.pixels[start..start + width * BYTES_PER_PIXEL];
            self.stream.read_exact(row).expect("read from the display");
        }
    }

    /// The picture after it has stopped changing.
    fn look(display: &Display) -> Picture {
        let mut viewer = Self::connect(display);
        let mut before = Vec::new();
        for _ in 0..TRIES {
            let whole = viewer.update();
            if whole && viewer.picture.pixels == before {
                return viewer.picture;
            }
            before.clone_from(&viewer.picture.pixels);
        }
        panic!("the display does not come to rest");
    }
}

/// Where a VM's display listens.
enum Display {
    Port(u16),
    Socket(PathBuf),
}

/// A display number whose port is free.
fn free_display() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its number").port() - 5900
}

/// Makes the guest fill its text screen with coloured blocks and write `word` below. Foreground and
/// background of a block have one colour, so that no cursor shows in it.
fn draw(vm: &mut Process, word: &str, step: &str) {
    // 7 colours in a row of 80: each line begins with another.
    let blocks = r" \021 \042 \063 \104 \125 \146 \167";
    let letters: Vec<String> = word.chars().map(|letter| format!(r"{letter}\036")).collect();
    let letters = letters.concat();
    let command = format!(
        "(i=0; while [ $i -lt 240 ]; do printf '{blocks}'; i=$((i+1)); done; printf '{letters}') >/tmp/p; \
         dd if=/tmp/p of=/dev/mem bs=32 seek=23552 conv=notrunc 2>/dev/null"
    );
    run_in_guest(vm, &command, step);
}

fn boot(env: &TestEnv, qemu: &Qemu, device: &[&str]) -> (Boot, [Display; 2]) {
    let number = free_display();
    let socket = env.path().join("vnc.sock");
    let (tcp, unix) = (format!("127.0.0.1:{number}"), format!("unix:{}", socket.display()));
    let mut boot = Boot::new("shell").with(device).with(&["-vnc", &tcp, "-vnc", &unix]);
    boot.qemu.clone_from(&qemu.path);
    boot.mem_mib = 96;
    let monitor = env.path().join("qmp.sock");
    let boot = boot.with(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
    (boot, [Display::Port(number + 5900), Display::Socket(socket)])
}

fn monitor(env: &TestEnv) -> Qmp {
    Qmp::connect(&env.path().join("qmp.sock"), WAIT).expect("connect to the monitor")
}

fn assert_same(seen: &Picture, expected: &Picture, what: &str) {
    let size = |picture: &Picture| (picture.width, picture.height);
    assert_eq!(size(seen), size(expected), "{what}");
    let differing = seen.differing(expected);
    assert_eq!(differing, 0, "{what}: {differing} pixels differ");
}

/// Runs `beside` while the VM is paused: before its checkpoint, and after each restore.
fn the_picture_comes_back(qemu: &Qemu, device: &[&str], beside: &dyn Fn(&TestEnv)) {
    println!("-- QEMU {}: {}", qemu.label, device.join(" "));
    let env = TestEnv::new();
    let (boot, displays) = boot(&env, qemu, device);
    let mut run = env.start(&["--interval", "none", "--name", "guest"], &boot);
    run.wait_for("KF READY");
    let blank = Viewer::look(&displays[0]);
    draw(&mut run, "checkpoint", "drawn");
    monitor(&env).stop().expect("stop");
    let expected = Viewer::look(&displays[0]);
    assert!(expected.colours() >= 8 && expected != blank, "{} colours", expected.colours());
    assert_same(&Viewer::look(&displays[1]), &expected, "the other display");
    beside(&env);
    env.ok(&["take", "--name", "guest"]);
    env.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
    for options in [&["--paused"][..], &["--paused", "--lazy"]] {
        let mut restored = env.restore("latest", options);
        restored.wait_for_error("is paused after");
        for display in &displays {
            assert_same(&Viewer::look(display), &expected, &format!("restored {options:?}"));
        }
        beside(&env);
        // A viewer that stays connected sees the guest run on.
        let mut viewer = Viewer::connect(&displays[1]);
        monitor(&env).cont().expect("cont");
        draw(&mut restored, "afterwards", "again");
        let changed =
            (0..TRIES).any(|_| viewer.update() && viewer.picture.differing(&expected) > 100);
        assert!(changed, "the display stands still");
        assert!(restored_pid(&restored) > 0 && restored.is_running(), "{}", restored.report());
        restored.signal(rustix::process::Signal::TERM);
        assert!(restored.wait().success(), "{}", restored.report());
    }
}

#[test]
fn a_viewer_sees_the_same_picture_after_a_restore() {
    for qemu in qemus() {
        the_picture_comes_back(&qemu, &["-device", "VGA"], &|_| {});
    }
}

#[test]
fn other_graphics_cards_show_the_same_picture_after_a_restore() {
    for qemu in qemus() {
        the_picture_comes_back(&qemu, &["-vga", "cirrus"], &|_| {});
    }
}

/// Why this QEMU has no SPICE.
fn lacks_spice(qemu: &Qemu) -> Option<String> {
    let output = Command::new(&qemu.path).args(["-spice", "help"]).output().expect("run QEMU");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success()).then(|| said.lines().last().unwrap_or("it says no more").to_owned())
}

/// Asserts that a SPICE server accepts a viewer's link to its main channel.
fn spice_answers(path: &Path) {
    let mut stream = UnixStream::connect(path).expect("connect to the display");
    stream.set_read_timeout(Some(WAIT)).expect("bound the wait");
    let word = |n: u32| n.to_le_bytes();
    // No session yet; the main channel; no capabilities, which would begin at byte 18.
    let link = [&word(0)[..], &[1, 0], &word(0), &word(0), &word(18)].concat();
    let hello = [&b"REDQ"[..], &word(2), &word(2), &word(link.len() as u32), &link].concat();
    stream.write_all(&hello).expect("write to the display");
    let mut header = [0; 16];
    stream.read_exact(&mut header).expect("read from the display");
    assert_eq!(&header[..8], [&b"REDQ"[..], &word(2)].concat(), "no SPICE");
    let mut error = [0; 4];
    stream.read_exact(&mut error).expect("read from the display");
    assert_eq!(error, [0; 4], "the link is refused");
}

#[test]
fn a_spice_display_comes_back() {
    for qemu in qemus() {
        if let Some(why) = lacks_spice(&qemu) {
            record_skip(Scope::Part, format!("QEMU {} has no SPICE: {why}", qemu.label));
            continue;
        }
        // The restored VM has the same path. The VNC display shows the picture.
        let dir =
            tempfile::Builder::new().prefix("keyframe-test-spice-").tempdir().expect("a directory");
        let socket = dir.path().join("spice.sock");
        let spice = format!("unix=on,addr={},disable-ticketing=on", socket.display());
        the_picture_comes_back(&qemu, &["-vga", "qxl", "-spice", &spice], &|_| {
            spice_answers(&socket);
        });
    }
}
