//! Runners, which provide the workers of a queue.

use crate::{Error, Queue, Result};
use std::str::FromStr;

/// The value of `--on`: the place where intervals are processed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunnerKind {
    /// In this process.
    Local,
    /// In Slurm jobs.
    Slurm {
        /// The partition; `None` for Slurm's default.
        partition: Option<String>,
    },
}

impl FromStr for RunnerKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.split_once(':') {
            None if text == "local" => Ok(Self::Local),
            None if text == "slurm" => Ok(Self::Slurm { partition: None }),
            Some(("slurm", name)) if !name.is_empty() => {
                Ok(Self::Slurm { partition: Some(name.into()) })
            }
            _ => Err(Error::UnknownRunner(text.into())),
        }
    }
}

/// Provides the workers of a queue.
pub trait Runner {
    /// Starts workers if needed, and returns the items of lost workers to the queue. The caller
    /// repeats it until all items are settled. Errors: those of the queue and of the workers.
    fn tend(&mut self, queue: &Queue) -> Result<()>;

    /// Ends the workers, after all items are settled or if the results are not wanted any more.
    /// Errors: those of the queue and of the workers.
    fn end(&mut self, queue: &Queue) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runners_are_parsed_by_name() {
        assert_eq!("local".parse::<RunnerKind>().unwrap(), RunnerKind::Local);
        assert_eq!("slurm".parse::<RunnerKind>().unwrap(), RunnerKind::Slurm { partition: None });
        assert_eq!(
            "slurm:long".parse::<RunnerKind>().unwrap(),
            RunnerKind::Slurm { partition: Some("long".into()) }
        );
        for wrong in ["", "slurm:", "kubernetes", "local:2"] {
            let error = wrong.parse::<RunnerKind>().unwrap_err();
            assert!(error.fix().unwrap().contains("slurm:PARTITION"), "{error}");
        }
    }
}
