//! What checkpoints cost the guest: work done by a computing guest, with and without Keyframe, in alternating runs.

use crate::guest::Guest as Files;
use crate::sample::Sample;
use crate::vm::{Guest, Protected};
use crate::{Error, Options, Report};
use std::time::Duration;

const MEM: &str = "1G";

pub fn run(options: &Options) -> Result<Report, Error> {
    let files = Files::find(options)?;
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let (pairs, seconds) = if options.quick { (1, 8) } else { (6, 15) };
    let (mut plain, mut protected, mut lost) = (Sample::default(), Sample::default(), Sample::default());
    let command = files.command(MEM, "kf.work=compute");
    for pair in 0..pairs {
        let without = || -> Result<f64, Error> {
            let mut guest = Guest::start(&command)?;
            work_per_s(&mut guest, seconds)
        };
        let with = || -> Result<f64, Error> {
            let store = dir.path().join(format!("store{pair}"));
            let mut vm = Protected::start(options, &store, ("1s", "precopy"), &command)?;
            work_per_s(&mut vm.guest, seconds)
        };
        // The order alternates, so that a machine that slows down favours neither.
        let (without, with) = if pair % 2 == 0 {
            let without = without()?;
            (without, with()?)
        } else {
            let with = with()?;
            (without()?, with)
        };
        plain.push(without);
        protected.push(with);
        lost.push(1.0 - with / without);
    }
    let mut report = Report::new("overhead");
    report.figure("compute_plain_units_per_s", plain.median());
    report.figure("compute_1s_units_per_s", protected.median());
    report.figure("compute_pairs", lost.len() as f64);
    report.ratio("work_lost_compute_1s", lost.median());
    Ok(report)
}

/// Units of work a second, from the guest's own counter against the host's clock.
fn work_per_s(guest: &mut Guest, seconds: u64) -> Result<f64, Error> {
    guest.wait_for("KF READY compute", 120)?;
    std::thread::sleep(Duration::from_secs(seconds + 2));
    let points: Vec<_> = guest
        .lines("compute ")
        .into_iter()
        .filter_map(|(at, line)| Some((at, line.split("work=").nth(1)?.trim().parse::<f64>().ok()?)))
        .collect();
    match (points.get(1), points.last()) {
        (Some((from, before)), Some((to, after))) if to > from => {
            Ok((after - before) / to.duration_since(*from).as_secs_f64())
        }
        _ => Err(Error::failed("measure the guest's work", "it printed too few lines")),
    }
}
