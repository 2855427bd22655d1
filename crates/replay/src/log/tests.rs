use super::*;
use proptest::prelude::*;

/// A log with a header and these events.
pub fn bytes(events: &[&[u8]]) -> Vec<u8> {
    let mut all = LogVersion::QEMU_10.0.to_be_bytes().to_vec();
    all.extend([0; 8]);
    all.extend(events.concat());
    all
}

fn instructions(count: u32) -> Vec<u8> {
    [&[0], &count.to_be_bytes()[..]].concat()
}

fn read(bytes: &[u8]) -> Result<(Vec<PositionedEvent>, u64)> {
    read_as(bytes, LogVersion::QEMU_10)
}

fn read_as(bytes: &[u8], version: LogVersion) -> Result<(Vec<PositionedEvent>, u64)> {
    let mut events = LogReader::new(&bytes[HEADER_BYTES as usize..], Path::new("log"), version);
    let mut all = Vec::new();
    while let Some(event) = events.next_event()? {
        all.push(event);
    }
    Ok((all, events.offset()))
}

#[test]
fn icount_sums_instructions_across_events() {
    let packet = [&[9, 1, 0, 0, 0, 0, 0, 0, 0, 3][..], b"abc"].concat();
    let log = bytes(&[&instructions(5), &[1], &packet, &instructions(7), &[30], &[39]]);
    let (all, end) = read(&log).unwrap();
    assert_eq!(all.iter().map(|p| p.icount).collect::<Vec<_>>(), [5, 5, 5, 12, 12, 12]);
    assert_eq!(all[3].event, LogEvent::Instructions(7));
    assert_eq!((all[4].event, all[5].event), (LogEvent::Checkpoint(0), LogEvent::End));
    assert_eq!(end, log.len() as u64);
}

#[test]
fn an_incomplete_event_is_not_returned_and_reading_resumes_at_it() {
    let log = bytes(&[&instructions(5), &instructions(9)]);
    for cut in 1..=4 {
        let (all, end) = read(&log[..log.len() - cut]).unwrap();
        assert_eq!((all.len(), end), (1, HEADER_BYTES + 5));
    }
    let mut rest = LogReader::resume(&log[17..], Path::new("log"), LogVersion::QEMU_10, 17, 5);
    assert_eq!(rest.next_event().unwrap().unwrap().icount, 14);
}

#[test]
fn instructions_without_events_are_unambiguous() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        file.path(),
        bytes(&[&instructions(5), &[1], &instructions(1), &[2], &instructions(7)]),
    )
    .unwrap();
    let index = LogIndex::read(file.path()).unwrap();
    let next: Vec<_> =
        [0, 4, 5, 6, 11, 12, 13].iter().map(|n| index.next_unambiguous(*n)).collect();
    assert_eq!(next, [Some(1), Some(7), Some(7), Some(7), Some(12), None, None]);
    assert!(next.iter().flatten().all(|n| index.is_unambiguous(*n)) && !index.is_unambiguous(6));
}

/// QEMU ends some time after the request, and a replay at another instruction than the recording.
#[test]
fn instructions_after_a_shutdown_request_do_not_count() {
    let ends = |log: &[&[u8]]| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes(log)).unwrap();
        let index = LogIndex::read(file.path()).unwrap();
        let summary = summarize(file.path()).unwrap();
        assert_eq!(summary.instructions, index.end());
        let last = (0..40).filter_map(|n| index.next_unambiguous(n)).max();
        (index.end(), index.ends_with_shutdown(), last, summary.is_complete)
    };
    let (five, nine) = (instructions(5), instructions(9));
    assert_eq!(ends(&[&five, &nine, &[39]]), (14, false, Some(13), true));
    assert_eq!(ends(&[&five, &[16], &nine, &[14], &[39]]), (5, true, Some(4), true));
    assert_eq!(ends(&[&five, &[16], &nine]), (5, true, Some(4), false));
    // A replay waits for a reset; the later shutdown is another request.
    assert_eq!(ends(&[&five, &[17], &nine, &[32], &five, &[39]]), (19, false, Some(18), true));
    assert_eq!(
        ends(&[&five, &[17], &nine, &[32], &five, &[12], &nine, &[39]]),
        (19, true, Some(18), true)
    );
}

