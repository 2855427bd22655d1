//! `keyframe bundle`: one file with everything that a restore on another machine needs.

use super::{MovedArg, StoreArg, changed_files};
use crate::failure::{DONE, Failure, Outcome, USAGE, WARNED};
use crate::output;
use crate::progress::BundleBar;
use keyframe_bundle::{BundleReport, BundleRequest};
use keyframe_event_text::shell_word;
use keyframe_store::Store;
use keyframe_store_keys::{BundleKeyArg, fix_of_bundle};
use keyframe_vm_disks::moved_images;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Write one file with all that a restore of a checkpoint on another machine needs
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The bundle holds the VM's RAM and devices, its disks with the content of the images beneath them, and the kernel, firmware,
CDs and read-only disks of its command line. The other machine needs only QEMU with its own firmware, and `keyframe import`.
Equal pages and blocks are in it once. A group's checkpoint brings all its VMs. The command warns (exit code 3) of options whose
files are not in the bundle: -readconfig, -L, shared directories, secrets, TLS credentials.

While the bundle is made, FILE.partial holds what is done; it and the bundle together need twice the space. A command that was
interrupted goes on if you run it again. The bundle is a tar archive of a store: keyframe list --store FILE shows the checkpoint.

The bundle of an encrypted store is encrypted with a key of its own (--encrypt), unless you say --plain.

Examples:
  keyframe bundle --store S latest -o web.bundle
  keyframe bundle --store S 12 -o web.bundle --image /old/disk.qcow2=/new/disk.qcow2
  keyframe bundle --store S 12 -o web.bundle --encrypt --bundle-key-file new.key
  keyframe import --store S web.bundle          # on the other machine"
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub struct Bundle {
    #[command(flatten)]
    store: StoreArg,
    /// A number, a tag or `latest`
    checkpoint: String,
    /// The file to make
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    moved: MovedArg,
    /// Bundle disks that were left out of the checkpoint as their images are now, which need not fit
    /// its RAM
    #[arg(long)]
    left_out_as_now: bool,
    /// Bundle read-only disks and CDs that have changed since the checkpoint as they are now
    #[arg(long)]
    changed_as_now: bool,
    /// Encrypt the bundle. Without the passphrase or key file its content is lost
    #[arg(long, conflicts_with = "plain")]
    encrypt: bool,
    /// Do not encrypt the bundle of an encrypted store
    #[arg(long)]
    plain: bool,
    #[command(flatten)]
    its_key: BundleKeyArg,
    /// Print JSON: sizes in bytes
    #[arg(long)]
    json: bool,
    /// No progress
    #[arg(long, short)]
    quiet: bool,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Made<'a> {
    bundle: &'a Path,
    bundle_bytes: u64,
    encrypted: bool,
    disks: &'a [String],
    files: Vec<&'a str>,
}

impl Bundle {
    /// Makes the bundle.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        self.require_choice(&store)?;
        let checkpoint = store.resolve(&self.checkpoint).map_err(|e| self.store.failure(&e))?;
        let mut meta = store.sealed(checkpoint).map_err(|e| self.store.failure(&e))?.meta;
        moved_images::apply(&self.moved.image, &mut meta)?;
        changed_files::check(&meta, self.changed_as_now)?;
        let request = BundleRequest {
            store: &store,
            checkpoint,
            meta: &meta,
            output: &self.output,
            moved: &self.moved.image,
            left_out_as_now: self.left_out_as_now,
            encrypted: self.encrypt,
            staging: &|path, exists| match (exists, self.encrypt) {
                (true, _) => self.its_key.open(path),
                (false, true) => self.its_key.init(path),
                (false, false) => Store::init(path),
            },
        };
        let mut bar = BundleBar::new(self.quiet);
        let made = keyframe_bundle::write(&request, &mut |progress| bar.show(progress));
        bar.end();
        let BundleReport { bundle_bytes, files, disks, left_behind } = made.map_err(|e| {
            let fix = match &e {
                keyframe_bundle::Error::Store { source, .. } => fix_of_bundle(source),
                _ => None,
            };
            Failure::from(e).with_fix(fix)
        })?;
        if self.json {
            let files = files.iter().map(|file| file.path.as_str()).collect();
            let (bundle, encrypted) = (&*self.output, self.encrypt);
            output::json(&Made { bundle, bundle_bytes, encrypted, disks: &disks, files })?;
        } else {
            let counts = format!("disks: {}, files: {}", disks.len(), files.len());
            eprintln!(
                "keyframe: checkpoint {checkpoint} of VM {} is in {} ({}, {counts}); on the other machine: \
                 keyframe import --store S {}",
                meta.vm,
                self.output.display(),
                output::bytes(bundle_bytes),
                shell_word(self.output.file_name().unwrap_or_default().as_ref()),
            );
        }
        for option in &left_behind {
            eprintln!(
                "keyframe: warning: the bundle does not hold what {option} names: copy it to the same place \
                 on the other machine"
            );
        }
        Ok(if left_behind.is_empty() { DONE } else { WARNED })
    }

    /// Refuses to decrypt without being told, and a key that nothing is encrypted with.
    fn require_choice(&self, store: &Store) -> Result<(), Failure> {
        let refusal = |text: &str| Failure { code: USAGE, ..Failure::new(text) };
        if store.is_encrypted() && !self.encrypt && !self.plain {
            return Err(refusal("the store is encrypted, and its bundle would not be").fix(
                "add --encrypt; or --plain, if all who can read the file may know its content",
            ));
        }
        if self.output == Path::new("-") {
            return Err(refusal("a bundle is not written to standard output: name a file"));
        }
        if self.its_key.is_given() && !self.encrypt {
            return Err(refusal("a key was given for a bundle that is not to be encrypted")
                .fix("add --encrypt; or leave out --bundle-key-file, KEYFRAME_BUNDLE_KEY_FILE and KEYFRAME_BUNDLE_PASSPHRASE"));
        }
        Ok(())
    }
}
