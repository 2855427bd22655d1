//! Probes which kernel features and rights this host grants, by trying each one.
//!
//! Each probe works on memory of this process or on a child made for it, and changes nothing on the
//! host. Absent: the rights of a certain QEMU (its user, its sandbox). Only attaching to it shows
//! them.

use crate::abi::{self, PageRegion, ScanArg};
use crate::access_gate::AccessGate;
use crate::fault_window::FaultWindow;
use crate::guest_instructions::GuestInstructions;
use crate::pagemap_quirks::own_userfaultfd;
use crate::{Error, Process, attach, read_memory, write_tracker::WriteTracker};
use keyframe_units::{HostVirt, PAGE_BYTES};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use serde::Serialize;
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Command, Stdio};
use std::{fs, io};

/// The result of a probe of this host.
#[derive(Clone, Debug, Serialize)]
pub struct HostFeatures {
    /// One item for each feature, in the order in which they build on each other.
    pub items: Vec<HostFeature>,
}

impl HostFeatures {
    /// Returns the item of that name; `None` if the probe has no such item.
    pub fn get(&self, name: &str) -> Option<&HostFeature> {
        self.items.iter().find(|item| item.name == name)
    }

    /// Returns true if all features that tracking a VM from outside requires are available.
    pub fn can_track(&self) -> bool {
        self.items.iter().all(|item| item.available || !item.required)
    }
}

/// One feature of the kernel, or one right of this user.
#[derive(Clone, Debug, Serialize)]
pub struct HostFeature {
    /// The name of the feature.
    pub name: &'static str,
    /// True if the feature works.
    pub available: bool,
    /// True if tracking requires the feature. Other features save time, or are shown for
    /// information.
    pub required: bool,
    /// The result of the probe, for users.
    pub detail: String,
    /// The way to make the feature available, if it is known.
    pub fix: Option<String>,
}

impl HostFeature {
    /// Makes the feature from the result of its probe: a description, or the problem and its fix.
    fn of(
        name: &'static str,
        required: bool,
        tried: Result<String, (String, Option<String>)>,
    ) -> Self {
        match tried {
            Ok(detail) => Self { name, available: true, required, detail, fix: None },
            Err((detail, fix)) => Self { name, available: false, required, detail, fix },
        }
    }
}

/// The reason why something is not available.
struct Why(String);

impl From<&str> for Why {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl From<io::Error> for Why {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<Error> for Why {
    fn from(error: Error) -> Self {
        Self(error.to_string())
    }
}

type Tried = Result<String, (String, Option<String>)>;

fn no(detail: impl Into<Why>, fix: &str) -> Tried {
    Err((detail.into().0, Some(fix.to_owned())))
}

/// Probes all features and returns the result. Takes some milliseconds and starts one short-lived
/// child.
pub fn probe() -> HostFeatures {
    let mut items = vec![HostFeature::of("kernel", false, Ok(kernel_version()))];
    items.push(HostFeature::of("userfaultfd", true, userfaultfd()));
    items.extend(uffd_features());
    items.push(HostFeature::of("PAGEMAP_SCAN", true, scan_finds_written_pages()));
    items.extend(with_child());
    items.push(HostFeature::of("memfd sealing", false, sealed_memfd()));
    items.push(HostFeature::of("huge pages", false, huge_pages()));
    items.push(HostFeature::of("raised priority", false, raised_priority()));
    items.push(HostFeature::of("page-fault window", false, page_fault_window()));
    items.push(HostFeature::of("held file writes", false, held_file_writes()));
    items.push(HostFeature::of("/dev/kvm", false, kvm()));
    items.push(HostFeature::of("guest instruction counter", false, guest_instruction_counter()));
    HostFeatures { items }
}

fn kernel_version() -> String {
    let name = rustix::system::uname();
    format!("{} {}", name.sysname().to_string_lossy(), name.release().to_string_lossy())
}

fn userfaultfd() -> Tried {
    match own_userfaultfd() {
        Ok(_) => Ok("userfaultfd(2) works".into()),
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
            no(error, "run a kernel with CONFIG_USERFAULTFD")
        }
        Err(error) => {
            no(error, "allow userfaultfd in the sandbox or container (seccomp) that this runs in")
        }
    }
}

/// One item for each feature bit.
fn uffd_features() -> Vec<HostFeature> {
    let has = own_userfaultfd().and_then(|uffd| abi::uffd_api(uffd.as_fd(), 0)).unwrap_or(0);
    let names = [
        "uffd PAGEFAULT_FLAG_WP",
        "uffd WP_HUGETLBFS_SHMEM",
        "uffd WP_UNPOPULATED",
        "uffd WP_ASYNC",
    ];
    let found = abi::FEATURES_NEEDED.iter().zip(names);
    found
        .map(|((bit, _, since), name)| {
            let tried = if has & bit != 0 {
                Ok(format!("since Linux {since}"))
            } else {
                no(
                    "the kernel lacks it",
                    &format!("run Linux {since} or newer, with CONFIG_PTE_MARKER_UFFD_WP"),
                )
            };
            HostFeature::of(name, true, tried)
        })
        .collect()
}

/// Pages to try on; unmapped on drop.
struct Pages(*mut u8);

const TRIED_PAGES: usize = 8;

impl Pages {
    fn new() -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is given, so that no mapping of ours is replaced.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                TRIED_PAGES * PAGE_BYTES,
                access,
                MapFlags::PRIVATE,
            )?
        };
        Ok(Self(start.cast()))
    }

    fn write(&self, page: usize) {
        assert!(page < TRIED_PAGES);
        // SAFETY: the page lies in the mapping (just asserted).
        let at = unsafe { self.0.add(page * PAGE_BYTES) };
        // SAFETY: mapped, writable, and no reference to it exists.
        unsafe { at.write_volatile(1) };
    }

    fn start(&self) -> u64 {
        self.0 as u64
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, whole; nothing refers to it.
        let _ = unsafe { munmap(self.0.cast(), TRIED_PAGES * PAGE_BYTES) };
    }
}

