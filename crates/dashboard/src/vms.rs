//! The VMs that run: their engines are asked, all at once, and the answers kept for a moment.

use super::{locked, said, stores::Stores};
use keyframe_session::control::{EngineRequest, EngineResponse, client};
use keyframe_session::run_dir;
use keyframe_web::VmState;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The time for which answers of engines are used again.
const KEPT: Duration = Duration::from_millis(700);
/// An engine answers in that time.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// The running VMs with the states in which they last answered.
#[derive(Default)]
pub struct Vms(Mutex<Option<(Instant, Vec<VmState>)>>);

impl Vms {
    /// Returns all running VMs, by name. Adds the stores to which they write to `stores`.
    pub fn all(&self, stores: &Stores) -> Vec<VmState> {
        let mut kept = locked(&self.0);
        let engines = run_dir::all().unwrap_or_default();
        if let Some((at, all)) = &*kept
            && at.elapsed() < KEPT
        {
            // One that has ended meanwhile is not shown for a moment longer.
            let lives =
                |vm: &&VmState| engines.iter().any(|engine| run_dir::name_of(engine) == vm.name);
            return all.iter().filter(lives).cloned().collect();
        }
        let asked = client::ask_all(&engines, &EngineRequest::Status, ANSWER_MAX);
        let found: Vec<_> =
            asked.into_iter().filter_map(|(engine, answer)| shown(engine, answer)).collect();
        let places = found.iter().filter_map(|(_, store)| store.clone()).collect();
        let ids = stores.name(places);
        let all: Vec<VmState> = found
            .into_iter()
            .map(|(vm, store)| VmState {
                store: store.and_then(|place| ids.get(&place).cloned()),
                ..vm
            })
            .collect();
        *kept = Some((Instant::now(), all.clone()));
        all
    }
}

/// Returns the state of a VM, and the path of its store; `None` if it has ended meanwhile.
fn shown(
    engine: &Path,
    answer: Result<EngineResponse, keyframe_session::Error>,
) -> Option<(VmState, Option<PathBuf>)> {
    let name = run_dir::name_of(engine);
    let silent = |problem| {
        let vm = VmState {
            name: name.clone(),
            store: None,
            problem: Some(problem),
            status: Value::Null,
        };
        Some((vm, None))
    };
    match answer {
        Ok(EngineResponse::Status(status)) => {
            let store =
                Some(PathBuf::from(&status.store)).filter(|place| !place.as_os_str().is_empty());
            let vm = VmState {
                name,
                store: None,
                problem: None,
                status: serde_json::to_value(&*status).ok()?,
            };
            Some((vm, store))
        }
        Ok(other) => silent(format!("unexpected answer: {other:?}")),
        Err(_) if !run_dir::all().is_ok_and(|live| live.iter().any(|one| one == engine)) => None,
        Err(error) => silent(said(&error, error.fix())),
    }
}
