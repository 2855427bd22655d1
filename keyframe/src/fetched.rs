//! Reports what this process fetched from checkpoint servers, if `KEYFRAME_FETCHED` is set: a line
//! on standard error if it is `-`, else a line of JSON appended to the file that it names.

use crate::output;
use keyframe_store::backend::served::{FetchStats, fetch_stats};
use std::io::Write;

const VARIABLE: &str = "KEYFRAME_FETCHED";

/// Tells it, if anything was fetched. What goes wrong with it is no reason to fail.
pub fn tell() {
    let Some(place) = std::env::var_os(VARIABLE).filter(|place| !place.is_empty()) else { return };
    let fetched = fetch_stats();
    if fetched == FetchStats::default() {
        return;
    }
    if place == "-" {
        let FetchStats { requests, bytes_fetched, cache_hits, cache_misses } = fetched;
        let bytes = output::bytes(bytes_fetched);
        eprintln!(
            "keyframe: {bytes} fetched in {requests} requests; {cache_hits} pieces were in the cache, {cache_misses} were not"
        );
        return;
    }
    let Ok(mut text) = serde_json::to_string(&fetched) else { return };
    text.push('\n');
    // One write, so that lines of processes that end together do not mix.
    let file = std::fs::File::options().create(true).append(true).open(&place);
    if let Err(error) = file.and_then(|mut file| file.write_all(text.as_bytes())) {
        eprintln!("keyframe: warning: {}: {error}", place.display());
    }
}
