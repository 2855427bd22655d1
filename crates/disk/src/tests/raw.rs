//! The protocol byte by byte: old and new ways to choose an export, slow reads, and clients that
//! send anything.

use super::Bed;
use crate::nbd::wire::{
    CMD_BLOCK_STATUS, CMD_DISC, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, EINVAL, IHAVEOPT,
    NBDMAGIC, OPT_EXPORT_NAME, OPT_GO, OPT_LIST, OPTION_REPLY, REP_ACK, REP_ERR_UNKNOWN,
    REP_SERVER, REQUEST, SIMPLE_REPLY,
};
use crate::nbd::{NbdExport, NbdServer};
use crate::{
    BLOCK_BYTES, Base, Block, Content, Disk, DiskBlock, ImageFormat, Lasting, Layer, Result,
};
use keyframe_bytes::ByteReader;
use keyframe_kernel::cpu_affinity;
use proptest::prelude::*;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_mins(2);

/// A client that sends what the test says.
struct Raw(UnixStream);

impl Raw {
    /// Connects and answers the greeting with `flags`.
    fn connect(bed: &Bed, flags: u32) -> Self {
        let stream = UnixStream::connect(bed.path("s")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let mut raw = Self(stream);
        let greeting = raw.take(18);
        let mut reader = ByteReader::new(&greeting);
        assert_eq!(
            (reader.u64_be(), reader.u64_be(), reader.u16_be()),
            (Ok(NBDMAGIC), Ok(IHAVEOPT), Ok(3))
        );
        raw.send(&[&flags.to_be_bytes()]);
        raw
    }

    /// Connects and chooses an export the old way, which uses simple replies.
    fn on(bed: &Bed, export: &str) -> Self {
        let mut raw = Self::connect(bed, 3);
        raw.option(OPT_EXPORT_NAME, export.as_bytes());
        raw.take(10);
        raw
    }

    fn send(&mut self, parts: &[&[u8]]) {
        self.0.write_all(&parts.concat()).unwrap();
    }

    fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn is_over(&mut self) -> bool {
        matches!(self.0.read(&mut [0; 1]), Ok(0)) || self.0.take_error().is_ok_and(|e| e.is_some())
    }

    fn option(&mut self, option: u32, data: &[u8]) {
        let len = data.len() as u32;
        self.send(&[&IHAVEOPT.to_be_bytes(), &option.to_be_bytes(), &len.to_be_bytes(), data]);
    }

    /// The type of an answer to an option, and its data.
    fn answer(&mut self) -> (u32, Vec<u8>) {
        let header = self.take(20);
        let mut reader = ByteReader::new(&header);
        assert_eq!(reader.u64_be(), Ok(OPTION_REPLY));
        let (_, kind, len) = (reader.u32_be(), reader.u32_be().unwrap(), reader.u32_be().unwrap());
        (kind, self.take(len as usize))
    }

    fn request(&mut self, command: u16, cookie: u64, offset: u64, len: u32, data: &[u8]) {
        self.send(&[&request(command, cookie, offset, len), data]);
    }

    /// The cookie and the error of a simple reply.
    fn reply(&mut self) -> (u64, u32) {
        let header = self.take(16);
        let mut reader = ByteReader::new(&header);
        assert_eq!(reader.u32_be(), Ok(SIMPLE_REPLY));
        let error = reader.u32_be().unwrap();
        (reader.u64_be().unwrap(), error)
    }
}

fn request(command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = REQUEST.to_be_bytes().to_vec();
    bytes.extend(0u16.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

fn serve(bed: &Bed, names: &[&str], layer: impl Fn() -> Option<Box<dyn Layer>>) -> NbdServer {
    let export = |name: &&str| {
        let base = Base::open(&bed.path("base.raw"), ImageFormat::Raw).unwrap();
        let disk =
            Disk::create(&bed.path(&format!("overlay-{name}")), base, layer(), Lasting::Durable)
                .unwrap();
        NbdExport { name: (*name).into(), disk: Arc::new(disk) }
    };
    NbdServer::start(&bed.path("s"), names.iter().map(export).collect()).unwrap()
}

#[test]
fn exports_are_listed_and_chosen_by_name_the_old_way_too() {
    let bed = Bed::new();
    let image = bed.raw("base.raw", 1 << 20);
    let _server = serve(&bed, &["a", "b"], || None);
    let mut raw = Raw::connect(&bed, 1);
    raw.option(OPT_LIST, b"");
    let names: Vec<_> = (0..2).map(|_| raw.answer()).collect();
    assert_eq!(
        names,
        [(REP_SERVER, b"\0\0\0\x01a".to_vec()), (REP_SERVER, b"\0\0\0\x01b".to_vec())]
    );
    assert_eq!(raw.answer().0, REP_ACK);
    // A server with several exports has no default.
    for name in [&b"\0\0\0\0\0\0"[..], b"\0\0\0\x01c\0\0"] {
        raw.option(OPT_GO, name);
        assert_eq!(raw.answer().0, REP_ERR_UNKNOWN);
    }
    // The old way, without the flag that omits the zeros, and with simple replies.
    raw.option(OPT_EXPORT_NAME, b"b");
    let chosen = raw.take(8 + 2 + 124);
    let mut reader = ByteReader::new(&chosen);
    assert_eq!(reader.u64_be(), Ok(1 << 20));
    assert!(reader.u16_be().unwrap() & 1 == 1 && reader.remaining().iter().all(|byte| *byte == 0));
    raw.request(CMD_WRITE, 1, 5000, 3, b"abc");
    raw.request(CMD_FLUSH, 2, 0, 0, b"");
    raw.request(CMD_READ, 3, 4999, 5, b"");
    let mut replies = vec![raw.reply()];
    // A flush is answered out of order.
    for _ in 0..2 {
        let reply = raw.reply();
        if reply.0 == 3 {
            assert_eq!(raw.take(5), [image[4999], b'a', b'b', b'c', image[5003]]);
        }
        replies.push(reply);
    }
    replies.sort_unstable();
    assert_eq!(replies, [(1, 0), (2, 0), (3, 0)]);
    // Without structured replies a status request fails, and so does a request past the end.
    raw.request(CMD_BLOCK_STATUS, 4, 0, 4096, b"");
    raw.request(CMD_READ, 5, (1 << 20) - 1, 2, b"");
    assert_eq!([raw.reply(), raw.reply()], [(4, EINVAL), (5, EINVAL)]);
    raw.request(CMD_DISC, 6, 0, 0, b"");
    assert!(raw.is_over());
    // Data that was written to one export is not in another.
    let mut other = Raw::on(&bed, "a");
    other.request(CMD_READ, 7, 5000, 3, b"");
    assert_eq!(other.reply(), (7, 0));
    assert_eq!(other.take(3), image[5000..5003]);
    let mut none = Raw::connect(&bed, 3);
    none.option(OPT_EXPORT_NAME, b"c");
    assert!(none.is_over(), "the old way refuses by ending the connection");
}

/// A layer that blocks every reader until the gate is opened.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    change: Condvar,
}

struct Held(Arc<Gate>);

impl Layer for Held {
    fn read_block(&self, _: DiskBlock, into: &mut Block) -> Result<Content> {
        let open = self.0.open.lock().unwrap();
        let _open = self.0.change.wait_timeout_while(open, PATIENCE, |open| !*open).unwrap();
        into.fill(77);
        Ok(Content::Data)
    }

    fn next_block(&self, from: DiskBlock) -> Result<Option<DiskBlock>> {
        Ok(Some(from).filter(|block| block.0 < 100))
    }
}

/// The threads of `process` with the given name, each with the cores on which it may run.
fn cores_of(process: u32, name: &str) -> Vec<Vec<usize>> {
    let is_called = |thread: &u32| {
        let said = std::fs::read_to_string(format!("/proc/{process}/task/{thread}/comm"));
        said.is_ok_and(|said| said.trim() == name)
    };
    cpu_affinity::threads_of(process)
        .into_iter()
        .filter(is_called)
        .map(cpu_affinity::cores_of_thread)
        .collect()
}

/// As for a VM that records: the client's own thread, on that core, answers all requests, also for
/// an image that must be decoded and for a layer.
#[test]
fn clients_are_answered_on_the_core_that_was_set() {
    for temporary in [false, true] {
        // A read that waits for this machine's disk is handed over, and so are the ones behind it.
        let is_answered = (0..5).any(|_| answers_on_its_core(temporary));
        assert!(is_answered, "each time something was handed over");
    }
}

/// Returns whether the client's own thread has answered all requests.
fn answers_on_its_core(temporary: bool) -> bool {
    let bed = Bed::new();
    let content = bed.raw("base.raw", 1 << 20);
    super::img(&[
        "convert",
        "-c",
        "-O",
        "qcow2",
        &bed.path("base.raw").display().to_string(),
        &bed.path("base.qcow2").display().to_string(),
    ]);
    let all = cpu_affinity::cores_of_thread(std::process::id());
    let core = *all.last().unwrap();
    let spec = crate::process::DiskSpec {
        layer: Some("9".into()),
        overlay: bed.path("overlay"),
        temporary,
        ..bed.spec("base.qcow2", ImageFormat::Qcow2)
    };
    let mut disks = bed.start(&spec);
    let mut raw = Raw::on(&bed, "d");
    disks.answer_on(core as u32).unwrap();
    for round in 0..3u64 {
        raw.request(CMD_READ, round, 0, 16384, b"");
        assert_eq!(raw.reply(), (round, 0));
        let read = raw.take(16384);
        assert!(
            read[..4096] == content[..4096]
                && read[4096..8192] == [9; 4096]
                && read[8192..12288] == [0; 4096]
        );
        assert!(read[12288..] == content[12288..16384]);
        raw.request(CMD_FLUSH, 10 + round, 0, 0, b"");
        assert_eq!(raw.reply(), (10 + round, 0));
        assert_eq!(cores_of(disks.pid(), "nbd-client"), [[core]], "round {round}");
        // A pause changes the priority of all threads, so they apply their placement again.
        disks.pause(Duration::from_secs(1)).unwrap();
        disks.settled().unwrap();
        disks.resumed().unwrap();
    }
    let was_handed_over = !cores_of(disks.pid(), "nbd-slow").is_empty();
    let mut flushing = cores_of(disks.pid(), "nbd-flush");
    for cores in &mut flushing {
        cores.sort_unstable();
    }
    let mut wherever = all;
    wherever.sort_unstable();
    assert_eq!(flushing, if temporary { vec![] } else { vec![wherever] });
    drop(raw);
    disks.end().unwrap();
    !was_handed_over
}

#[test]
fn a_slow_read_delays_no_other_request() {
    let bed = Bed::new();
    bed.raw("base.raw", 1 << 20);
    let gate = Arc::new(Gate::default());
    let server = serve(&bed, &["d"], || Some(Box::new(Held(Arc::clone(&gate)))));
    let mut raw = Raw::on(&bed, "d");
    // More reads than threads for slow reads.
    for cookie in 0..6 {
        raw.request(CMD_READ, cookie, cookie * 8192, 4096, b"");
    }
    raw.request(CMD_WRITE, 100, 90 * 4096, 4096, &[5; BLOCK_BYTES]);
    raw.request(CMD_READ, 101, 90 * 4096, 4096, b"");
    raw.request(CMD_FLUSH, 102, 0, 0, b"");
    assert_eq!(raw.reply(), (100, 0));
    assert_eq!(raw.reply(), (101, 0));
    assert_eq!(raw.take(4096), [5; BLOCK_BYTES]);
    assert_eq!(raw.reply(), (102, 0));
    *gate.open.lock().unwrap() = true;
    gate.change.notify_all();
    let mut slow: Vec<u64> = (0..6)
        .map(|_| {
            let (cookie, error) = raw.reply();
            assert_eq!((error, raw.take(4096)), (0, vec![77; 4096]));
            cookie
        })
        .collect();
    slow.sort_unstable();
    assert_eq!(slow, [0, 1, 2, 3, 4, 5]);
    server.end();
}

/// Bytes that resemble a request or an option, or random bytes.
fn junk() -> impl Strategy<Value = Vec<u8>> {
    let number =
        || prop_oneof![Just(0u64), Just(u64::MAX), Just(1 << 20), any::<u64>(), 0u64..1 << 21];
    let len = || prop_oneof![Just(0u32), Just(u32::MAX), Just(32 << 20), any::<u32>(), 0u32..9000];
    let tail = || prop::collection::vec(any::<u8>(), 0..200);
    let asked = (0u16..9, number(), len(), tail())
        .prop_map(|(command, offset, len, tail)| [request(command, 9, offset, len), tail].concat());
    let option = (0u32..12, len(), tail()).prop_map(|(option, len, tail)| {
        [&IHAVEOPT.to_be_bytes()[..], &option.to_be_bytes(), &len.to_be_bytes(), &tail].concat()
    });
    prop_oneof![asked, option, tail()]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    /// A client may send anything, before and after it has chosen an export: other clients are
    /// served, and the disk holds what they wrote.
    #[test]
    fn a_hostile_client_hurts_itself_alone(chosen in any::<bool>(), sent in prop::collection::vec(junk(), 1..12)) {
        let bed = Bed::new();
        bed.raw("base.raw", 1 << 20);
        let server = serve(&bed, &["d", "e"], || None);
        let mut good = Raw::on(&bed, "e");
        good.request(CMD_WRITE, 1, 4096, 4096, &[8; BLOCK_BYTES]);
        prop_assert_eq!(good.reply(), (1, 0));
        let mut bad = if chosen { Raw::on(&bed, "d") } else { Raw::connect(&bed, 3) };
        for bytes in sent {
            // The server may have closed the connection already.
            if bad.0.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = bad.0.shutdown(std::net::Shutdown::Write);
        // The connection ends, because no more bytes come. The answers until then do not matter.
        let mut answers = Vec::new();
        let ended = Read::take(&mut bad.0, 512 << 20).read_to_end(&mut answers);
        prop_assert!(ended.is_ok() || !matches!(ended.unwrap_err().kind(),
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut), "it hangs");
        good.request(CMD_READ, 2, 4096, 4096, b"");
        prop_assert_eq!(good.reply(), (2, 0));
        prop_assert_eq!(good.take(4096), [8; BLOCK_BYTES]);
        good.request(CMD_TRIM, 3, 4096, 4096, b"");
        prop_assert_eq!(good.reply(), (3, 0));
        server.end();
    }
}
