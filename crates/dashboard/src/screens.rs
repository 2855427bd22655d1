//! Pictures of displays. This reads a page map, a device state and a display's memory, so the last
//! few pictures are kept.

use super::listed::ListedStore;
use super::{locked, said};
use keyframe_inspect::display_picture::{self as screens, NoPicture};
use keyframe_inspect::guest_memory::Guest;
use keyframe_store::CheckpointId;
use keyframe_web::ApiError;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Pictures that are kept.
const KEPT_MAX: usize = 16;

/// Draws the displays of checkpoints, and keeps the last few pictures.
#[derive(Default)]
pub struct Screens {
    kept: Mutex<VecDeque<(Key, Arc<[u8]>)>>,
}

/// The store, the checkpoint, the member of its group.
type Key = (String, u64, Option<String>);

impl Screens {
    /// Returns the picture of the display of checkpoint `id`, as a PNG file. `member` names the VM
    /// in a checkpoint of a group; `None` for a checkpoint of one VM.
    ///
    /// Errors: there is no such checkpoint or VM; the VM has no display; Keyframe cannot draw the
    /// display; the store cannot be read.
    pub fn of(
        &self,
        listed: &ListedStore,
        id: u64,
        member: Option<&str>,
    ) -> Result<Arc<[u8]>, ApiError> {
        let key = (listed.id().to_owned(), id, member.map(str::to_owned));
        // A forgotten checkpoint has no picture, even if it is kept here.
        let listing = listed.listing()?;
        listing.get(id).ok_or_else(|| ApiError::Unknown(format!("there is no checkpoint {id}")))?;
        if let Some((_, kept)) = locked(&self.kept).iter().find(|(known, _)| *known == key) {
            return Ok(Arc::clone(kept));
        }
        let loaded = listed.store().load(CheckpointId(id)).map_err(|e| listed.error(&e))?;
        let guest = Guest::choose(&loaded, member).map_err(|e| ApiError::Bad(said(&e, e.fix())))?;
        let what = format!("VM {} in checkpoint {id}", member.unwrap_or(&loaded.meta.vm));
        let picture = screens::picture(&loaded, &guest).map_err(|none| {
            let answer = match none {
                NoPicture::NoDisplay => ApiError::Unknown,
                NoPicture::NotDrawn(_) => ApiError::NotShown,
                NoPicture::Failed(_) => ApiError::Failed,
            };
            let error = match none {
                NoPicture::Failed(error) => error,
                none => none.into_error(&what),
            };
            answer(said(&error, error.fix()))
        })?;
        let png: Arc<[u8]> =
            screens::png(&picture).map_err(|e| ApiError::Failed(said(&e, e.fix())))?.into();
        let mut kept = locked(&self.kept);
        kept.push_back((key, Arc::clone(&png)));
        if kept.len() > KEPT_MAX {
            kept.pop_front();
        }
        Ok(png)
    }
}
