//! The speed-up model. A run of a VM is cut into intervals, which nodes simulate in parallel while
//! the VM runs.
//!
//! ```text
//!   recording   │ L │t_c│ L │t_c│ L │t_c│ ...       slower than the VM alone by the factor s_log
//!   node 1         └ t_i │ simulation, slower by s_sim │──▶ the next interval
//!   node 2                 └ t_i │ ...
//! ```
//!
//! Two formulas, after Eicher, *VM Checkpoint Storage and Distribution for SimuBoost* (2015):
//!
//! | nodes | parallel simulation time `T_ps` | equation |
//! |---|---|---|
//! | enough: no interval waits for a node | `s_log T_vm (t_c/L + 1) + t_i + s_sim/s_log L` | 2.1 |
//! | too few: all nodes are busy to the end | `N s_cp L + T_vm (s_log t_i + s_sim L) / (N L)` | 3.5 |
//!
//! `L` is the recorded time between two checkpoints. All times are in seconds. If `s_cp` is not
//! given, it follows from the pause: `1 + t_c/L`. Then both formulas give the same time if `N`
//! nodes are just enough, and the best `L` follows from both.
//!
//! The best length follows from equation 2.1: `L_opt = sqrt(s_log^2 T_vm t_c / s_sim)`, as equation
//! 2.3 has it. Equation 2.2 is the speed-up `s_sim T_vm / T_ps`, with 2.1 as `T_ps`.
//!
//! The formulas assume equal intervals and ignore the transfer of checkpoints and nodes that start
//! late or fail. [`simulation`] includes these.

mod constants;
mod fit;
mod formula;
mod prediction_figure;
mod prediction_table;
mod range_length;
mod recommendation;
pub mod simulation;

pub use constants::{Constants, InvalidConstant};
pub use fit::{SlowdownFit, TimedSimulation, fit_slowdown};
pub use formula::Formula;
pub use prediction_figure::prediction_figure;
pub use prediction_table::prediction_table;
pub use range_length::{RangeTimes, range_length};
pub use recommendation::{Prediction, Recommendation, recommend, recommend_nodes};
