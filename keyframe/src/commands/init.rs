//! `keyframe init`: makes a store.

use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use keyframe_store::Store;
use std::path::PathBuf;

/// Make an empty store
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  keyframe init /var/lib/keyframe
  keyframe init 's3://backups/vms?endpoint=http://127.0.0.1:9000'   # rights: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY
  export KEYFRAME_STORE=/var/lib/keyframe     # then --store can be left out")]
pub struct Init {
    /// Directory to make, which must not exist or be empty; or s3://BUCKET/PREFIX of a bucket that exists
    #[arg(value_name = "STORE", env = "KEYFRAME_STORE")]
    store: PathBuf,
}

impl Init {
    /// Makes the store.
    pub fn run(&self) -> Outcome {
        let store = Store::init(&self.store).map_err(|e| Failure::store(&e, &self.store))?;
        output::print_line(&format!("store {} made in {}", store.id(), self.store.display()))?;
        Ok(DONE)
    }
}
