//! Tests a checkpoint's screen against QEMU's own `screendump` of the same instant, pixel by pixel:
//! the firmware's text, and each kind of mode, set and filled by an option ROM. Also displays that
//! cannot be shown.

use crate::mount::Mounted;
use keyframe_qemu::Qmp;
use keyframe_tests::{Http, Process, Qemu, TestEnv, chosen_qemus, qemus};
use rustix::process::Signal;
use serde_json::Value;
use std::io::Cursor;
use std::path::Path;
use std::time::Duration;

const WAIT: Duration = Duration::from_mins(2);

/// A picture of a display: red, green and blue of each pixel.
#[derive(PartialEq, Eq)]
struct Picture {
    width: usize,
    height: usize,
    rgb: Vec<u8>,
}

impl Picture {
    fn of_png(bytes: &[u8]) -> Self {
        let mut reader = png::Decoder::new(Cursor::new(bytes)).read_info().expect("a PNG");
        let mut rgb = vec![0; reader.output_buffer_size().expect("a size")];
        let info = reader.next_frame(&mut rgb).expect("its pixels");
        assert_eq!((info.color_type, info.bit_depth), (png::ColorType::Rgb, png::BitDepth::Eight));
        Self { width: info.width as usize, height: info.height as usize, rgb }
    }

    /// Parses the output of `screendump`: `P6`, width and height, the largest value, pixels.
    fn of_ppm(bytes: &[u8]) -> Self {
        let mut lines = bytes.splitn(4, |byte| *byte == b'\n');
        let mut text = || String::from_utf8_lossy(lines.next().expect("a line")).into_owned();
        let (kind, size, largest) = (text(), text(), text());
        assert_eq!((kind.as_str(), largest.as_str()), ("P6", "255"));
        let (width, height) = size.split_once(' ').expect("a size");
        let number = |text: &str| text.parse().expect("a number");
        Self {
            width: number(width),
            height: number(height),
            rgb: lines.next().expect("pixels").to_vec(),
        }
    }

    fn colours(&self) -> usize {
        self.rgb.chunks(3).collect::<std::collections::BTreeSet<_>>().len()
    }

    fn assert_is(&self, other: &Self, what: &str) {
        assert_eq!((self.width, self.height), (other.width, other.height), "{what}");
        let mut pixels = self.rgb.chunks(3).zip(other.rgb.chunks(3)).enumerate();
        if let Some((at, (seen, expected))) = pixels.find(|(_, (seen, expected))| seen != expected)
        {
            let differing = 1 + pixels.filter(|(_, (seen, expected))| seen != expected).count();
            let (x, y) = (at % self.width, at / self.width);
            panic!(
                "{what}: {differing} pixels differ; the first, {x} x {y}, is {seen:?}, not {expected:?}"
            );
        }
        assert_eq!(self.rgb.len(), other.rgb.len(), "{what}");
    }
}

/// Starts `keyframe run` of a VM without a disk or a kernel, with `arguments`.
fn start(env: &TestEnv, qemu: &Qemu, arguments: &[&str]) -> Process {
    let store = env.store();
    let monitor = format!("unix:{},server=on,wait=off", env.path().join("qmp.sock").display());
    let run = ["run", "--store", &store, "--interval", "none", "--name", "guest", "--"];
    let vm = ["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-m", "64"];
    let all = [&run[..], &[&qemu.path], &vm, &["-qmp", &monitor], arguments].concat();
    let mut vm = Process::start(env.command(&all));
    let control = env.path().join("keyframe/guest/control.sock");
    let found = vm.wait_until(|_| control.exists().then_some(()));
    assert!(found.is_some(), "no engine; {}", vm.report());
    vm
}

fn monitor(env: &TestEnv, vm: &mut Process) -> Qmp {
    let path = env.path().join("qmp.sock");
    let found = vm.wait_until(|_| path.exists().then_some(()));
    assert!(found.is_some(), "no monitor; {}", vm.report());
    Qmp::connect(&path, WAIT).expect("connect to the monitor")
}

/// The picture that QEMU shows.
fn dumped(env: &TestEnv, monitor: &mut Qmp) -> Picture {
    let file = env.path().join("dump.ppm");
    let arguments = serde_json::json!({ "filename": file });
    monitor.execute("screendump", Some(arguments)).expect("a screendump");
    Picture::of_ppm(&std::fs::read(&file).expect("read the screendump"))
}

