//! The client: against this crate's server, and against servers that send anything.

use super::Bed;
use crate::nbd::client::{Client, RangeStatus};
use crate::nbd::wire::{
    CHUNK_BLOCK_STATUS, CHUNK_DONE, CHUNK_OFFSET_DATA, IHAVEOPT, INFO_EXPORT, NBDMAGIC, OPT_GO,
    OPT_SET_META_CONTEXT, OPT_STRUCTURED_REPLY, OPTION_REPLY, REP_ACK, REP_INFO, REP_META_CONTEXT,
    STATE_HOLE_ZERO, STRUCTURED_REPLY,
};
use crate::{BLOCK_BYTES, Block, ImageFormat};
use proptest::prelude::*;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;

const DISK_BYTES: u64 = 1 << 20;

/// Sends `script` to the one client that connects, regardless of its requests, and disconnects.
fn serve(socket: &Path, script: Vec<u8>) -> std::thread::JoinHandle<()> {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // The client may have disconnected already.
        let _ = stream.write_all(&script);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    })
}

fn answer(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u32).to_be_bytes();
    [&OPTION_REPLY.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len, data]
        .concat()
}

fn greeting() -> Vec<u8> {
    [&NBDMAGIC.to_be_bytes()[..], &IHAVEOPT.to_be_bytes(), &3u16.to_be_bytes()].concat()
}

/// A complete handshake. The context has number 1.
fn handshake() -> Vec<u8> {
    handshake_of(DISK_BYTES)
}

/// A complete handshake for a disk of `disk_bytes` bytes.
fn handshake_of(disk_bytes: u64) -> Vec<u8> {
    let info =
        [&INFO_EXPORT.to_be_bytes()[..], &disk_bytes.to_be_bytes(), &1u16.to_be_bytes()].concat();
    [
        greeting(),
        answer(OPT_STRUCTURED_REPLY, REP_ACK, b""),
        answer(OPT_SET_META_CONTEXT, REP_META_CONTEXT, b"\0\0\0\x01base:allocation"),
        answer(OPT_SET_META_CONTEXT, REP_ACK, b""),
        answer(OPT_GO, REP_INFO, &info),
        answer(OPT_GO, REP_ACK, b""),
    ]
    .concat()
}

fn chunk(cookie: u64, flags: u16, kind: u16, data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u32).to_be_bytes();
    let header =
        [&STRUCTURED_REPLY.to_be_bytes()[..], &flags.to_be_bytes(), &kind.to_be_bytes()].concat();
    [&header, &cookie.to_be_bytes()[..], &len, data].concat()
}

fn data(cookie: u64, flags: u16, offset: u64, bytes: &[u8]) -> Vec<u8> {
    chunk(cookie, flags, CHUNK_OFFSET_DATA, &[&offset.to_be_bytes()[..], bytes].concat())
}

/// A status reply: the context, then lengths with flags.
fn status(cookie: u64, parts: &[(u32, u32)]) -> Vec<u8> {
    let mut bytes = 1u32.to_be_bytes().to_vec();
    for (len, flags) in parts {
        bytes.extend([len.to_be_bytes(), flags.to_be_bytes()].concat());
    }
    chunk(cookie, CHUNK_DONE, CHUNK_BLOCK_STATUS, &bytes)
}

fn connect(bed: &Bed) -> crate::Result<Client> {
    Client::connect(&bed.path("s"), "d", "base:allocation")
}

#[test]
fn what_is_allocated_is_told_and_read() {
    let bed = Bed::new();
    std::fs::write(bed.path("base.raw"), vec![0; DISK_BYTES as usize]).unwrap();
    let disks = bed.start(&bed.spec("base.raw", ImageFormat::Raw));
    bed.io(&["write -P 7 64k 8k", "write -P 9 900k 4k"]);
    let mut client = connect(&bed).unwrap();
    assert_eq!(client.len_bytes(), DISK_BYTES);
    let (mut at, mut data) = (0, Vec::new());
    while at < DISK_BYTES {
        for part in client.status(at).unwrap() {
            assert_eq!(part.offset, at, "end to end");
            at += part.len;
            if part.flags != STATE_HOLE_ZERO {
                data.push(part.offset..at);
            }
        }
    }
    let told = |at: u64| data.iter().any(|range| range.contains(&at));
    assert!(told(64 << 10) && told((72 << 10) - 1) && told(900 << 10), "{data:?}");
    let mut bytes = vec![1; 16 << 10];
    client.read(60 << 10, &mut bytes).unwrap();
    assert!(
        bytes[..4096] == [0; 4096]
            && bytes[4096..12288] == [7; 8192]
            && bytes[12288..] == [0; 4096]
    );
    assert!(client.read(DISK_BYTES, &mut bytes).is_err(), "past its end");
    drop(client);
    let unknown =
        Client::connect(&bed.path("s"), "d", "qemu:dirty-bitmap:none").unwrap_err().to_string();
    assert!(unknown.contains("qemu:dirty-bitmap:none"), "{unknown}");
    disks.end().unwrap();
}

