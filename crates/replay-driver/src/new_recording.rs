//! The description of a recording that is about to be made.

use crate::error::{Error, Result};
use crate::log_version_of;
use keyframe_qemu::{Invocation, Medium};
use keyframe_replay::recording::{FORMAT, ImageMeta, VERSION};
use keyframe_replay::{RecordingEnding, RecordingMeta};
use keyframe_store::Store;
use std::ffi::OsString;
use std::path::Path;

/// Describes a new recording of the VM that `command` starts in the working directory of this process.
/// The VM is called `name`, or as its command line says. `store` is the place of its checkpoints.
/// Nothing is made or started. Errors: QEMU cannot record this command line; the binary cannot be
/// read, or writes logs of an unknown version.
pub fn new_recording(
    command: Vec<OsString>,
    name: Option<&str>,
    store: String,
) -> Result<RecordingMeta> {
    let invocation = Invocation::parse(command)?;
    // Before anything is made or opened.
    invocation.clone().record(Path::new("log"))?;
    let identity = invocation.identity()?;
    let directory =
        std::env::current_dir().map_err(|e| Error::io("find the working directory", e))?;
    // Of what is not there, QEMU tells.
    let medium = |medium: Medium| ImageMeta::of(&medium.name, &directory.join(&medium.image)).ok();
    let media = invocation.media().into_iter().filter_map(medium).collect();
    let vm = name.or(invocation.vm_name()).unwrap_or("vm");
    Ok(RecordingMeta {
        format: FORMAT.into(),
        version: VERSION,
        id: keyframe_replay::recording::new_id()?,
        vm: keyframe_session::run_dir::name_from(vm),
        began_at: jiff::Timestamp::now(),
        duration_ns: 0,
        ending: RecordingEnding::Recording,
        instructions: 0,
        log_bytes: 0,
        log_version: log_version_of(&identity)?,
        qemu_path: identity.path.to_string_lossy().into_owned(),
        qemu_version: identity.version,
        qemu_blake3: identity.blake3,
        working_directory: directory.to_string_lossy().into_owned(),
        user_command: invocation.words().to_vec(),
        images: Vec::new(),
        media,
        store,
    })
}

/// Returns the images beneath the disks of the first checkpoint in `store` of the recording with the id
/// `recording`; none if there is no such checkpoint. Errors: the store or an image cannot be read.
pub fn recorded_images(store: &Store, recording: &str) -> Result<Vec<ImageMeta>> {
    let listing = store.checkpoints().map_err(|e| Error::store(store.path(), e))?;
    let first = listing.sealed.iter().find(|sealed| {
        sealed.meta.machine.recorded.as_ref().is_some_and(|place| place.recording == recording)
    });
    let disks = first.map_or(&[][..], |sealed| &sealed.meta.disks);
    let image =
        |disk: &keyframe_store::DiskMeta| ImageMeta::of(&disk.name, Path::new(&disk.base.path));
    let images: std::result::Result<_, _> = disks.iter().map(image).collect();
    Ok(images?)
}
