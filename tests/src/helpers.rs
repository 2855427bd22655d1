//! The helper processes of an engine, and their deaths.

use crate::PATIENCE;
use rustix::process::{Pid, Signal, kill_process};
use std::time::Instant;

/// The helper processes of engine `engine` whose hidden command is `word`, for example `__disks`.
pub fn helpers_of(engine: u32, word: &str) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{engine}/task")).into_iter().flatten().flatten();
    let children = |task: std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("children")).unwrap_or_default()
    };
    let mut helpers = Vec::new();
    for pid in tasks.map(children).flat_map(|text| {
        text.split_whitespace().filter_map(|word| word.parse().ok()).collect::<Vec<u32>>()
    }) {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if line.split(|byte| *byte == 0).any(|argument| argument == word.as_bytes()) {
            helpers.push(pid);
        }
    }
    helpers
}

/// The one helper process `word` of an engine. Waits until there is one.
pub fn helper_of(engine: u32, word: &str) -> u32 {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let [helper] = helpers_of(engine, word)[..] {
            return helper;
        }
        assert!(Instant::now() < deadline, "engine {engine} has no single process {word}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Kills a process, as a host without memory does. It may have ended.
pub fn kill(pid: u32) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        let _ = kill_process(pid, Signal::KILL);
    }
}
