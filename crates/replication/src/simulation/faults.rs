//! The faults, and the operator who helps if the protocol promises nothing.

use super::Mutant;
use super::net::{LINKS, MS, end_of};
use super::node::{NodeInput, PacketGate};
use super::world::{World, WorldEvent};
use crate::{Arbitration, PrimaryEvent, PrimaryState, RunPermit, StandbyEvent};

/// An operator looks at a VM that does not run for so long.
const PATIENCE_NS: u64 = 4000 * MS;
/// All faults of a calm seed, and those that heal, are over after so long.
const FAULT_NS_MAX: u64 = 3000 * MS;
/// Then the VM is to be protected again within this: the longest are the wait of a sick standby and
/// fencing that backs off.
const RECOVERY_NS: u64 = 25_000 * MS;

impl World {
    /// Faults one after the other, each when all is well again.
    pub fn live_calmly(&mut self) {
        for _ in 0..4 {
            self.recover();
            let wait_ns = self.rng.u64(..500 * MS);
            self.play(self.now_ns + wait_ns);
            self.fail(true);
            self.play(self.now_ns + FAULT_NS_MAX);
        }
        self.recover();
        assert!(!self.gone, "the VM is gone after single faults");
        let helped = ["insisted", "forced"].iter().any(|what| self.tally.contains_key(what));
        assert!(
            !helped || self.arbitration != Arbitration::Witness,
            "an operator was needed after single faults"
        );
    }

    /// Faults on faults.
    pub fn live_wildly(&mut self) {
        while self.now_ns < 15_000 * MS {
            let wait_ns = self.rng.u64(50 * MS..2500 * MS);
            self.play(self.now_ns + wait_ns);
            self.fail(false);
        }
        self.heal_all();
        self.recover();
        if self.chance(4) {
            self.end_vm();
        }
    }

    /// The guest shuts down, and maybe something fails just then.
    fn end_vm(&mut self) {
        let Some(node) = (0..2).find(|node| self.nodes[*node].runs()).filter(|_| !self.gone) else {
            return;
        };
        self.tell(&format!("the guest of {node} shuts down"));
        self.came("VM ended");
        let takeovers = self.activated.len();
        self.nodes[node].vm = None;
        self.gone = true;
        match self.rng.u32(..4) {
            0 => self.cut(&[0, 1], 1000 * MS),
            1 => self.power_off(1 - node),
            2 => self.cut(&[2 + node], 1000 * MS),
            _ => {}
        }
        self.input(node, NodeInput::Primary(PrimaryEvent::VmEnded));
        self.play(self.now_ns + RECOVERY_NS);
        let over = self.nodes[node].primary().is_none() && self.nodes[node].gate.held.is_empty();
        assert!(over || self.activated.len() > takeovers, "the VM has ended, its primary has not");
    }

    /// Until the VM is protected again, as it has to be.
    pub fn recover(&mut self) {
        let until_ns = self.now_ns + RECOVERY_NS;
        while !self.gone && !self.is_protected() {
            assert!(self.now_ns < until_ns, "all is healed, and the VM is not protected");
            self.play(self.now_ns + 50 * MS);
        }
    }

    fn fail(&mut self, calm: bool) {
        let node = self.rng.usize(..2);
        let for_ns = self.rng.u64(20 * MS..FAULT_NS_MAX);
        match self.rng.u32(..21) {
            0 => self.cut(&[0, 1], for_ns),
            1 => {
                let link = self.rng.usize(..4);
                self.cut(&[link], for_ns);
            }
            2 => self.cut(&[0, 1, 2 + node], for_ns),
            3 => self.flap(),
            4 => {
                let link = self.rng.usize(..4);
                self.tell(&format!("link {link} is reset"));
                self.came("reset");
                self.close(link, 0);
                self.close(link, 1);
            }
            5..8 => self.kill_engine(node),
            8..11 => self.power_off(node),
            11..13 => self.stall(node, for_ns),
            13 => {
                self.tell("the witness crashes");
                self.came("witness crashed");
                self.witness_up = false;
                for link in [2, 3] {
                    self.links[link].connection[1] = None;
                }
                self.at(for_ns, WorldEvent::WitnessBack);
            }
            14 => {
                self.tell(&format!("the disk of {node} is full"));
                self.nodes[node].disk_full = true;
                self.at(for_ns, WorldEvent::Room { node });
            }
            15..17 => {
                self.tell(&format!("user: switch over, at {node}"));
                self.came("switch-over asked");
                self.command(node, PrimaryEvent::SwitchOver, StandbyEvent::SwitchOver);
                if !calm && self.chance(2) {
                    self.interrupt_switch_over();
                }
            }
            17 => {
                self.tell(&format!("user: fail over, at {node}"));
                let force = self.mutant == Some(Mutant::TakesOverAtOnce);
                self.command(node, PrimaryEvent::Tick, StandbyEvent::FailOver { force });
            }
            18 => {
                let link = self.rng.usize(..4);
                self.tell(&format!("link {link} is slow"));
                self.links[link].slow_ns = self.rng.u64(20 * MS..300 * MS);
                self.at(for_ns, WorldEvent::Fast { link });
            }
            19 if !calm => self.delay_pairing(for_ns),
            _ => {
                self.tell("the fence hook fails");
                self.fence_broken = true;
                self.at(for_ns, WorldEvent::FenceRepaired);
            }
        }
    }

