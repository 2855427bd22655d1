//! A source with generated VMs and checkpoints, in any number and with hostile names, for tests.

use crate::{
    ApiError, CheckpointListing, CheckpointRow, DashboardAction, DashboardSource, HeatMap,
    HeatRegion, PauseBreakdown, StoreHead, StoreSizes, VmState,
};
use keyframe_locks::IgnorePoison;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A PNG of one red pixel.
pub const PNG: &[u8] = b"\x89PNG\x0d\x0a\x1a\x0a\x00\x00\x00\x0dIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x02\x00\x00\x00\x90wS\xde\x00\x00\x00\x0cIDATx\x9cc\xf8\xcf\xc0\x00\x00\x03\x01\x01\x00\xc9\xfe\x92\xef\x00\x00\x00\x00IEND\xaeB`\x82";
/// The id of the only store.
pub const STORE: &str = "00112233445566778899aabbccddeeff";
/// A name with characters that are special in HTML, in metric labels and in log lines.
pub const HOSTILE: &str = "<img src=x onerror=\"window.hacked=1\">\"\\\n'&amp;";

/// A data source for tests: generated VMs, and a store with checkpoints of each VM in turn. The
/// first VM and one tag have a hostile name.
pub struct SyntheticSource {
    vms: usize,
    listing: Arc<CheckpointListing>,
    /// The actions that were asked for so far.
    pub acted: Mutex<Vec<DashboardAction>>,
    /// The number of calls of `vms`, if the source changes with each.
    looks: Option<AtomicU64>,
}

impl SyntheticSource {
    /// Creates a source with `vms` VMs and `checkpoints` checkpoints.
    pub fn new(vms: usize, checkpoints: u64) -> Self {
        let checkpoints =
            (1..=checkpoints).map(|id| Arc::new(checkpoint(id, vms as u64))).collect();
        let listing = Arc::new(CheckpointListing { generation: 1, checkpoints });
        Self { vms, listing, acted: Mutex::default(), looks: None }
    }

    /// Returns a source in which each VM seals a checkpoint, and the store changes, at each call of
    /// `vms`.
    #[must_use]
    pub fn living(self) -> Self {
        Self { looks: Some(AtomicU64::new(0)), ..self }
    }

    fn looks(&self) -> u64 {
        self.looks.as_ref().map_or(0, |looks| looks.load(Ordering::Relaxed))
    }

    fn known(&self, store: &str, id: u64) -> Result<&Arc<CheckpointRow>, ApiError> {
        let unknown = || ApiError::Unknown(format!("there is no checkpoint {id} in {store}"));
        self.listing.get(id).filter(|_| store == STORE).ok_or_else(unknown)
    }
}

/// Returns the name of a VM, by its number.
pub fn name(vm: u64) -> String {
    if vm == 0 { HOSTILE.into() } else { format!("vm-{vm}") }
}

fn checkpoint(id: u64, vms: u64) -> CheckpointRow {
    // Some pauses are long.
    let copy = if id.is_multiple_of(997) { 40_000_000 } else { 300_000 + id % 13 * 20_000 };
    let pause = PauseBreakdown {
        stop: 200_000,
        device_state: 150_000,
        scan: 90_000,
        copy,
        resume: 110_000,
    };
    let taken_at = jiff::Timestamp::from_second(1_800_000_000 + id as i64).unwrap_or_default();
    CheckpointRow {
        id,
        vm: name(id % vms.max(1)),
        run: format!("{:032x}", id % vms.max(1)),
        epoch: id / vms.max(1),
        parent: id.checked_sub(vms).filter(|parent| *parent > 0),
        taken_at: taken_at.to_string(),
        taken_ms: taken_at.as_millisecond(),
        reason: "interval".into(),
        tags: if id == 7 { vec![HOSTILE.into()] } else { Vec::new() },
        pinned: id == 7,
        strategy: "precopy".into(),
        pause_ns: pause.named().iter().map(|(_, ns)| ns).sum(),
        pause,
        dirty_pages: 1000,
        zero_pages: 100,
        dedup_pages: 250,
        unchanged_pages: 50,
        stored_pages: 600,
        added_bytes: 900_000,
        stored_bytes: 850_000,
        disk_written_bytes: 4096,
        interval_ns: 1_000_000_000,
        backlog_ns: 0,
        encode_ns: 20_000_000,
        ram_bytes: 1 << 30,
    }
}

