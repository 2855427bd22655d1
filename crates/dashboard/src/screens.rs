//! What displays showed. A page map, a device state and a display's memory are read for it, so the
//! last few pictures are kept.

use super::listed::Listed;
use super::{locked, of_store, said};
use keyframe_inspect::display_picture::{self as screens, NoPicture};
use keyframe_inspect::guest_memory::Guest;
use keyframe_store::CheckpointId;
use keyframe_web::ApiError;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Pictures that are kept.
const KEPT_MAX: usize = 16;

/// The last few.
#[derive(Default)]
pub struct Screens {
    kept: Mutex<VecDeque<(Key, Arc<[u8]>)>>,
}

/// The store, the checkpoint, the member of its group.
type Key = (String, u64, Option<String>);

impl Screens {
    /// The picture as a PNG.
    pub fn of(
        &self,
        listed: &Listed,
        id: u64,
        member: Option<&str>,
    ) -> Result<Arc<[u8]>, ApiError> {
        let key = (listed.id().to_owned(), id, member.map(str::to_owned));
        // One that was forgotten has no picture either.
        let listing = listed.listing()?;
        listing.get(id).ok_or_else(|| ApiError::Unknown(format!("there is no checkpoint {id}")))?;
        if let Some((_, kept)) = locked(&self.kept).iter().find(|(known, _)| *known == key) {
            return Ok(Arc::clone(kept));
        }
        let loaded =
            listed.store().load(CheckpointId(id)).map_err(|e| of_store(&e, listed.place()))?;
        let guest =
            Guest::choose(&loaded, member).map_err(|e| ApiError::Bad(said(&of_inspect(&e))))?;
        let what = format!("VM {} in checkpoint {id}", member.unwrap_or(&loaded.meta.vm));
        let picture = screens::picture(&loaded, &guest).map_err(|none| match none {
            NoPicture::NoDisplay => ApiError::Unknown(said(&of_inspect(&none.into_error(&what)))),
            NoPicture::NotDrawn(_) => {
                ApiError::NotShown(said(&of_inspect(&none.into_error(&what))))
            }
            NoPicture::Failed(failure) => ApiError::Failed(said(&of_inspect(&failure))),
        })?;
        let png: Arc<[u8]> =
            screens::png(&picture).map_err(|e| ApiError::Failed(said(&of_inspect(&e))))?.into();
        let mut kept = locked(&self.kept);
        kept.push_back((key, Arc::clone(&png)));
        if kept.len() > KEPT_MAX {
            kept.pop_front();
        }
        Ok(png)
    }
}

/// An error of what a checkpoint holds.
fn of_inspect(error: &keyframe_inspect::Error) -> keyframe_failure::Failure {
    let fix = error.fix();
    keyframe_failure::Failure {
        fix,
        ..keyframe_failure::Failure::new(keyframe_failure::chain(error))
    }
}
