//! Against a real Firecracker: the facts of its API that this crate depends on, for the version that
//! `guests/build firecracker` has.

use keyframe_firecracker::api::InstanceState;
use keyframe_firecracker::event_loop::EventLoop;
use keyframe_firecracker::restore::{Plan, SharedRam};
use keyframe_firecracker::state_file::SaveMethod;
use keyframe_firecracker::{Error, FirecrackerVm};
use keyframe_machine::RamSource;
use keyframe_testing::skip;
use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange};
use keyframe_vmm::{PlanOptions, RestoreSource, RunState, StopOutcome, Vmm};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Firecracker and its payload, or why they cannot be had here.
fn guest() -> Result<PathBuf, String> {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return Err(format!("no KVM: /dev/kvm: {error}"));
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/build");
    let built = Command::new(script).arg("firecracker").output().expect("run guests/build");
    let errors = String::from_utf8_lossy(&built.stderr).trim().to_owned();
    match built.status.code() {
        Some(0) => Ok(String::from_utf8_lossy(&built.stdout).lines().last().unwrap().into()),
        Some(3) => Err(format!("Firecracker: {errors}")),
        _ => panic!("guests/build firecracker: {errors}"),
    }
}

/// The guest; skips the test if it cannot be had.
macro_rules! needs_guest {
    () => {
        match guest() {
            Ok(guest) => guest,
            Err(reason) => skip!("{reason}"),
        }
    };
}

/// A Firecracker that ends with its test.
struct Running {
    child: Child,
    dir: tempfile::TempDir,
}

impl Running {
    fn start(guest: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = serde_json::json!({
            "boot-source": { "kernel_image_path": guest.join("payload.elf"), "boot_args": "" },
            "drives": [],
            "machine-config": { "vcpu_count": 1, "mem_size_mib": 64 },
        });
        std::fs::write(dir.path().join("vm.json"), config.to_string()).unwrap();
        let child = Command::new(guest.join("bin/firecracker"))
            .args(["--api-sock", "api.sock", "--config-file", "vm.json"])
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(File::create(dir.path().join("out")).unwrap())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let running = Self { child, dir };
        running.prints_more();
        running
    }

