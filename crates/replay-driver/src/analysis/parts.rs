//! Makes the part of an interval: its QEMU, with the tool's plugin.

use super::Analysis;
use super::files::{
    DONE, FAILED, FinishedPart, MESSAGE_LINES, QEMU_LOG, empty_dir, finished_part, part_dir,
    qemu_messages, write,
};
use crate::error::{Error, Result};
use crate::guest_ram::guest_ram;
use crate::{ReplayControl, ReplayOptions};
use keyframe_analysis::{Icount, IcountInterval, Part, ReplayRam, RunContext};
use keyframe_inspect::source_of;
use keyframe_replay::interval::{Interval, RecordedCheckpoint};
use keyframe_units::{duration_ns, elapsed_ns, error_chain};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

impl Analysis<'_> {
    /// Returns the directory of the interval's part.
    pub(super) fn part_dir(&self, interval: &Interval) -> PathBuf {
        part_dir(&self.out, interval)
    }

    /// Makes the part of `interval` in up to `tries_max` tries, and publishes it, or the reason why
    /// it failed. `maker` is the name of the worker. `on_progress` is called now and then with the
    /// instruction that QEMU has reached.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`] if `interrupted` became true, with nothing published; other errors if
    /// the analysis' directory cannot be written. A replay that fails is no error.
    pub fn make(
        &self,
        interval: &Interval,
        maker: &str,
        tries_max: u32,
        interrupted: &AtomicBool,
        on_progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let (began, began_at) = (Instant::now(), SystemTime::now());
        let dir = self.out.join("parts").join(format!(".{:06}.{maker}", interval.index));
        let mut log = String::new();
        let mut tries = 0;
        loop {
            tries += 1;
            empty_dir(&dir)?;
            let control = ReplayControl { interrupted, on_progress: &mut *on_progress };
            let ran = self.run(&dir, std::slice::from_ref(interval), control);
            if interrupted.load(Ordering::Relaxed) {
                // No other process knows of this directory.
                let _ = std::fs::remove_dir_all(&dir);
                return Err(Error::Interrupted);
            }
            let _ = match &ran {
                Ok(_) => {
                    writeln!(log, "try {tries}: done after {:.3} s", began.elapsed().as_secs_f64())
                }
                Err(error) => writeln!(log, "try {tries}: {}", error_chain(error)),
            };
            let messages = qemu_messages(&dir.join(QEMU_LOG));
            log.push_str(&messages);
            write(&dir.join("log"), log.as_bytes())?;
            match ran {
                Ok(parts) => {
                    let since = began_at.duration_since(UNIX_EPOCH).unwrap_or_default();
                    let done = FinishedPart {
                        index: interval.index,
                        tries,
                        wall_ns: elapsed_ns(began),
                        began_at_ns: duration_ns(since),
                        worker: maker.to_owned(),
                        is_old: false,
                        parts,
                    };
                    let text = serde_json::to_string(&done).unwrap_or_default();
                    write(&dir.join(DONE), text.as_bytes())?;
                    return self.publish(&dir, interval);
                }
                Err(error) if tries >= tries_max => {
                    let text = with_last_lines(error_chain(&error), &messages);
                    write(&dir.join(FAILED), text.as_bytes())?;
                    return self.publish(&dir, interval);
                }
                Err(_) => {}
            }
        }
    }

    /// Renames `dir` to the interval's part, unless another worker was faster.
    fn publish(&self, dir: &Path, interval: &Interval) -> Result<()> {
        let place = self.part_dir(interval);
        let failed = |e| Error::file("rename", dir, e);
        if std::fs::rename(dir, &place).is_ok() {
            return Ok(());
        }
        if finished_part(&self.out, interval).is_some() {
            return std::fs::remove_dir_all(dir).map_err(failed);
        }
        // A part that failed before is there.
        std::fs::remove_dir_all(&place).map_err(failed)?;
        std::fs::rename(dir, &place).map_err(failed)
    }

    /// Returns the intervals before `first` that warm up the tool.
    fn warm_up(&self, first: &Interval) -> Vec<Interval> {
        // The simulation of an interval does not end where the next interval begins.
        if self.subject.is_approximate() {
            return Vec::new();
        }
        let progress = self.progress();
        let all = &progress.known.intervals;
        let Some(at) = all.iter().position(|one| one.index == first.index) else {
            return Vec::new();
        };
        let before = &all[..=at];
        let consecutive =
            before.windows(2).rev().take_while(|pair| pair[0].end_icount == pair[1].from_icount);
        let count = consecutive.take(self.tool.warm_up_intervals()).count();
        before[at - count..at].to_vec()
    }

    /// Makes the parts of `intervals`, which are consecutive, in one QEMU that runs through the
    /// tool's warm-up and then through them.
    pub(super) fn run(
        &self,
        dir: &Path,
        intervals: &[Interval],
        control: ReplayControl<'_>,
    ) -> Result<Vec<Part>> {
        let Some(first) = intervals.first() else { return Ok(Vec::new()) };
        let before = self.warm_up(first);
        let all = [&*before, intervals].concat();
        let begin = before.first().unwrap_or(first).begin;
        let mut parts = self.run_from(dir, begin, &all, control)?;
        parts.retain(|part| before.iter().all(|one| one.index != part.interval.index));
        Ok(parts)
    }

    /// Makes the parts of `intervals`, which are consecutive, in one QEMU that begins at the
    /// checkpoint `begin`. The tool drops what lies before the first interval.
    fn run_from(
        &self,
        dir: &Path,
        begin: RecordedCheckpoint,
        intervals: &[Interval],
        control: ReplayControl<'_>,
    ) -> Result<Vec<Part>> {
        let Some(first) = intervals.first() else { return Ok(Vec::new()) };
        let warm_up = (begin.icount < first.from_icount).then_some(IcountInterval {
            index: first.index,
            start: Icount(begin.icount),
            end: Icount(first.from_icount),
        });
        let context = RunContext {
            interface: self.interface,
            plugin: self.plugin.clone(),
            ram: self.ram_at(begin)?,
            dir: dir.to_owned(),
            warm_up,
            intervals: intervals.iter().copied().map(icount_interval).collect(),
        };
        let mut running = self.tool.begin(&context)?;
        let options = ReplayOptions {
            extra: vec!["-plugin".into(), running.option().into()],
            log: Some(dir.join(QEMU_LOG)),
            lazy: !self.tool.reads_ram(),
            ..ReplayOptions::default()
        };
        let mut on_end = || running.cut().map_err(Error::from);
        self.subject.run_intervals(begin, intervals, options, control, &mut on_end)?;
        Ok(running.finish()?)
    }

    /// Describes the guest's RAM at a checkpoint.
    fn ram_at(&self, checkpoint: RecordedCheckpoint) -> Result<ReplayRam> {
        let store = self.subject.store();
        let sealed = store.sealed(checkpoint.checkpoint);
        let meta = sealed.map_err(|e| Error::store(store.path(), e))?.meta;
        let source = source_of(&meta.machine, &meta.ram);
        guest_ram(&source, &meta.machine.guest_map.unwrap_or_default(), self.interface)
    }
}

/// Adds the last lines of QEMU's messages, which tell why a replay failed, to its error.
fn with_last_lines(error: String, messages: &str) -> String {
    let last: Vec<&str> = messages.lines().rev().take(MESSAGE_LINES).collect();
    last.iter().rev().fold(error, |all, line| all + "\n  " + line)
}

fn icount_interval(interval: Interval) -> IcountInterval {
    IcountInterval {
        index: interval.index,
        start: Icount(interval.from_icount),
        end: Icount(interval.end_icount),
    }
}