/// Probes tracking on a few pages of this process: a written page must be reported once.
fn scan_finds_written_pages() -> Tried {
    let scan = || -> io::Result<Vec<Vec<PageRegion>>> {
        let (pages, uffd) = (Pages::new()?, own_userfaultfd()?);
        abi::uffd_api(uffd.as_fd(), abi::features_needed())?;
        abi::uffd_register(uffd.as_fd(), pages.start(), (TRIED_PAGES * PAGE_BYTES) as u64)?;
        let pagemap = fs::File::open("/proc/self/pagemap")?;
        let arg = ScanArg {
            flags: abi::SCAN_WP_MATCHING | abi::SCAN_CHECK_WPASYNC,
            start: pages.start(),
            end: pages.start() + (TRIED_PAGES * PAGE_BYTES) as u64,
            category_mask: abi::PAGE_WRITTEN,
            return_mask: abi::PAGE_WRITTEN,
            ..ScanArg::default()
        };
        let mut found = Vec::new();
        for written in [Some(0), Some(3), None] {
            if let Some(page) = written {
                pages.write(page);
            }
            let mut regions = [PageRegion::default(); TRIED_PAGES];
            let (count, _) = abi::pagemap_scan(pagemap.as_fd(), arg, &mut regions)?;
            let relative = |r: &PageRegion| PageRegion {
                start: r.start - arg.start,
                end: r.end - arg.start,
                ..*r
            };
            found.push(regions.iter().take(count).map(relative).collect());
        }
        Ok(found)
    };
    let page = |n: usize| PageRegion {
        start: (n * PAGE_BYTES) as u64,
        end: ((n + 1) * PAGE_BYTES) as u64,
        categories: abi::PAGE_WRITTEN,
    };
    match scan() {
        Ok(found) if found.get(1..) == Some(&[vec![page(3)], vec![]]) => {
            Ok("finds and protects written pages".into())
        }
        Ok(found) => no(
            format!("it found {found:?}").as_str(),
            "run another kernel: this one's PAGEMAP_SCAN is wrong",
        ),
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
            no(error, "run Linux 6.7 or newer")
        }
        Err(error) => Err((error.to_string(), None)),
    }
}

