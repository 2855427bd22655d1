//! A simulated VM that writes whenever it may, and ports that fail whenever they are told to: every
//! sealed checkpoint must equal the RAM at its pause, and the VM must run after every cycle.

use super::*;
use crate::encoder::CheckpointEncoder;
use crate::machine::{PauseSteps, pause_in_steps};
use crate::ports::{
    CaptureObserver, CheckpointSink, FirstWriteHook, FirstWriteMonitor, RamFreezer,
};
use crate::strategy::{
    AutoStrategy, CopyOnWriteStrategy, CopyStrategy, ForkStrategy, PrescanStrategy,
    StopCopyStrategy,
};
use keyframe_scheduling::PrecopyPolicy;
use keyframe_units::{BlockKind, PAGE_BYTES, Page, PageIndex, PageRange, RamBlock};
use keyframe_vmm::PauseVerdict;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::SystemTime;

mod sink;

use sink::{Image, Queue};

const PAGES: u64 = 40;

/// The guest, and the fate of the calls to come.
struct World {
    ram: Vec<u64>,
    written: PageSet,
    running: bool,
    resumed_by_other: bool,
    writes_per_call: u64,
    seed: u64,
    calls_until_failure: Option<u32>,
    /// Pages that the guest writes just before each stop.
    burst_pages: u64,
    at_pause: Option<Vec<u64>>,
    /// Copy-on-write: whom to tell of writes, and those that wait until it was told.
    hook: Option<FirstWriteHook>,
    faulting: Vec<(u64, u64)>,
    /// Pages that the hook was told of since they were drained: it is told once.
    told: PageSet,
    /// Of the RAM block, as QEMU lists it; and what it is to be in the next pause.
    used_pages: u64,
    resized_in_pause: Option<u64>,
    /// True if the tracker has windows; and what was written since the open one began.
    windows: bool,
    window: Option<PageSet>,
}

impl World {
    fn random(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed
    }

    fn write(&mut self) {
        let (page, value) = (self.random() % PAGES, self.random() % 5);
        if self.hook.is_some() {
            self.faulting.push((page, value));
        } else {
            self.land(page, value);
        }
    }

    /// A write happens.
    fn land(&mut self, page: u64, value: u64) {
        self.ram[page as usize] = value;
        self.written.insert(PageIndex(page));
        if let Some(window) = &mut self.window {
            window.insert(PageIndex(page));
        }
    }

