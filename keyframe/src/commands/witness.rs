//! `keyframe witness`: lets at most one host run a protected VM.

use super::protect::folder;
use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use crate::rights;
use crate::words::StderrWords;
use crate::words::failover::failure;
use keyframe_failover::settings::{HostKey, address};
use keyframe_failover::witness::WitnessServer;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;

/// Decide, on a third host, which of two hosts runs a protected VM
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The witness knows for each VM which host runs it and which host may take it over. It grants the VM to the first host that asks,
and remembers that in --dir, which must survive a crash of the witness's host. The witness may be absent as long as no host fails.
One witness serves thousands of VMs.

Examples:
  keyframe witness --key KEY --listen 0.0.0.0:7431 --dir /var/lib/keyframe/witness"
)]
pub struct Witness {
    #[command(flatten)]
    key: HostKey,
    /// Where to listen
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:7431")]
    listen: String,
    /// Where it keeps what it knows [default: ~/.local/state/keyframe/witness]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl Witness {
    /// Answers until a signal comes.
    pub fn run(self) -> Outcome {
        let party = self.key.party().map_err(failure)?;
        let folder = folder(self.dir, "witness")?;
        let wanted = address(&self.listen).map_err(failure)?;
        let listener = TcpListener::bind(wanted).map_err(|e| {
            Failure::new(format!("listen at {wanted}: {e}")).fix("name another port: --listen")
        })?;
        let server = WitnessServer::open(&folder, party, StderrWords::shared(false, false));
        let server = Arc::new(server.map_err(failure)?);
        rights::writes_beneath(&[folder]);
        let stop = keyframe_session::interrupt::interruption()?;
        let found = listener.local_addr().map_err(|e| Failure::new(format!("listen: {e}")))?;
        output::print_line(&format!("witness at {found}, knows {} VMs", server.groups()))?;
        server.serve(&listener, &stop).map_err(failure)?;
        Ok(DONE)
    }
}