/// The picture of a checkpoint, written to a file.
fn exported(env: &TestEnv, checkpoint: &str) -> Vec<u8> {
    let (store, file) = (env.store(), env.path().join("screen.png"));
    let output = file.display().to_string();
    env.ok(&[
        "export", checkpoint, "--store", &store, "--format", "png", "-f", "-q", "-o", &output,
    ]);
    std::fs::read(&file).expect("read the picture")
}

fn take(env: &TestEnv) {
    env.ok(&["take", "--name", "guest"]);
}

fn stop(env: &TestEnv, mut vm: Process) {
    env.ok(&["stop", "--name", "guest"]);
    assert!(vm.wait().success(), "{}", vm.report());
}

/// An option ROM, in real mode. For each mode of the table after it, it sets the mode through the
/// firmware, fills the memory with words of a generator, writes a line to the serial port, and
/// waits there for a byte.
const ROM: &[u8] = &[
    0x55, 0xaa, 1, // an option ROM of 512 bytes
    0x60, 0x1e, 0x06, 0xfc, // pusha; push ds; push es; cld
    0xbe, 0xa4, 0x00, // mov si, table
    // next:
    0x2e, 0x8b, 0x1c, 0x83, 0xc6, 0x02, // mov bx, cs:[si]; add si, 2
    0x85, 0xdb, 0x74, 0x6c, // test bx, bx; jz done
    0xb8, 0x02, 0x4f, 0x84, 0xff, 0x75, 0x02, // mov ax, 4f02h; test bh, bh; jnz set
    0x89, 0xd8, // mov ax, bx
    0xcd, 0x10, // set: int 10h
    0xbd, 0x01, 0x00, // mov bp, 1
    0xb8, 0x00, 0xb8, 0x83, 0xfb, 0x07, 0x76, 0x03, // mov ax, b800h; cmp bx, 7; jbe segment
    0xb8, 0x00, 0xa0, // mov ax, a000h
    0x8e, 0xc0, // segment: mov es, ax
    0x81, 0xfb, 0x04, 0x01, 0x73, 0x1d, // cmp bx, 104h; jae banks
    0xb1, 0x01, // mov cl, 1
    // planes: one after the other; for text and CGA, two at once
    0xba, 0xc4, 0x03, 0xb0, 0x02, 0x88, 0xcc, // mov dx, 3c4h; mov al, 2; mov ah, cl
    0x83, 0xfb, 0x07, 0x77, 0x02, 0xb4, 0x03, // cmp bx, 7; ja mask; mov ah, 3
    0xef, 0xe8, 0x3b, 0x00, // mask: out dx, ax; call fill
    0xd0, 0xe1, 0x80, 0xf9, 0x10, 0x72, 0xe7, // shl cl, 1; cmp cl, 16; jb planes
    0xeb, 0x17, // jmp say
    0xb1, 0x30, // banks: mov cl, 48
    0xfe, 0xc9, // bank: dec cl
    0xb8, 0x05, 0x00, 0xba, 0xce, 0x01, 0xef, // mov ax, 5; mov dx, 1ceh; out dx, ax
    0x0f, 0xb6, 0xc1, 0x42, 0xef, // movzx ax, cl; inc dx; out dx, ax
    0xe8, 0x1f, 0x00, // call fill
    0x84, 0xc9, 0x75, 0xeb, // test cl, cl; jnz bank
    0xba, 0xf8, 0x03, // say: mov dx, 3f8h
    0xb0, b'k', 0xee, 0xb0, b'\n',
    0xee, // mov al, 'k'; out dx, al; mov al, newline; out dx, al
    0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74,
    0xf8, // wait: mov dx, 3fdh; in al, dx; test al, 1; jz wait
    0xba, 0xf8, 0x03, 0xec, 0xeb, 0x8a, // mov dx, 3f8h; in al, dx; jmp next
    0x07, 0x1f, 0x61, 0xcb, // done: pop es; pop ds; popa; retf
    0x51, 0x81, 0xc5, 0x57, 0x13, // fill: push cx; add bp, 1357h
    0xb9, 0x00, 0x40, 0x31, 0xff, // mov cx, 4000h; xor di, di
    0x83, 0xfb, 0x07, 0x76, 0x02, 0x01, 0xc9, // cmp bx, 7; jbe word; add cx, cx
    0x69, 0xed, 0x55, 0x62, 0x81, 0xc5, 0x19, 0x36, // word: imul bp, bp, 25173; add bp, 13849
    0x89, 0xe8, 0xab, 0xe2, 0xf3, // mov ax, bp; stosw; loop word
    0x59, 0xc3, // pop cx; ret
];
const ROM_BYTES: usize = 512;

