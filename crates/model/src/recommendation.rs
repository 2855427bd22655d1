//! Recommends the length of intervals for a number of nodes, and the number of nodes.

use crate::{Constants, Formula};
use serde::{Deserialize, Serialize};

/// The shortest recommended interval, in seconds.
const LENGTH_MIN: f64 = 1e-3;

/// The run time that the model predicts for a number of nodes and a length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The number of nodes.
    pub nodes: u64,
    /// The length of an interval, in seconds.
    pub length_s: f64,
    /// The formula that holds.
    pub formula: Formula,
    /// The time from the beginning of the recording to the end of the last simulation, in seconds.
    pub run_time_s: f64,
    /// The speed-up over one simulation of the whole run.
    pub speed_up: f64,
}

/// A recommended length of an interval for a number of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recommendation {
    /// The nodes, the recommended length, and the predicted run time.
    #[serde(flatten)]
    pub best: Prediction,
    /// The number of nodes that would be busy at that length if there were enough.
    pub nodes_demanded: f64,
    /// The number of nodes that are missing at the best length of equation 3.7 (equation 3.8):
    /// positive if the nodes are too few.
    pub nodes_missing: f64,
}

impl Recommendation {
    /// Returns the reason why the formula of the best prediction holds, as a sentence for users.
    pub fn why(&self) -> String {
        let Self { best, nodes_demanded, .. } = self;
        let Prediction { nodes, length_s, formula, .. } = best;
        let busy = format!(
            "at {length_s:.3} s, {nodes_demanded:.1} nodes would be busy before the first is done"
        );
        match formula {
            Formula::Limited => format!("{busy}: {nodes} are too few, and all are busy to the end"),
            Formula::Enough => format!("{busy}: {nodes} are enough, and no interval waits"),
        }
    }
}

impl Prediction {
    /// Predicts the run time on `nodes` nodes with intervals of `length` seconds, by the formula
    /// that holds for them.
    pub fn at(constants: &Constants, nodes: u64, length: f64) -> Self {
        Self::by(constants, constants.formula(nodes, length), nodes, length)
    }

    fn by(constants: &Constants, formula: Formula, nodes: u64, length: f64) -> Self {
        let run_time_s = constants.run_time(formula, nodes, length);
        let speed_up = constants.speed_up(run_time_s);
        Self { nodes, length_s: length, formula, run_time_s, speed_up }
    }
}

/// Returns the best length of an interval if there are enough nodes, and the number of these nodes.
pub fn recommend_nodes(constants: &Constants) -> Recommendation {
    let length = clamp_length(constants, constants.length_enough());
    let nodes = constants.nodes_enough(length);
    recommendation(constants, Prediction::by(constants, Formula::Enough, nodes, length))
}

/// Returns the best length of an interval for `nodes` nodes; 0 counts as 1.
///
/// If `s_cp` is given, the sign of equation 3.8 of Eicher's thesis selects the formula, as there.
/// Otherwise the two formulas form one continuous function of the length. Its minimum is at the
/// best length of one formula, if that formula holds there, or at the length for which the nodes
/// are just enough.
pub fn recommend(constants: &Constants, nodes: u64) -> Recommendation {
    let nodes = nodes.max(1);
    let lengths = [constants.length_limited(nodes), constants.length_enough()];
    let [limited, enough] = lengths.map(|length| clamp_length(constants, length));
    if constants.s_cp.is_some() {
        let point = if constants.nodes_missing(nodes) > 0.0 {
            Prediction::by(constants, Formula::Limited, nodes, limited)
        } else {
            Prediction::by(constants, Formula::Enough, nodes, enough)
        };
        return recommendation(constants, point);
    }
    let all = [limited, enough, clamp_length(constants, just_enough(constants, nodes)), LENGTH_MIN];
    let points = all.map(|length| Prediction::at(constants, nodes, length));
    let least = points.into_iter().min_by(|a, b| a.run_time_s.total_cmp(&b.run_time_s));
    recommendation(constants, least.unwrap_or(points[0]))
}

/// Returns the length for which `nodes` are just enough: the solution of
/// `(t_i + s_sim/s_log L) / (t_c + L) = N`. The result is not finite if there is none.
fn just_enough(constants: &Constants, nodes: u64) -> f64 {
    let nodes = nodes as f64;
    (constants.t_i - nodes * constants.t_c) / (nodes - constants.slowdown())
}

/// Clamps a length to [`LENGTH_MIN`] and the duration of the whole run.
fn clamp_length(constants: &Constants, length: f64) -> f64 {
    let longest = (constants.s_log * constants.t_vm).max(LENGTH_MIN);
    if length.is_finite() { length.clamp(LENGTH_MIN, longest) } else { longest }
}

fn recommendation(constants: &Constants, best: Prediction) -> Recommendation {
    Recommendation {
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
    fn enough_nodes_are_90_with_a_speed_up_of_84() {
        let plan = recommend_nodes(&PAPER);
        assert_eq!((plan.best.nodes, plan.best.formula), (90, Formula::Enough));
        near(plan.best.speed_up, 84.3);
        near(plan.best.length_s, 2.049);
    }

    /// Figure 3.4. The paper prints its constants except `s_sim`; with 41.25, `N_demand` crosses 0
    /// at the printed place.
    #[test]
    fn with_few_nodes_intervals_are_long() {
        let constants = Constants { s_sim: 41.25, s_cp: Some(1.2), ..PAPER };
        near(recommend(&constants, 1).best.length_s, 56.9);
        near(recommend(&constants, 32).best.length_s, 1.78);
        assert!(constants.nodes_missing(32) > 0.0 && constants.nodes_missing(33) < 0.0);
        assert_eq!(recommend(&constants, 32).best.formula, Formula::Limited);
        assert_eq!(recommend(&constants, 33).best.formula, Formula::Enough);
    }

    /// Section 6.3.4, figure 6.15.
    #[test]
    fn four_nodes_have_a_speed_up_of_3_9() {
        let constants = Constants {
            t_vm: 600.0,
            s_sim: 31.0,
            s_log: 1.0,
            t_c: 0.0,
            t_i: 3.7,
            s_cp: Some(1.024),
        };
        near(Prediction::at(&constants, 4, 8.0).speed_up, 3.91);
        near(recommend(&constants, 4).best.speed_up, 3.9);
    }

    #[test]
    fn constants_out_of_bounds_are_refused() {
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
        /// No length is better than the recommended one.
        #[test]
        fn no_length_is_better(constants in constants(), nodes in 1_u64..10_000, factor in 1e-3..1e3_f64) {
            let plan = recommend(&constants, nodes).best;
            let other = clamp_length(&constants, plan.length_s * factor);
            let other = Prediction::at(&constants, nodes, other);
            prop_assert!(other.run_time_s >= plan.run_time_s * (1.0 - 1e-9), "{other:?} {plan:?}");
        }

        /// If the nodes are just enough, both formulas give the same time.
        #[test]
        fn the_formulas_meet(constants in constants(), nodes in 1_u64..10_000) {
            let length = just_enough(&constants, nodes);
            prop_assume!(length.is_finite() && length > LENGTH_MIN);
            let both = [Formula::Enough, Formula::Limited].map(|f| constants.run_time(f, nodes, length));
            prop_assert!((both[0] / both[1] - 1.0).abs() < 1e-6, "{both:?}");
        }
    }
}
