//! Carries out the actions of a standby.

use super::{ask, fence, order_vm, send_message};
use crate::simulation::Mutant;
use crate::simulation::net::MS;
use crate::simulation::node::{NodeInput, PacketGate, Role, WriteLogVm};
use crate::simulation::world::{Operation, World, WorldEvent};
use crate::{
    Epoch, Primary, PrimaryStart, RunPermit, StandbyAction, StandbyEvent, StandbyState, Term,
};

/// Hands an event to the node's standby and carries out the actions.
pub(super) fn handle(world: &mut World, node: usize, event: StandbyEvent) {
    let now_ns = world.nodes[node].local_ns(world.now_ns);
    let Some(engine) = &mut world.nodes[node].engine else { return };
    let id = engine.id;
    let Role::Standby(standby) = &mut engine.role else { return };
    let before = standby.state();
    let actions = standby.handle(now_ns, event);
    let (state, term) = (standby.state(), standby.term());
    if state != before {
        world.tell(&format!("{node} is {state:?}"));
    }
    if state != StandbyState::Active {
        world.nodes[node].term = term;
    }
    for action in actions {
        // An earlier action may have ended the engine.
        if world.is_engine(node, id) {
            if !matches!(action, StandbyAction::Send { .. } | StandbyAction::Apply { .. }) {
                world.tell(&format!("{node}: {action:?}"));
            }
            carry_out(world, node, action);
        }
    }
}

fn carry_out(world: &mut World, node: usize, action: StandbyAction) {
    match action {
        StandbyAction::Send { path, message } => send_message(world, node, path, &message),
        StandbyAction::AskWitness(request) => ask(world, node, request),
        StandbyAction::Receive { session } => {
            if let Some(engine) = &mut world.nodes[node].engine {
                engine.receives = Some(session);
                engine.partial = None;
            }
        }
        StandbyAction::Apply { epoch } => order_apply(world, node, epoch),
        StandbyAction::DiscardPartial => {
            if let Some(engine) = &mut world.nodes[node].engine {
                engine.partial = None;
            }
        }
        StandbyAction::Reject { epoch } => {
            world.came("rejected");
            if let Some(engine) = &mut world.nodes[node].engine {
                engine.whole.retain(|data| data.epoch != epoch.0);
            }
        }
        StandbyAction::Fence => fence(world, node),
        StandbyAction::Activate { epoch, term, forced } => {
            activate(world, node, epoch, term, forced);
        }
        StandbyAction::Notify(_) => {}
    }
}

/// Begins to apply an epoch; epochs are applied in their order.
fn order_apply(world: &mut World, node: usize, epoch: Epoch) {
    let Some(id) = world.nodes[node].engine.as_ref().map(|engine| engine.id) else { return };
    if world.mutant == Some(Mutant::AcknowledgesEarly) {
        let applied = NodeInput::Standby(StandbyEvent::Applied { epoch });
        world.at(0, WorldEvent::Input { node, engine: id, input: applied });
    }
    let wait_ns = world.rng.u64(MS..20 * MS);
    let now_ns = world.now_ns;
    let Some(engine) = &mut world.nodes[node].engine else { return };
    engine.apply_at_ns = engine.apply_at_ns.max(now_ns) + wait_ns;
    let at_ns = engine.apply_at_ns - now_ns;
    world.local(node, at_ns, Operation::Apply { epoch: epoch.0 });
}

/// Starts the VM from the replica, and a primary in place of the standby.
fn activate(world: &mut World, node: usize, epoch: Epoch, term: Term, forced: bool) {
    world.check_activation(node, epoch, term, forced);
    world.came(if forced { "forced" } else { "taken over" });
    let host = &mut world.nodes[node];
    let replica = host.replica.take().expect("a replica");
    host.vm = Some(WriteLogVm { log: replica.log.to_vec(), running: false });
    host.gate = PacketGate::default();
    host.permit = RunPermit::Free;
    host.epoch = epoch.0;
    host.term = term;
    host.insisted = forced;
    let config = world.config(node);
    world
        .start(node, Role::Primary(Primary::new(config, PrimaryStart::TakenOver { term, forced })));
    order_vm(world, node, Operation::Launch);
}
