//! The actions that the page asks of a running VM's engine: a rollback to a checkpoint.

use super::listed::ListedStore;
use super::said;
use keyframe_session::control::{EngineRequest, EngineResponse, client};
use keyframe_session::run_dir;
use keyframe_units::human_duration;
use keyframe_web::ApiError;
use std::path::Path;
use std::time::Duration;

/// The longest time for which a page waits for the engine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Rolls the running VM of checkpoint `id` back to that checkpoint. Returns the text for the user.
/// Errors: there is no such checkpoint; its VM does not run, or refuses the rollback.
pub fn roll_back(listed: &ListedStore, id: u64) -> Result<String, ApiError> {
    let listing = listed.listing()?;
    let one =
        listing.get(id).ok_or_else(|| ApiError::Unknown(format!("there is no checkpoint {id}")))?;
    let failed = |e: keyframe_session::Error| ApiError::Failed(said(&e, e.fix()));
    let engine = run_dir::find(Some(&one.vm)).map_err(|e| ApiError::Unknown(said(&e, e.fix())))?;
    let ask = |request: &EngineRequest| client::ask(&engine, request, PATIENCE).map_err(failed);
    // Another VM of this name may write to another store.
    match ask(&EngineRequest::Status)? {
        EngineResponse::Status(status) if Path::new(&status.store) == listed.place() => {}
        _ => {
            return Err(ApiError::Unknown(format!(
                "VM {} runs, and does not write to this store",
                one.vm
            )));
        }
    }
    match ask(&EngineRequest::Rollback { checkpoint: id.to_string(), fast: false })? {
        EngineResponse::RolledBack(done) => {
            let kept = done
                .before
                .map_or_else(String::new, |before| format!("; what it was is checkpoint {before}"));
            let (vm, stood) = (done.vm, human_duration(done.stood_ns));
            Ok(format!("VM {vm} is back at checkpoint {id} after {stood}{kept}"))
        }
        other => Err(ApiError::Failed(format!("unexpected answer: {other:?}"))),
    }
}