#[test]
fn an_interrupt_at_the_end_makes_it_ambiguous() {
    let is_ambiguous = |log: &[&[u8]]| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes(log)).unwrap();
        LogIndex::read(file.path()).unwrap().end_is_ambiguous()
    };
    let five = instructions(5);
    let shutdown: &[u8] = &[10];
    assert!(is_ambiguous(&[&five, &[1], shutdown, &five, &[39]]));
    assert!(is_ambiguous(&[&five, shutdown, &[2], &five, &[1], &[39]]));
    assert!(!is_ambiguous(&[&five, &[1], &five, shutdown, &five, &[1], &[39]]));
    assert!(!is_ambiguous(&[&five, shutdown, &[39]]));
}

#[test]
fn a_bottom_half_scheduled_twice_is_a_hold() {
    let half = |at: u64| [&[3][..], &at.to_be_bytes()].concat();
    let packet = [&[9, 1, 0, 0, 0, 0, 0, 0, 0, 3][..], b"abc"].concat();
    let file = tempfile::NamedTempFile::new().unwrap();
    // Once, and by another device; twice with packets between; once more at a later instruction.
    let log = [
        instructions(5),
        half(5),
        half(4),
        instructions(5),
        half(10),
        packet,
        half(10),
        instructions(5),
        half(10),
    ];
    std::fs::write(file.path(), bytes(&log.iter().map(Vec::as_slice).collect::<Vec<_>>())).unwrap();
    assert_eq!(LogIndex::read(file.path()).unwrap().holds(), [10]);
}

#[test]
fn a_log_without_its_end_is_repaired() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut log = bytes(&[&instructions(5), &[0, 1]]);
    log[..4].fill(0);
    std::fs::write(file.path(), &log).unwrap();
    assert!(repair(file.path(), LogVersion::QEMU_11).unwrap());
    let mended = std::fs::read(file.path()).unwrap();
    assert_eq!((&mended[..4], mended.len()), (&LogVersion::QEMU_11.0.to_be_bytes()[..], 17));
    assert!(
        !repair(file.path(), LogVersion::QEMU_11).unwrap(),
        "the second repair changes nothing"
    );
    std::fs::write(file.path(), b"something else").unwrap();
    assert!(repair(file.path(), LogVersion::QEMU_11).is_err());
}

/// The events in which versions differ, each followed by instructions. The keys are what QEMU 10.0 and
/// 11.1 wrote for the key A.
#[test]
fn each_version_has_its_own_keys_and_audio_input() {
    let (old, new) = (LogVersion::QEMU_10, LogVersion::QEMU_11);
    let key = [&[5, 0, 0, 0, 0, 0, 0, 0, 0x1e, 1, 6][..], &instructions(5)].concat();
    let key_with_kind =
        [&[5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0x24, 1, 6][..], &instructions(5)].concat();
    let audio = [&[26, 0, 0, 0, 0, 0, 0, 0, 2][..], &[9; 32], &instructions(5)].concat();
    let icount = |event: &[u8], version| {
        let (all, _) = read_as(&bytes(&[event, &[39]]), version).ok()?;
        all.iter().rfind(|event| event.event == LogEvent::End).map(|end| end.icount)
    };
    assert_eq!((icount(&key_with_kind, old), icount(&key, new)), (Some(5), Some(5)));
    assert_eq!(icount(&key_with_kind, LogVersion::QEMU_11_0), Some(5));
    assert!(icount(&key, old) != Some(5) && icount(&key_with_kind, new) != Some(5));
    assert_eq!((icount(&audio, old), icount(&audio, new)), (None, Some(5)));
    let huge = [&[26][..], &u64::MAX.to_be_bytes()].concat();
    assert_eq!(icount(&huge, new), None);
}

proptest! {
    /// The reader reads or refuses any bytes, in bounded memory.
    #[test]
    fn arbitrary_bytes_are_read_or_refused(
        log in prop::collection::vec(any::<u8>(), 0..200),
        version in prop::sample::select(LogVersion::ALL.to_vec()),
    ) {
        let mut events = LogReader::new(&log[..], Path::new("log"), version);
        while let Ok(Some(_)) = events.next_event() {}
        prop_assert!(events.offset() <= HEADER_BYTES + log.len() as u64);
    }
}
