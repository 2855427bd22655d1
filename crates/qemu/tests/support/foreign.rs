//! QEMUs that somebody else started: by hand, not through Keyframe.

use super::{payload, words};
use keyframe_qemu::{AttachOptions, Monitor, Qmp, Vm};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long anything may take that happens at all.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// A QEMU with two monitors, `a` and `b`, in `dir`; killed with its test.
pub struct Foreign {
    pub child: Child,
    pub dir: PathBuf,
}

impl Foreign {
    pub fn start(qemu: &str, line: &[String], dir: &Path) -> Self {
        let mut command = Command::new(qemu);
        command.args(line);
        for name in ["a", "b"] {
            command
                .arg("-qmp")
                .arg(format!("unix:{},server=on,wait=off", dir.join(name).display()));
        }
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let foreign = Self { child, dir: dir.into() };
        // It is there when it answers.
        drop(Qmp::connect(&foreign.socket("b"), PATIENCE).unwrap());
        foreign
    }

    /// With the self-checking guest, which says its passes in `dir/serial`.
    pub fn with_payload(qemu: &str, line: &str, dir: &Path) -> Self {
        let firmware = payload(dir, 2000);
        let mut line = words(line);
        line.extend(words("-display none -nodefaults -bios"));
        line.push(firmware.to_str().unwrap().into());
        line.extend(["-serial".into(), format!("file:{}", dir.join("serial").display())]);
        Self::start(qemu, &line, dir)
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub fn options(&self, name: &str) -> AttachOptions {
        AttachOptions { monitor: Monitor::Socket(self.socket(name)) }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn attach(&self) -> keyframe_qemu::Result<Vm> {
        Vm::attach(self.pid(), &self.options("a"))
    }

    /// The other monitor, for a moment.
    pub fn other(&self) -> Qmp {
        Qmp::connect(&self.socket("b"), PATIENCE).unwrap()
    }

    /// QEMU's descriptor sets and open files that are ours.
    pub fn traces(&self) -> String {
        let sets = self.other().execute("query-fdsets", None).unwrap().to_string();
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        let ours = files.filter_map(|f| std::fs::read_link(f.unwrap().path()).ok());
        let ours: Vec<_> =
            ours.filter(|f| f.to_string_lossy().contains("keyframe-devices")).collect();
        if sets == "[]" && ours.is_empty() { String::new() } else { format!("{sets} {ours:?}") }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until `done`.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what}: never");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// This test program as another process that runs only `test`, which finds `value` in the variable
/// `KEYFRAME_PART`. Its descriptor 3 is the pipe that is its standard output here.
pub fn part(test: &str, value: &str) -> Command {
    let mut command = Command::new("sh");
    let script = r#"exec 3>&1 >/dev/null; part=$2; shift 2; KEYFRAME_WORDS="$*" KEYFRAME_PART=$part exec "$0" --exact "$part_test" --ignored --nocapture"#;
    command.env("part_test", test);
    command.arg("-c").arg(script).arg(std::env::current_exe().unwrap()).args([test, value]);
    command
}

/// What [`part`] was given; `None` where the test is run by itself.
pub fn given() -> Option<(String, Vec<std::ffi::OsString>)> {
    let value = std::env::var("KEYFRAME_PART").ok()?;
    let words = std::env::var("KEYFRAME_WORDS").unwrap_or_default();
    Some((value, words.split_whitespace().map(Into::into).collect()))
}

/// Where a [`part`] says something.
pub fn out() -> std::fs::File {
    std::fs::OpenOptions::new().write(true).open("/proc/self/fd/3").unwrap()
}
