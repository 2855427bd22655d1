//! The lines by which an engine orders its watchdog.

use crate::Error;
use keyframe_vmm::{RollbackPlan, RollbackStep};
use std::time::Duration;

/// The longest line: a plan names each disk and each RAM block.
const LINE_BYTES_MAX: usize = 4 << 20;

/// An order of the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Arm(Duration),
    ArmSaved(Duration),
    Disarm,
    Between,
    /// The plan of a rollback; `None` if the rollback has ended.
    Plan(Option<RollbackPlan>),
    Step(RollbackStep),
    End,
}

/// Assembles lines from the pieces that a pipe delivers.
#[derive(Default)]
pub(super) struct Lines(Vec<u8>);

impl Lines {
    /// Adds `bytes` and returns the lines that are complete now. A line that is too long is cut.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        for byte in bytes {
            if *byte == b'\n' {
                lines.push(String::from_utf8_lossy(&self.0).into_owned());
                self.0.clear();
            } else if self.0.len() < LINE_BYTES_MAX {
                self.0.push(*byte);
            }
        }
        lines
    }
}

pub(super) fn parse(line: &str) -> Result<Order, Error> {
    let bad = || Error::Problem { problem: format!("{line:?} was sent, which is no order") };
    match line.split_at_checked(1) {
        Some(("D", "")) => Ok(Order::Disarm),
        Some(("E", "")) => Ok(Order::End),
        Some(("B", "")) => Ok(Order::Between),
        Some(("C", "")) => Ok(Order::Plan(None)),
        Some(("T", plan)) => Ok(Order::Plan(Some(parse_plan(plan).ok_or_else(bad)?))),
        Some(("S", step)) => Ok(Order::Step(parse_step(step).ok_or_else(bad)?)),
        Some((order @ ("A" | "P"), ms)) => {
            let limit = ms.parse().map(Duration::from_millis).map_err(|_| bad())?;
            Ok(if order == "A" { Order::Arm(limit) } else { Order::ArmSaved(limit) })
        }
        _ => Err(bad()),
    }
}

/// Returns the line that tells the watchdog the plan of a rollback; with `None`, that the rollback
/// has ended. For the tests of drivers.
pub fn plan_line(plan: Option<&RollbackPlan>) -> String {
    let Some(plan) = plan else { return "C\n".into() };
    let flags = [plan.ran, plan.runs, plan.is_intact].map(|flag| if flag { '1' } else { '0' });
    format!("T{} {}\n", flags.iter().collect::<String>(), plan.words)
}

fn parse_plan(text: &str) -> Option<RollbackPlan> {
    let (flags, words) = text.split_once(' ')?;
    let flags: Vec<bool> = flags.chars().map(|flag| flag == '1').collect();
    let [ran, runs, is_intact] = flags[..] else { return None };
    Some(RollbackPlan { ran, runs, is_intact, words: words.into() })
}

/// Returns the line that tells the watchdog the next step of a rollback. For the tests of drivers.
pub fn step_line(step: &RollbackStep) -> String {
    match step {
        RollbackStep::Prepares(load) => format!("Sp{load}\n"),
        RollbackStep::Resets => "Sr\n".into(),
        RollbackStep::Loads => "Sl\n".into(),
        RollbackStep::Loaded => "Sd\n".into(),
        RollbackStep::Failed => "Sf\n".into(),
    }
}

fn parse_step(text: &str) -> Option<RollbackStep> {
    match text.split_at_checked(1)? {
        ("p", load) => Some(RollbackStep::Prepares(load.into())),
        ("r", "") => Some(RollbackStep::Resets),
        ("l", "") => Some(RollbackStep::Loads),
        ("d", "") => Some(RollbackStep::Loaded),
        ("f", "") => Some(RollbackStep::Failed),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_and_steps_survive_the_pipe() {
        let words = "{\"store\":\"/a b\"}".to_owned();
        let plan = RollbackPlan { ran: true, runs: false, is_intact: true, words: words.clone() };
        let steps = [
            RollbackStep::Prepares(words),
            RollbackStep::Resets,
            RollbackStep::Loads,
            RollbackStep::Loaded,
            RollbackStep::Failed,
        ];
        let sent: String = steps.iter().map(step_line).collect();
        let sent = [plan_line(Some(&plan)), sent, plan_line(None)].concat();
        let mut lines = Lines::default();
        let read: Vec<_> = sent.as_bytes().chunks(3).flat_map(|piece| lines.push(piece)).collect();
        let read: Vec<_> = read.iter().map(|line| parse(line).unwrap()).collect();
        let steps = steps.into_iter().map(Order::Step);
        let orders: Vec<_> =
            [Order::Plan(Some(plan))].into_iter().chain(steps).chain([Order::Plan(None)]).collect();
        assert_eq!(read, orders);
        for bad in ["T11 x", "T", "Sx", "S", "Srx"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
