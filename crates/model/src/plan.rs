//! The best intervals for some nodes, and the best number of nodes.

use crate::{Constants, Formula};
use serde::{Deserialize, Serialize};

/// The shortest interval that is recommended, in seconds, and looked at.
const LENGTH_MIN: f64 = 1e-3;

/// What the model says of some nodes and a length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Nodes.
    pub nodes: u64,
    /// Interval length, in seconds.
    pub length_s: f64,
    /// Which formula holds.
    pub formula: Formula,
    /// From the recording's begin to the last simulation's end, in seconds.
    pub run_time_s: f64,
    /// Over one simulation of the whole run.
    pub speed_up: f64,
}

/// A recommendation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Its nodes, its length, and what comes of them.
    #[serde(flatten)]
    pub best: Point,
    /// Nodes that would be busy at that length if there were enough.
    pub nodes_demanded: f64,
    /// How many are missing at the length that is best for that number of nodes where they are too
    /// few (equation 3.8): positive where that formula holds.
    pub nodes_missing: f64,
}

impl Point {
    /// That of `nodes` and `length`, in seconds.
    pub fn at(constants: &Constants, nodes: u64, length: f64) -> Self {
        Self::by(constants, constants.formula(nodes, length), nodes, length)
    }

    fn by(constants: &Constants, formula: Formula, nodes: u64, length: f64) -> Self {
        let run_time_s = constants.run_time(formula, nodes, length);
        let speed_up = constants.speed_up(run_time_s);
        Self { nodes, length_s: length, formula, run_time_s, speed_up }
    }
}

/// The best length with nodes enough, and how many these are.
pub fn nodes_best(constants: &Constants) -> Plan {
    let length = within(constants, constants.length_enough());
    let nodes = constants.nodes_enough(length);
    plan(constants, Point::by(constants, Formula::Enough, nodes, length))
}

/// The best length for `nodes`, one at least.
///
/// With `s_cp`, the formula is chosen as in the paper, by the sign of equation 3.8. Without, the
/// two formulas are one function of the length, which is least at the best length of one of them,
/// where that one holds, or where the nodes are just enough.
pub fn best(constants: &Constants, nodes: u64) -> Plan {
    let nodes = nodes.max(1);
    let lengths = [constants.length_limited(nodes), constants.length_enough()];
    let [limited, enough] = lengths.map(|length| within(constants, length));
    if constants.s_cp.is_some() {
        let point = if constants.nodes_missing(nodes) > 0.0 {
            Point::by(constants, Formula::Limited, nodes, limited)
        } else {
            Point::by(constants, Formula::Enough, nodes, enough)
        };
        return plan(constants, point);
    }
    let all = [limited, enough, within(constants, just_enough(constants, nodes)), LENGTH_MIN];
    let points = all.map(|length| Point::at(constants, nodes, length));
    let least = points.into_iter().min_by(|a, b| a.run_time_s.total_cmp(&b.run_time_s));
    plan(constants, least.unwrap_or(points[0]))
}

/// The length at which `nodes` are just enough: `(t_i + s_sim/s_log L) / (t_c + L) = N`. Not finite
/// where there is none.
fn just_enough(constants: &Constants, nodes: u64) -> f64 {
    let nodes = nodes as f64;
    (constants.t_i - nodes * constants.t_c) / (nodes - constants.slowdown())
}

/// A length that can be: no longer than the whole run.
fn within(constants: &Constants, length: f64) -> f64 {
    let longest = (constants.s_log * constants.t_vm).max(LENGTH_MIN);
    if length.is_finite() { length.clamp(LENGTH_MIN, longest) } else { longest }
}

fn plan(constants: &Constants, best: Point) -> Plan {
    Plan {
        best,
        nodes_demanded: constants.nodes_demanded(best.length_s),
        nodes_missing: constants.nodes_missing(best.nodes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAPER: Constants =
        Constants { t_vm: 3600.0, s_sim: 100.0, s_log: 1.08, t_c: 0.1, t_i: 1.0, s_cp: None };

    fn near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 0.01, "{found}, expected {expected}");
    }

    /// Section 2.4.2 of the paper.
    #[test]
    fn nodes_enough_are_90_and_84_times_as_fast() {
        let plan = nodes_best(&PAPER);
        assert_eq!((plan.best.nodes, plan.best.formula), (90, Formula::Enough));
        near(plan.best.speed_up, 84.3);
        near(plan.best.length_s, 2.049);
    }

    /// Figure 3.4: its constants but for `s_sim` are printed; 41.25 has `N_demand` cross 0 where it
    /// does.
    #[test]
    fn with_few_nodes_intervals_are_long() {
        let constants = Constants { s_sim: 41.25, s_cp: Some(1.2), ..PAPER };
        near(best(&constants, 1).best.length_s, 56.9);
        near(best(&constants, 32).best.length_s, 1.78);
        assert!(constants.nodes_missing(32) > 0.0 && constants.nodes_missing(33) < 0.0);
        assert_eq!(best(&constants, 32).best.formula, Formula::Limited);
        assert_eq!(best(&constants, 33).best.formula, Formula::Enough);
    }

    /// Section 6.3.4, figure 6.15.
    #[test]
    fn four_nodes_are_3_9_times_as_fast() {
        let constants = Constants {
            t_vm: 600.0,
            s_sim: 31.0,
            s_log: 1.0,
            t_c: 0.0,
            t_i: 3.7,
            s_cp: Some(1.024),
        };
        near(Point::at(&constants, 4, 8.0).speed_up, 3.91);
        near(best(&constants, 4).best.speed_up, 3.9);
    }

    #[test]
    fn constants_that_say_nothing_are_refused() {
        assert!(PAPER.check().is_ok());
        for (bad, name) in [
            (Constants { t_vm: 0.0, ..PAPER }, "t_vm"),
            (Constants { s_sim: f64::NAN, ..PAPER }, "s_sim"),
            (Constants { s_log: f64::INFINITY, ..PAPER }, "s_log"),
            (Constants { t_c: -1.0, ..PAPER }, "t_c"),
            (Constants { s_cp: Some(0.5), ..PAPER }, "s_cp"),
        ] {
            assert_eq!(bad.check().unwrap_err().name, name);
        }
    }

    fn constants() -> impl Strategy<Value = Constants> {
        (1.0..1e5_f64, 1.0..1e4_f64, 1.0..3.0_f64, 0.0..5.0_f64, 0.0..50.0_f64).prop_map(
            |(t_vm, s_sim, s_log, t_c, t_i)| Constants { t_vm, s_sim, s_log, t_c, t_i, s_cp: None },
        )
    }

    proptest! {
        /// No length is better than the one that is recommended.
        #[test]
        fn no_length_is_better(constants in constants(), nodes in 1_u64..10_000, factor in 1e-3..1e3_f64) {
            let plan = best(&constants, nodes).best;
            let other = within(&constants, plan.length_s * factor);
            let other = Point::at(&constants, nodes, other);
            prop_assert!(other.run_time_s >= plan.run_time_s * (1.0 - 1e-9), "{other:?} {plan:?}");
        }

        /// Where the nodes are just enough, both formulas say the same.
        #[test]
        fn the_formulas_meet(constants in constants(), nodes in 1_u64..10_000) {
            let length = just_enough(&constants, nodes);
            prop_assume!(length.is_finite() && length > LENGTH_MIN);
            let both = [Formula::Enough, Formula::Limited].map(|f| constants.run_time(f, nodes, length));
            prop_assert!((both[0] / both[1] - 1.0).abs() < 1e-6, "{both:?}");
        }
    }
}