    /// The standby goes while it is handed the VM.
    fn interrupt_switch_over(&mut self) {
        for link in [0, 1] {
            self.links[link].slow_ns = 200 * MS;
            self.at(2000 * MS, WorldEvent::Fast { link });
        }
        let until_ns = self.now_ns + self.rng.u64(400 * MS..900 * MS);
        self.play(until_ns);
        if let Some(node) = (0..2).find(|node| self.nodes[*node].standby_state().is_some()) {
            self.power_off(node);
        }
    }

    /// The request for a pairing is delayed, while no node hears another.
    fn delay_pairing(&mut self, for_ns: u64) {
        let Some(node) = (0..2).find(|node| self.nodes[*node].standby_state().is_some()) else {
            return;
        };
        self.kill_engine(node);
        let until_ns = self.now_ns + 4000 * MS;
        while self.nodes[1 - node].primary_state() != Some(PrimaryState::Pairing) {
            if self.now_ns > until_ns {
                return;
            }
            self.play(self.now_ns + MS / 2);
        }
        self.tell("the pairing is asked for");
        self.came("pairing delayed");
        self.close(3 - node, 0);
        self.close(3 - node, 1);
        self.cut(&[0, 1], for_ns);
        let longer_ns = for_ns / 2 + self.rng.u64(..2000 * MS);
        self.cut(&[2 + node], longer_ns);
    }

    fn command(&mut self, node: usize, primary: PrimaryEvent, standby: StandbyEvent) {
        let input = if self.nodes[node].primary().is_some() {
            NodeInput::Primary(primary)
        } else {
            NodeInput::Standby(standby)
        };
        self.input(node, input);
    }

    /// One way, the other, or both, for as long; connections over it may break meanwhile.
    fn cut(&mut self, links: &[usize], for_ns: u64) {
        let directions: &[usize] = [&[0][..], &[1], &[0, 1], &[0, 1]][self.rng.usize(..4)];
        self.tell(&format!("links {links:?} are cut, directions {directions:?}"));
        self.came(if directions.len() == 2 { "cut" } else { "cut one way" });
        for &link in links {
            for &direction in directions {
                self.links[link].cut[direction] = true;
                self.at(for_ns, WorldEvent::Heal { link, direction });
            }
            if for_ns > 300 * MS && self.chance(2) {
                let end = self.rng.usize(..2);
                self.close(link, end);
            }
        }
    }

    fn flap(&mut self) {
        let link = self.rng.usize(..2);
        self.tell(&format!("link {link} flaps"));
        self.came("flap");
        let down_ns = self.rng.u64(20 * MS..400 * MS);
        for direction in 0..2 {
            self.links[link].cut[direction] = true;
            self.at(down_ns, WorldEvent::Heal { link, direction });
        }
        self.close(link, 0);
    }

    fn stall(&mut self, node: usize, for_ns: u64) {
        if self.nodes[node].engine.is_some() && !self.nodes[node].stalled {
            self.tell(&format!("engine {node} stalls"));
            self.came("stalled");
            self.nodes[node].stalled = true;
            self.at(for_ns, WorldEvent::Wake { node });
        }
    }