/// Probes the features that need another process: a child that waits for its end.
fn with_child() -> Vec<HostFeature> {
    const NAMES: [&str; 4] = ["attach (ptrace)", "pidfd_getfd", "process_vm_readv", "map_files"];
    let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            let why = (format!("could not be tried: start cat: {error}"), None);
            return NAMES
                .iter()
                .map(|name| HostFeature::of(name, *name != "map_files", Err(why.clone())))
                .collect();
        }
    };
    let tried = match Process::open(child.id()) {
        Ok(process) => [
            attached(&process),
            descriptor_taken(&process),
            memory_read(&process),
            mapping_opened(&process),
        ],
        Err(error) => std::array::from_fn(|_| failed(&error)),
    };
    // Its input ends, so does it; a failure to do so is not ours to report.
    drop(child.stdin.take());
    let _ = child.kill();
    let _ = child.wait();
    NAMES
        .iter()
        .zip(tried)
        .map(|(name, tried)| HostFeature::of(name, *name != "map_files", tried))
        .collect()
}

fn failed(error: &Error) -> Tried {
    Err((error.to_string(), error.fix()))
}

/// The whole of it: attach, take over a userfaultfd, ask it for its features.
fn attached(process: &Process) -> Tried {
    let attached = attach::inject_userfaultfd(process).map_err(|e| failed(&e).unwrap_err())?;
    let detail = format!("attached to a child, stopped for {} us", attached.stopped_ns / 1000);
    WriteTracker::new(process, attached.uffd).map_err(|e| failed(&e).unwrap_err())?;
    let yama = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    match yama.trim() {
        "1" if !has_capability(CAP_SYS_PTRACE) => no(
            "kernel.yama.ptrace_scope=1 permits attaching to own children alone",
            "set kernel.yama.ptrace_scope=0 (sysctl), or run keyframe as root or with CAP_SYS_PTRACE",
        ),
        _ => Ok(detail),
    }
}

const CAP_SYS_PTRACE: u32 = 19;

/// True if we have that capability.
fn has_capability(number: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .is_some_and(|bits| bits >> number & 1 == 1)
}

fn descriptor_taken(process: &Process) -> Tried {
    match pidfd_getfd(process.pidfd(), 0, PidfdGetfdFlags::empty()) {
        Ok(_) => Ok("took a descriptor of a child".into()),
        Err(rustix::io::Errno::NOSYS) => no("the kernel lacks it", "run Linux 5.6 or newer"),
        Err(error) => no(io::Error::from(error), "run keyframe as root or with CAP_SYS_PTRACE"),
    }
}

fn memory_read(process: &Process) -> Tried {
    let read = || {
        let maps = process.maps()?;
        let first = maps.iter().find(|m| m.readable).map_or(HostVirt(0), |m| m.range.start);
        read_memory(process, first, &mut [0; 64])
    };
    read().map(|()| "read a child's memory".into()).or_else(|error| failed(&error))
}

fn mapping_opened(process: &Process) -> Tried {
    let open = || {
        let maps = process.maps()?;
        let file = maps
            .iter()
            .find(|m| m.inode != 0)
            .map(|m: &crate::Mapping| m.map_file())
            .unwrap_or_default();
        process.open_file(&file, OFlags::RDONLY)
    };
    match open() {
        Ok(_) => Ok("opened a mapping of a child".into()),
        Err(error) => no(
            error,
            "run keyframe as root or with CAP_CHECKPOINT_RESTORE; without it, the memory's file is looked for among \
             QEMU's descriptors",
        ),
    }
}

/// Probes whether a memfd can be sealed against shrinking.
fn sealed_memfd() -> Tried {
    let seal = || -> rustix::io::Result<bool> {
        let file = memfd_create("keyframe-probe", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, PAGE_BYTES as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK)?;
        Ok(ftruncate(&file, 0).is_err())
    };
    match seal() {
        Ok(true) => {
            Ok("memory of memory-backend-memfd is read through a mapping of our own".into())
        }
        Ok(false) => Err(("a sealed memfd could be made shorter".into(), None)),
        Err(error) => Err((io::Error::from(error).to_string(), None)),
    }
}

/// The pools of huge pages.
fn huge_pages() -> Tried {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/kernel/mm/hugepages").into_iter().flatten().flatten() {
        let number = |file: &str| {
            fs::read_to_string(entry.path().join(file)).unwrap_or_default().trim().to_owned()
        };
        let size = entry.file_name().to_string_lossy().replace("hugepages-", "");
        found.push((
            number("nr_hugepages") != "0",
            format!("{size}: {} free of {}", number("free_hugepages"), number("nr_hugepages")),
        ));
    }
    found.sort();
    let detail = found.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join(", ");
    if found.iter().any(|(any, _)| *any) {
        return Ok(detail);
    }
    no(
        if detail.is_empty() { "the kernel has none" } else { detail.as_str() },
        "set vm.nr_hugepages (sysctl), if VMs are to use them",
    )
}

