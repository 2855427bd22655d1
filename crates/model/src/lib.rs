//! The speed-up model: a run of a VM is cut into intervals, which are simulated side by side while
//! the VM still runs.
//!
//! ```text
//!   recorded   │ L │t_c│ L │t_c│ L │t_c│ ...                 slower than the VM alone by s_log
//!   node 1         └ t_i │ simulates, slower by s_sim │──▶ next that is due
//!   node 2                 └ t_i │ ...
//! ```
//!
//! Two formulas, after Eicher, *VM Checkpoint Storage and Distribution for SimuBoost* (2015):
//!
//! | nodes | parallel simulation time `T_ps` | equation |
//! |---|---|---|
//! | enough: no interval waits | `s_log T_vm (t_c/L + 1) + t_i + s_sim/s_log L` | 2.1 |
//! | too few: all are busy to the end | `N s_cp L + T_vm (s_log t_i + s_sim L) / (N L)` | 3.5 |
//!
//! `L` is the time between two checkpoints as it is recorded, all times are seconds. Where `s_cp`
//! is not given it is what the pause makes of it, `1 + t_c/L`: then both formulas give the same
//! where `N` nodes are just enough, and the best `L` follows from both.
//!
//! The best length is derived from 2.1: `L_opt = sqrt(s_log^2 T_vm t_c / s_sim)`. Equation 2.2 as
//! it is printed does not follow from 2.1 in every term.
//!
//! The formulas leave out: intervals that differ, transfer of checkpoints, nodes that begin late or
//! fail. [`simulation`] has these.

mod constants;
mod fit;
mod formula;
mod plan;
pub mod simulation;

pub use constants::{Constants, Error};
pub use fit::{Fit, fit};
pub use formula::Formula;
pub use plan::{Plan, Point, best, nodes_best};
