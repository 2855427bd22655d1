//! Asks the arbiter that decides which host runs the VM: the witness, or the hook that switches the
//! other host off. The answer comes to the engine's inbox.

use super::settings::FailoverSetup;
use super::witness::{self, WitnessAnswer};
use keyframe_replication::WitnessRequest;
use std::sync::mpsc::Sender;

/// Sends `request` to the witness in a thread, and sends the answer to `inbox`, wrapped by `wrap`.
/// The answer is [`WitnessAnswer::Lost`] if the witness does not answer, if this host has no
/// witness, or if the thread cannot be started.
pub fn ask<T: Send + 'static>(
    setup: &FailoverSetup,
    request: WitnessRequest,
    inbox: &Sender<T>,
    wrap: fn(WitnessAnswer) -> T,
) {
    let Some(address) = setup.witness else {
        let _ = inbox.send(wrap(WitnessAnswer::Lost { sent: false }));
        return;
    };
    let party = setup.party.clone();
    aside("ask-witness", inbox, wrap, WitnessAnswer::Lost { sent: false }, move || {
        witness::ask(&party, address, request)
    });
}

/// Runs the hook that switches the other host of VM `vm` off, in a thread. `role` is this host's
/// role. Sends true to `inbox`, wrapped by `wrap`, if the hook reports that the other host is off.
/// Sends false otherwise, also if there is no hook or if it has not ended after 2 min.
pub fn fence<T: Send + 'static>(
    setup: &FailoverSetup,
    vm: &str,
    role: &'static str,
    inbox: &Sender<T>,
    wrap: fn(bool) -> T,
) {
    let (setup, vm) = (setup.clone(), vm.to_owned());
    aside("fence", inbox, wrap, false, move || setup.fence(&vm, role));
}

/// Runs `work` in a thread. Uses `otherwise` as the answer if the thread cannot be started.
fn aside<T: Send + 'static, A>(
    name: &str,
    inbox: &Sender<T>,
    wrap: fn(A) -> T,
    otherwise: A,
    work: impl FnOnce() -> A + Send + 'static,
) where
    A: Send + 'static,
{
    let sender = inbox.clone();
    let all = move || {
        let _ = sender.send(wrap(work()));
    };
    if std::thread::Builder::new().name(name.into()).spawn(all).is_err() {
        let _ = inbox.send(wrap(otherwise));
    }
}
