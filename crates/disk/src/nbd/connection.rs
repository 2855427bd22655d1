//! Serves one client, from its greeting to its disconnect.

use super::Shared;
use super::handshake::negotiate;
use super::input::ClientInput;
use super::transmission::Transmission;
use crate::{Error, Result};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The time limit between two messages of a client's negotiation.
const PATIENCE: Duration = Duration::from_secs(30);

/// Serves one client on `stream` until it disconnects. Errors: the client broke the protocol; the
/// connection failed.
pub fn serve(shared: &Arc<Shared>, stream: UnixStream) -> Result<()> {
    let failed = || Error::io("an NBD client", "set up the connection to");
    let clone = || stream.try_clone().map_err(failed());
    stream.set_read_timeout(Some(PATIENCE)).map_err(failed())?;
    let mut input = ClientInput::new(clone()?);
    let Some(agreed) = negotiate(shared, &mut input, clone()?)? else { return Ok(()) };
    // A guest may not use its disk for days.
    stream.set_read_timeout(None).map_err(failed())?;
    shared.traffic.served.fetch_add(1, Ordering::AcqRel);
    Transmission::new(Arc::clone(shared), agreed, input, stream).run()
}
