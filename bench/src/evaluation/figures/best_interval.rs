//! Figure 3.4: the best interval for a limited number of nodes, and the nodes that are missing then.
//! It follows from the formulas alone.

use super::super::output::{CsvTable, Outputs, PaperFigure};
use super::chart::point;
use crate::Error;
use keyframe_model::Constants;
use keyframe_plot::{Axis, Chart, Figure, Scale, Series};

/// The paper's sample values. It does not print `s_sim`: with 41, `N_demand` crosses 0 where the
/// paper's does, and `s_cp` follows from its `L_opt(1)`.
const SAMPLE: Constants =
    Constants { t_vm: 3600.0, s_sim: 41.0, s_log: 1.08, t_c: 0.1, t_i: 1.0, s_cp: Some(1.2) };
/// The largest number of nodes.
const NODES_MAX: u64 = 40;

/// Writes it.
pub fn write(outputs: &mut Outputs) -> Result<(), Error> {
    let mut table = CsvTable::new(&["constants", "nodes", "l_opt_s", "nodes_missing"]);
    let (mut lengths, mut missing) = (Vec::new(), Vec::new());
    for nodes in 1..=NODES_MAX {
        let n = nodes as f64;
        let (length_s, nodes_missing) = (SAMPLE.length_limited(nodes), SAMPLE.nodes_missing(nodes));
        table.row(&["paper"], &[n, length_s, nodes_missing]);
        lengths.push(point(n, length_s));
        missing.push(point(n, nodes_missing));
    }
    let chart = |title: &str, label: &str, points| Chart {
        title: title.into(),
        x: Axis::new("nodes N", Scale::Linear),
        y: Axis::new(label, Scale::Linear),
        series: vec![Series { name: "by equations 3.7 and 3.8".into(), points }],
    };
    let plot = Figure {
        title: "The best interval for N nodes".into(),
        charts: vec![chart("L_opt(N)", "seconds", lengths), chart("N_demand(N)", "nodes", missing)],
    };
    let enough = (1..=NODES_MAX).find(|nodes| SAMPLE.nodes_missing(*nodes) <= 0.0);
    let values = format!(
        "L_opt(1) {:.1} s, L_opt(32) {:.2} s; N_demand is at most 0 from {} nodes on (T_vm 3600 s, \
         s_log 1.08, t_i 1 s, s_cp 1.2, s_sim 41)",
        SAMPLE.length_limited(1),
        SAMPLE.length_limited(32),
        enough.map_or_else(|| "more".into(), |nodes| nodes.to_string())
    );
    let title = "L_opt(N) and N_demand(N), by formula";
    let paper = PaperFigure { number: "3.4", file: "3.4-best-interval", title };
    outputs.add(paper, &table, &plot, values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sample_values_give_the_papers_points() {
        assert!((SAMPLE.length_limited(1) - 57.0).abs() < 0.5);
        assert!((SAMPLE.length_limited(32) - 1.8).abs() < 0.05);
        assert!(SAMPLE.nodes_missing(32) > 0.0 && SAMPLE.nodes_missing(33) < 0.0);
    }
}
