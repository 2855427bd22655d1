//! A simulated VM that writes whenever it may, and ports that fail whenever they are told to: every sealed checkpoint
//! must equal the RAM at its pause, and the VM must run after every cycle.

use super::*;
use crate::ports::Observer;
use keyframe_units::{BlockKind, PAGE_BYTES, Page, PageIndex, PageRange, RamBlock};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

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
    at_pause: Option<Vec<u64>>,
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
        self.ram[page as usize] = value;
        self.written.insert(PageIndex(page));
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
    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    fn layout() -> RamLayout {
        let bytes = PAGES * PAGE_BYTES as u64;
        let block =
            RamBlock { name: "ram".into(), kind: BlockKind::Backend, used_bytes: bytes, total_bytes: bytes };
        RamLayout::new(vec![block]).unwrap()
    }
}

impl Tracker for Vm {
    fn drain(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        let mut world = self.world();
        let failed = world.call("drain");
        if failed.is_err() {
            // Half of the bits are gone and reported to nobody.
            let half: Vec<_> = world.written.iter().filter(|p| p.0 % 2 == 0).collect();
            for page in half {
                world.written.remove(page);
            }
            return failed;
        }
        written.union_with(&world.written);
        world.written.clear();
        Ok(())
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
    fn ram(&mut self) -> Result<RamLayout, BoxError> {
        self.world().call("ram")?;
        Ok(Self::layout())
    }
    fn stop(&mut self) -> Result<Stopped, BoxError> {
        self.world().call("stop")?;
        self.world().running = false;
        Ok(Stopped::ByUs)
    }
    fn save_devices(&mut self) -> Result<Vec<u8>, BoxError> {
        self.world().call("save devices")?;
        // Saving a device may write guest memory.
        self.world().write();
        Ok(b"devices".to_vec())
    }
    fn resume(&mut self, stopped: Stopped) -> Result<(), BoxError> {
        assert_eq!(stopped, Stopped::ByUs);
        let mut world = self.world();
        world.running = true;
        world.call("resume")
    }
    fn resumed(&mut self, _: Stopped) -> Result<Resumed, BoxError> {
        let mut world = self.world();
        world.call("resumed")?;
        Ok(if std::mem::take(&mut world.resumed_by_other) { Resumed::ByOther } else { Resumed::ByUs })
    }
}

impl Observer for Vm {
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

/// A store of one image.
struct Image {
    vm: Vm,
    sealed: BTreeMap<u64, u64>,
    put: BTreeMap<u64, u64>,
}

impl Sink for Image {
    type Sealed = ();
    fn put(&mut self, page: PageIndex, content: &Page) -> Result<(), BoxError> {
        assert!(self.vm.world().running, "the sink was used while the VM was paused");
        self.vm.world().call("put")?;
        self.put.insert(page.0, u64::from_le_bytes(content[..8].try_into().unwrap()));
        Ok(())
    }
    fn seal(&mut self, captured: &Captured) -> Result<(), BoxError> {
        self.vm.world().call("seal")?;
        assert_eq!(captured.dirty_pages, self.put.len() as u64);
        self.sealed.append(&mut self.put);
        Ok(())
    }
    fn abandon(&mut self) {
        self.put.clear();
    }
}

fn world(seed: u64, writes_per_call: u64) -> Vm {
    let mut written = PageSet::new(PAGES);
    written.insert_range(PageRange::new(PageIndex(0), PAGES));
    Vm(Arc::new(Mutex::new(World {
        ram: (0..PAGES).map(|p| p % 3).collect(),
        written,
        running: true,
        resumed_by_other: false,
        writes_per_call,
        seed: seed | 1,
        calls_until_failure: None,
        at_pause: None,
    })))
}

fn policy(rounds_max: u32) -> PrecopyPolicy {
    PrecopyPolicy { target_pages: 2, rounds_max, converging_percent: 90 }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn every_sealed_checkpoint_is_the_ram_at_its_pause(
        seed in any::<u64>(),
        writes in 0u64..4,
        cycles in prop::collection::vec((prop::option::of(0u32..160), 0u32..5, prop::bool::weighted(0.1)), 1..12),
    ) {
        let vm = world(seed, writes);
        let limits = Limits { staging_pages: 16 };
        let mut cycle = Cycle::new(Vm::layout(), vm.clone(), Arc::new(vm.clone()), limits).unwrap();
        let mut image = Image { vm: vm.clone(), sealed: BTreeMap::new(), put: BTreeMap::new() };
        for (failure, rounds, other) in cycles {
            vm.world().calls_until_failure = failure;
            vm.world().resumed_by_other = other;
            let result = cycle.take(&mut vm.clone(), &mut image, &mut vm.clone(), &policy(rounds));
            vm.world().calls_until_failure = None;
            prop_assert!(vm.world().running, "the VM stands still after {:?}", result);
            if result.is_ok() {
                prop_assert!(!other, "a torn checkpoint was sealed");
                let expected = vm.world().at_pause.take().unwrap();
                let image: Vec<u64> = (0..PAGES).map(|p| image.sealed[&p]).collect();
                prop_assert_eq!(image, expected);
            }
            vm.world().resumed_by_other = false;
        }
    }
}

#[test]
fn a_failure_at_each_single_call_loses_nothing() {
    let mut failures = 0;
    for call in 0..400 {
        let vm = world(7, 1);
        let limits = Limits { staging_pages: 16 };
        let mut cycle = Cycle::new(Vm::layout(), vm.clone(), Arc::new(vm.clone()), limits).unwrap();
        let mut image = Image { vm: vm.clone(), sealed: BTreeMap::new(), put: BTreeMap::new() };
        vm.world().calls_until_failure = Some(call);
        let failed = (0..3)
            .filter(|_| cycle.take(&mut vm.clone(), &mut image, &mut vm.clone(), &policy(3)).is_err())
            .count();
        failures += failed;
        assert!(vm.world().running);
        vm.world().calls_until_failure = None;
        cycle.take(&mut vm.clone(), &mut image, &mut vm.clone(), &policy(3)).unwrap();
        let expected = vm.world().at_pause.take().unwrap();
        assert_eq!(
            (0..PAGES).map(|p| image.sealed[&p]).collect::<Vec<_>>(),
            expected,
            "after call {call} failed"
        );
    }
    assert!(failures > 300, "only {failures} of the injected failures were met");
}
