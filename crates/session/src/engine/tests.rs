//! The loop of a run over a fake VM: what a user sees if a part fails.
//!
//! The engine, the capture cycle, the encoder's thread and the store are the real ones. The VM and
//! its watchdog are a [`FakeVm`], whose RAM lies in this process. Each run has an audit unless its
//! test says otherwise: the engine compares each sealed checkpoint with the RAM at its pause.

mod captures;
mod encoder;
mod outages;
mod readiness;
mod requests;
mod rollbacks;
mod signals;
mod successions;
mod teardowns;
mod vms;

use super::{CheckpointReason, Engine, EngineInputs, EngineMessage, RunReport};
use crate::SessionOptions;
use crate::control::server::Pending;
use crate::control::{EngineRequest, EngineResponse, OnExit};
use crate::error::Result;
use crate::event::{Event, EventSink};
use crate::launch::PreparedSession;
use crate::machines::{Machines, Member, Peripherals};
use crate::ram_capture::{RamAccess, RamCapture, StartedTracker, UseOfWindows};
use crate::run_dir::RunDir;
use crate::session_vm::SessionVm;
use crate::store_sink::{MachineDescriptions, StoreSink};
use crate::watchdog_keeper::WatchdogKeeper;
use keyframe_capture::{
    BoxError, CapturePhase, DirtyTracker, FirstWriteMonitor, PageReader, RamFreezer,
};
use keyframe_disk_capture::DiskCapture;
use keyframe_store::{DiskState, MemberMeta, Store, Tuning};
use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange, PageSet, RamLayout};
use keyframe_vmm::fake::{FakeControl, FakeVm};
use keyframe_vmm::{PauseWatchdog, Vmm};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use tempfile::TempDir;

const PAGES: usize = 24;
const VM: &str = "web";
/// A run that takes longer hangs.
const RUN_MAX: Duration = Duration::from_secs(60);

/// Collects events.
#[derive(Default)]
struct Told(Mutex<Vec<Event>>);

impl EventSink<Event> for Told {
    fn event(&self, event: &Event) {
        self.0.lock().unwrap().push(event.clone());
    }
}

impl Told {
    fn count(&self, of: impl Fn(&Event) -> bool) -> usize {
        self.0.lock().unwrap().iter().filter(|event| of(event)).count()
    }

    /// The texts of the failures that were told.
    fn failures(&self) -> Vec<String> {
        let events = self.0.lock().unwrap();
        let text = |event: &Event| match event {
            Event::Failed { failure, .. } => Some(failure.to_string()),
            _ => None,
        };
        events.iter().filter_map(text).collect()
    }

    fn sealed(&self) -> usize {
        self.count(|event| matches!(event, Event::Sealed(_)))
    }
}

/// Keeps the encoder waiting while it is closed.
#[derive(Default)]
struct Gate {
    is_closed: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn close(&self) {
        *self.is_closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }

    fn open(&self) {
        *self.is_closed.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let closed = self.is_closed.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.opened.wait_while(closed, |is_closed| *is_closed));
    }
}

/// The RAM of a [`FakeVm`].
struct FakeRam {
    control: FakeControl,
    layout: RamLayout,
    is_pinned: bool,
}

impl FakeRam {
    fn open(vm: &mut dyn Vmm) -> Result<Box<dyn RamAccess>> {
        let (layout, is_pinned) = (vm.ram_layout()?, vm.pins_ram()?);
        let vm = vm.as_any_mut().downcast_mut::<FakeVm>().expect("a fake VM");
        Ok(Box::new(Self { control: vm.control(), layout, is_pinned }))
    }
}

impl RamAccess for FakeRam {
    fn layout(&self) -> &RamLayout {
        &self.layout
    }

    fn watches_discards(&self) -> bool {
        false
    }

    fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    fn reader(&self) -> Arc<dyn PageReader> {
        Arc::new(FakePages(self.control.clone()))
    }

    fn write_page(&self, page: PageIndex, content: &Page) -> Result<(), BoxError> {
        self.control.write_page(page, content);
        Ok(())
    }

    fn track_writes(&self, _: UseOfWindows, _: &dyn EventSink<Event>) -> Result<StartedTracker> {
        let tracker = FakeTracker { control: self.control.clone(), has_begun: false };
        Ok(StartedTracker { tracker: Box::new(tracker), stopped_ns: None })
    }

    fn track_first_writes(
        &self,
        _: &dyn EventSink<Event>,
    ) -> Result<(StartedTracker, Arc<dyn FirstWriteMonitor>)> {
        unimplemented!("the loop is the same for each strategy")
    }

