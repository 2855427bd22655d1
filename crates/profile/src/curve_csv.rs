//! Writes curves as CSV: a line for each number of vCPUs and each length of the epoch. The name of
//! a column ends with its unit.

use crate::{Curve, CurveRow, Error, Result, Statistic};

const COUNTS: [&str; 4] = ["pages", "sectors", "disk_writes", "packets"];

/// Returns `curves` as CSV with a header. A value that was not measured is an empty cell.
///
/// Error: [`Error::Csv`] if the CSV library fails.
pub fn curves_to_csv(curves: &[Curve]) -> Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(header())?;
    for curve in curves {
        for row in &curve.rows {
            writer.write_record(cells(curve, row))?;
        }
    }
    let bytes = writer.into_inner().map_err(|e| csv::Error::from(e.into_error()))?;
    String::from_utf8(bytes).map_err(|e| Error::Csv { problem: e.to_string() })
}

impl From<csv::Error> for Error {
    fn from(error: csv::Error) -> Self {
        Self::Csv { problem: error.to_string() }
    }
}

fn header() -> Vec<String> {
    let mut header: Vec<String> =
        ["vcpus", "epoch_ms", "samples", "measured_mean_ms"].map(str::to_owned).to_vec();
    for count in COUNTS {
        header.extend(["mean", "deviation", "min", "max"].map(|part| format!("{count}_{part}")));
    }
    header.extend(["growth_percent_per_doubling".into(), "dirty_page_set".into()]);
    header
}

fn cells(curve: &Curve, row: &CurveRow) -> Vec<String> {
    let is_set = curve.dirty_page_set.is_some_and(|set| set.epoch_ns == row.epoch_ns);
    let mut cells = vec![
        curve.vcpus.map_or_else(String::new, |n| n.to_string()),
        number(row.epoch_ns as f64 / 1e6),
        row.samples.to_string(),
        number(row.measured_ns.mean / 1e6),
    ];
    for count in [Some(row.pages), row.sectors, row.disk_writes, row.packets] {
        cells.extend(statistic_cells(count));
    }
    cells.push(row.growth_percent.map_or_else(String::new, number));
    cells.push(u8::from(is_set).to_string());
    cells
}

fn statistic_cells(statistic: Option<Statistic>) -> [String; 4] {
    statistic.map_or_else(Default::default, |s| {
        [number(s.mean), number(s.deviation), s.min.to_string(), s.max.to_string()]
    })
}

/// Writes a number with at most three decimals, without trailing zeros.
fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MeasuredEpoch;
    use std::time::Duration;

    #[test]
    fn each_row_is_a_line_and_an_unknown_value_is_an_empty_cell() {
        let epoch = |ms: u64, pages| MeasuredEpoch {
            length: Duration::from_millis(ms),
            measured_ns: ms * 1_000_000,
            pages,
            sectors: Some(0),
            disk_writes: Some(1),
            packets: None,
        };
        let curve = Curve::new(Some(2), &[epoch(10, 100), epoch(10, 103), epoch(20, 100)]);
        let text = curves_to_csv(&[curve.clone(), Curve { vcpus: None, ..curve }]).unwrap();
        let lines: Vec<_> = text.lines().map(|l| l.split(',').collect::<Vec<_>>()).collect();
        assert_eq!(lines.len(), 5);
        assert!(lines.iter().all(|l| l.len() == lines[0].len()), "{text}");
        assert!(
            text.contains("\n2,10,2,10,101.5,2.121,100,103,0,0,0,0,1,0,1,1,,,,,,1\n"),
            "{text}"
        );
        assert_eq!((lines[3][0], lines[2][1]), ("", "20"));
    }
}
