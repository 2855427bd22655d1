//! A frozen copy of the memory of a process that writes on: what a hook copies before it is
//! written, and the rest at leisure.

use crate::target::{HUGE, HugePages, PAGE, Target, part};
use keyframe_kernel::fault_tracker::MemoryEvent;
use keyframe_kernel::memory::GuestReader;
use keyframe_kernel::write_tracker::WrittenPages;
use keyframe_units::HostRange;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A copy in the making.
struct Image {
    ram: HostRange,
    reader: GuestReader,
    bytes: Vec<u8>,
    /// Of this checkpoint.
    copied: Vec<bool>,
    by_hook: usize,
    discards: usize,
}

impl Image {
    /// Copies the pages of `range` that are not copied yet.
    fn copy(&mut self, range: HostRange) -> usize {
        let first = (range.start.0 - self.ram.start.0) / PAGE;
        let mut copied = 0;
        for page in first..first + range.len_bytes / PAGE {
            if !std::mem::replace(&mut self.copied[page as usize], true) {
                let at = (page * PAGE) as usize;
                let bytes = &mut self.bytes[at..at + PAGE as usize];
                self.reader.read(&[part(self.ram, page, 1)], bytes).unwrap();
                copied += 1;
            }
        }
        copied
    }
}

/// Each round is a checkpoint of the dirty pages; the image must be the memory at the instant of
/// the stop, each time.
fn run(kind: &str, len_bytes: u64) {
    let mut target = Target::start();
    let ram = target.map(kind, len_bytes);
    let tracker = target.watch(ram);
    let image = Arc::new(Mutex::new(Image {
        ram,
        reader: GuestReader::new(&target.process, &[ram]).unwrap(),
        bytes: vec![0; ram.len_bytes as usize],
        copied: Vec::new(),
        by_hook: 0,
        discards: 0,
    }));
    let mut frozen_while_writing = 0;
    for round in 0..8 {
        target.tell(&format!("scribble {} {} 3 3000000 0", ram.start.0, ram.len_bytes));
        assert_eq!(target.answer(), "waiting");
        std::thread::sleep(Duration::from_millis(4));
        target.freeze();
        image.lock().unwrap().copied = vec![false; (ram.len_bytes / PAGE) as usize];
        let hook = Arc::clone(&image);
        tracker.set_hook(Some(Arc::new(move |touch| {
            let mut image = hook.lock().unwrap();
            match touch {
                MemoryEvent::Write(page) => image.by_hook += image.copy(page),
                MemoryEvent::Discard(_) => image.discards += 1,
            }
        })));
        let memory = target.content(ram);
        let mut set: Vec<WrittenPages> = Vec::new();
        tracker.drain(ram, &mut set).unwrap();
        target.thaw();
        for written in &set {
            // A page at a time, so that writers come in between; the last first, as they write the
            // first most.
            for page in (0..written.range.len_bytes / PAGE).rev() {
                image.lock().unwrap().copy(part(written.range, page, 1));
            }
        }
        tracker.set_hook(None);
        let ended = target.try_answer().is_some();
        frozen_while_writing += usize::from(!ended);
        if !ended {
            assert_eq!(target.answer(), "ok");
        }
        let bytes = image.lock().unwrap().bytes.clone();
        let pages = memory.chunks(PAGE as usize).zip(bytes.chunks(PAGE as usize)).enumerate();
        let wrong: Vec<_> =
            pages.filter(|(_, (frozen, copy))| frozen != copy).map(|(page, _)| page).collect();
        assert!(wrong.is_empty(), "{kind}, round {round}: not as at the stop: {wrong:?}");
    }
    let image = image.lock().unwrap();
    assert_eq!(image.discards, 0);
    println!(
        "{kind}: {} pages copied by the hook, {frozen_while_writing} checkpoints while it wrote",
        image.by_hook
    );
    assert!(
        image.by_hook > 0,
        "{kind}: nothing was written while it was frozen, so nothing was tested"
    );
}

#[test]
fn the_copy_is_the_memory_at_the_stop() {
    for kind in ["anon", "thp", "memfd", "sealed", "memcopy"] {
        run(kind, 4096 * PAGE);
    }
}

#[test]
fn the_copy_of_huge_pages_is_the_memory_at_the_stop() {
    let Some(_pool) = HugePages::reserve(24) else {
        return;
    };
    for kind in ["hugetlb", "hugeanon"] {
        run(kind, 8 * HUGE);
    }
}