    fn freezer(&self) -> Result<Box<dyn RamFreezer>> {
        unimplemented!("the loop is the same for each strategy")
    }
}

struct FakePages(FakeControl);

impl PageReader for FakePages {
    fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError> {
        self.0.read_pages(ranges, dst);
        Ok(())
    }
}

struct FakeTracker {
    control: FakeControl,
    has_begun: bool,
}

impl DirtyTracker for FakeTracker {
    fn drain(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        written.union_with(&self.control.take_dirty());
        if !std::mem::replace(&mut self.has_begun, true) {
            written.insert_range(PageRange::new(PageIndex(0), self.control.len_pages()));
        }
        Ok(())
    }
}

/// A page that no other number has.
fn page(number: u8) -> Page {
    let mut page = [number; PAGE_BYTES];
    page[..4].copy_from_slice(b"page");
    page
}

/// A session over a fake VM. Dropped last, since an engine borrows its store.
struct Bench {
    control: FakeControl,
    told: Arc<Told>,
    gate: Arc<Gate>,
    /// Has the encoder's thread panic at the next phase that it reaches.
    encoder_panics: Arc<AtomicBool>,
    interrupted: Arc<AtomicBool>,
    store: Store,
    dir: TempDir,
}

impl Bench {
    /// A bench, and the options of its session: a checkpoint each millisecond, the VM kept at the
    /// end.
    fn new() -> (Self, SessionOptions) {
        let (vm, _, control) = FakeVm::new(PAGES);
        drop(vm);
        let dir = TempDir::new().unwrap();
        let store = Store::init(&dir.path().join("store")).unwrap();
        let told = Arc::new(Told::default());
        let bench = Self {
            control,
            told: Arc::clone(&told),
            gate: Arc::default(),
            encoder_panics: Arc::default(),
            interrupted: Arc::default(),
            store,
            dir,
        };
        let mut options = SessionOptions::every(Some(Duration::from_millis(1)), OnExit::Keep);
        options.audit = Some(bench.dir.path().join("audit"));
        (options.copy_threads, options.encode_threads) = (Some(1), Some(1));
        (options.index_memory_mib, options.encode_memory_mib) = (1, 1);
        options.events = told;
        for number in 0..PAGES as u64 {
            bench.control.write_page(PageIndex(number), &page(number as u8));
        }
        (bench, options)
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run").join(VM)
    }

