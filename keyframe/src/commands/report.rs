//! `keyframe report`: a store or a recording as one HTML file.

use super::warn_of_unreadable;
use crate::failure::{Failure, Outcome};
use crate::output;
use keyframe_dashboard::reporting::{ReportPage, of_checkpoints, of_recording};
use keyframe_replay::Recording;
use keyframe_store::Sealed;
use keyframe_store_keys::KeyArg;
use std::path::{Path, PathBuf};

/// Write a report of a store or a recording: one HTML file with tables and plots
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The file needs neither a network nor scripts: you can send it, print it, or keep it with the run. For each VM of a store it shows
the pauses by phase (percentiles, over time, the longest), how dirty pages were stored, bytes, growth and deduplication. For a
recording it also shows intervals, instructions and sizes, and with --analysis the course of its analyses.

Examples:
  keyframe report S -o report.html
  keyframe report S --vm web -o web.html
  keyframe report REC --analysis OUT -o recording.html"
)]
pub struct Report {
    /// The store's directory (or s3://BUCKET/PREFIX, kf://HOST:PORT), or a recording's
    #[arg(value_name = "STORE|REC", env = "KEYFRAME_STORE")]
    about: PathBuf,
    /// The file to write
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
    /// Only this VM
    #[arg(long, value_name = "NAME")]
    vm: Option<String>,
    /// What `keyframe analyze --out` has made; may be repeated
    #[arg(long, value_name = "DIR")]
    analysis: Vec<PathBuf>,
    #[command(flatten)]
    key: KeyArg,
}

impl Report {
    /// Writes it.
    pub fn run(&self) -> Outcome {
        let recording = self.recording()?;
        let place = recording.as_ref().map_or_else(|| self.about.clone(), Recording::store_path);
        let failed = |e: keyframe_store::Error| Failure::store(&e, &place);
        let store = self.key.open(&place).map_err(failed)?;
        let mut listing = store.checkpoints().map_err(failed)?;
        let is_wanted = |one: &Sealed| self.vm.as_ref().is_none_or(|vm| one.meta.vm == *vm);
        listing.sealed.retain(is_wanted);
        let name = |path: &Path| {
            std::path::absolute(path)
                .ok()
                .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        };
        let name = name(&self.about).unwrap_or_else(|| self.about.display().to_string());
        let mut page = ReportPage::new(&format!("Keyframe: {name}"));
        let now = jiff::Timestamp::now().to_string();
        page.line(&format!(
            "{}, as it was at {} UTC.",
            self.about.display(),
            now.get(..19).unwrap_or(&now).replace('T', " ")
        ));
        let code = warn_of_unreadable(&listing);
        if !listing.unreadable.is_empty() {
            page.line(&format!(
                "{} checkpoints cannot be read and are left out.",
                listing.unreadable.len()
            ));
        }
        let sealed = match &recording {
            Some(recording) => {
                let (places, sealed): (Vec<_>, Vec<_>) =
                    of_recording::checkpoints(recording, listing.sealed).into_iter().unzip();
                of_recording::add(&mut page, recording, places)?;
                sealed
            }
            None => listing.sealed,
        };
        for out in &self.analysis {
            of_recording::add_analysis(&mut page, out)?;
        }
        if sealed.is_empty() {
            page.line("There are no checkpoints.");
        } else {
            of_checkpoints::add(&mut page, &sealed)?;
        }
        if recording.is_none() && self.vm.is_none() {
            of_checkpoints::add_store(&mut page, &store.stats().map_err(failed)?);
        }
        page.write(&self.out)?;
        output::print_line(&format!(
            "report of {} checkpoints: {}",
            sealed.len(),
            self.out.display()
        ))?;
        Ok(code)
    }

    /// Opens the subject as a recording; `None` if it is none.
    fn recording(&self) -> Result<Option<Recording>, Failure> {
        if !self.about.join("recording.json").is_file() {
            return Ok(None);
        }
        Recording::open(&self.about).map(Some).map_err(|e| Failure::recording(&e))
    }
}
