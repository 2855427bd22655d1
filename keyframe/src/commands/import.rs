//! `keyframe import`: a bundle, or a migration stream that QEMU wrote, becomes a checkpoint.

use super::StoreArg;
use crate::failure::{DONE, Failure, Outcome, WARNED};
use crate::output;
use crate::progress::BundleBar;
use crate::words::StderrWords;
use keyframe_bundle::Bundle;
use keyframe_inspect::entry::Entry;
use keyframe_qemu::Invocation;
use keyframe_session::migration_import::MigrationImport;
use keyframe_store::Store;
use keyframe_store_keys::{BundleKeyArg, fix_of_bundle};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

/// Bytes of the stream that are read at once.
const BUFFER_BYTES: usize = 1 << 20;

/// Make a checkpoint of a bundle, or of a migration stream that QEMU wrote to a file
#[derive(clap::Args, Debug)]
#[command(
    after_help = "A bundle (keyframe bundle) brings the checkpoint and all files that its VM needs. Kernels, firmware and CDs are written to
--files, and the checkpoint names them there: keep that directory as long as the checkpoint. An import that was interrupted goes
on if you run it again. A bundle that was imported before is not imported twice.

A migration stream needs the command line of the QEMU that wrote it, without -incoming, after two dashes. Keyframe starts a QEMU with
it for a moment, to ask for the layout of its RAM. The guest does not run. Keyframe refuses streams made with multifd, compress,
xbzrle, postcopy-ram, mapped-ram or x-ignore-shared.

The checkpoint is then like any other.

Examples:
  keyframe import --store S web.bundle
  keyframe import --store s3://backups/vms --files /var/lib/vm-files web.bundle
  (qemu) migrate \"exec:cat > vm.mig\"
  keyframe import --store S vm.mig -- qemu-system-x86_64 -m 1G ...
  zstdcat vm.mig.zst | keyframe import --store S - --tag golden -- qemu-system-x86_64 -m 1G ..."
)]
pub struct Import {
    #[command(flatten)]
    store: StoreArg,
    /// The bundle or the stream; - for a stream on standard input
    file: PathBuf,
    /// Of a bundle: write the files that the VM needs into this directory [default: `imported` in the
    /// store's directory; for another store, a directory of the user]
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    files: Option<PathBuf>,
    #[command(flatten)]
    bundle_key: BundleKeyArg,
    /// Of a stream: the VM's name in the store [default: QEMU's -name, or `vm`]
    #[arg(long, requires = "command")]
    name: Option<String>,
    /// A name for the checkpoint
    #[arg(long)]
    tag: Option<String>,
    /// Print JSON: the entry of `list`
    #[arg(long)]
    json: bool,
    /// No progress
    #[arg(long, short)]
    quiet: bool,
    /// Of a stream: QEMU's command line
    #[arg(last = true, value_name = "QEMU COMMAND")]
    command: Vec<OsString>,
}

impl Import {
    /// Imports the file.
    pub fn run(self) -> Outcome {
        let store = self.store.open()?;
        if let Some(tag) = &self.tag {
            keyframe_store::check_tag(tag).map_err(|e| self.store.failure(&e))?;
        }
        match (Bundle::is_bundle(&self.file), self.command.is_empty()) {
            (true, true) => self.bundle(&store),
            (false, false) => self.stream(&store),
            (true, false) => Err(Failure::usage(format!("{} is a bundle", self.file.display()))
                .fix("leave out QEMU's command line: the bundle holds it")),
            (false, true) => {
                let is_file = self.file != Path::new("-");
                if is_file && let Err(e) = File::open(&self.file) {
                    return Err(Failure::new(format!("open {}: {e}", self.file.display())));
                }
                let what =
                    if is_file { "this is no bundle" } else { "a bundle is not read from a pipe" };
                Err(Failure::usage(format!("{}: {what}", self.file.display())).fix(
                    "name the file of a bundle; if it is a migration stream, give the command line of the \
                     QEMU that wrote it: -- qemu-system-x86_64 ...",
                ))
            }
        }
    }

    fn bundle(&self, store: &Store) -> Outcome {
        let opened = self
            .bundle_key
            .open(&self.file)
            .map_err(|e| Failure::store(&e, &self.file).with_fix(fix_of_bundle(&e)))?;
        let bundle = Bundle::of(opened)?;
        let folder = match &self.files {
            Some(folder) => crate::failure::paths::absolute(folder)?,
            None => store.local_folder().map_err(|e| self.store.failure(&e))?.join("imported"),
        };
        let mut bar = BundleBar::new(self.quiet);
        let imported = bundle.import(store, &folder, &mut |progress| bar.show(progress));
        bar.end();
        let imported = imported?;
        let id = imported.id;
        let mut code = DONE;
        for tag in &imported.tags_left {
            eprintln!("keyframe: tag {tag} is another checkpoint's in the store: it stays there");
            code = WARNED;
        }
        if let Some(tag) = &self.tag {
            store.set_tag(tag, id).map_err(|e| self.store.failure(&e))?;
        }
        if self.json {
            output::json(&Entry::of(&store.sealed(id).map_err(|e| self.store.failure(&e))?))?;
            return Ok(code);
        }
        let (file, vm) = (self.file.display(), bundle.vm());
        if imported.was_known {
            eprintln!("keyframe: {file} was imported before: it is checkpoint {id} of VM {vm}");
            return Ok(code);
        }
        eprintln!("keyframe: {file} is checkpoint {id} of VM {vm}");
        if !bundle.files().is_empty() {
            let count = bundle.files().len();
            eprintln!(
                "keyframe: the files that the VM reads ({count}) are in {}",
                folder.display()
            );
        }
        Ok(code)
    }

    fn stream(&self, store: &Store) -> Outcome {
        let invocation = Invocation::parse(self.command.clone()).map_err(|e| Failure::qemu(&e))?;
        let (name, tag) = (self.name.as_deref(), self.tag.as_deref());
        let words = StderrWords::default();
        let import = MigrationImport { store, invocation: &invocation, name, tag, events: &words };
        let sealed = import.read(self.input()?)?;
        if self.json {
            output::json(&Entry::of(&sealed))?;
        } else {
            let (file, vm) = (self.file.display(), &sealed.meta.vm);
            eprintln!("keyframe: {file} is checkpoint {} of VM {vm}", sealed.id);
        }
        Ok(DONE)
    }

    fn input(&self) -> Result<BufReader<Box<dyn Read>>, Failure> {
        let input: Box<dyn Read> = if self.file == Path::new("-") {
            Box::new(io::stdin())
        } else {
            let fail = |e: io::Error| Failure::new(format!("open {}: {e}", self.file.display()));
            Box::new(File::open(&self.file).map_err(fail)?)
        };
        Ok(BufReader::with_capacity(BUFFER_BYTES, input))
    }
}
