//! Parses squeue's output: a line `ARRAY|TASK|STATE|NODES|REASON` for each task
//! (`--format=%F|%K|%T|%N|%r`). All versions of Slurm have this format; that of `--json` differs.

use std::fmt;

/// The option for the format that [`parse`] reads.
pub const FORMAT: &str = "--format=%F|%K|%T|%N|%r";

/// A task of a job array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlurmTask {
    /// The array's job id.
    pub job: u64,
    /// Its index in the array; `None` if squeue shows several waiting tasks as one.
    pub index: Option<u32>,
    /// Slurm's name of its state: `RUNNING`, `PENDING`, ...
    pub state: String,
    /// The node on which it runs; empty if it does not run.
    pub node: String,
    /// Slurm's reason why the task does not run; empty if it runs.
    pub reason: String,
}

impl SlurmTask {
    /// Returns whether processes of the task may exist.
    pub fn is_running(&self) -> bool {
        matches!(
            &*self.state,
            "RUNNING" | "SUSPENDED" | "STOPPED" | "SIGNALING" | "STAGE_OUT" | "RESIZING"
        )
    }

    /// Returns whether the task has not run yet but still may.
    pub fn is_waiting(&self) -> bool {
        matches!(
            &*self.state,
            "PENDING"
                | "CONFIGURING"
                | "REQUEUED"
                | "REQUEUE_FED"
                | "REQUEUE_HOLD"
                | "SPECIAL_EXIT"
        )
    }
}

impl fmt::Display for SlurmTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let index = self.index.map_or_else(|| "*".into(), |index| index.to_string());
        write!(f, "job {}_{index} {}", self.job, self.state)?;
        if !self.node.is_empty() {
            write!(f, " on {}", self.node)?;
        }
        if matches!(&*self.reason, "" | "None") { Ok(()) } else { write!(f, " ({})", self.reason) }
    }
}

/// Parses the tasks of `text`. Other lines, for example of a site's wrapper, are skipped.
pub fn parse(text: &str) -> Vec<SlurmTask> {
    let task = |line: &str| {
        let mut words = line.trim().splitn(5, '|');
        let (job, index) = (words.next()?.parse().ok()?, words.next()?.parse().ok());
        let (state, node) = (words.next()?.to_owned(), words.next()?.to_owned());
        let reason = words.next()?.to_owned();
        Some(SlurmTask { job, index, state, node, reason })
    };
    text.lines().filter_map(task).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_tasks() {
        let text = "12|0|RUNNING|n1|None\nmaintenance tonight\n12|1|PENDING||Resources\n12|2-4|PENDING||Priority\n13|N/A|NODE_FAIL|n2|NodeDown\n|||\n";
        let all = parse(text);
        assert_eq!(all.len(), 4);
        assert!(
            all[0].is_running()
                && !all[0].is_waiting()
                && all[1].is_waiting()
                && all[2].index.is_none()
        );
        assert!(!all[3].is_running() && !all[3].is_waiting());
        assert_eq!(all[0].to_string(), "job 12_0 RUNNING on n1");
        assert_eq!(all[3].to_string(), "job 13_* NODE_FAIL on n2 (NodeDown)");
    }
}