impl DashboardSource for SyntheticSource {
    fn vms(&self) -> Vec<VmState> {
        if let Some(looks) = &self.looks {
            looks.fetch_add(1, Ordering::Relaxed);
        }
        let newest = |name: &str| self.listing.checkpoints.iter().rev().find(|one| one.vm == name);
        let vm = |vm: usize| {
            let name = name(vm as u64);
            let last = newest(&name);
            let status = json!({
                "vm": name, "state": "running", "sealed": 500 + self.looks(), "failed": 1, "last_error": HOSTILE, "interval_ns": 1_000_000_000_u64,
                "backlog_ns": 0, "queued": 0, "phase": "idle", "encoder": "sealed", "store": HOSTILE, "last": last.map(AsRef::as_ref),
                "last_age_ns": 250_000_000,
            });
            VmState { name, store: Some(STORE.into()), problem: None, status }
        };
        let replication = json!({
            "role": "primary", "state": "protected", "protects": HOSTILE, "term": 2, "connected": true, "epoch": 70, "acknowledged": 69, "epochs": 70,
            "reason": HOSTILE, "note": HOSTILE, "pages": 1203, "wire_bytes": 90_000, "all_wire_bytes": 9_000_000, "all_raw_bytes": 90_000_000,
            "pause_ns": 2_100_000, "transfer_ns": 9_000_000, "epoch_ns": 25_000_000, "held_packets": 3, "held_bytes": 300, "passed_packets": 4000,
            "dropped_packets": 0, "took_over_ns": null, "estimates": [[HOSTILE, 118_000_000.0]],
            "reasons": { (HOSTILE): 60, "packets held": 10 }, "all_pages": 22_000, "all_pause_ns": 150_000_000, "all_transfer_ns": 600_000_000,
            "all_suspended_ns": 1_000_000,
        });
        let protected = VmState {
            name: "protected".into(),
            store: None,
            problem: None,
            status: json!({ "vm": "protected", "state": "running", "replication": replication }),
        };
        let silent = VmState {
            name: "silent".into(),
            store: None,
            problem: Some("its engine does not answer".into()),
            status: Value::Null,
        };
        (0..self.vms).map(vm).chain([protected, silent]).collect()
    }

    fn stores(&self) -> Vec<StoreHead> {
        let all = &self.listing.checkpoints;
        let vms: BTreeSet<&String> = all.iter().map(|one| &one.vm).collect();
        vec![StoreHead {
            id: STORE.into(),
            place: format!("/srv/{HOSTILE}"),
            checkpoints: all.len(),
            newest: all.last().map(|one| one.id),
            vms: vms.into_iter().cloned().collect(),
            generation: 1 + self.looks(),
            problem: None,
        }]
    }

    fn listing(&self, store: &str) -> Result<Arc<CheckpointListing>, ApiError> {
        let unknown = || ApiError::Unknown(format!("no store {store} is shown here"));
        (store == STORE).then(|| Arc::clone(&self.listing)).ok_or_else(unknown)
    }

    fn checkpoint(&self, store: &str, id: u64) -> Result<Value, ApiError> {
        let one = self.known(store, id)?;
        let mut all = serde_json::to_value(&**one).map_err(|e| ApiError::Failed(e.to_string()))?;
        let more = json!({
            "precopy_rounds": 2, "parent_is_there": one.parent.is_some(), "previous": one.parent, "next": null,
            "screens": if id % 3 == 2 { json!([null]) } else { json!([]) },
            "ram": [{ "name": HOSTILE, "used_bytes": 1 << 30, "total_bytes": 1 << 30 }],
            "machine": { "machine_type": "pc-i440fx-7.2", "cpus": 1, "qemu_version": "7.2", "user_command": ["qemu-system-x86_64", HOSTILE] },
            "commands": [{ "name": "restore", "command": format!("keyframe restore --store S {id}"), "can_be_done": false }, { "name": "pin", "command": format!("keyframe pin --store S {id}"), "can_be_done": true }],
        });
        if let (Some(all), Some(more)) = (all.as_object_mut(), more.as_object()) {
            all.extend(more.clone());
        }
        Ok(all)
    }

    fn heat(&self, store: &str, id: u64, pieces: u64) -> Result<HeatMap, ApiError> {
        let one = self.known(store, id)?;
        let changed: Vec<u64> = (0..pieces).map(|piece| piece % 7).collect();
        let region = HeatRegion {
            name: HOSTILE.into(),
            pages: pieces * 16,
            nonzero_pages: pieces * 8,
            changed_pages: changed.iter().sum(),
            changed,
            nonzero: vec![8; pieces as usize],
        };
        Ok(HeatMap { id, parent: one.parent, piece_pages: 16, regions: vec![region] })
    }

    fn diff(&self, store: &str, id: u64) -> Result<Value, ApiError> {
        let first = self.known(store, id)?.parent;
        Ok(
            json!({ "first": first, "second": id, "ram": [], "disks": [], "device_bytes": [1, 1], "same_devices": true }),
        )
    }

    fn screen(&self, store: &str, id: u64, member: Option<&str>) -> Result<Arc<[u8]>, ApiError> {
        self.known(store, id)?;
        match (member, id % 3) {
            (Some(member), _) => Err(ApiError::Bad(format!("it has no member {member}"))),
            (None, 0) => Err(ApiError::Unknown("the VM has no display".into())),
            (None, 1) => Err(ApiError::NotShown(format!("its display is {HOSTILE}"))),
            (None, _) => Ok(PNG.into()),
        }
    }

    fn sizes(&self, store: &str) -> Result<StoreSizes, ApiError> {
        let all = self.listing(store)?.checkpoints.len() as u64;
        Ok(StoreSizes { total_bytes: all * 900_000, raw_bytes: all << 30, ..StoreSizes::default() })
    }

    fn recordings(&self) -> Value {
        json!({ "recordings": [{ "path": HOSTILE, "problem": HOSTILE }], "analyses": [] })
    }

    fn act(&self, store: &str, action: &DashboardAction) -> Result<String, ApiError> {
        if let DashboardAction::Pin(id)
        | DashboardAction::Unpin(id)
        | DashboardAction::Tag(id, _)
        | DashboardAction::Rollback(id)
        | DashboardAction::Branch(id) = action
        {
            self.known(store, *id)?;
        }
        self.acted.lock().ignore_poison().push(action.clone());
        Ok("done".into())
    }
}
