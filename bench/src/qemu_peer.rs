//! QEMU's own ways to save a VM, on a guest without Keyframe.
//!
//! ```text
//!   savevm               ████████ paused: all RAM into a qcow2 image ████████
//!   migrate              ████████ paused: all RAM into a file ███████████████
//!   migrate, live        ── RAM into a file while the guest runs ── ██ rest ██
//!   background-snapshot  █ devices, protect RAM █ ── RAM into a file; first writes wait ──
//! ```

use crate::guest_files::SmallGuest;
use crate::pause_events::PauseEvents;
use crate::running_guest::{RunningGuest, TimeSpan};
use crate::{Error, Options};
use keyframe_qemu::Qmp;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The file name of the image that holds the snapshots.
const IMAGE: &str = "savevm.qcow2";
/// Longest time to save all of RAM.
const SAVE_TIMEOUT: Duration = Duration::from_secs(120);
/// The time before a save whose work is compared with the work during the save.
pub const BEFORE: Duration = Duration::from_millis(3200);

/// A way to save a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveMethod {
    /// `savevm`.
    Savevm,
    /// `stop`, `migrate exec:`, `cont`.
    Migrate,
    /// `migrate exec:` of the running VM, `cont`.
    LiveMigrate,
    /// `migrate exec:` with the capability `background-snapshot`.
    BackgroundSnapshot,
}

impl SaveMethod {
    /// Returns the beginning of its keys.
    pub fn key(self) -> &'static str {
        match self {
            Self::Savevm => "savevm",
            Self::Migrate => "migrate",
            Self::LiveMigrate => "migrate_live",
            Self::BackgroundSnapshot => "background_snapshot",
        }
    }
}

/// The times of one save.
#[derive(Clone, Copy, Debug)]
pub struct SaveTimes {
    /// The pause of the VM.
    pub pause_ns: f64,
    /// The time of the whole save.
    pub whole_ns: f64,
    /// The part of its work that the guest lost during the save, against the seconds before it;
    /// `None` if the save was too short.
    pub work_lost: Option<f64>,
}

/// A guest with two monitors, one of them for events.
pub struct QemuPeer {
    /// The guest and its console.
    pub guest: RunningGuest,
    qmp: Qmp,
    events: PauseEvents,
    file: PathBuf,
}

impl QemuPeer {
    /// Starts the guest with an image for `savevm`. Its files go to `dir`.
    pub fn start(files: &SmallGuest, dir: &Path, mem: &str, append: &str) -> Result<Self, Error> {
        Self::start_command(files.command(mem, append), dir, "KF READY dirty")
    }

    /// Starts a guest by `command` as [`Self::start`] does. The guest is ready when it prints `ready`.
    pub fn start_command(mut command: Vec<String>, dir: &Path, ready: &str) -> Result<Self, Error> {
        std::fs::create_dir_all(dir).map_err(Error::io(format!("make {}", dir.display())))?;
        let image = dir.join(IMAGE);
        make_image(&image)?;
        let (monitor, events) = (dir.join("monitor.sock"), dir.join("events.sock"));
        command.extend([
            "-drive".into(),
            format!("if=none,id=vmstate,format=qcow2,file={}", image.display()),
        ]);
        for socket in [&monitor, &events] {
            command
                .extend(["-qmp".into(), format!("unix:{},server=on,wait=off", socket.display())]);
        }
        let mut guest = RunningGuest::start(&command)?;
        guest.wait_for(ready, 180)?;
        let mut qmp = Qmp::connect(&monitor, Duration::from_secs(10))
            .map_err(Error::qmp("connect to QEMU"))?;
        qmp.set_timeout(SAVE_TIMEOUT);
        qmp.hmp("migrate_set_parameter max-bandwidth 100G")
            .map_err(Error::qmp("migrate_set_parameter"))?;
        let events = PauseEvents::listen(&events)?;
        Ok(Self { guest, qmp, events, file: dir.join("migrated") })
    }

