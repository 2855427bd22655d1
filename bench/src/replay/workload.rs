//! The guests' work: a fixed amount of it between two lines on the console, in whatever way the
//! guest is run.
//!
//! ```text
//!   small guest   shell: the script's name is typed ─▶ kf-begin ─ work ─ kf-end ─ a line feed is typed ─▶ power off
//!   real guest    the script is its job             ─▶ kf-begin ─ work ─ kf-end ─ `poweroff` is typed ───▶ power off
//! ```

use super::initrd;
use crate::guest::{Guest, Real};
use crate::overhead::compile;
use crate::{Error, Options};
use std::path::Path;

/// Said before the work.
pub const BEGIN: &str = "kf-begin";
/// Said behind it.
pub const END: &str = "kf-end";

/// Which guest it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum In {
    Small,
    Real,
}

/// A workload, before its guest is looked for.
pub struct Kind {
    /// As in keys.
    pub key: &'static str,
    /// For people.
    pub about: &'static str,
    place: In,
    /// It mostly waits: its ratios are in no mean.
    pub is_idle: bool,
    /// Shell commands that come before the work, and the work, `units` of it: about a second each.
    script: fn(units: u32) -> (String, String),
}

impl Kind {
    /// Whether it needs the guest with a distribution's programs.
    pub fn is_of_real_guest(&self) -> bool {
        self.place == In::Real
    }
}

/// All of them.
pub const ALL: [Kind; 9] = [
    Kind {
        key: "idle",
        about: "sleeping",
        place: In::Small,
        is_idle: true,
        script: |units| (String::new(), format!("sleep {units}")),
    },
    Kind {
        key: "compute",
        about: "floating-point sums, no memory to speak of",
        place: In::Small,
        is_idle: false,
        script: |units| {
            let steps = units * 200_000;
            (String::new(), format!("awk 'BEGIN{{for(i=0;i<{steps};i++)s+=i*i; print s}}'"))
        },
    },
    Kind {
        key: "hash",
        about: "SHA-256 through a pipe",
        place: In::Small,
        is_idle: false,
        script: |units| {
            (
                String::new(),
                format!("dd if=/dev/zero bs=1M count={} 2>/dev/null | sha256sum", units * 28),
            )
        },
    },
    Kind {
        key: "processes",
        about: "what a compiler run does: processes, small files, sorting, allocation, pipes",
        place: In::Small,
        is_idle: false,
        script: |units| {
            let jobs = units * 25;
            let work = format!(
                "i=0; while [ $i -lt {jobs} ]; do /kfguest --compile-job $i 0 | md5sum >/dev/null; i=$((i+1)); done"
            );
            ("mkdir -p /tmp/kf".into(), work)
        },
    },
    Kind {
        key: "compile",
        about: "gcc, assembler and linker",
        place: In::Real,
        is_idle: false,
        script: |units| {
            let work = format!(
                "n=0; while [ $n -lt {units} ]; do gcc -std=gnu11 -D_GNU_SOURCE -O2 -c params.c; n=$((n + 1)); done"
            );
            (compile::sources(), work)
        },
    },
    Kind {
        key: "redis",
        about: "redis-benchmark, sets and gets",
        place: In::Real,
        is_idle: false,
        script: |units| {
            let before = "redis-server --save '' --daemonize yes >/dev/null\n\
                          until redis-cli ping >/dev/null 2>&1; do sleep 0.2; done";
            (
                before.into(),
                format!("redis-benchmark -q -n {} -c 8 -t set,get >/dev/null", units * 700),
            )
        },
    },
    Kind {
        key: "sqlite",
        about: "rows inserted into a table, a transaction each",
        place: In::Real,
        is_idle: false,
        script: |units| {
            let before = format!(
                "sqlite3 /tmp/db 'create table t(a integer primary key, b text)'\n\
                 i=0; while [ $i -lt {} ]; do echo \"insert into t(b) values('row $i of a table');\"; i=$((i+1)); done >/tmp/rows",
                units * 400
            );
            (before, "sqlite3 /tmp/db </tmp/rows".into())
        },
    },
    Kind {
        key: "web",
        about: "nginx, asked by ab",
        place: In::Real,
        is_idle: false,
        script: |units| {
            let before = "mkdir -p /var/log/nginx; nginx\n\
                          until ab -n 1 http://127.0.0.1/ >/dev/null 2>&1; do sleep 0.2; done";
            (before.into(), format!("ab -q -n {} -c 4 http://127.0.0.1/ >/dev/null", units * 300))
        },
    },
    Kind {
        key: "postmark",
        about: "small files made, read, appended to, removed",
        place: In::Real,
        is_idle: false,
        script: |units| {
            let transactions = units * 1500;
            let before = format!(
                "mkdir /tmp/mail\nprintf 'set location /tmp/mail\\nset number 500\\nset transactions {transactions}\\nrun\\nquit\\n' >/tmp/mail.conf"
            );
            (before, "postmark </tmp/mail.conf >/dev/null".into())
        },
    },
];

/// A workload with its guest.
pub struct Workload {
    /// What it is.
    pub kind: &'static Kind,
    /// QEMU's command line.
    pub command: Vec<String>,
    /// What is typed once the guest is ready; none where it begins by itself.
    pub typed: Option<String>,
    /// What switches the guest off.
    pub off: &'static str,
}

impl Workload {
    /// `units` of it. Scripts are written into `dir`.
    pub fn prepare(
        kind: &'static Kind,
        units: u32,
        options: &Options,
        dir: &Path,
    ) -> Result<Self, Error> {
        let (before, work) = (kind.script)(units);
        let script = format!("{before}\necho {BEGIN}\n{work}\necho {END}\n");
        let mut made = match kind.place {
            In::Small => {
                let mut command = Guest::find(options)?.command("256M", "kf.work=shell");
                let path = dir.join(format!("{}-{units}.cpio", kind.key));
                let given = command.iter().position(|word| word == "-initrd").map(|at| at + 1);
                if let Some(word) = given.and_then(|at| command.get_mut(at)) {
                    let script = format!("{script}read x\nbusybox poweroff -f\n");
                    initrd::write(Path::new(word), &script, &path)?;
                    *word = path.display().to_string();
                }
                Self { kind, command, typed: Some(format!("sh /{}", initrd::NAME)), off: "" }
            }
            In::Real => {
                let path = dir.join(format!("{}-{units}.sh", kind.key));
                let script = format!("#!/bin/bash\nset -e\ncd /tmp\n{script}sleep 1000\n");
                std::fs::write(&path, script)
                    .map_err(Error::io(format!("write {}", path.display())))?;
                let command = Real::find(options)?.command("1G", &path);
                Self { kind, command, typed: None, off: "poweroff" }
            }
        };
        if let Some(qemu) = &options.qemu {
            made.command[0] = qemu.display().to_string();
        }
        // As a recording has it, so that all ways have the same clocks.
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
    fn what_is_typed_fits_a_serial_port_and_no_work_ends_itself() {
        assert!(initrd::NAME.len() < 8);
        for kind in &ALL {
            let (before, work) = (kind.script)(4);
            assert!(
                !before.contains(END) && !work.contains(END) && !work.is_empty(),
                "{}",
                kind.key
            );
        }
    }
}
