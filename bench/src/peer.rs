//! QEMU's own ways to save a VM, on a guest that Keyframe has nothing to do with.
//!
//! ```text
//!   savevm               ████████ paused: all RAM into a qcow2 image ████████
//!   migrate              ████████ paused: all RAM into a file ███████████████
//!   migrate, live        ── RAM into a file while the guest runs ── ██ rest ██
//!   background-snapshot  █ devices, protect all RAM █ ── RAM into a file; each first write of the guest waits ──
//! ```

use crate::events::Events;
use crate::guest::Guest as Files;
use crate::vm::Guest;
use crate::{Error, Options};
use keyframe_qemu::Qmp;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// How long saving all of RAM may take.
const SAVE_TIMEOUT: Duration = Duration::from_secs(120);
/// How much of the guest's life before a save is compared with what it does meanwhile.
pub const BEFORE: Duration = Duration::from_millis(3200);

/// One of QEMU's ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// `savevm`.
    Savevm,
    /// `stop`, `migrate exec:`, `cont`.
    Migrate,
    /// `migrate exec:` of the running VM, `cont`.
    LiveMigrate,
    /// `migrate exec:` with the capability `background-snapshot`.
    BackgroundSnapshot,
}

impl Way {
    /// The beginning of its keys.
    pub fn key(self) -> &'static str {
        match self {
            Self::Savevm => "savevm",
            Self::Migrate => "migrate",
            Self::LiveMigrate => "migrate_live",
            Self::BackgroundSnapshot => "background_snapshot",
        }
    }
}

/// One save.
#[derive(Clone, Copy, Debug)]
pub struct Saved {
    /// How long the VM stood still.
    pub pause_ns: f64,
    /// How long it took in all.
    pub whole_ns: f64,
    /// What part of its computing the guest lost from the beginning to the end, against the seconds
    /// before; `None` where that was too short to tell.
    pub work_lost: Option<f64>,
}

/// A guest, its monitor, and another one for its events.
pub struct Peer {
    /// Its console.
    pub guest: Guest,
    qmp: Qmp,
    events: Events,
    file: PathBuf,
}

impl Peer {
    /// Starts the guest, with an image for `savevm`. Its files are in `dir`.
    pub fn start(files: &Files, dir: &Path, mem: &str, append: &str) -> Result<Self, Error> {
        std::fs::create_dir_all(dir).map_err(Error::io(format!("make {}", dir.display())))?;
        let image = dir.join("savevm.qcow2");
        make_image(&image)?;
        let (monitor, events) = (dir.join("monitor.sock"), dir.join("events.sock"));
        let mut command = files.command(mem, append);
        command.extend([
            "-drive".into(),
            format!("if=none,id=vmstate,format=qcow2,file={}", image.display()),
        ]);
        for socket in [&monitor, &events] {
            command
                .extend(["-qmp".into(), format!("unix:{},server=on,wait=off", socket.display())]);
        }
        let mut guest = Guest::start(&command)?;
        guest.wait_for("KF READY dirty", 180)?;
        let mut qmp = Qmp::connect(&monitor, Duration::from_secs(10))
            .map_err(Error::qmp("connect to QEMU"))?;
        qmp.set_timeout(SAVE_TIMEOUT);
        qmp.hmp("migrate_set_parameter max-bandwidth 100G")
            .map_err(Error::qmp("migrate_set_parameter"))?;
        let events = Events::listen(&events)?;
        Ok(Self { guest, qmp, events, file: dir.join("migrated") })
    }

    /// Saves it once. `None`, told to the user, where this QEMU or kernel cannot.
    pub fn save(&mut self, way: Way, options: &Options) -> Result<Option<Saved>, Error> {
        if way == Way::BackgroundSnapshot
            && let Err(e) = self.background_snapshots(true)
        {
            options.say(format!("no background-snapshot: {e}"));
            return Ok(None);
        }
        self.events.forget();
        let started = Instant::now();
        match way {
            Way::Savevm => self.savevm()?,
            Way::Migrate => {
                self.qmp.stop().map_err(Error::qmp("stop"))?;
                self.migrate()?;
                self.qmp.cont().map_err(Error::qmp("cont"))?;
            }
            Way::LiveMigrate => {
                self.migrate()?;
                self.qmp.cont().map_err(Error::qmp("cont"))?;
            }
            Way::BackgroundSnapshot => self.migrate()?,
        }
        let ended = Instant::now();
        let whole_ns = ended.duration_since(started).as_nanos() as f64;
        let pause_ns = self.events.pause_ns(way.key())?;
        match way {
            Way::Savevm => drop(self.qmp.hmp("delvm bench").map_err(Error::qmp("delvm"))?),
            Way::BackgroundSnapshot => self.background_snapshots(false)?,
            Way::Migrate | Way::LiveMigrate => {}
        }
        let units_per_s = |from, to| self.guest.rate("dirty ", "work=", (from, to));
        let work_lost = started
            .checked_sub(BEFORE)
            .and_then(|from| units_per_s(from, started))
            .zip(units_per_s(started, ended))
            .map(|(before, during)| 1.0 - during / before);
        Ok(Some(Saved { pause_ns, whole_ns, work_lost }))
    }

    /// Leaves a snapshot under the name of [`Way::Savevm`]'s key.
    pub fn save_for_loadvm(&mut self) -> Result<(), Error> {
        let answer =
            self.qmp.hmp(&format!("savevm {}", Way::Savevm.key())).map_err(Error::qmp("savevm"))?;
        if answer.trim().is_empty() { Ok(()) } else { Err(Error::failed("savevm", answer)) }
    }

    fn savevm(&mut self) -> Result<(), Error> {
        let answer = self.qmp.hmp("savevm bench").map_err(Error::qmp("savevm"))?;
        if answer.trim().is_empty() { Ok(()) } else { Err(Error::failed("savevm", answer)) }
    }

    /// A migration into a file as fast as it goes, to its end.
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

impl Drop for Peer {
    fn drop(&mut self) {
        // Without a word about a signal; where it fails the guest is ended by one.
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