    fn prints_more(&self) {
        let lines = || {
            let text = std::fs::read_to_string(self.dir.path().join("out")).unwrap_or_default();
            text.lines().filter(|line| line.starts_with("kf ")).count()
        };
        let (before, until) = (lines(), Instant::now() + Duration::from_mins(2));
        while lines() <= before {
            assert!(Instant::now() < until, "the guest does not run");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn attach(&self) -> FirecrackerVm {
        FirecrackerVm::attach(self.child.id(), &self.dir.path().join("api.sock")).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A restored VM that ends with its test.
struct Ends(FirecrackerVm);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.end();
    }
}

/// Waits until the VM's devices are at work.
fn comes_to_wait_for_events(event_loop: &EventLoop) {
    let until = Instant::now() + Duration::from_mins(1);
    while !event_loop.waits_for_events().unwrap() {
        assert!(Instant::now() < until, "the event loop is not at work");
    }
}

/// The RAM of the paused VM, as it is in its process.
struct Copied(Vec<u8>);

impl Copied {
    fn of(vm: &mut FirecrackerVm) -> Self {
        let block = vm.ram_blocks().unwrap().remove(0);
        let mut bytes = vec![0; block.block.total_bytes as usize];
        let memory = File::open(format!("/proc/{}/mem", vm.pid())).unwrap();
        memory.read_exact_at(&mut bytes, block.host.0).unwrap();
        Self(bytes)
    }
}

impl RamSource for Copied {
    fn read(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        range.iter().try_for_each(|page| {
            let at = page.0 as usize * PAGE_BYTES;
            sink(page, self.0[at..at + PAGE_BYTES].try_into().unwrap())
        })
    }
}

/// The state and RAM of the VM in a pause, with what a restore needs.
fn checkpoint(vm: &mut FirecrackerVm) -> (Vec<u8>, Copied, RestoreSource) {
    assert_eq!(vm.stop().unwrap(), StopOutcome::Stopped);
    let state = vm.save_devices().unwrap();
    let ram = Copied::of(vm);
    vm.resume_after_stop().unwrap();
    assert!(!vm.ran_meanwhile().unwrap());
    let source = RestoreSource { machine: vm.spec().unwrap(), ram: vm.ram_layout().unwrap() };
    (state, ram, source)
}

fn plan(source: &RestoreSource, dir: &Path) -> Plan {
    let options = PlanOptions { paused: true, ..PlanOptions::default() };
    Plan::new(source.clone(), options).unwrap().to_file(dir.join("restored"))
}

#[test]
fn devices_are_saved_without_ram_and_with_it_and_both_states_load() {
    let guest = needs_guest!();
    let running = Running::start(&guest);
    let mut vm = running.attach();
    for method in [SaveMethod::WithoutMemory, SaveMethod::WithMemory] {
        vm.state_file().set_method(method);
        let (state, ram, source) = checkpoint(&mut vm);
        assert_eq!(vm.state_file().method(), method, "a version that behaves in another way");
        assert_loads(&running, &source, &state, &ram);
        running.prints_more();
    }
}

/// A VM that is loaded from `state` and `ram` has this RAM.
fn assert_loads(running: &Running, source: &RestoreSource, state: &[u8], ram: &Copied) {
    let shared = SharedRam::fill(&source.ram, ram).unwrap();
    let (restored, _) = plan(source, running.dir.path()).start_shared(&shared, state).unwrap();
    let mut restored = Ends(restored);
    assert_eq!(restored.0.run_state().unwrap(), RunState::Paused);
    // As it loads a VM, Firecracker writes a new generation id (VMGenID) into one page.
    let now = Copied::of(&mut restored.0);
    let pairs = now.0.chunks_exact(PAGE_BYTES).zip(ram.0.chunks_exact(PAGE_BYTES));
    let differing = pairs.filter(|(now, then)| now != then).count();
    assert!(differing <= 1, "{differing} pages of another RAM");
}

#[test]
fn a_whole_pause_keeps_other_clients_waiting_and_its_state_loads() {
    let guest = needs_guest!();
    let running = Running::start(&guest);
    let (mut vm, mut other) = (running.attach(), running.attach());
    // In the later ones Firecracker waits with less of its state.
    for _ in 0..3 {
        let saved = vm.pause_and_save().unwrap().expect("this version cannot");
        assert_eq!(saved.stop, StopOutcome::Stopped);
        let mut state = saved.device_state;
        let ram = std::thread::scope(|scope| {
            let asked = scope.spawn(|| other.api().pause().unwrap());
            let ram = Copied::of(&mut vm);
            std::thread::sleep(Duration::from_millis(200));
            assert!(!asked.is_finished(), "another client was served");
            assert!(Copied::of(&mut vm).0 == ram.0, "RAM was written to");
            vm.end_saved_pause().unwrap();
            assert!(!vm.ran_meanwhile().unwrap());
            assert_eq!(asked.join().unwrap(), InstanceState::Running);
            ram
        });
        assert_eq!(vm.run_state().unwrap(), RunState::Paused, "the user's pause was undone");
        vm.complete_device_state(&mut state).unwrap();
        assert!(!state.is_empty());
        let paused = vm.pause_and_save().unwrap().expect("this version cannot");
        assert_eq!(paused.stop, StopOutcome::AlreadyPaused);
        vm.end_saved_pause().unwrap();
        assert!(!vm.ran_meanwhile().unwrap());
        assert_eq!(vm.run_state().unwrap(), RunState::Paused, "it was resumed");
        let mut again = Vec::new();
        vm.complete_device_state(&mut again).unwrap();
        assert_eq!(again.len(), state.len());
        let source = RestoreSource { machine: vm.spec().unwrap(), ram: vm.ram_layout().unwrap() };
        assert_loads(&running, &source, &state, &ram);
        other.api().resume().unwrap();
        running.prints_more();
    }
}

#[test]
fn a_whole_pause_ends_with_its_engine() {
    let guest = needs_guest!();
    let running = Running::start(&guest);
    let mut vm = running.attach();
    assert!(vm.pause_and_save().unwrap().is_some());
    std::thread::sleep(Duration::from_millis(100));
    drop(vm);
    running.prints_more();
    assert_eq!(running.attach().run_state().unwrap(), RunState::Running);
}

#[test]
fn a_damaged_state_does_not_load_and_leaves_no_process() {
    let guest = needs_guest!();
    let running = Running::start(&guest);
    let (state, ram, source) = checkpoint(&mut running.attach());
    let shared = SharedRam::fill(&source.ram, &ram).unwrap();
    let (half, middle) = (state.len() / 2, state.len() / 2);
    let mut flipped = state.clone();
    flipped[middle] ^= 1;
    for damaged in [&state[..half], &flipped, b"nothing"] {
        let plan = plan(&source, running.dir.path()).at_socket(running.dir.path().join("r.sock"));
        let error = plan.start_shared(&shared, damaged).err().expect("it loads");
        assert!(matches!(error, Error::NotLoaded { .. } | Error::DeviceState { .. }), "{error:?}");
        let _ = std::fs::remove_file(running.dir.path().join("r.sock"));
        let children = std::fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
        let own = running.child.id().to_string();
        assert!(children.split_whitespace().all(|child| child == own), "{children}");
    }
    running.prints_more();
}

#[test]
fn the_devices_stand_still_in_a_pause() {
    let guest = needs_guest!();
    let running = Running::start(&guest);
    let (mut vm, event_loop) = (running.attach(), EventLoop::of(running.child.id()).unwrap());
    comes_to_wait_for_events(&event_loop);
    assert!(matches!(event_loop.at_rest(), Err(Error::DevicesRun { .. })));
    vm.stop().unwrap();
    let rest = event_loop.at_rest().unwrap().expect("it sleeps");
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(event_loop.reading().unwrap(), rest);
    // A request of another client in the pause, after the devices were saved.
    vm.save_devices().unwrap();
    assert!(!vm.ran_meanwhile().unwrap());
    running.attach();
    assert!(vm.ran_meanwhile().unwrap());
    vm.resume_after_stop().unwrap();
    comes_to_wait_for_events(&event_loop);
    running.prints_more();
}

#[test]
fn a_vm_that_was_loaded_and_has_not_run_stands_still_for_a_save() {
    let guest = needs_guest!();
    let running = Running::start(&guest);
    let (state, ram, source) = checkpoint(&mut running.attach());
    let shared = SharedRam::fill(&source.ram, &ram).unwrap();
    let (restored, _) = plan(&source, running.dir.path()).start_shared(&shared, &state).unwrap();
    let mut restored = Ends(restored);
    comes_to_wait_for_events(&EventLoop::of(restored.0.pid()).unwrap());
    assert_eq!(restored.0.stop().unwrap(), StopOutcome::AlreadyPaused);
    restored.0.save_devices().unwrap();
    assert_eq!(restored.0.run_state().unwrap(), RunState::Paused);
}

#[test]
fn a_vm_that_another_client_lets_run_in_a_pause_is_noticed() {
    let guest = needs_guest!();
    let running = Running::start(&guest);
    let (mut vm, mut other) = (running.attach(), running.attach());
    for before_the_save in [true, false] {
        vm.stop().unwrap();
        assert!(!vm.ran_meanwhile().unwrap());
        if !before_the_save {
            vm.save_devices().unwrap();
        }
        assert!(!vm.ran_meanwhile().unwrap(), "the save is none");
        // For an instant: paused again as if nothing had been.
        other.api().resume().unwrap();
        other.api().pause().unwrap();
        assert!(vm.ran_meanwhile().unwrap());
        vm.resume_after_stop().unwrap();
    }
    vm.stop().unwrap();
    assert!(!vm.ran_meanwhile().unwrap(), "a pause is forgotten with the next");
    vm.resume_after_stop().unwrap();
    running.prints_more();
}

#[test]
fn what_is_not_that_firecracker_is_refused() {
    let guest = needs_guest!();
    let running = Running::start(&guest);
    let socket = running.dir.path().join("api.sock");
    for (pid, socket, word) in [
        (std::process::id(), socket.clone(), "that of process"),
        (running.child.id(), running.dir.path().join("none"), "is gone"),
        (u32::MAX, socket, "process"),
    ] {
        let error = FirecrackerVm::attach(pid, &socket).err().expect("it is refused");
        assert!(error.to_string().contains(word) && error.fix().is_some(), "{error}");
    }
    running.prints_more();
}
