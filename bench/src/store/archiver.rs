//! borg and restic: an archive of each image.
//!
//! ```text
//!   image.raw  ◀── dirty pages of a second      borg create | restic backup      for each checkpoint
//! ```
//!
//! The archivers have their default settings, except that borg does not encrypt, and a temporary
//! cache. Both sync before they end, and run on the core of this process (`taskset -c`). The time
//! includes their reading of the whole image, but not the writing of the image.

use keyframe_bench_feed::{Error, FeedSink, ProgramUsage, Result, Store, StoreReader, StoreWriter};
use keyframe_units::{PAGE_BYTES, Page, PageIndex, ZERO_PAGE};
use nix::sys::resource::{UsageWho, getrusage};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The archived file.
const IMAGE: &str = "image.raw";
/// Longest time for one archive.
const RUN_MAX: Duration = Duration::from_mins(10);

/// The archivers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Program {
    Borg,
    Restic,
}

impl Program {
    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Borg => "borg",
            Self::Restic => "restic",
        }
    }

    /// Returns its Debian package.
    pub fn package(self) -> &'static str {
        match self {
            Self::Borg => "borgbackup",
            Self::Restic => "restic",
        }
    }

    fn init(self) -> Vec<String> {
        match self {
            Self::Borg => words(&["init", "--encryption=none", "repository"]),
            Self::Restic => words(&["--quiet", "--repo", "repository", "init"]),
        }
    }

    fn archive(self, checkpoint: usize) -> Vec<String> {
        match self {
            Self::Borg => words(&["create", &format!("repository::{checkpoint}"), IMAGE]),
            Self::Restic => {
                let tag = checkpoint.to_string();
                words(&["--quiet", "--repo", "repository", "backup", "--tag", &tag, IMAGE])
            }
        }
    }

    fn extract(self, checkpoint: usize) -> Vec<String> {
        match self {
            Self::Borg => {
                words(&["extract", "--stdout", &format!("repository::{checkpoint}"), IMAGE])
            }
            Self::Restic => {
                let tag = checkpoint.to_string();
                let file = format!("/{IMAGE}");
                words(&["--quiet", "--repo", "repository", "dump", "--tag", &tag, "latest", &file])
            }
        }
    }
}

fn words(all: &[&str]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}

/// An archiver that is bound to a core.
#[derive(Clone)]
pub struct Archiver {
    program: Program,
    cpu: usize,
    /// The largest memory of a run, in bytes.
    peak_bytes: Arc<AtomicU64>,
}

impl Archiver {
    /// Makes the store of `program`, bound to core `cpu`.
    pub fn new(program: Program, cpu: usize) -> Self {
        Self { program, cpu, peak_bytes: Arc::default() }
    }

    fn command(&self, dir: &Path, args: &[String]) -> Command {
        // It ends with this process.
        let mut command = Command::new("setpriv");
        command
            .args([
                "--pdeathsig",
                "KILL",
                "taskset",
                "-c",
                &self.cpu.to_string(),
                self.program.name(),
            ])
            .args(args)
            .current_dir(dir)
            .env("BORG_BASE_DIR", dir.join("cache"))
            .env("BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK", "yes")
            .env("RESTIC_CACHE_DIR", dir.join("cache"))
            .env("RESTIC_PASSWORD", "keyframe-bench store")
            .stdin(Stdio::null());
        command
    }

