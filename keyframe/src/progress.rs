//! Progress bars on standard error.

use indicatif::{ProgressBar, ProgressStyle};
use keyframe_bundle::{Progress, Step};

/// A bar of this `template` for work of a length, if that is known. If `quiet` is true, the bar is not
/// shown, and can be moved all the same.
pub fn bar(quiet: bool, length: Option<u64>, template: &str) -> ProgressBar {
    if quiet {
        return ProgressBar::hidden();
    }
    let bar = length.map_or_else(ProgressBar::no_length, ProgressBar::new);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// A bar for a number of instructions, while the VM is `doing` something: `replaying`. If it is not
/// shown, it can be moved all the same.
pub fn instructions_bar(doing: &str, instructions: u64, is_shown: bool) -> ProgressBar {
    let template =
        format!("{doing} {{wide_bar}} {{percent}}% of {{human_len}} instructions, {{eta}} {{msg}}");
    bar(!is_shown, Some(instructions), &template)
}

/// The progress of a bundle or of its import: a bar for each step.
pub struct BundleBar {
    bar: ProgressBar,
    step: Option<Step>,
}

impl BundleBar {
    /// Makes the bar, which is hidden if `quiet` is true.
    pub fn new(quiet: bool) -> Self {
        Self { bar: bar(quiet, Some(0), "{msg} {wide_bar} {bytes}/{total_bytes}"), step: None }
    }

    /// Shows `progress`.
    pub fn show(&mut self, progress: &Progress) {
        if self.step.as_ref() != Some(&progress.step) {
            self.bar.set_message(match &progress.step {
                Step::File(path) => path.clone(),
                Step::Ram => "RAM".into(),
                Step::Disk(name) => format!("disk {name}"),
                Step::Archive => "bundle".into(),
            });
            self.bar.set_length(progress.total_bytes);
            self.step = Some(progress.step.clone());
        }
        self.bar.set_position(progress.done_bytes);
    }

    /// Removes the bar.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}
