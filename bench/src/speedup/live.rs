//! An analysis during the recording, over the same analysis after it.
//!
//! ```text
//!   deferred   record ──────────▶ analyze --jobs 2 ────▶      T_record + T_2
//!   live       record ──────────▶
//!              analyze --follow --jobs 2 ──────────▶          T_live, from the begin of the recording
//! ```
//!
//! While the guest is recorded it has a processor for itself, so that on two processors an analysis
//! has one until the recording ends.

use super::{analyse_meanwhile, ns, record};
use crate::replay::recording::Recording;
use crate::{Error, Options, Report};
use std::path::Path;

/// Records `work` with a checkpoint every `every`, analyses it meanwhile with `tool` and two jobs,
/// and again when the recording has ended. Adds the results to `report`.
pub fn measure(
    options: &Options,
    tool: &str,
    (work, every): ((&str, u32), &'static str),
    dir: &Path,
    report: &mut Report,
) -> Result<(), Error> {
    options.say(format!("{tool}, live"));
    let alone = dir.join(format!("{tool}-alone"));
    record(options, work, every, dir, &alone)?;
    let recorded_ns = Recording { options, dir: &alone }.duration_ns()?;
    let place = dir.join(format!("{tool}-live"));
    let recording = Recording { options, dir: &place };
    let arguments = ["--tool", tool, "--jobs", "2"];
    let follow = [&arguments[..], &["--follow"]].concat();
    let ((_, mut live), live_ns) =
        analyse_meanwhile(options, (work, every), dir, &place, || recording.reports(&follow, 1))?;
    let live = live.pop().unwrap_or_default();
    options.say(format!("{tool}, the same deferred"));
    let (_, mut deferred) = recording.reports(&arguments, 1)?;
    let deferred = deferred.pop().unwrap_or_default();
    if live["summary"] != deferred["summary"] {
        return Err(Error::failed(
            format!("analyze --follow --tool {tool}"),
            "the summary is not that of the analysis after the recording",
        ));
    }
    let deferred_ns = ns(&deferred, "wall_ns");
    report.figure(format!("{tool}_live_recorded_ns"), recorded_ns);
    report.figure(format!("{tool}_live_ns"), live_ns);
    report.figure(format!("{tool}_live_deferred_ns"), deferred_ns);
    report.ratio(format!("live_over_recording_alone_{tool}"), live_ns / recorded_ns);
    report.ratio(format!("gain_of_live_{tool}"), (recorded_ns + deferred_ns) / live_ns);
    Ok(())
}
