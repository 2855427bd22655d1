//! The workloads: a fixed amount of work between two lines on the console, with every method.
//!
//! ```text
//!   small guest   the script's name is typed ─▶ kf-begin ─ work ─ kf-end ─ line feed typed ─▶ off
//!   real guest    the script is its job ──────▶ kf-begin ─ work ─ kf-end ─ `poweroff` typed ─▶ off
//! ```

use crate::guest_files::{RealGuest, SmallGuest};
use crate::overhead::compile_job;
use crate::script_initrd;
use crate::{Error, Options};
use std::path::Path;

/// The line that the guest prints before the work.
pub const BEGIN: &str = "kf-begin";
/// The line that the guest prints after the work.
pub const END: &str = "kf-end";

/// The guest that a workload needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GuestKind {
    Small,
    Real,
}

/// The shell commands of a workload.
pub struct Script {
    /// Preparation, before the line [`BEGIN`].
    setup: String,
    /// The timed work.
    work: String,
}

impl Script {
    fn without_setup(work: String) -> Self {
        Self { setup: String::new(), work }
    }
}

/// A workload of the benchmark.
pub struct Workload {
    /// Its name in keys.
    pub key: &'static str,
    /// Its description for a person.
    pub about: &'static str,
    guest: GuestKind,
    /// It mostly waits, so that its ratios are in no mean.
    pub is_idle: bool,
    /// Makes the script with `units` of work, about one second each.
    script: fn(units: u32) -> Script,
}

impl Workload {
    /// Returns whether it needs the real guest.
    pub fn is_of_real_guest(&self) -> bool {
        self.guest == GuestKind::Real
    }
}

/// All workloads.
pub const ALL: [Workload; 9] = [
    Workload {
        key: "idle",
        about: "sleeping",
        guest: GuestKind::Small,
        is_idle: true,
        script: |units| Script::without_setup(format!("sleep {units}")),
    },
    Workload {
        key: "compute",
        about: "floating-point sums, hardly any memory",
        guest: GuestKind::Small,
        is_idle: false,
        script: |units| {
            let steps = units * 200_000;
            let program = format!("BEGIN{{for(i=0;i<{steps};i++)s+=i*i; print s}}");
            Script::without_setup(format!("awk '{program}'"))
        },
    },
    Workload {
        key: "hash",
        about: "SHA-256 through a pipe",
        guest: GuestKind::Small,
        is_idle: false,
        script: |units| {
            let mib = units * 28;
            Script::without_setup(format!(
                "dd if=/dev/zero bs=1M count={mib} 2>/dev/null | sha256sum"
            ))
        },
    },
    Workload {
        key: "processes",
        about: "like a compiler run: processes, small files, sorting, allocation, pipes",
        guest: GuestKind::Small,
        is_idle: false,
        script: |units| Script {
            setup: "mkdir -p /tmp/kf".into(),
            work: format!(
                "i=0; while [ $i -lt {} ]; do \
                 /kfguest --compile-job $i 0 | md5sum >/dev/null; i=$((i+1)); done",
                units * 25
            ),
        },
    },
    Workload {
        key: "compile",
        about: "gcc, assembler and linker",
        guest: GuestKind::Real,
        is_idle: false,
        script: |units| Script {
            setup: compile_job::sources(),
            work: format!(
                "n=0; while [ $n -lt {units} ]; do \
                 gcc -std=gnu11 -D_GNU_SOURCE -O2 -c params.c; n=$((n + 1)); done"
            ),
        },
    },
    Workload {
        key: "redis",
        about: "redis-benchmark, sets and gets",
        guest: GuestKind::Real,
        is_idle: false,
        script: |units| Script {
            setup: "redis-server --save '' --daemonize yes >/dev/null\n\
                    until redis-cli ping >/dev/null 2>&1; do sleep 0.2; done"
                .into(),
            work: format!("redis-benchmark -q -n {} -c 8 -t set,get >/dev/null", units * 700),
        },
    },
    Workload {
        key: "sqlite",
        about: "rows inserted into a table, a transaction each",
        guest: GuestKind::Real,
        is_idle: false,
        script: |units| Script {
            setup: format!(
                "sqlite3 /tmp/db 'create table t(a integer primary key, b text)'\n\
                 i=0; while [ $i -lt {} ]; do \
                 echo \"insert into t(b) values('row $i of a table');\"; i=$((i+1)); done \
                 >/tmp/rows",
                units * 400
            ),
            work: "sqlite3 /tmp/db </tmp/rows".into(),
        },
    },
    Workload {
        key: "web",
        about: "nginx, with ab as the client",
        guest: GuestKind::Real,
        is_idle: false,
        script: |units| Script {
            setup: "mkdir -p /var/log/nginx; nginx\n\
                    until ab -n 1 http://127.0.0.1/ >/dev/null 2>&1; do sleep 0.2; done"
                .into(),
            work: format!("ab -q -n {} -c 4 http://127.0.0.1/ >/dev/null", units * 300),
        },
    },
    Workload {
        key: "postmark",
        about: "small files created, read, appended to, removed",
        guest: GuestKind::Real,
        is_idle: false,
        script: |units| Script {
            setup: format!(
                "mkdir /tmp/mail\n\
                 printf 'set location /tmp/mail\\nset number 500\\nset transactions {}\\n\
                 run\\nquit\\n' >/tmp/mail.conf",
                units * 1500
            ),
            work: "postmark </tmp/mail.conf >/dev/null".into(),
        },
    },
];