/// The ROM for `modes`, with its checksum.
fn rom(modes: &[Mode]) -> Vec<u8> {
    let mut rom = ROM.to_vec();
    rom.extend(modes.iter().flat_map(|mode| mode.number.to_le_bytes()));
    rom.resize(ROM_BYTES - 1, 0);
    rom.push(rom.iter().fold(0u8, |sum, byte| sum.wrapping_sub(*byte)));
    rom
}

/// A mode, and the monitor commands after it is set.
struct Mode {
    number: u16,
    size: (usize, usize),
    colours: usize,
    orders: &'static [&'static str],
}

const fn mode(
    number: u16,
    size: (usize, usize),
    colours: usize,
    orders: &'static [&'static str],
) -> Mode {
    Mode { number, size, colours, orders }
}

const NO_CURSOR: &str = "o/h 0x3d4 0x200a";

/// Text, CGA, planes, 256 colours, VBE with 8, 15, 16, 24 and 32 bits.
const MODES: [Mode; 13] = [
    mode(0x03, (720, 400), 16, &[NO_CURSOR]),
    // From the second line on: characters of another font, 8 pixels wide, from a split screen;
    // other colours.
    mode(
        0x03,
        (640, 400),
        16,
        &[
            NO_CURSOR,
            "o/h 0x3d4 0x500d",
            "o/h 0x3c4 0x0503",
            "o/h 0x3c4 0x0101",
            "o/h 0x3d4 0x0f07",
            "o/h 0x3d4 0x0f09",
            "o/h 0x3d4 0x7818",
        ],
    ),
    mode(0x01, (640, 400), 16, &[NO_CURSOR]),
    mode(0x04, (640, 400), 4, &[]),
    mode(0x06, (640, 400), 2, &[]),
    mode(0x0d, (640, 400), 16, &[]),
    mode(0x12, (640, 480), 16, &["o/h 0x3d4 0x2e07", "o/h 0x3d4 0x0009", "o/h 0x3d4 0x6418"]),
    mode(0x13, (640, 400), 200, &[]),
    // A part of a wider picture, from its middle.
    mode(
        0x103,
        (800, 600),
        200,
        &[
            "o/h 0x1ce 6",
            "o/h 0x1cf 1024",
            "o/h 0x1ce 8",
            "o/h 0x1cf 24",
            "o/h 0x1ce 9",
            "o/h 0x1cf 40",
        ],
    ),
    mode(0x10d, (320, 200), 1000, &[]),
    mode(0x10e, (320, 200), 1000, &[]),
    mode(0x112, (640, 480), 1000, &[]),
    mode(0x143, (800, 600), 1000, &["o/h 0x1ce 9", "o/h 0x1cf 5"]),
];

#[test]
fn every_mode_is_shown_as_qemu_shows_it() {
    for qemu in qemus() {
        println!("-- QEMU {}", qemu.label);
        let env = TestEnv::new();
        let file = env.path().join("modes.rom");
        std::fs::write(&file, rom(&MODES)).expect("write the ROM");
        let mut vm =
            start(&env, &qemu, &["-vga", "std", "-option-rom", &file.display().to_string()]);
        let mut monitor = monitor(&env, &mut vm);
        let mut expected = Vec::new();
        for (step, mode) in MODES.iter().enumerate() {
            vm.wait_for_after(step, "k");
            monitor.stop().expect("stop");
            for order in mode.orders {
                monitor.hmp(order).expect("write to a port");
            }
            let picture = dumped(&env, &mut monitor);
            let (size, colours) = ((picture.width, picture.height), picture.colours());
            assert!(
                size == mode.size && colours >= mode.colours,
                "{:#x}: {size:?}, {colours}",
                mode.number
            );
            expected.push(picture);
            take(&env);
            monitor.cont().expect("cont");
            vm.type_line("");
        }
        stop(&env, vm);
        for ((mode, expected), id) in MODES.iter().zip(&mut expected).zip(1..) {
            let mut seen = Picture::of_png(&exported(&env, &format!("{id}")));
            // 15 bits a pixel: QEMU 7.2 leaves the low bits of a colour at zero, QEMU 10 does not.
            if mode.number == 0x10d {
                let colours = seen.rgb.iter_mut().chain(&mut expected.rgb);
                colours.for_each(|part| *part &= 0xf8);
            }
            seen.assert_is(expected, &format!("mode {:#x}, checkpoint {id}", mode.number));
        }
    }
}

