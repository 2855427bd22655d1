//! `keyframe standby`: holds what a protected VM is, and goes on with it.

use super::protect::{exit_code, folder};
use crate::failure::Outcome;
use crate::words::StderrWords;
use crate::words::failover::failure;
use keyframe_failover::links::StandbyAddresses;
use keyframe_failover::settings::{FailoverSettings, address};
use keyframe_failover::standby::{self, StandbyOptions};
use std::ffi::OsString;
use std::path::PathBuf;

/// Hold a protected VM's newest state, and go on with it when its host fails
#[derive(clap::Args, Debug)]
#[command(
    after_help = "A QEMU waits on this host and receives the VM's memory epoch by epoch. It runs when the primary has failed and the witness or the
fence command has confirmed it, or after `keyframe failover`. Files that the VM's command line names, such as kernel and firmware,
must be here under the same paths. Its network must exist here, for example a tap with the same name; otherwise give other
arguments for it after --. The VM's disks are kept in --dir.

With --peer this host, once it runs the VM, protects it again as soon as a standby listens at that address. Start `keyframe standby` on
the failed host when it is back. A primary that was started with --listen does that by itself. When the VM moves to that host, this
host becomes its standby again.

Examples:
  keyframe standby --key KEY --witness c:7431 --listen 0.0.0.0:7430 --dir D --peer a:7430
  keyframe standby --key KEY --witness c:7431 --listen 0.0.0.0:7430 --dir D      # the VM runs here without a standby, once it does
  keyframe standby --key KEY --fence-with 'ipmitool -H a-ipmi power off' --listen 0.0.0.0:7430 --dir D
  keyframe standby ... -- -netdev tap,id=n0,ifname=tap7,script=no        # the same netdev, by another tap"
)]
pub struct Standby {
    /// Where to listen
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:7430")]
    listen: String,
    /// Where disks are kept [default: ~/.local/state/keyframe/standby]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Its name among what runs here, for status and failover
    #[arg(long, value_name = "NAME", default_value = "standby")]
    name: String,
    /// The address of a standby for the VM once it runs here
    #[arg(long, value_name = "HOST:PORT")]
    peer: Option<String>,
    /// The same by a second way
    #[arg(long, value_name = "HOST:PORT", requires = "peer")]
    peer_beat: Option<String>,
    #[command(flatten)]
    settings: FailoverSettings,
    /// Words that differ from the primary's line here
    #[arg(last = true, value_name = "QEMU OPTIONS")]
    extra: Vec<OsString>,
}

impl Standby {
    /// Stands by until the VM has run here to its end, or a signal comes.
    pub fn run(self) -> Outcome {
        let words = StderrWords::shared(self.settings.is_quiet(), false);
        let setup = self.settings.resolve(words).map_err(failure)?;
        let beat = self.peer_beat.as_deref().map(address).transpose().map_err(failure)?;
        let peer = self.peer.as_deref().map(address).transpose().map_err(failure)?;
        let ending = standby::run(&StandbyOptions {
            listen: address(&self.listen).map_err(failure)?,
            folder: folder(self.dir, "standby")?,
            name: self.name,
            extra: self.extra,
            peer: peer.map(|control| StandbyAddresses { control, beat }),
            setup,
        });
        ending.map(exit_code).map_err(failure)
    }
}
