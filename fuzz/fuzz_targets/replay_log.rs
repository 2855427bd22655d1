#![no_main]
//! QEMU's log of a recording, behind its header.

use keyframe_replay::cutting::{Cutter, Every};
use keyframe_replay::log::{Boundaries, Events};
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::time::Duration;

fuzz_target!(|data: &[u8]| {
    let mut events = Events::new(data, Path::new("log"));
    let mut boundaries = Boundaries::default();
    let mut cutters =
        [Every::Instructions(1 << 20), Every::Time(Duration::from_millis(1))].map(Cutter::new);
    while let Ok(Some(placed)) = events.next_event() {
        boundaries.take(placed);
        if cutters.iter_mut().any(|cutter| cutter.take(placed).is_err()) {
            return;
        }
    }
    for mut cutter in cutters {
        let mut last = 0;
        while let Some(cut) = cutter.next_cut(&boundaries) {
            assert!(
                cut > last && boundaries.is_unambiguous(cut),
                "cuts rise, where the log has nothing"
            );
            last = cut;
        }
    }
});
