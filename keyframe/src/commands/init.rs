//! `keyframe init`: makes a store.

use crate::failure::{DONE, Failure, Outcome, USAGE};
use crate::output;
use keyframe_event_text::shell_word;
use keyframe_store::Store;
use keyframe_store_keys::KeyArg;
use std::path::PathBuf;

/// Make an empty store
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  keyframe init /var/lib/keyframe
  export KEYFRAME_STORE=/var/lib/keyframe     # then --store can be left out
  keyframe init /var/lib/keyframe --encrypt   # asks for a passphrase, or takes it from KEYFRAME_PASSPHRASE
  keyframe init S --encrypt --key-file FILE   # FILE: (umask 077; head -c 32 /dev/urandom > FILE)
  keyframe init 's3://backups/vms?endpoint=http://127.0.0.1:9000'   # rights: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY")]
pub struct Init {
    /// Directory to make, which must not exist or be empty; or s3://BUCKET/PREFIX of a bucket that
    /// exists
    #[arg(value_name = "STORE", env = "KEYFRAME_STORE")]
    store: PathBuf,
    /// Encrypt everything in the store. Without the passphrase or key file the data is lost
    #[arg(long)]
    encrypt: bool,
    #[command(flatten)]
    key: KeyArg,
}

impl Init {
    /// Makes the store.
    pub fn run(&self) -> Outcome {
        if !self.encrypt && self.key.is_given() {
            return Err(Failure {
                code: USAGE,
                ..Failure::new("a key was given for a store that is not to be encrypted")
            }
            .fix(
                "add --encrypt; or leave out --key-file, KEYFRAME_KEY_FILE and KEYFRAME_PASSPHRASE",
            ));
        }
        let made = if self.encrypt { self.key.init(&self.store) } else { Store::init(&self.store) };
        let store = made.map_err(|e| Failure::store(&e, &self.store))?;
        let encrypted = if store.is_encrypted() { ", encrypted" } else { "" };
        output::print_line(&format!(
            "store {} made in {}{encrypted}",
            store.id(),
            self.store.display()
        ))?;
        if store.is_encrypted() {
            let local = store.local_folder().map_err(|e| Failure::store(&e, &self.store))?;
            eprintln!(
                "keyframe: not encrypted are sizes, times and names of files, and tags; and, on this host alone, what guests write to \
                 served disks, in {}",
                local.display()
            );
        }
        eprintln!(
            "keyframe: checkpoints into it: keyframe run --store {} -- qemu-system-x86_64 ... (or firecracker ...)",
            shell_word(&self.store)
        );
        Ok(DONE)
    }
}
