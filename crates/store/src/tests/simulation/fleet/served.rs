//! The writers of a fleet that are behind a checkpoint server: messages and answers are lost or come
//! twice, others act between any two of them, and leases end at any instant.

use super::super::super::direct_server::{DirectWriters, Fate, LEASE_MS, Network};
use super::super::super::{layout, request};
use super::super::world::{RAM_PAGES, put};
use super::{Fleet, Member, locked};
use crate::{Error, Result, Store, Writer};
use keyframe_store_backend::served::wire::{Request, WriteAct};
use keyframe_store_backend::testing::FaultyBackend;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// So many servers are kept whose leases may end.
const SERVERS_MAX: usize = 8;

/// The connection of one writer to its server.
pub(super) struct Unsteady {
    fleet: Arc<Fleet>,
    /// A message or an answer was lost since this was reset.
    is_disturbed: AtomicBool,
}

impl std::fmt::Debug for Unsteady {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Unsteady")
    }
}

impl Network for Unsteady {
    fn fate(&self, request: &Request) -> Fate {
        let is_last = matches!(request, Request::Write { act: WriteAct::Leave, .. });
        if std::thread::panicking() || is_last {
            return Fate::Arrives;
        }
        let fate = match self.fleet.below(150) {
            0 => Fate::Lost,
            1 => Fate::AnswerLost,
            2..7 => Fate::ArrivesTwice,
            _ => Fate::Arrives,
        };
        if matches!(fate, Fate::Lost | Fate::AnswerLost) {
            self.is_disturbed.store(true, Ordering::Relaxed);
            self.fleet.came("message or answer lost", 1);
        }
        fate
    }

    fn after(&self, _: &Request) {
        if !std::thread::panicking() {
            self.fleet.interrupt(14);
        }
    }
}

/// What a remote writer has in place of the medium.
#[derive(Debug)]
pub(super) struct OfServer {
    network: Arc<Unsteady>,
}

impl OfServer {
    /// True if a message was lost since the last call.
    pub fn was_disturbed(&self) -> bool {
        self.network.is_disturbed.swap(false, Ordering::Relaxed)
    }
}

impl Fleet {
    /// The store as a remote writer opens it. The server works for it in `process`.
    pub(super) fn open_elsewhere(
        self: &Arc<Self>,
        process: &FaultyBackend,
    ) -> (OfServer, Result<Store>) {
        let (medium, for_writer) = (locked(&self.medium).clone(), process.clone());
        let server = DirectWriters::start(&medium, move || for_writer.clone());
        let mut servers = locked(&self.servers);
        if servers.len() >= SERVERS_MAX {
            servers.remove(0);
        }
        servers.push(Arc::clone(&server));
        drop(servers);
        let network =
            Arc::new(Unsteady { fleet: Arc::clone(self), is_disturbed: AtomicBool::new(false) });
        let store = server.client(Arc::clone(&network) as Arc<dyn Network>);
        (OfServer { network }, store)
    }

    /// Lets the lease of some remote writer end, whatever that writer is doing.
    pub(super) fn end_a_lease(&self) {
        let server = {
            let servers = locked(&self.servers);
            if servers.is_empty() {
                return;
            }
            Arc::clone(&servers[self.below(servers.len() as u64) as usize])
        };
        server.pass(LEASE_MS + 1);
        self.tell("a lease ends");
    }

    /// After an act of a member: true if it has lost its place. Asserts that it cannot seal any more.
    pub(super) fn is_late(&self, member: &mut Member) -> bool {
        let Member { serial, writer: Some(writer), run: Some(run), guest, .. } = member else {
            return false;
        };
        if !writer.is_lost() {
            return false;
        }
        self.came("late writer refused", 1);
        self.tell(format!("writer {serial} has lost its place"));
        run.abandon();
        guest.owed = true;
        let next = guest.image.clone();
        let sealed =
            put(run, guest, &next).and_then(|()| run.seal(request(&layout(RAM_PAGES as u64))));
        assert!(sealed.is_err(), "a writer without a place has sealed");
        true
    }

    /// True if any operation of this member may fail.
    pub(super) fn may_fail(&self, error: &Error, member: &Member) -> bool {
        let is_lost = member.writer.as_ref().is_some_and(Writer::is_lost);
        let is_disturbed = member.elsewhere.as_ref().is_some_and(OfServer::was_disturbed);
        is_lost || is_disturbed || self.is_due(error, &member.medium)
    }
}
