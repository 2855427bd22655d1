//! Who has workers at a queue.

use crate::{Error, Queue, Result};
use std::str::FromStr;

/// Where work is done, as `--on` says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum On {
    /// By this process.
    Local,
    /// By jobs of Slurm's.
    Slurm {
        /// In which partition; Slurm's default where none is named.
        partition: Option<String>,
    },
}

impl FromStr for On {
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

/// Has workers at a queue.
pub trait Runner {
    /// Called again and again until all is settled: sees to it that workers are there, and puts
    /// back what lost ones had.
    fn tend(&mut self, queue: &Queue) -> Result<()>;

    /// Takes its workers away: nothing is left to do, or nobody wants it any more.
    fn end(&mut self, queue: &Queue) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runners_have_names() {
        assert_eq!("local".parse::<On>().unwrap(), On::Local);
        assert_eq!("slurm".parse::<On>().unwrap(), On::Slurm { partition: None });
        assert_eq!(
            "slurm:long".parse::<On>().unwrap(),
            On::Slurm { partition: Some("long".into()) }
        );
        for wrong in ["", "slurm:", "kubernetes", "local:2"] {
            let error = wrong.parse::<On>().unwrap_err();
            assert!(error.fix().unwrap().contains("slurm:PARTITION"), "{error}");
        }
    }
}
