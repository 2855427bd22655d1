//! Draws the pauses and the restores over the size of RAM.

use super::rows::{Rows, VMMS};
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};

/// Draws a line for each VMM and method. A chart has at most seven, because there are as many
/// colours. One without lines is left out.
pub fn figure(rows: &Rows) -> Figure {
    let pauses =
        [("pause", "pause_ns"), ("Full", "full_ns"), ("Diff", "diff_ns"), ("savevm", "savevm_ns")];
    let restores = [
        ("restore", "restore_ns"),
        ("lazy", "lazy_restore_ns"),
        ("own load", "load_command_ns"),
        ("loadvm", "loadvm_ns"),
    ];
    let [firecracker, tcg, kvm] = VMMS;
    let charts = [
        chart(rows, "The VM stands still", &VMMS, &pauses),
        chart(rows, "Until a restored VM of Firecracker runs", &[firecracker], &restores),
        chart(rows, "Until a restored VM of QEMU runs", &[tcg, kvm], &restores),
    ];
    Figure {
        title: "Checkpoint and restore by VMM and size of RAM".into(),
        charts: charts.into_iter().filter(|chart| !chart.series.is_empty()).collect(),
    }
}

fn chart(rows: &Rows, title: &str, vmms: &[&'static str], methods: &[(&str, &str)]) -> Chart {
    let of_vmm = |vmm: &'static str| {
        methods.iter().map(move |(name, measure)| series(rows, vmm, name, measure))
    };
    let all = vmms.iter().flat_map(|vmm| of_vmm(vmm));
    Chart {
        title: title.into(),
        x: Axis::new("RAM, MiB", Scale::Log),
        y: Axis::new("median, ms", Scale::Log),
        series: all.filter(|series| !series.points.is_empty()).collect(),
    }
}

fn series(rows: &Rows, vmm: &'static str, name: &str, measure: &str) -> Series {
    let point = |mib: u64| {
        let y = rows.median((vmm, mib), measure)? / 1e6;
        Some(Point { x: mib as f64, y, deviation: None })
    };
    Series {
        name: format!("{vmm} {name}"),
        points: rows.sizes(vmm).into_iter().filter_map(point).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_measured_methods_are_drawn() {
        let mut rows = Rows::default();
        for mib in [128, 256] {
            rows.push(("tcg", mib), "pause_ns", 2e6);
            rows.push(("tcg", mib), "savevm_ns", 2e8);
        }
        let figure = figure(&rows);
        let names: Vec<&str> = figure.charts[0].series.iter().map(|series| &*series.name).collect();
        assert_eq!(names, ["tcg pause", "tcg savevm"]);
        assert_eq!(figure.charts[0].series[0].points.len(), 2);
        assert_eq!(figure.charts.len(), 1, "no restores were measured");
        assert!(figure.svg().unwrap().contains("tcg savevm"));
    }
}
