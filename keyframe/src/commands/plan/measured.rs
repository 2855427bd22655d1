//! The measurements of a recording and an analysis, as a line for users.

use keyframe_replay_driver::RecordingMeasurements;

/// Returns the measurements as a line for users.
pub fn line(measured: &RecordingMeasurements) -> String {
    let RecordingMeasurements { recorded_s, checkpoints, intervals, .. } = measured;
    let pause = measured.pause_s.map_or_else(String::new, |pause| {
        format!("; {checkpoints} checkpoints, a pause of {:.1} ms each", pause * 1e3)
    });
    let fit = measured.fit.map_or_else(String::new, |fit| {
        let poor = if measured.fits_badly() {
            ": a poor fit, so that --t-i and --s-sim are better given, and --simulate takes the intervals as they are"
        } else {
            ""
        };
        format!(
            "; {intervals} intervals simulated in {:.2} s and {:.2} s for each second (R^2 {:.2}{poor})",
            fit.t_i, fit.slowdown, fit.r_squared
        )
    });
    format!("measured: {recorded_s:.1} s recorded{pause}{fit}")
}