    /// Saves the VM once. Returns `None`, and reports that, if this QEMU or kernel lacks the method.
    pub fn save(&mut self, way: SaveMethod, options: &Options) -> Result<Option<SaveTimes>, Error> {
        if way == SaveMethod::BackgroundSnapshot
            && let Err(e) = self.background_snapshots(true)
        {
            options.say(format!("no background-snapshot: {e}"));
            return Ok(None);
        }
        self.events.clear();
        let started = Instant::now();
        match way {
            SaveMethod::Savevm => self.savevm()?,
            SaveMethod::Migrate => {
                self.qmp.stop().map_err(Error::qmp("stop"))?;
                self.migrate()?;
                self.qmp.cont().map_err(Error::qmp("cont"))?;
            }
            SaveMethod::LiveMigrate => {
                self.migrate()?;
                self.qmp.cont().map_err(Error::qmp("cont"))?;
            }
            SaveMethod::BackgroundSnapshot => self.migrate()?,
        }
        let ended = Instant::now();
        let whole_ns = ended.duration_since(started).as_nanos() as f64;
        let pause_ns = self.events.pause_ns(way.key())?;
        match way {
            SaveMethod::Savevm => drop(self.qmp.hmp("delvm bench").map_err(Error::qmp("delvm"))?),
            SaveMethod::BackgroundSnapshot => self.background_snapshots(false)?,
            SaveMethod::Migrate | SaveMethod::LiveMigrate => {}
        }
        let units_per_s = |from, to| self.guest.rate("dirty ", "work=", TimeSpan { from, to });
        let work_lost = started
            .checked_sub(BEFORE)
            .and_then(|from| units_per_s(from, started))
            .zip(units_per_s(started, ended))
            .map(|(before, during)| 1.0 - during / before);
        Ok(Some(SaveTimes { pause_ns, whole_ns, work_lost }))
    }

    /// Saves a snapshot under the name of [`SaveMethod::Savevm`]'s key and keeps it.
    pub fn save_for_loadvm(&mut self) -> Result<(), Error> {
        let answer = self
            .qmp
            .hmp(&format!("savevm {}", SaveMethod::Savevm.key()))
            .map_err(Error::qmp("savevm"))?;
        if answer.trim().is_empty() { Ok(()) } else { Err(Error::failed("savevm", answer)) }
    }

    /// Returns the path of the image that holds the snapshots.
    pub fn image(&self) -> PathBuf {
        self.file.with_file_name(IMAGE)
    }

    /// Returns the path of the file that `migrate` writes.
    pub fn migrated(&self) -> &Path {
        &self.file
    }

    /// Loads the snapshot of [`Self::save_for_loadvm`] into the running VM. Returns the time until
    /// QEMU has answered, in nanoseconds.
    pub fn load_snapshot(&mut self) -> Result<f64, Error> {
        let started = Instant::now();
        let answer = self
            .qmp
            .hmp(&format!("loadvm {}", SaveMethod::Savevm.key()))
            .map_err(Error::qmp("loadvm"))?;
        let took_ns = started.elapsed().as_nanos() as f64;
        if answer.trim().is_empty() { Ok(took_ns) } else { Err(Error::failed("loadvm", answer)) }
    }

    fn savevm(&mut self) -> Result<(), Error> {
        let answer = self.qmp.hmp("savevm bench").map_err(Error::qmp("savevm"))?;
        if answer.trim().is_empty() { Ok(()) } else { Err(Error::failed("savevm", answer)) }
    }

    /// Migrates into a file at full speed, and waits for the end.
    fn migrate(&mut self) -> Result<(), Error> {
        let uri = format!("exec:cat > '{}'", self.file.display());
        self.qmp.execute("migrate", Some(json!({ "uri": uri }))).map_err(Error::qmp("migrate"))?;
        let started = Instant::now();
        loop {
            let info =
                self.qmp.execute("query-migrate", None).map_err(Error::qmp("query-migrate"))?;
            match info.get("status").and_then(Value::as_str) {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => return Err(Error::failed("migrate", info)),
                _ if started.elapsed() > SAVE_TIMEOUT => {
                    return Err(Error::failed(
                        "migrate",
                        format!("not done within {} s", SAVE_TIMEOUT.as_secs()),
                    ));
                }
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    fn background_snapshots(&mut self, on: bool) -> Result<(), Error> {
        let capabilities =
            json!({ "capabilities": [{ "capability": "background-snapshot", "state": on }] });
        self.qmp
            .execute("migrate-set-capabilities", Some(capabilities))
            .map_err(Error::qmp("migrate-set-capabilities"))
            .map(drop)
    }
}

impl Drop for QemuPeer {
    fn drop(&mut self) {
        // QEMU prints no message about a signal. If this fails, dropping the guest ends it.
        if self.qmp.quit().is_ok() {
            self.guest.end(10);
        }
    }
}

fn make_image(image: &Path) -> Result<(), Error> {
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(image)
        .arg("64M")
        .output()
        .map_err(Error::io("run qemu-img (Debian: qemu-utils)"))?;
    if made.status.success() {
        return Ok(());
    }
    Err(Error::failed("qemu-img create", String::from_utf8_lossy(&made.stderr)))
}