    /// The process of the engine is no more; connections close on this side.
    pub fn lose_engine(&mut self, node: usize) {
        self.nodes[node].engine = None;
        self.nodes[node].stalled = false;
        self.nodes[node].backlog.clear();
        for (link, (a, b)) in LINKS.into_iter().enumerate() {
            if a == node || b == node {
                self.links[link].connection[end_of(link, node)] = None;
            }
        }
    }

    fn kill_engine(&mut self, node: usize) {
        if self.nodes[node].engine.is_none() {
            return;
        }
        self.tell(&format!("engine {node} is killed"));
        self.came("engine killed");
        let lives = self.nodes[node].vm.is_some() && self.nodes[node].permit == RunPermit::Free;
        if lives {
            // The guard lets go what the gate holds, as the VM runs alone by right.
            let held = std::mem::take(&mut self.nodes[node].gate).held;
            self.lose_engine(node);
            for (_, write) in held {
                self.visible(node, write);
            }
            if let Some(vm) = &mut self.nodes[node].vm {
                vm.running = true;
            }
            self.came("VM outlived its engine");
        } else {
            self.vm_dies(node);
            self.lose_engine(node);
            self.nodes[node].gate = PacketGate::default();
        }
        let wait_ns = self.rng.u64(100 * MS..1500 * MS);
        self.at(wait_ns, WorldEvent::StartEngine { node, attached: lives });
    }

    pub fn power_off(&mut self, node: usize) {
        if !self.nodes[node].up {
            return;
        }
        self.tell(&format!("host {node} is off"));
        self.came("powered off");
        self.vm_dies(node);
        self.lose_engine(node);
        self.nodes[node].gate = PacketGate::default();
        self.nodes[node].permit = RunPermit::Stopped;
        self.nodes[node].up = false;
        self.nodes[node].insisted = false;
        let wait_ns = self.rng.u64(300 * MS..2500 * MS);
        self.at(wait_ns, WorldEvent::Boot { node });
    }

    fn heal_all(&mut self) {
        self.tell("all is healed");
        for link in 0..LINKS.len() {
            self.links[link].slow_ns = 0;
            for direction in 0..2 {
                self.at(1, WorldEvent::Heal { link, direction });
            }
        }
        self.fence_broken = false;
        for node in 0..2 {
            self.nodes[node].disk_full = false;
            self.at(1, WorldEvent::Wake { node });
        }
        if !self.witness_up {
            self.at(1, WorldEvent::WitnessBack);
        }
    }

    /// If no VM runs for long, a user checks that the other host is off and forces this one on.
    pub fn operate(&mut self) {
        if self.nodes[0].runs() || self.nodes[1].runs() {
            self.idle_since_ns = self.now_ns;
        }
        let ready = |node: usize| self.nodes[node].engine.is_some() && !self.nodes[node].stalled;
        if self.gone || self.now_ns < self.idle_since_ns + PATIENCE_NS || !ready(0) || !ready(1) {
            return;
        }
        let Some(node) = (0..2).find(|node| self.nodes[*node].vm.is_some()) else {
            return self.insist_on_a_copy();
        };
        if self.arbitration == Arbitration::Witness {
            return;
        }
        self.idle_since_ns = self.now_ns;
        self.came("insisted");
        if self.activated.contains(&self.nodes[node].term.next()) {
            self.tell(&format!("user: the VM of {node} is of the past"));
            self.nodes[node].vm = None;
            self.kill_engine(node);
        } else {
            self.tell(&format!("user: {node} goes on alone"));
            self.nodes[node].insisted = true;
            self.input(node, NodeInput::Primary(PrimaryEvent::GoSolo));
        }
    }

    fn insist_on_a_copy(&mut self) {
        let newest = |node: &usize| {
            self.nodes[*node].replica.as_ref().map(|replica| (replica.term, replica.epoch))
        };
        let best =
            (0..2).filter(|node| self.nodes[*node].standby_state().is_some()).max_by_key(newest);
        self.idle_since_ns = self.now_ns;
        match best.filter(|node| newest(node).is_some()) {
            Some(node) => {
                self.tell(&format!("user: {node} takes over, by force"));
                self.input(node, NodeInput::Standby(StandbyEvent::FailOver { force: true }));
            }
            None if self.nodes.iter().all(|node| node.standby_state().is_some()) => {
                self.tell("no host has the VM any more");
                assert!(self.solo_death, "the VM is gone though it was protected");
                self.came("gone");
                self.gone = true;
            }
            None => {}
        }
    }
}
