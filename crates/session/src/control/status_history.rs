//! What is known of each VM over time: its engine's newest answer, and the checkpoints or epochs
//! that earlier answers had.

use super::EngineStatus;
use std::collections::{BTreeMap, VecDeque};

/// Checkpoints of a VM that are kept.
pub const KEPT: usize = 240;

/// One checkpoint of a VM, or one epoch of its replication, as a status showed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryPoint {
    /// Its number.
    pub number: u64,
    /// How long the VM stood.
    pub pause_ns: u64,
    /// Pages in it.
    pub pages: u64,
    /// Bytes that were stored, or sent.
    pub bytes: u64,
}

impl HistoryPoint {
    fn newest(status: &EngineStatus) -> Option<Self> {
        if let Some(of) = &status.replication {
            let (pause_ns, pages, bytes) = (of.pause_ns, of.pages, of.wire_bytes);
            return of.epoch.map(|number| Self { number, pause_ns, pages, bytes });
        }
        let last = status.last.as_ref()?;
        let (number, pause_ns) = (last.id, last.pause_ns);
        Some(Self { number, pause_ns, pages: last.dirty_pages, bytes: last.stored_bytes })
    }
}

/// The VM's name, with its engine's answer or the reason why there is none.
pub type StatusAnswer = (String, Result<EngineStatus, String>);

/// The history of one VM: the newest status of its engine, and its last checkpoints or epochs.
#[derive(Debug)]
pub struct VmHistory {
    /// What its engine said last.
    pub status: EngineStatus,
    /// Why it did not answer the last time. `None` if it did.
    pub silent: Option<String>,
    /// What was seen, the oldest first.
    pub points: VecDeque<HistoryPoint>,
}

/// The history of all VMs whose engines answer: what the answers of the engines over time have
/// shown.
#[derive(Debug, Default)]
pub struct History {
    vms: BTreeMap<String, VmHistory>,
}

impl History {
    /// Adds the answers of engines, all of the same time. A VM without an answer has ended, and is
    /// removed.
    pub fn take(&mut self, answers: Vec<StatusAnswer>) {
        self.vms.retain(|name, _| answers.iter().any(|(answered, _)| answered == name));
        for (name, answer) in answers {
            let vm = self.vms.entry(name).or_insert_with(|| VmHistory {
                status: EngineStatus::default(),
                silent: None,
                points: VecDeque::new(),
            });
            match answer {
                Err(why) => vm.silent = Some(why),
                Ok(status) => {
                    vm.silent = None;
                    if vm.status.engine_pid != status.engine_pid {
                        vm.points.clear();
                    }
                    let newest = HistoryPoint::newest(&status);
                    if newest.is_some_and(|point| {
                        vm.points.back().is_none_or(|last| last.number != point.number)
                    }) {
                        vm.points.extend(newest);
                    }
                    vm.points.drain(..vm.points.len().saturating_sub(KEPT));
                    vm.status = status;
                }
            }
        }
    }

    /// Returns the VMs with their names, sorted by name.
    pub fn vms(&self) -> impl ExactSizeIterator<Item = (&str, &VmHistory)> {
        self.vms.iter().map(|(name, vm)| (name.as_str(), vm))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::ReplicationStatus;

    fn epoch(engine_pid: u32, number: u64) -> EngineStatus {
        let replication = Some(ReplicationStatus {
            epoch: Some(number),
            pause_ns: number * 10,
            ..Default::default()
        });
        EngineStatus { engine_pid, replication, ..Default::default() }
    }

    fn numbers(history: &History) -> Vec<u64> {
        history.vms().flat_map(|(_, vm)| vm.points.iter().map(|point| point.number)).collect()
    }

    #[test]
    fn each_epoch_is_kept_once_and_only_those_of_the_engine_that_runs() {
        let mut history = History::default();
        for number in [3, 3, 4, 9] {
            history.take(vec![("a".into(), Ok(epoch(1, number)))]);
        }
        assert_eq!(numbers(&history), [3, 4, 9]);
        history.take(vec![("a".into(), Err("no answer".into()))]);
        assert_eq!(
            (numbers(&history).len(), history.vms().filter(|(_, vm)| vm.silent.is_some()).count()),
            (3, 1)
        );
        history.take(vec![("a".into(), Ok(epoch(2, 1)))]);
        assert_eq!(numbers(&history), [1]);
        for number in 2..1000 {
            history.take(vec![("a".into(), Ok(epoch(2, number)))]);
        }
        assert_eq!((numbers(&history).len(), numbers(&history).last()), (KEPT, Some(&999)));
        history.take(Vec::new());
        assert_eq!(history.vms().len(), 0);
    }
}