    fn engine(&self, options: SessionOptions) -> Engine<'_> {
        self.engine_with(options, None)
    }

    fn engine_with(
        &self,
        options: SessionOptions,
        disks: Option<Box<dyn DiskCapture>>,
    ) -> Engine<'_> {
        let (vm, watchdog) = self.control.attach();
        let member = |vm| Member::new(VM.into(), vm, true);
        self.engine_of((vm, Box::new(watchdog)), member, options, disks)
    }

    /// An engine whose pauses `keeper` watches.
    fn engine_watched_by(&self, options: SessionOptions, keeper: WatchdogKeeper) -> Engine<'_> {
        let (vm, _) = self.control.attach();
        let health = keeper.health();
        let member = |vm| Member::new(VM.into(), vm, true).watched_by(health);
        self.engine_of((vm, Box::new(keeper)), member, options, None)
    }

    fn engine_of(
        &self,
        (mut vm, watchdog): (FakeVm, Box<dyn PauseWatchdog>),
        member: impl FnOnce(SessionVm) -> Member,
        options: SessionOptions,
        disks: Option<Box<dyn DiskCapture>>,
    ) -> Engine<'_> {
        let base = self.dir.path().join("run");
        std::fs::create_dir_all(&base).unwrap();
        let run_dir = RunDir::claim_in(&base, VM).unwrap();
        let mut writer = self.store.lock_writer_tuned("the test", Tuning::default()).unwrap();
        let (machine, pid) = (vm.spec().unwrap(), vm.pid());
        let copying =
            RamCapture::start_with(FakeRam::open, &mut [(VM, &mut vm)], false, &options).unwrap();
        let member_meta = MemberMeta { name: VM.into(), pid, ram_blocks: 1, machine };
        let meta = MachineDescriptions::new(vec![member_meta], false);
        let run = writer.begin_run_with(VM, &copying.layout, Vec::new(), DiskState::default());
        let sink = StoreSink::new(run.unwrap(), meta.clone(), options.fault.clone(), None);
        let vm = SessionVm::new(Box::new(vm), watchdog, options.pause_limit, false);
        let members = vec![member(vm)];
        let machines = Machines::new(members, false, Peripherals { lans: None, disks });
        let name = VM.into();
        let parts = PreparedSession { name, run_dir, machines, copying, sink, writer, meta };
        let (gate, panics) = (Arc::clone(&self.gate), Arc::clone(&self.encoder_panics));
        let encoder_observer = Arc::new(move |_: CapturePhase| {
            assert!(!panics.load(Ordering::Relaxed), "the test asked for this panic");
            gate.pass();
        });
        let interrupted = Arc::clone(&self.interrupted);
        let inputs = EngineInputs { interrupted, encoder_observer };
        Engine::assemble(&self.store, parts, options, inputs).unwrap()
    }

    /// An engine whose VM has checkpoint 1 already.
    fn engine_with_checkpoint(&self, options: SessionOptions) -> Engine<'_> {
        let mut engine = self.engine(options);
        engine.capture(CheckpointReason::Take, None, None).unwrap();
        let idle = |engine: &mut Engine<'_>| (engine.copying.cycle.in_flight() == 0).then_some(());
        engine.handle_reports_until(idle).unwrap();
        engine
    }

    /// Runs a session with `options` to its end. Fails the test if it hangs.
    fn run(&self, options: SessionOptions) -> Result<RunReport> {
        self.run_engine(self.engine(options))
    }

    fn run_engine(&self, engine: Engine<'_>) -> Result<RunReport> {
        let (ended, end) = channel::<()>();
        let (interrupted, gate) = (Arc::clone(&self.interrupted), Arc::clone(&self.gate));
        let timer = std::thread::spawn(move || {
            let hangs = end.recv_timeout(RUN_MAX) == Err(RecvTimeoutError::Timeout);
            if hangs {
                interrupted.store(true, Ordering::Relaxed);
                gate.open();
            }
            hangs
        });
        let report = engine.run();
        drop(ended);
        assert!(!timer.join().unwrap(), "the run did not end");
        if let Ok(report) = &report {
            assert_eq!(report.sealed as usize, self.told.sealed());
            assert_eq!(report.audited_wrong, 0, "a checkpoint differs from the RAM at its pause");
        }
        assert!(!self.control.is_watchdog_armed());
        report
    }

    /// Asserts that the VM runs and was never ended.
    fn assert_runs(&self) {
        assert!(self.control.runs(), "the VM does not run");
        assert!(!self.control.has_ended(), "the VM was ended");
    }

    /// The RAM of the VM.
    fn ram(&self) -> Vec<u8> {
        let mut ram = vec![0; PAGES * PAGE_BYTES];
        self.control.read_pages(&[PageRange::new(PageIndex(0), PAGES as u64)], &mut ram);
        ram
    }

    /// The RAM of checkpoint `name`.
    fn checkpoint(&self, name: &str) -> Vec<u8> {
        let loaded = self.store.load(self.store.resolve(name).unwrap()).unwrap();
        let mut pages = vec![[0; PAGE_BYTES]; PAGES];
        loaded.read_into(PageIndex(0), &mut pages).unwrap();
        pages.concat()
    }

    /// Number of checkpoints in the store.
    fn checkpoints(&self) -> usize {
        self.store.ids().unwrap().len()
    }
}

/// A client of the control socket.
#[derive(Clone)]
struct Client(Sender<EngineMessage>);

impl Client {
    fn of(engine: &Engine<'_>) -> Self {
        Self(engine.inbox_sender.clone())
    }

    fn ask(&self, request: EngineRequest) -> Receiver<EngineResponse> {
        let (answer, answered) = channel();
        self.0.send(EngineMessage::Request(Pending { request, answer })).unwrap();
        answered
    }

    fn take(&self, tag: &str) -> Receiver<EngineResponse> {
        self.ask(EngineRequest::Take { tag: Some(tag.into()), strategy: None })
    }

    fn stop(&self, on_exit: Option<OnExit>) -> Receiver<EngineResponse> {
        self.ask(EngineRequest::Stop { on_exit })
    }

    fn roll_back(&self, checkpoint: &str) -> Receiver<EngineResponse> {
        self.ask(EngineRequest::Rollback { checkpoint: checkpoint.into(), fast: false })
    }
}

fn failed(answer: &Receiver<EngineResponse>) -> String {
    match answer.recv().unwrap() {
        EngineResponse::Failed(text) => text,
        other => panic!("answered {other:?}"),
    }
}