    /// Lets the guest run a little; an error where this call is the one to fail.
    fn call(&mut self, what: &str) -> Result<(), BoxError> {
        if self.running {
            for _ in 0..self.writes_per_call {
                self.write();
            }
        }
        match &mut self.calls_until_failure {
            Some(0) => {
                self.calls_until_failure = None;
                Err(format!("injected: {what}").into())
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

#[derive(Clone)]
struct Vm(Arc<Mutex<World>>);

impl Vm {
    /// Tells the hook of the writes that wait, without the world's lock, as a fault handler would;
    /// then they happen. The hook reads, and meanwhile the guest writes more: those are told too.
    fn serve_faults(&self) {
        for _ in 0..2 * PAGES {
            let (hook, faulting) = {
                let mut world = self.world();
                (world.hook.clone(), std::mem::take(&mut world.faulting))
            };
            if faulting.is_empty() {
                return;
            }
            for (page, value) in faulting {
                let fresh = self.world().told.insert(PageIndex(page));
                if let Some(hook) = hook.as_ref().filter(|_| fresh) {
                    hook(PageRange::new(PageIndex(page), 1));
                }
                self.world().land(page, value);
            }
        }
        panic!("the guest writes on for ever");
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    fn layout(used_pages: u64) -> RamLayout {
        let [used_bytes, total_bytes] = [used_pages, PAGES].map(|pages| pages * PAGE_BYTES as u64);
        let block =
            RamBlock { name: "ram".into(), kind: BlockKind::Backend, used_bytes, total_bytes };
        RamLayout::new(vec![block]).unwrap()
    }
}

impl DirtyTracker for Vm {
    fn drain(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        let mut world = self.world();
        let failed = world.call("drain");
        if failed.is_err() {
            // Half of the bits are lost: no drain has reported them.
            let half: Vec<_> = world.written.iter().filter(|p| p.0 % 2 == 0).collect();
            for page in half {
                world.written.remove(page);
            }
            return failed;
        }
        written.union_with(&world.written);
        let late = world.written.iter().next();
        world.written.clear();
        world.told.clear();
        let hook = world.hook.clone();
        let value = world.random() % 5;
        drop(world);
        // A fault from before the stop, answered only now: its write lands behind the drain.
        if let (Some(page), Some(hook)) = (late, hook) {
            hook(PageRange::new(page, 1));
            let mut world = self.world();
            world.told.insert(page);
            world.ram[page.0 as usize] = value;
            world.written.insert(page);
        }
        Ok(())
    }

    fn has_window(&self) -> bool {
        self.world().windows
    }

    fn open_window(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        self.world().window = Some(PageSet::new(PAGES));
        self.drain(written)
    }

    /// What a window names stays written. Each fourth window has a gap.
    fn drain_paused(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        let mut world = self.world();
        match world.window.take() {
            Some(named) if !world.random().is_multiple_of(4) => {
                world.call("read the window")?;
                written.union_with(&named);
                Ok(())
            }
            _ => {
                drop(world);
                self.drain(written)
            }
        }
    }

    fn close_window(&mut self) {
        self.world().window = None;
    }

    fn estimate_pages(&mut self) -> Option<u64> {
        Some(self.world().written.len())
    }
}

impl PageReader for Vm {
    fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError> {
        let mut world = self.world();
        let pages: Vec<_> = ranges.iter().flat_map(|r| r.iter()).collect();
        assert_eq!(dst.len(), pages.len() * PAGE_BYTES);
        for (page, cell) in pages.into_iter().zip(dst.chunks_exact_mut(PAGE_BYTES)) {
            world.call("read")?;
            cell.fill(0);
            cell[..8].copy_from_slice(&world.ram[page.0 as usize].to_le_bytes());
        }
        Ok(())
    }
}

impl Machine for Vm {
    fn ram_layout(&mut self) -> Result<RamLayout, BoxError> {
        let mut world = self.world();
        world.call("ram")?;
        Ok(Self::layout(world.used_pages))
    }
    fn pause(&mut self, work: &mut dyn PauseWork) -> Result<PauseRecord, CaptureError> {
        pause_in_steps(self, work)
    }
}

impl PauseSteps for Vm {
    fn hold(&mut self) -> Result<StopOutcome, BoxError> {
        let mut world = self.world();
        world.call("stop")?;
        for page in 0..world.burst_pages {
            world.land(page, 4);
        }
        world.running = false;
        Ok(StopOutcome::Stopped)
    }
    fn save_device_state(&mut self) -> Result<Vec<u8>, BoxError> {
        let mut world = self.world();
        world.used_pages = world.resized_in_pause.take().unwrap_or(world.used_pages);
        world.call("save devices")?;
        drop(world);
        // Saving a device may write guest memory.
        self.world().write();
        Ok(b"devices".to_vec())
    }
    fn release(&mut self, stopped: StopOutcome) -> Result<(), BoxError> {
        assert_eq!(stopped, StopOutcome::Stopped);
        let mut world = self.world();
        world.running = true;
        world.call("resume")
    }
    fn finish_pause(&mut self, _: StopOutcome) -> Result<PauseVerdict, BoxError> {
        // The guest runs again: its writes so far reach their pages before anything was copied in
        // the background.
        self.serve_faults();
        let mut world = self.world();
        world.call("resumed")?;
        Ok(if std::mem::take(&mut world.resumed_by_other) {
            PauseVerdict::RanMeanwhile
        } else {
            PauseVerdict::Undisturbed
        })
    }
}

/// A VMM that pauses, saves its devices and resumes in one command.
struct OneCommandVm(Vm);

impl Machine for OneCommandVm {
    fn ram_layout(&mut self) -> Result<RamLayout, BoxError> {
        self.0.ram_layout()
    }
    fn pause(&mut self, work: &mut dyn PauseWork) -> Result<PauseRecord, CaptureError> {
        let (taken_at, paused_at) = (SystemTime::now(), Instant::now());
        self.0.world().running = false;
        let device_state = self.0.save_device_state();
        let looked = work.look();
        self.0.world().running = true;
        self.0.serve_faults();
        looked?;
        Ok(PauseRecord {
            taken_at,
            paused_at,
            stop: StopOutcome::Stopped,
            device_state: device_state.map_err(machine_error("save"))?,
            stop_ns: 0,
            device_state_ns: 0,
            resume_ns: 0,
            pause_ns: elapsed_ns(paused_at),
        })
    }
}

impl CaptureObserver for Vm {
    fn paused(&mut self, _: &dyn PageReader, _: &RamLayout) -> Result<(), BoxError> {
        let mut world = self.world();
        world.call("audit")?;
        world.at_pause = Some(world.ram.clone());
        if world.resumed_by_other {
            world.running = true;
            world.write();
        }
        Ok(())
    }
}

/// Tells first writes while a hook is set.
impl FirstWriteMonitor for Vm {
    fn set_hook(&self, hook: Option<FirstWriteHook>) {
        self.serve_faults();
        self.world().hook = hook;
    }

    fn unannounced(&self) -> Result<PageSet, BoxError> {
        self.world().call("unannounced")?;
        Ok(PageSet::new(PAGES))
    }
}

/// A copy of all RAM stands for the frozen child.
struct Child(Vm, Vec<u64>);
impl RamFreezer for Vm {
    fn freeze(&mut self) -> Result<Box<dyn PageReader>, BoxError> {
        self.world().call("fork")?;
        let ram = self.world().ram.clone();
        Ok(Box::new(Child(self.clone(), ram)))
    }
}
impl PageReader for Child {
    fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError> {
        self.0.world().call("read the child")?;
        for (page, cell) in
            ranges.iter().flat_map(|r| r.iter()).zip(dst.chunks_exact_mut(PAGE_BYTES))
        {
            cell.fill(0);
            cell[..8].copy_from_slice(&self.1[page.0 as usize].to_le_bytes());
        }
        Ok(())
    }
}

struct Bench {
    vm: Vm,
    cycle: CaptureCycle,
    queue: Queue,
    /// RAM at the pause of each capture in flight.
    expected: BTreeMap<u64, Vec<u64>>,
}

impl Bench {
    fn new(seed: u64, writes_per_call: u64) -> Self {
        let mut written = PageSet::new(PAGES);
        written.insert_range(PageRange::new(PageIndex(0), PAGES));
        let vm = Vm(Arc::new(Mutex::new(World {
            ram: (0..PAGES).map(|p| p % 3).collect(),
            written,
            running: true,
            resumed_by_other: false,
            writes_per_call,
            seed: seed | 1,
            calls_until_failure: None,
            burst_pages: 0,
            at_pause: None,
            hook: None,
            faulting: Vec::new(),
            told: PageSet::new(PAGES),
            used_pages: PAGES,
            resized_in_pause: None,
            windows: seed & 2 == 0,
            window: None,
        })));
        // Hardly more than RAM, so that pages go through the encoder while they are captured.
        let pool = StagingPool::of_chunks(21, 2);
        let cycle =
            CaptureCycle::new(Vm::layout(PAGES), Box::new(vm.clone()), Arc::new(vm.clone()), pool);
        let (sealed, put) = (BTreeMap::new(), BTreeMap::new());
        let image = Image { vm: vm.clone(), sealed, put, broken: false, used_pages: 0 };
        let encoder = CheckpointEncoder::new(image, PAGES, Box::new(|_| {}));
        let queue = Queue {
            messages: VecDeque::new(),
            encoder,
            reports: Vec::new(),
            at_once: false,
            idle_at_abandon: false,
        };
        Self { vm, cycle, queue, expected: BTreeMap::new() }
    }

    /// Captures, and once more if the first try says that this may help.
    fn capture(&mut self, strategy: &mut dyn CopyStrategy) -> Result<u64, CaptureError> {
        let is_disturbed = self.vm.world().resumed_by_other;
        match self.try_to_capture(strategy) {
            Err(_) if self.cycle.wants_another_try() => {
                self.vm.world().resumed_by_other = is_disturbed;
                self.try_to_capture(strategy)
            }
            other => other,
        }
    }

    fn try_to_capture(&mut self, strategy: &mut dyn CopyStrategy) -> Result<u64, CaptureError> {
        self.vm.world().at_pause = None;
        let (mut machine, mut observer) = (self.vm.clone(), self.vm.clone());
        let captured =
            self.cycle.capture(&mut machine, &mut observer, strategy, &mut self.queue, Vec::new());
        self.vm.serve_faults();
        assert!(self.vm.world().hook.is_none(), "the guest's writes are still held up");
        if let Ok(seq) = captured {
            self.expected.insert(seq, self.vm.world().at_pause.take().unwrap());
        }
        captured
    }

    /// Lets the encoder work off `messages` of its queue; how many checkpoints were sealed and
    /// lost.
    fn encode(&mut self, messages: usize) -> (usize, usize) {
        let mut counts = (0, 0);
        for _ in 0..messages.min(self.queue.messages.len() + self.queue.reports.len()) {
            self.queue.handle(1);
            for report in std::mem::take(&mut self.queue.reports) {
                let (sealed, lost) = self.settle(report);
                counts = (counts.0 + sealed, counts.1 + lost);
            }
        }
        counts
    }

    fn settle(&mut self, report: EncodeReport<()>) -> (usize, usize) {
        match self.cycle.settle(report) {
            SettledReport::Sealed { seq, .. } => {
                let expected = self.expected.remove(&seq).unwrap();
                // Reports come one by one, the image may be of a later checkpoint: compared where
                // it is of this one.
                if self.queue.messages.is_empty() && self.expected.is_empty() {
                    let sealed = &self.queue.encoder.sink().sealed;
                    let image: Vec<u64> = (0..PAGES).map(|p| sealed[&p]).collect();
                    assert_eq!(image, expected, "checkpoint {seq}");
                }
                (1, 0)
            }
            SettledReport::Failed { lost, .. } => {
                for seq in &lost {
                    self.expected.remove(seq).unwrap();
                }
                (0, lost.len().max(1))
            }
            SettledReport::Stale => (0, 0),
        }
    }
}

fn strategies(vm: &Vm, rounds_max: u32) -> [Box<dyn CopyStrategy>; 6] {
    let policy = PrecopyPolicy { target_pages: 2, rounds_max, converging_percent: 90 };
    [
        Box::new(PrecopyStrategy { policy }),
        Box::new(StopCopyStrategy),
        Box::new(CopyOnWriteStrategy::new(Arc::new(vm.clone()))),
        Box::new(ForkStrategy::new(Box::new(vm.clone()))),
        Box::new(AutoStrategy::default()),
        Box::new(PrescanStrategy),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Captures, failures of any call, and an encoder that lags behind by any number of messages.
    #[test]
    fn every_sealed_checkpoint_is_the_ram_at_its_pause(
        seed in any::<u64>(),
        writes in 0u64..4,
        steps in prop::collection::vec(
            (prop::option::of(0u32..160), 0u32..5, 0usize..6, 0usize..9, prop::bool::weighted(0.1)), 1..14),
    ) {
        let mut bench = Bench::new(seed, writes);
        for (failure, rounds, which, encoded, other) in steps {
            bench.vm.world().calls_until_failure = failure;
            bench.vm.world().resumed_by_other = other;
            let mut strategies = strategies(&bench.vm, rounds);
            bench.queue.at_once = encoded > 5;
            let captured = bench.capture(&mut *strategies[which]);
            prop_assert!(bench.vm.world().running, "the VM stands still after {:?}", captured);
            prop_assert!(!(other && captured.is_ok()), "a torn checkpoint was captured");
            bench.encode(encoded);
            bench.vm.world().calls_until_failure = None;
            bench.vm.world().resumed_by_other = false;
        }
        bench.encode(usize::MAX);
        bench.queue.at_once = true;
        let free = bench.cycle.pool().free_pages();
        prop_assert_eq!(free, bench.cycle.pool().capacity_pages(), "memory was lost");
        bench.capture(&mut StopCopyStrategy).unwrap();
        prop_assert_eq!(bench.encode(usize::MAX), (1, 0));
    }
}

#[test]
fn a_machine_that_pauses_in_one_command_is_captured_by_every_strategy() {
    for which in 0..6 {
        let mut bench = Bench::new(5, 1);
        bench.queue.at_once = true;
        let mut strategies = strategies(&bench.vm, 3);
        for _ in 0..3 {
            let (mut machine, mut observer) = (OneCommandVm(bench.vm.clone()), bench.vm.clone());
            let seq = bench
                .cycle
                .capture(
                    &mut machine,
                    &mut observer,
                    &mut *strategies[which],
                    &mut bench.queue,
                    Vec::new(),
                )
                .unwrap();
            let at_pause = bench.vm.world().at_pause.take().unwrap();
            bench.expected.insert(seq, at_pause);
            assert_eq!(bench.encode(usize::MAX), (1, 0), "strategy {which}");
            assert!(bench.vm.world().running, "strategy {which}");
        }
    }
}

#[test]
fn a_failure_at_each_single_call_loses_nothing() {
    let mut failures = 0;
    for (call, which) in (0..300).flat_map(|call| (0..6).map(move |which| (call, which))) {
        let mut bench = Bench::new(7, 1);
        let mut strategies = strategies(&bench.vm, 3);
        bench.vm.world().calls_until_failure = Some(call);
        bench.vm.world().windows = call % 4 < 2;
        bench.queue.at_once = call % 2 == 0;
        for _ in 0..4 {
            failures += usize::from(bench.capture(&mut *strategies[which]).is_err());
            // The encoder is one checkpoint behind.
            if bench.cycle.in_flight() > 1 {
                failures += bench.encode(2).1;
            }
        }
        failures += bench.encode(usize::MAX).1;
        assert!(bench.vm.world().running);
        bench.vm.world().calls_until_failure = None;
        bench.queue.at_once = true;
        // One that cannot count what is dirty (copy-on-write) may find memory too small once; it
        // knows the next time.
        let captured = bench.capture(&mut *strategies[which]);
        captured.or_else(|_| bench.capture(&mut *strategies[which])).unwrap();
        assert_eq!(bench.encode(usize::MAX), (1, 0), "after call {call} failed, strategy {which}");
    }
    assert!(failures > 1000, "only {failures} of the injected failures were met");
}

#[test]
fn a_block_that_was_resized_since_the_checkpoint_before_is_captured_as_it_is_now() {
    for which in 0..6 {
        let mut bench = Bench::new(11, 1);
        let mut strategies = strategies(&bench.vm, 3);
        bench.queue.at_once = true;
        for (before, in_pause) in
            [(PAGES, None), (PAGES - 1, None), (PAGES - 1, None), (PAGES - 1, Some(PAGES))]
        {
            bench.vm.world().used_pages = before;
            bench.vm.world().resized_in_pause = in_pause;
            bench.capture(&mut *strategies[which]).unwrap();
            assert_eq!(bench.encode(usize::MAX), (1, 0), "strategy {which}");
            assert_eq!(
                bench.queue.encoder.sink().used_pages,
                in_pause.unwrap_or(before),
                "strategy {which}"
            );
        }
        // Nothing is known from before: it is told, and the next one is as it is then.
        let mut bench = Bench::new(12, 1);
        bench.queue.at_once = true;
        bench.vm.world().resized_in_pause = Some(PAGES - 1);
        assert!(matches!(bench.capture(&mut StopCopyStrategy), Err(CaptureError::Resized)));
        bench.capture(&mut StopCopyStrategy).unwrap();
        assert_eq!(
            (bench.encode(usize::MAX), bench.queue.encoder.sink().used_pages),
            ((1, 0), PAGES - 1)
        );
    }
}

#[test]
fn a_burst_that_a_pause_had_no_memory_for_is_captured_at_the_second_attempt() {
    let mut bench = Bench::new(7, 0);
    bench.vm.world().burst_pages = 20;
    bench.queue.idle_at_abandon = true;
    bench.capture(&mut StopCopyStrategy).unwrap();
    assert!(bench.queue.at_once, "there was memory enough: nothing was tested");
    assert_eq!(bench.encode(usize::MAX), (1, 0));
    // Where there is never enough it is an error.
    let mut bench = Bench::new(7, 0);
    bench.vm.world().burst_pages = 20;
    let error = bench.capture(&mut StopCopyStrategy).unwrap_err();
    assert!(matches!(error, CaptureError::Staging(StagingError::Full { .. })), "{error}");
    assert!(bench.vm.world().running);
}
