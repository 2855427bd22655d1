//! Against `dd` in place of QEMU: it writes a file in pieces of 32 KiB.

use super::*;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PIECE_BYTES: usize = SLOTS_MIN * SLOT_BYTES;

/// Writes `state` into `pipe`, as QEMU does.
fn writer(pipe: &StatePipe, state: &[u8]) -> (tempfile::NamedTempFile, Child) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(state).unwrap();
    let target =
        format!("of=/proc/{}/fd/{}", std::process::id(), crate::spawn::number(&pipe.write_end));
    let input = format!("if={}", file.path().display());
    let child = Command::new("dd")
        .args([&*input, &*target, "bs=32768", "conv=notrunc", "status=none"])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    (file, child)
}

fn wait_for_end(child: &mut Child) -> bool {
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().unwrap() {
            return status.success();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    false
}

/// `None` if it has ended.
fn process_of(child: &Child) -> Option<Process> {
    match Process::open(child.id()) {
        Err(keyframe_kernel::Error::Gone { .. }) => None,
        process => Some(process.unwrap()),
    }
}

/// The write of `child` into the pipe for which it waits; `None` if it ends.
fn next_write(pipe: &StatePipe, child: &mut Child) -> Option<BlockedWrite> {
    let process = process_of(child)?;
    let call = File::open(format!("/proc/{0}/task/{0}/syscall", child.id())).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        if child.try_wait().unwrap().is_some() {
            return None;
        }
        if let Ok(Some(write)) = pipe.blocked_write(&process, &call) {
            return Some(write);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("it neither waits nor ends");
}

fn state_of(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n / 7 % 251) as u8).collect()
}

/// Takes the state while its writer waits with the last piece. Returns it, and how many pieces the
/// writer waited with.
fn hold(pipe: &mut StatePipe, child: &mut Child, len: usize) -> Option<(Vec<u8>, usize, usize)> {
    let process = process_of(child)?;
    let (mut state, mut waits) = (Vec::new(), 0);
    loop {
        let piece = next_write(pipe, child)?.content(&process).unwrap();
        waits += 1;
        let read_bytes = state.len();
        pipe.peek(&mut state).unwrap();
        state.extend_from_slice(&piece);
        if state.len() == len {
            pipe.expect(state.len(), piece.len());
            return Some((state, read_bytes, waits));
        }
        state.truncate(read_bytes);
        pipe.admit(&piece, &mut state).unwrap();
    }
}

#[test]
fn the_whole_state_is_known_while_its_writer_waits_with_the_last_piece() {
    let mut pipe = StatePipe::new().unwrap();
    // One piece; exactly one; the next pieces of every size; many; back to few.
    for len in
        [1, 4096, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 6548, 12 * PIECE_BYTES, 900_001]
    {
        for round in 0..2 {
            pipe.prepare().unwrap();
            let state = state_of(len);
            let (_file, mut child) = writer(&pipe, &state);
            let (held, read_bytes, waits) = hold(&mut pipe, &mut child, len).unwrap();
            assert!(held == state, "{len} bytes, round {round}");
            let is_expected = round == 1 && len < (SLOTS_MAX - SLOTS_MIN) * SLOT_BYTES;
            assert!(!is_expected || waits == 1, "{len} bytes: the writer waited {waits} times");
            let mut written = Vec::new();
            let deadline = Instant::now() + Duration::from_secs(20);
            while child.try_wait().unwrap().is_none() && Instant::now() < deadline {
                pipe.drain(&mut written).unwrap();
            }
            pipe.drain(&mut written).unwrap();
            assert!(wait_for_end(&mut child));
            assert!(written == state[read_bytes..], "{len} bytes, round {round}");
        }
    }
}

#[test]
fn a_state_that_is_shorter_than_expected_does_not_wait_and_is_expected_next() {
    let mut pipe = StatePipe::new().unwrap();
    pipe.expect(20 * PIECE_BYTES + 5, 5);
    let len = 3 * PIECE_BYTES + 100;
    let state = state_of(len);
    pipe.prepare().unwrap();
    let (_file, mut child) = writer(&pipe, &state);
    assert!(hold(&mut pipe, &mut child, len).is_none());
    let mut written = Vec::new();
    pipe.drain(&mut written).unwrap();
    assert!(written == state);
    pipe.expect_length(written.len());
    pipe.prepare().unwrap();
    let (_file, mut child) = writer(&pipe, &state);
    let (held, _, waits) = hold(&mut pipe, &mut child, len).unwrap();
    assert!(held == state && waits == 1);
    pipe.drain(&mut Vec::new()).unwrap();
    assert!(wait_for_end(&mut child));
}

#[test]
fn a_writer_whose_reader_is_gone_does_not_wait() {
    let mut pipe = StatePipe::new().unwrap();
    pipe.prepare().unwrap();
    let (_file, mut child) = writer(&pipe, &state_of(100_000));
    assert!(next_write(&pipe, &mut child).is_some());
    drop(pipe);
    assert!(!wait_for_end(&mut child), "dd reports the broken pipe");
}

#[test]
fn only_a_write_into_this_pipe_counts() {
    let pipe = StatePipe::new().unwrap();
    let mut sleeper = Command::new("sleep").arg("60").spawn().unwrap();
    let process = Process::open(sleeper.id()).unwrap();
    let call = File::open(format!("/proc/{0}/task/{0}/syscall", sleeper.id())).unwrap();
    assert_eq!(pipe.blocked_write(&process, &call).unwrap(), None);
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();

    let other = StatePipe::new().unwrap();
    let (_file, mut child) = writer(&other, &state_of(1 << 20));
    assert!(next_write(&other, &mut child).is_some());
    let process = Process::open(child.id()).unwrap();
    let call = File::open(format!("/proc/{0}/task/{0}/syscall", child.id())).unwrap();
    assert_eq!(pipe.blocked_write(&process, &call).unwrap(), None);
    drop(other);
    assert!(!wait_for_end(&mut child));
}

#[test]
fn the_kernels_text_of_a_system_call_is_read_or_refused() {
    let write = BlockedWrite::parse("20 0x1f 0x7ffe10 0x1 0x0 0x0 0x0 0x7ffe00 0x7f00\n").unwrap();
    assert_eq!(write, BlockedWrite { call: 20, descriptor: 31, buffer: 0x007f_fe10, count: 1 });
    for text in
        ["running\n", "-1 0x7ffe00 0x7f00\n", "7 0x1 0x2 0x3\n", "20 0x1f\n", "20 31 4 5\n", ""]
    {
        assert_eq!(BlockedWrite::parse(text), None, "{text:?}");
    }
}
