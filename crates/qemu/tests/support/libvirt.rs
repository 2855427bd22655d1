//! A libvirt of the test's own: `libvirtd` in a mount namespace in which all that it writes lies in
//! the test's directory.

use keyframe_qemu::{AttachOptions, Monitor};
use keyframe_testing::{PATIENCE, Scope, has_program, record_skip, wait_until};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// What libvirtd is told: no other user, no control groups, nothing of the machine's is changed.
const CONFIG: &str = "user = \"root\"\ngroup = \"root\"\ndynamic_ownership = 0\nremember_owner = 0\n\
                      security_driver = \"none\"\ncgroup_controllers = []\nnamespaces = []\nstdio_handler = \"file\"\n";

/// Puts the test's directory in place of libvirt's own, then becomes libvirtd. Of the machine's
/// modules for QEMU only accelerators are left: a QEMU of another version, asked for all its types
/// as libvirt asks, loads those that it has not itself, and aborts.
const START: &str = r#"
    set -e
    mount --make-rprivate /
    for pair in etc:/etc/libvirt run:/run/libvirt lib:/var/lib/libvirt log:/var/log/libvirt cache:/var/cache/libvirt; do
        mount --bind "$0/${pair%%:*}" "${pair#*:}"
    done
    for modules in /usr/lib/*/qemu; do
        cp "$modules"/accel-*.so "$0/modules" || continue
        mount --bind "$0/modules" "$modules"
    done
    mount --bind "$0/passwd" /etc/passwd
    mount --bind "$0/group" /etc/group
    exec libvirtd --pid-file "$0/libvirtd.pid"
"#;

pub struct Libvirt {
    daemon: Child,
    dir: PathBuf,
}

impl Libvirt {
    /// Starts it in `dir`. If this machine cannot, counts the running test as skipped and returns
    /// `None`.
    pub fn start(dir: &Path) -> Option<Self> {
        let skip = |reason: &str| record_skip(Scope::Test, reason);
        for program in ["libvirtd", "virsh", "unshare"] {
            if !has_program(program) {
                skip(&format!(
                    "there is no {program} (Debian: libvirt-daemon-driver-qemu, libvirt-clients)"
                ));
                return None;
            }
        }
        if !rustix::process::geteuid().is_root() {
            skip("only root can give libvirtd directories of its own");
            return None;
        }
        for (name, place) in [
            ("etc", "/etc"),
            ("run", "/run"),
            ("lib", "/var/lib"),
            ("log", "/var/log"),
            ("cache", "/var/cache"),
        ] {
            std::fs::create_dir(dir.join(name)).unwrap();
            if !Path::new(place).join("libvirt").is_dir() {
                skip(&format!("there is no {place}/libvirt to put another in its place"));
                return None;
            }
        }
        std::fs::create_dir(dir.join("modules")).unwrap();
        std::fs::write(dir.join("etc/qemu.conf"), CONFIG).unwrap();
        // libvirt wants its user to be there although nothing runs as it.
        for (name, line) in [
            ("passwd", "libvirt-qemu:x:64055:64055::/:/bin/false\n"),
            ("group", "libvirt-qemu:x:64055:\n"),
        ] {
            let text = std::fs::read_to_string(Path::new("/etc").join(name)).unwrap();
            std::fs::write(dir.join(name), text + line).unwrap();
        }
        let log = std::fs::File::create(dir.join("daemon.log")).unwrap();
        let daemon = Command::new("unshare")
            .args(["-m", "sh", "-c", START])
            .arg(dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut libvirt = Self { daemon, dir: dir.into() };
        let mut ended = false;
        wait_until("libvirt answers", || {
            ended = libvirt.daemon.try_wait().unwrap().is_some();
            ended || libvirt.virsh(&["list"]).status.success()
        });
        if ended {
            let log = std::fs::read_to_string(dir.join("daemon.log")).unwrap_or_default();
            skip(&format!(
                "libvirtd does not start here: {}",
                log.lines().last().unwrap_or_default()
            ));
            return None;
        }
        Some(libvirt)
    }

    pub fn uri(&self) -> String {
        format!("qemu+unix:///system?socket={}", self.dir.join("run/libvirt-sock").display())
    }

    pub fn virsh(&self, words: &[&str]) -> Output {
        Command::new("virsh").args(["-q", "-c", &self.uri()]).args(words).output().unwrap()
    }

    /// virsh, which must succeed.
    pub fn must(&self, words: &[&str]) -> String {
        let output = self.virsh(words);
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts a domain with TCG: `inside` is the part of its definition that tells what it boots
    /// and has.
    pub fn create(&self, name: &str, qemu: &str, inside: &str, devices: &str) -> u32 {
        let xml = format!(
            "<domain type='qemu'><name>{name}</name><memory unit='MiB'>128</memory><vcpu>1</vcpu>{inside}\
             <devices><emulator>{qemu}</emulator>{devices}<memballoon model='none'/></devices></domain>"
        );
        let path = self.dir.join(format!("{name}.xml"));
        std::fs::write(&path, xml).unwrap();
        self.must(&["create", path.to_str().unwrap()]);
        let pid = std::fs::read_to_string(self.dir.join(format!("run/qemu/{name}.pid"))).unwrap();
        pid.trim().parse().unwrap()
    }

    pub fn options(&self, domain: &str) -> AttachOptions {
        AttachOptions { monitor: Monitor::Libvirt { domain: domain.into(), uri: Some(self.uri()) } }
    }
}

impl Drop for Libvirt {
    /// Its VMs outlive it unless they are ended first.
    fn drop(&mut self) {
        let names = self.virsh(&["list", "--name"]).stdout;
        for name in String::from_utf8_lossy(&names).lines().filter(|name| !name.is_empty()) {
            self.virsh(&["destroy", name]);
        }
        let pid = rustix::process::Pid::from_raw(self.daemon.id().cast_signed()).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let deadline = std::time::Instant::now() + PATIENCE;
        while matches!(self.daemon.try_wait(), Ok(None)) && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}
