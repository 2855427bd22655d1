use super::*;
use crate::icount_warp;
use crate::log::LogVersion;
use crate::log::tests::bytes;
use jiff::Timestamp;

fn meta() -> RecordingMeta {
    RecordingMeta {
        format: FORMAT.into(),
        version: VERSION,
        id: "0".repeat(32),
        vm: "vm".into(),
        began_at: Timestamp::UNIX_EPOCH,
        duration_ns: 0,
        ending: RecordingEnding::Recording,
        instructions: 0,
        log_bytes: 0,
        qemu_path: "/q".into(),
        qemu_version: "7.2.22".into(),
        qemu_blake3: String::new(),
        log_version: LogVersion::default(),
        working_directory: "/".into(),
        user_command: vec!["q".into()],
        images: Vec::new(),
        media: Vec::new(),
        store: OWN_STORE.into(),
    }
}

#[test]
fn a_finished_recording_returns_its_log_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rec");
    let mut recording = Recording::create(&path, meta()).unwrap();
    let log = bytes(&[&[0, 0, 0, 0, 9], &[39]]);
    std::fs::write(recording.log_path(), &log).unwrap();
    assert_eq!(recording.finish(7).unwrap().instructions, 9);
    let opened = Recording::open(&path).unwrap();
    assert_eq!(
        (opened.meta.ending, opened.meta.instructions, opened.meta.duration_ns),
        (RecordingEnding::Complete, 9, 7)
    );
    assert_eq!(std::fs::read(opened.readable_log().unwrap().path()).unwrap(), log);
    assert!(!opened.log_path().exists());
    assert!(matches!(Recording::create(&path, meta()), Err(Error::Exists { .. })));
}

#[test]
fn the_readable_log_is_corrected_and_the_packed_log_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let mut recording = Recording::create(dir.path(), meta()).unwrap();
    let letters = |last: &str| icount_warp::tests::log(&format!("N W 5 h 6 7 h {last} B A A I N"));
    std::fs::write(recording.log_path(), letters("20")).unwrap();
    recording.finish(7).unwrap();
    let readable = recording.readable_log().unwrap();
    assert!(std::fs::read(readable.path()).unwrap() == letters("5"));
    let packed = zstd::decode_all(File::open(recording.packed_path()).unwrap()).unwrap();
    assert!(packed == letters("20"));
}

#[test]
fn a_recording_of_a_killed_qemu_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let mut recording = Recording::create(dir.path(), meta()).unwrap();
    let mut log = bytes(&[&[0, 0, 0, 0, 9], &[0, 0]]);
    log[..4].fill(0);
    std::fs::write(recording.log_path(), &log).unwrap();
    recording.finish(7).unwrap();
    assert_eq!((recording.meta.ending, recording.meta.log_bytes), (RecordingEnding::Cut, 17));
}

#[test]
fn a_recording_of_a_failed_qemu_ends_one_instruction_earlier_than_that_of_a_killed_one() {
    let instructions = |head: &[u8], tail: &[u8]| {
        let dir = tempfile::tempdir().unwrap();
        let mut recording = Recording::create(dir.path(), meta()).unwrap();
        let mut log = bytes(&[&[0, 0, 0, 0, 9], tail]);
        log[..4].copy_from_slice(head);
        std::fs::write(recording.log_path(), &log).unwrap();
        recording.end(7, true).unwrap();
        (recording.meta.ending, recording.meta.instructions)
    };
    assert_eq!(
        instructions(&LogVersion::QEMU_10.0.to_be_bytes(), &[39]),
        (RecordingEnding::Complete, 8)
    );
    assert_eq!(instructions(&[0; 4], &[0, 0]), (RecordingEnding::Cut, 9));
}

#[test]
fn other_directories_and_formats_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let open = |text: String| {
        std::fs::write(dir.path().join(META), text).unwrap();
        Recording::open(dir.path())
    };
    assert!(matches!(Recording::open(dir.path()), Err(Error::NoRecording { .. })));
    let later = format!("{{\"format\": {FORMAT:?}, \"version\": 99}}");
    assert!(matches!(open(later), Err(Error::UnsupportedVersion { found: 99, .. })));
    let other = "{\"format\": \"other\", \"version\": 1}".into();
    assert!(matches!(open(other), Err(Error::Damaged { .. })));
    assert!(matches!(open("{".into()), Err(Error::Damaged { .. })));
}

#[test]
fn a_recording_of_a_pre_release_build_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut old = serde_json::to_value(meta()).unwrap();
    old.as_object_mut().unwrap().remove("format");
    std::fs::write(dir.path().join(META), old.to_string()).unwrap();
    assert!(matches!(Recording::open(dir.path()), Err(Error::PreRelease { found: 1, .. })));
}

#[test]
fn recording_json_of_version_1_is_read() {
    let golden = include_str!("../../tests/golden/recording-v1.json");
    let parsed = RecordingMeta::parse(golden, Path::new(META)).unwrap();
    assert_eq!(parsed.version, 1);
    assert_eq!(serde_json::to_string_pretty(&parsed).unwrap(), golden.trim_end());
}
