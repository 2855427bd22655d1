//! A memory cgroup of the test's own, in either version of cgroups.

use keyframe_testing::{Scope, record_skip};
use std::path::PathBuf;
use std::process::Command;

/// A memory cgroup. It is removed when this is dropped.
pub struct MemoryCgroup(PathBuf);

impl MemoryCgroup {
    /// Makes one with a limit of `limit_bytes`. Skips the test if the host or the user cannot.
    pub fn new(limit_bytes: u64) -> Option<Self> {
        let made = Self::make(limit_bytes);
        if made.is_none() {
            record_skip(Scope::Test, "no memory cgroup can be made here");
        }
        made
    }

    fn make(limit_bytes: u64) -> Option<Self> {
        let name = format!("keyframe-test-{}", std::process::id());
        for (root, limit) in
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
        {
            let folder = PathBuf::from(root).join(&name);
            if std::fs::create_dir(&folder).is_err() {
                continue;
            }
            let cgroup = Self(folder);
            let limited = cgroup.0.join(limit);
            if limited.exists() && std::fs::write(limited, limit_bytes.to_string()).is_ok() {
                return Some(cgroup);
            }
        }
        None
    }

    /// The same command, in this cgroup.
    pub fn wrap(&self, command: &Command) -> Command {
        let enter = format!("echo $$ >{} && exec \"$@\"", self.0.join("cgroup.procs").display());
        let mut wrapped = Command::new("sh");
        wrapped.args(["-c", &enter, "sh"]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => wrapped.env(name, value),
                None => wrapped.env_remove(name),
            };
        }
        if let Some(folder) = command.get_current_dir() {
            wrapped.current_dir(folder);
        }
        wrapped
    }

    /// How many of its processes the kernel has ended because memory ran out.
    pub fn ended_by_kernel(&self) -> u64 {
        let texts = ["memory.oom_control", "memory.events"]
            .map(|name| std::fs::read_to_string(self.0.join(name)).unwrap_or_default());
        let counts = texts.iter().flat_map(|text| text.lines());
        counts.filter_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok()).sum()
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        // A process that has just ended may still count.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}
