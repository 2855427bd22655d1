//! The rules that must hold after each event, judged by the true state of the world and not by the
//! state that a role assumes.
//!
//! 1. Two VMs never run at the same instant.
//! 2. Clients see the output of epochs that the standby holds, or of a node that runs alone by
//!    right.
//! 3. A standby holds a whole epoch.
//! 4. A node that takes over has all output that clients saw, unless a VM that ran alone has died
//!    and a user forces the takeover.
//! 5. A term is activated once.
//! 6. Once all faults are healed, the VM runs and is protected.

use super::node::WriteLogVm;
use super::world::World;
use crate::{Arbitration, Epoch, OwnerMode, PrimaryState, StandbyState, Term};

impl World {
    pub fn check_running(&self) {
        assert!(!(self.nodes[0].runs() && self.nodes[1].runs()), "two VMs run");
    }

    /// Returns whether a node may run its VM whatever the other does.
    pub fn is_alone(&self, node: usize) -> bool {
        let (me, other) = (&self.nodes[node], &self.nodes[1 - node]);
        if me.insisted {
            return true;
        }
        match self.arbitration {
            Arbitration::Witness => self.register().is_none_or(|(owner, term, mode)| {
                owner == node && term == me.term && mode == OwnerMode::Solo
            }),
            Arbitration::Fencing => {
                let harmless =
                    [StandbyState::Alone, StandbyState::Joining, StandbyState::Following];
                // A node that has handed its VM over runs it again only if a user says so.
                other.engine.is_none()
                    || other.standby_state().is_some_and(|state| harmless.contains(&state))
                    || other.primary_state() == Some(PrimaryState::HandedOver)
            }
            Arbitration::Manual => me.primary_state().is_none_or(|state| {
                use PrimaryState::{Closing, Ended, Solo, Syncing};
                matches!(state, Solo | Syncing | Closing | Ended)
            }),
        }
    }

    /// A client sees the answer of `node`'s VM to a write.
    pub fn visible(&mut self, node: usize, write: u32) {
        let other = &self.nodes[1 - node];
        let term = self.nodes[node].term;
        let replica = other.replica.as_ref().filter(|replica| replica.term == term);
        let committed = replica.is_some_and(|replica| replica.log.binary_search(&write).is_ok())
            || self.taken.contains(&write);
        // A standby that has left the session of an ended VM takes nothing over.
        let ended =
            self.nodes[node].vm.is_none() && other.standby_state() == Some(StandbyState::Alone);
        assert!(
            ended || committed || self.is_alone(node),
            "node {node} lets out write {write}, which the standby does not hold, without the right to run alone"
        );
        self.seen.insert(write);
    }

    pub fn check_replica(&self, node: usize) {
        let replica = self.nodes[node].replica.as_ref().expect("a replica");
        let epoch =
            self.snapshots.get(&(replica.term, replica.epoch)).expect("an epoch that was taken");
        assert!(*epoch == replica.log, "node {node} holds no whole epoch {}", replica.epoch);
    }

    pub fn check_activation(&mut self, node: usize, epoch: Epoch, term: Term, forced: bool) {
        assert!(self.activated.insert(term), "term {term} is activated twice");
        self.check_replica(node);
        let log = self.nodes[node].replica.as_ref().expect("a replica").clone();
        assert_eq!(log.epoch, epoch.0, "another epoch than the node holds");
        let lost = self.seen.iter().filter(|write| log.log.binary_search(write).is_err()).count();
        if lost > 0 {
            assert!(
                forced && self.solo_death,
                "{lost} writes that clients saw are lost in term {term}"
            );
            self.came("lost by force");
            self.seen.retain(|write| log.log.binary_search(write).is_ok());
        }
        self.taken.extend(log.log.iter());
        self.solo_death = false;
    }

    /// The VM of `node` goes with its host or engine.
    pub fn vm_dies(&mut self, node: usize) {
        let Some(WriteLogVm { running, .. }) = self.nodes[node].vm.take() else { return };
        self.solo_death |= self.is_alone(node) || !running && self.is_behind(1 - node);
        self.tell(&format!("the VM of {node} dies"));
    }

    /// Clients saw what this node does not hold.
    fn is_behind(&self, node: usize) -> bool {
        let replica = self.nodes[node].replica.as_ref();
        self.seen
            .iter()
            .any(|write| replica.is_none_or(|replica| replica.log.binary_search(write).is_err()))
    }

    pub fn is_protected(&self) -> bool {
        (0..2).any(|node| {
            self.nodes[node].runs()
                && self.nodes[node].primary_state() == Some(PrimaryState::Protected)
                && self.nodes[1 - node].standby_state() == Some(StandbyState::Armed)
        })
    }
}
