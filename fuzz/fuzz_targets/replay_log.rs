#![no_main]
//! The events of QEMU's record/replay log.

use keyframe_replay::cut_points::{CutFinder, CutSpacing};
use keyframe_replay::log::{LogIndex, LogReader, LogVersion};
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::time::Duration;

fuzz_target!(|data: &[u8]| {
    let Some((choice, data)) = data.split_first() else { return };
    let version = LogVersion::ALL[usize::from(*choice) % LogVersion::ALL.len()];
    let mut reader = LogReader::new(data, Path::new("log"), version);
    let mut index = LogIndex::default();
    let mut finders =
        [CutSpacing::Instructions(1 << 20), CutSpacing::Time(Duration::from_millis(1))].map(CutFinder::new);
    while let Ok(Some(event)) = reader.next_event() {
        index.add(event);
        if finders.iter_mut().any(|finder| finder.add_event(event).is_err()) {
            return;
        }
    }
    for mut finder in finders {
        let mut last = 0;
        while let Some(cut) = finder.next_cut(&index) {
            assert!(
                cut > last && index.is_unambiguous(cut),
                "cuts rise and are unambiguous"
            );
            last = cut;
        }
    }
});