/// Probes the priority in a new thread, so that the calling thread keeps its own.
fn raised_priority() -> Tried {
    let raised = std::thread::Builder::new()
        .spawn(crate::priority::raise_current_thread)
        .map(std::thread::JoinHandle::join);
    match raised {
        Ok(Ok(true)) => Ok("the copying threads can be raised over the guest".into()),
        _ => no(
            "not permitted",
            "run keyframe as root or with CAP_SYS_NICE, or raise its limits (ulimit -r 1, ulimit -e 30)",
        ),
    }
}

fn kvm() -> Tried {
    const KVM_GET_API_VERSION: libc::Ioctl = 0xAE00;
    match fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(device) => {
            // SAFETY: an open descriptor; this request takes no argument, and is unknown to any
            // other device.
            let version = unsafe { libc::ioctl(device.as_raw_fd(), KVM_GET_API_VERSION, 0) };
            if version > 0 {
                Ok(format!("API version {version}"))
            } else {
                Err(("it does not answer as KVM does".into(), None))
            }
        }
        Err(error) => no(
            error,
            "VMs run by emulation (TCG) instead; load the kvm module, or join the group kvm",
        ),
    }
}

/// Whether page faults name the pages that a VM writes last, so that pauses need no scan.
fn page_fault_window() -> Tried {
    match FaultWindow::probe() {
        Ok(()) => Ok("the pause of a VM without KVM and with private RAM needs no scan".into()),
        Err(error) => Err((error.to_string(), error.fix())),
    }
}

/// Whether drives of a VMM that opens its files itself can be captured on a file system that does not
/// clone files.
fn held_file_writes() -> Tried {
    let works = || Ok("Firecracker's drives can be captured on ext4, too".into());
    let mode = Mode::RUSR | Mode::WUSR;
    let file = rustix::fs::open(std::env::temp_dir(), OFlags::TMPFILE | OFlags::RDWR, mode);
    match file.map(|file| AccessGate::over(&[file.into()])) {
        Ok(Ok(_)) => works(),
        // The kernel can, and the file system of temporary files cannot.
        Ok(Err(Error::AccessGate { source, .. }))
            if source.raw_os_error() == Some(libc::EOPNOTSUPP) =>
        {
            works()
        }
        Ok(Err(error)) => Err((error.to_string(), error.fix())),
        Err(error) => Err((format!("no file can be made to try it on: {error}"), None)),
    }
}

/// Whether `--count-instructions` works for VMs of this user.
fn guest_instruction_counter() -> Tried {
    match GuestInstructions::probe() {
        Ok(()) => Ok("--count-instructions works for VMs under KVM".into()),
        Err(error) => Err((error.to_string(), error.fix())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::HostRange;

    #[test]
    fn every_lack_says_why_and_names_are_one_of_a_kind() {
        let features = probe();
        for item in &features.items {
            assert!(!item.detail.is_empty(), "{item:?}");
            assert_eq!(
                features.items.iter().filter(|other| other.name == item.name).count(),
                1,
                "{item:?}"
            );
            assert!(!item.available || item.fix.is_none(), "{item:?}");
        }
        // The other tests of this crate need as much, so a host without it must be told from a
        // wrong probe.
        let lacking: Vec<_> =
            features.items.iter().filter(|item| item.required && !item.available).collect();
        assert!(lacking.is_empty(), "{lacking:#?}");
        assert!(features.can_track());
        assert!(features.get("uffd WP_ASYNC").is_some() && features.get("no such thing").is_none());
    }

    /// The page written is told from its neighbours, wherever the mapping happens to lie.
    #[test]
    fn pages_are_tried_on_memory_of_our_own() {
        let pages = Pages::new().unwrap();
        pages.write(TRIED_PAGES - 1);
        let range = HostRange {
            start: HostVirt(pages.start()),
            len_bytes: (TRIED_PAGES * PAGE_BYTES) as u64,
        };
        let own = Process::open(std::process::id()).unwrap();
        assert!(own.maps().unwrap().iter().any(|mapping| mapping.range.contains(range)));
    }
}