/// A stopped VM whose firmware found nothing to boot, with a checkpoint; and the picture of its
/// display.
fn without_a_system(env: &TestEnv, qemu: &Qemu, arguments: &[&str]) -> (Process, Picture) {
    let log = env.path().join("firmware.log");
    let chardev = format!("file,id=log,path={}", log.display());
    let debug = ["-chardev", &chardev, "-device", "isa-debugcon,iobase=0x402,chardev=log"];
    let mut vm = start(env, qemu, &[&debug, arguments].concat());
    let mut monitor = monitor(env, &mut vm);
    let said = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let found = vm.wait_until(|_| said(&log).contains("No bootable device.").then_some(()));
    assert!(found.is_some(), "{}", said(&log));
    // The firmware writes its log to the screen, and then waits for a minute.
    monitor.stop().expect("stop");
    let picture = dumped(env, &mut monitor);
    take(env);
    (vm, picture)
}

#[test]
fn the_firmwares_screen_is_in_files_the_mount_and_the_dashboard() {
    for qemu in chosen_qemus(0) {
        println!("-- QEMU {}", qemu.label);
        let env = TestEnv::new();
        let (vm, expected) = without_a_system(&env, &qemu, &["-device", "VGA"]);
        assert!(expected.colours() >= 2);
        stop(&env, vm);
        let png = exported(&env, "latest");
        let seen = Picture::of_png(&png);
        seen.assert_is(&expected, "the VM when it was stopped");
        let mut restored = env.restore("latest", &["--paused"]);
        restored.wait_for_error("is paused after");
        let mut monitor = monitor(&env, &mut restored);
        seen.assert_is(&dumped(&env, &mut monitor), "the restored VM");
        restored.signal(Signal::TERM);
        assert!(restored.wait().success(), "{}", restored.report());
        let mounted = Mounted::new(&env);
        assert!(std::fs::read(mounted.path("1/screen.png")).expect("the mounted file") == png);
        drop(mounted);
        let (server, http, store) = serve(&env);
        let path = format!("/api/v1/stores/{store}/checkpoints/1/screen");
        let get = |path: &str| http.send("GET", path, &[]);
        let answer = get(&path);
        assert_eq!((answer.status, answer.header("content-type")), (200, Some("image/png")));
        assert!(answer.bytes == png, "another picture in the dashboard");
        assert_eq!(get(&format!("{path}?member=web")).status, 400);
        assert_eq!(get(&path.replace("/1/", "/9/")).status, 404);
        end(server);
    }
}

#[test]
fn a_display_without_vga_is_shown() {
    for qemu in chosen_qemus(1) {
        let env = TestEnv::new();
        let devices = ["-machine", "q35", "-device", "bochs-display"];
        let (vm, expected) = without_a_system(&env, &qemu, &devices);
        stop(&env, vm);
        assert!(expected.colours() >= 2);
        Picture::of_png(&exported(&env, "latest")).assert_is(&expected, "bochs-display");
    }
}

#[test]
fn no_display_and_one_that_qemu_keeps_to_itself_are_told_apart() {
    for (arguments, status, words) in [
        (&["-vga", "none"][..], 404, "has no display"),
        (&["-device", "virtio-gpu-pci"], 422, "its display is virtio-gpu: its picture is in QEMU"),
    ] {
        for qemu in chosen_qemus(0) {
            let env = TestEnv::new();
            let mut vm = start(&env, &qemu, arguments);
            monitor(&env, &mut vm);
            take(&env);
            stop(&env, vm);
            let (store, file) = (env.store(), env.path().join("screen.png"));
            let output = file.display().to_string();
            let export = ["export", "1", "--store", &store, "--format", "png", "-o", &output];
            env.refused(&export, 1, &[words]);
            assert!(!file.exists());
            let (server, http, store) = serve(&env);
            let answer =
                http.send("GET", &format!("/api/v1/stores/{store}/checkpoints/1/screen"), &[]);
            assert_eq!(answer.status, status);
            assert!(
                answer.json()["error"].as_str().expect("a reason").contains(words),
                "{}",
                answer.body
            );
            end(server);
        }
    }
}

/// The store in a dashboard, and its id there.
fn serve(env: &TestEnv) -> (Process, Http, String) {
    let store = env.store();
    let all = ["serve", &store, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--json"];
    let mut server = Process::start(env.command(&all));
    let said: Value =
        serde_json::from_str(&server.wait_for("\"http\"")).expect("what it says first");
    let http = Http::at(said["http"].as_str().expect("an address"));
    let id = http.get("/api/v1/stores").json()[0]["id"].as_str().expect("an id").to_owned();
    (server, http, id)
}

fn end(mut server: Process) {
    server.signal(Signal::TERM);
    assert!(server.wait().success(), "{}", server.report());
}