#[test]
fn replies_that_leave_bytes_out_are_refused() {
    let bytes = |len: usize| vec![5; len];
    let done = CHUNK_DONE;
    for (script, whole) in [
        (vec![data(1, 0, 0, &bytes(4096)), data(1, done, 4096, &bytes(4096))], true),
        // One half twice, half of the range, more than the range, another range, nothing.
        (vec![data(1, 0, 0, &bytes(4096)), data(1, done, 0, &bytes(4096))], false),
        (vec![data(1, done, 0, &bytes(4096))], false),
        (vec![data(1, done, 0, &bytes(12288))], false),
        (vec![data(1, done, 1 << 40, &bytes(8192))], false),
        (vec![chunk(1, done, 0, b"")], false),
        // A reply to another request.
        (vec![data(2, done, 0, &bytes(8192))], false),
    ] {
        let bed = Bed::new();
        let server = serve(&bed.path("s"), [handshake(), script.concat()].concat());
        let mut client = connect(&bed).unwrap();
        let mut into = vec![0; 8192];
        let read = client.read(0, &mut into);
        assert_eq!(read.is_ok(), whole, "{read:?}");
        assert!(!whole || into == bytes(8192));
        drop(client);
        server.join().unwrap();
    }
}

#[test]
fn a_status_is_cut_to_the_disk() {
    let bed = Bed::new();
    let server = serve(
        &bed.path("s"),
        [handshake(), status(1, &[(4096, 3), (u32::MAX, 0), (9, 1)])].concat(),
    );
    let mut client = connect(&bed).unwrap();
    let found = client.status(8192).unwrap();
    let rest = DISK_BYTES - 12288;
    let expected = [
        RangeStatus { offset: 8192, len: 4096, flags: 3 },
        RangeStatus { offset: 12288, len: rest, flags: 0 },
    ];
    assert_eq!(found, expected);
    drop(client);
    server.join().unwrap();
}

/// Zeros and data share a block, and so do two parts of data. The disk ends within its last block.
#[test]
fn blocks_are_given_whole_and_once_however_the_server_cuts_them() {
    let bed = Bed::new();
    let parts =
        [(1024, 3), (512, 0), (512, 2), (1024, 0), (9216, 3), (5120, 0), (3072, 2), (512, 0)];
    let script = [
        handshake_of(5 * 4096 + 512),
        status(1, &parts),
        data(2, CHUNK_DONE, 0, &[1; 4096]),
        data(3, CHUNK_DONE, 3 * 4096, &[2; 8192]),
        data(4, CHUNK_DONE, 5 * 4096, &[3; 512]),
    ];
    let server = serve(&bed.path("s"), script.concat());
    let mut client = connect(&bed).unwrap();
    let mut given = Vec::new();
    let take = |first, blocks: &[Block]| {
        given.push((first, blocks.to_vec()));
        Ok::<_, crate::Error>(())
    };
    client.each_block(|flags| flags & 2 == 0, take).unwrap();
    let mut last = [0; BLOCK_BYTES];
    last[..512].fill(3);
    assert!(
        given == [(0, vec![[1; BLOCK_BYTES]]), (3, vec![[2; BLOCK_BYTES]; 2]), (5, vec![last])],
        "{:?}",
        given.iter().map(|(first, blocks)| (first, blocks.len())).collect::<Vec<_>>()
    );
    drop(client);
    server.join().unwrap();
}

#[test]
fn a_server_that_answers_without_end_is_left() {
    let bed = Bed::new();
    let answers = answer(OPT_STRUCTURED_REPLY, REP_INFO, &[0; 100]).repeat(100_000);
    let server = serve(&bed.path("s"), [greeting(), answers].concat());
    let error = connect(&bed).unwrap_err().to_string();
    assert!(error.contains("too many answers"), "{error}");
    server.join().unwrap();
}

/// Bytes that resemble an answer or a reply, or random bytes.
fn junk() -> impl Strategy<Value = Vec<u8>> {
    let tail = || prop::collection::vec(any::<u8>(), 0..100);
    let number = || prop_oneof![Just(0u64), Just(u64::MAX), any::<u64>(), 0u64..1 << 20];
    let option = (0u32..12, any::<u32>(), 0u32..6, tail(), any::<bool>()).prop_map(
        |(option, any, kind, tail, odd)| answer(option, if odd { any } else { kind }, &tail),
    );
    let reply = (0u64..3, 0u16..2, 0u16..8, number(), tail()).prop_map(
        |(cookie, flags, kind, number, tail)| {
            chunk(cookie, flags, kind, &[&number.to_be_bytes()[..], &tail].concat())
        },
    );
    let parts = prop::collection::vec((any::<u32>(), 0u32..4), 0..20);
    let told = (0u64..3, parts).prop_map(|(cookie, parts)| status(cookie, &parts));
    prop_oneof![option, reply, told, tail()]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

    /// The client returns an answer or an error for any server. It never panics or waits without
    /// end, and a status stays within the disk.
    #[test]
    fn a_hostile_server_is_no_danger(shaken in any::<bool>(), said in prop::collection::vec(junk(), 0..8)) {
        let bed = Bed::new();
        let before = if shaken { handshake() } else { greeting() };
        let server = serve(&bed.path("s"), [before, said.concat()].concat());
        if let Ok(mut client) = connect(&bed) {
            if let Ok(parts) = client.status(0) {
                let mut at = 0;
                for part in parts {
                    prop_assert_eq!(part.offset, at);
                    at += part.len;
                }
                prop_assert!(at <= client.len_bytes());
            }
            let mut into = [0; 512];
            let _ = client.read(4096, &mut into);
        }
        server.join().unwrap();
    }
}