/// A workload with its guest.
pub struct PreparedWorkload {
    /// The workload.
    pub workload: &'static Workload,
    /// QEMU's command line.
    pub command: Vec<String>,
    /// The command to type once the guest is ready; `None` if the work begins by itself.
    pub start_command: Option<String>,
    /// The command that switches the guest off.
    pub off_command: &'static str,
}

impl PreparedWorkload {
    /// Prepares `units` of `workload`. Writes scripts into `dir`.
    pub fn prepare(
        workload: &'static Workload,
        units: u32,
        options: &Options,
        dir: &Path,
    ) -> Result<Self, Error> {
        let Script { setup, work } = (workload.script)(units);
        let script = format!("{setup}\necho {BEGIN}\n{work}\necho {END}\n");
        let mut made = match workload.guest {
            GuestKind::Small => {
                let mut command = SmallGuest::find(options)?.command("256M", "kf.work=shell");
                let path = dir.join(format!("{}-{units}.cpio", workload.key));
                let initrd = command.iter().position(|word| word == "-initrd").map(|at| at + 1);
                if let Some(word) = initrd.and_then(|at| command.get_mut(at)) {
                    let script = format!("{script}read x\nbusybox poweroff -f\n");
                    script_initrd::write(Path::new(word), &script, &path)?;
                    *word = path.display().to_string();
                }
                let start_command = Some(format!("sh /{}", script_initrd::NAME));
                Self { workload, command, start_command, off_command: "" }
            }
            GuestKind::Real => {
                let path = dir.join(format!("{}-{units}.sh", workload.key));
                let script = format!("#!/bin/bash\nset -e\ncd /tmp\n{script}sleep 1000\n");
                std::fs::write(&path, script)
                    .map_err(Error::io(format!("write {}", path.display())))?;
                let command = RealGuest::find(options)?.command("1G", &path);
                Self { workload, command, start_command: None, off_command: "poweroff" }
            }
        };
        if let Some(qemu) = &options.qemu {
            made.command[0] = qemu.display().to_string();
        }
        // As in a recording, so that the guest has the same clocks with every method.
        for word in &mut made.command {
            if word == "pc" {
                "pc,hpet=off".clone_into(word);
            }
        }
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_typed_name_fits_a_serial_port_and_no_work_prints_the_end() {
        assert!(script_initrd::NAME.len() < 8);
        for workload in &ALL {
            let Script { setup, work } = (workload.script)(4);
            assert!(
                !setup.contains(END) && !work.contains(END) && !work.is_empty(),
                "{}",
                workload.key
            );
        }
    }
}
