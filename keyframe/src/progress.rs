//! Progress bars on standard error.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar for a number of instructions, while the VM is `doing` something: `replaying`. If it is not
/// shown, it can be moved all the same.
pub fn instructions_bar(doing: &str, instructions: u64, is_shown: bool) -> ProgressBar {
    if !is_shown {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(instructions);
    let template =
        format!("{doing} {{wide_bar}} {{percent}}% of {{human_len}} instructions, {{eta}} {{msg}}");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style);
    }
    bar
}