    /// Runs it to its end and reads its memory meanwhile. The kernel's total at the end would include
    /// the time before the program was loaded, when its process was a copy of this one.
    fn run(&self, dir: &Path, args: &[String]) -> Result<()> {
        let operation = format!("{} {}", self.program.name(), args.join(" "));
        let failed = || Error::io(format!("run {operation}"));
        let messages = dir.join("messages");
        let file = File::create(&messages).map_err(Error::file("make", &messages))?;
        let mut command = self.command(dir, args);
        let mut child = command.stdout(Stdio::null()).stderr(file).spawn().map_err(failed())?;
        let deadline = Instant::now() + RUN_MAX;
        let status = loop {
            if let Some(status) = child.try_wait().map_err(failed())? {
                break status;
            }
            if Instant::now() > deadline {
                child.kill().and_then(|()| child.wait()).map_err(failed())?;
                return Err(Error::failed(
                    operation,
                    format!("not done within {} s", RUN_MAX.as_secs()),
                ));
            }
            if let Some(bytes) = peak_bytes_of(child.id()) {
                self.peak_bytes.fetch_max(bytes, Ordering::Relaxed);
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        if status.success() {
            return Ok(());
        }
        let problem = std::fs::read_to_string(&messages).unwrap_or_default();
        Err(Error::failed(operation, problem.trim()))
    }
}

impl Store for Archiver {
    fn create(&self, dir: &Path, image_pages: u64) -> Result<Box<dyn StoreWriter>> {
        std::fs::create_dir_all(dir).map_err(Error::file("make", dir))?;
        self.run(dir, &self.program.init())?;
        let path = dir.join(IMAGE);
        let image = File::create_new(&path).map_err(Error::file("make", &path))?;
        image.set_len(image_pages * PAGE_BYTES as u64).map_err(Error::file("size", &path))?;
        Ok(Box::new(ArchiveWriter {
            archiver: self.clone(),
            dir: dir.to_path_buf(),
            image,
            checkpoints: 0,
        }))
    }

    fn open(&self, dir: &Path) -> Result<Box<dyn StoreReader>> {
        Ok(Box::new(ArchiveReader { archiver: self.clone(), dir: dir.to_path_buf() }))
    }

    fn programs(&self) -> Option<ProgramUsage> {
        let usage = getrusage(UsageWho::RUSAGE_CHILDREN).ok()?;
        let ns = |time: nix::sys::time::TimeVal| {
            time.tv_sec() as u64 * 1_000_000_000 + time.tv_usec() as u64 * 1000
        };
        Some(ProgramUsage {
            cpu_ns: ns(usage.user_time()) + ns(usage.system_time()),
            peak_bytes: self.peak_bytes.load(Ordering::Relaxed),
        })
    }
}

/// Returns the program's peak memory in bytes; `None` until the program is loaded.
fn peak_bytes_of(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let kib =
        text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix("kB"))?;
    let loaded = ["setpriv", "taskset", "keyframe"]
        .iter()
        .all(|name| !text.starts_with(&format!("Name:\t{name}")));
    loaded.then(|| kib.trim().parse::<u64>().ok().map(|kib| kib * 1024))?
}

struct ArchiveWriter {
    archiver: Archiver,
    dir: PathBuf,
    image: File,
    checkpoints: usize,
}

impl StoreWriter for ArchiveWriter {
    fn prepare(&mut self, pages: &[(PageIndex, &Page)]) -> Result<()> {
        for (page, content) in pages {
            let at = page.0 * PAGE_BYTES as u64;
            self.image.write_all_at(*content, at).map_err(Error::io(format!("write {IMAGE}")))?;
        }
        Ok(())
    }

    fn checkpoint(&mut self, _pages: &[(PageIndex, &Page)]) -> Result<()> {
        self.archiver.run(&self.dir, &self.archiver.program.archive(self.checkpoints))?;
        self.checkpoints += 1;
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        // Neither the image nor the cache, which can be made again, is part of the stored size.
        for (name, remove) in [
            (IMAGE, std::fs::remove_file as fn(PathBuf) -> std::io::Result<()>),
            ("messages", std::fs::remove_file),
            ("cache", std::fs::remove_dir_all),
        ] {
            match remove(self.dir.join(name)) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::file("remove", &self.dir.join(name))(e));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

struct ArchiveReader {
    archiver: Archiver,
    dir: PathBuf,
}

impl StoreReader for ArchiveReader {
    fn image(&mut self, checkpoint: usize, sink: FeedSink<'_>) -> Result<()> {
        let args = self.archiver.program.extract(checkpoint);
        let operation = format!("{} {}", self.archiver.program.name(), args.join(" "));
        let mut child = self
            .archiver
            .command(&self.dir, &args)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(Error::io(format!("run {operation}")))?;
        let mut read = Ok(());
        if let Some(mut out) = child.stdout.take() {
            let (mut number, mut page) = (0, ZERO_PAGE);
            loop {
                match out.read_exact(&mut page) {
                    Ok(()) if page == ZERO_PAGE => {}
                    Ok(()) => sink(PageIndex(number), &page),
                    Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => break,
                    Err(e) => {
                        read = Err(Error::io(format!("read from {operation}"))(e));
                        break;
                    }
                }
                number += 1;
            }
        }
        let status = child.wait().map_err(Error::io(format!("wait for {operation}")))?;
        read?;
        if status.success() { Ok(()) } else { Err(Error::failed(operation, status)) }
    }
}
