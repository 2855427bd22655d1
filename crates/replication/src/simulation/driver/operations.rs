//! The operations that an engine begins and that take time: on the VM, the disks and the fence
//! hook.

use super::release;
use crate::simulation::Mutant;
use crate::simulation::net::{Data, MS, Packet};
use crate::simulation::node::{NodeEngine, NodeInput, Replica, Role};
use crate::simulation::world::{Operation, World};
use crate::{Epoch, Primary, PrimaryEvent, RunPermit, StandbyEvent};
use std::rc::Rc;

/// The most epochs that are captured and not acknowledged yet.
const IN_FLIGHT_MAX: u64 = 3;

/// Finishes an operation that the engine began, and tells the engine.
pub(super) fn finish(world: &mut World, node: usize, operation: Operation) {
    match operation {
        Operation::Stop => {
            if let Some(vm) = &mut world.nodes[node].vm {
                vm.running = false;
            }
            world.input(node, NodeInput::Primary(PrimaryEvent::VmStopped));
        }
        Operation::Resume | Operation::Launch => resume(world, node),
        Operation::Kill => world.nodes[node].vm = None,
        Operation::Capture { last } => capture(world, node, last),
        Operation::Scheduled => scheduled(world, node),
        Operation::Apply { epoch } => apply(world, node, epoch),
        Operation::Fence => switch_peer_off(world, node),
    }
}

/// Lets the VM run if its permit allows it, and tells the engine whether it runs.
fn resume(world: &mut World, node: usize) {
    let local_ns = world.nodes[node].local_ns(world.now_ns);
    let host = &mut world.nodes[node];
    let may = match host.permit {
        RunPermit::Free => true,
        RunPermit::Until(until_ns) => local_ns < until_ns,
        RunPermit::Stopped => false,
    };
    if let Some(vm) = &mut host.vm {
        vm.running = may;
        let told = if may { PrimaryEvent::VmResumed } else { PrimaryEvent::VmStopped };
        if may || matches!(host.permit, RunPermit::Until(_)) {
            world.input(node, NodeInput::Primary(told));
        }
    }
}

/// The fence hook switches the other host off, unless it is broken.
fn switch_peer_off(world: &mut World, node: usize) {
    let off = !world.fence_broken;
    world.tell(&format!("{node} fences: {off}"));
    if off {
        world.came("fenced");
        world.power_off(1 - node);
    }
    let input = match world.nodes[node].engine.as_ref().map(|engine| &engine.role) {
        Some(Role::Primary(_)) => NodeInput::Primary(PrimaryEvent::Fenced(off)),
        _ => NodeInput::Standby(StandbyEvent::Fenced(off)),
    };
    world.input(node, input);
}

/// Captures an epoch if captures are allowed and the standby keeps up, and schedules the next.
fn scheduled(world: &mut World, node: usize) {
    let Some(NodeEngine { may_capture: true, .. }) = &world.nodes[node].engine else { return };
    let wait_ns = world.rng.u64(20 * MS..60 * MS);
    world.local(node, wait_ns, Operation::Scheduled);
    let acked = world.nodes[node].primary().and_then(Primary::acknowledged);
    let is_late = acked.is_some_and(|acked| world.nodes[node].epoch > acked.0 + IN_FLIGHT_MAX);
    if !is_late {
        capture(world, node, false);
    }
}

/// Captures an epoch and sends it in three pieces. One capture in 100 fails.
fn capture(world: &mut World, node: usize, last: bool) {
    let fails = world.chance(100);
    let host = &mut world.nodes[node];
    let Some(Role::Primary(primary)) = host.engine.as_ref().map(|engine| &engine.role) else {
        return;
    };
    let Some(vm) = host.vm.as_ref().filter(|vm| !(fails || last && vm.running)) else {
        world.input(node, NodeInput::Primary(PrimaryEvent::CaptureFailed));
        return;
    };
    let (term, session) = (primary.term(), primary.session());
    host.epoch += 1;
    let (epoch, log) = (host.epoch, Rc::new(vm.log.clone()));
    world.snapshots.insert((term, epoch), Rc::clone(&log));
    let Some(engine) = &mut host.engine else { return };
    let before = engine.sent.replace((log.len(), epoch));
    let (base, after) = (before.map_or(0, |(len, _)| len), before.map(|(_, epoch)| epoch));
    if world.mutant == Some(Mutant::ReleasesAtCapture) {
        release(world, node, epoch);
    }
    world.input(node, NodeInput::Primary(PrimaryEvent::Captured { epoch: Epoch(epoch) }));
    let Some(session) = session else { return };
    let writes = Rc::new(log[base.min(log.len())..].to_vec());
    for piece in 0..3 {
        let data = Data {
            session,
            epoch,
            piece,
            last: piece == 2,
            after,
            base,
            writes: Rc::clone(&writes),
        };
        world.send(0, node, Packet::Data(data));
    }
}

/// Applies an epoch to the replica, as a whole.
fn apply(world: &mut World, node: usize, epoch: u64) {
    let full = world.nodes[node].disk_full;
    let torn = world.mutant == Some(Mutant::AppliesTorn) && world.chance(50);
    let host = &mut world.nodes[node];
    let Some(engine) = &mut host.engine else { return };
    while engine
        .whole
        .front()
        .is_some_and(|data| data.epoch < epoch && Some(data.session) != engine.receives)
    {
        engine.whole.pop_front();
    }
    let Some(at) = engine.whole.iter().position(|data| data.epoch == epoch) else { return };
    if full {
        engine.whole.clear();
        world.came("disk full");
        world.input(
            node,
            NodeInput::Standby(StandbyEvent::ApplyFailed { reason: "disk full".into() }),
        );
        return;
    }
    let data = engine.whole.remove(at).expect("at its place");
    let Role::Standby(standby) = &engine.role else { return };
    let term = standby.term();
    let mut log = host
        .replica
        .as_ref()
        .map_or(Vec::new(), |replica| replica.log[..data.base.min(replica.log.len())].to_vec());
    let whole = log.len() == data.base;
    log.extend_from_slice(&data.writes);
    if torn {
        log.pop();
    }
    host.replica = Some(Replica { term, epoch, log: Rc::new(log) });
    assert!(whole, "epoch {epoch} builds upon what node {node} does not hold");
    world.check_replica(node);
    world.input(node, NodeInput::Standby(StandbyEvent::Applied { epoch: Epoch(epoch) }));
}
