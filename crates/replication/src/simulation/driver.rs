//! The driver of a role: hands it events and carries out its actions.

mod operations;
mod primary_actions;
mod standby_actions;

use super::net::{MS, Packet};
use super::node::{NodeInput, Role};
use super::world::{Operation, World, WorldEvent};
use crate::{PeerMessage, PrimaryEvent, StandbyEvent, WitnessReply, WitnessRequest};

/// A VM is stopped, resumed or killed within this time: well within what the lease leaves of the
/// detection time.
const VM_NS_MAX: u64 = 50 * MS;

/// Handles one input, carries out its actions, and schedules the next tick.
pub fn input(world: &mut World, node: usize, input: NodeInput) {
    let input = match input {
        NodeInput::Done(operation) => return operations::finish(world, node, operation),
        NodeInput::Data(data) => {
            let whole = world.nodes[node].engine.as_mut().and_then(|engine| engine.receive(data));
            let Some(whole) = whole else { return };
            NodeInput::Standby(whole)
        }
        input => input,
    };
    let Some(engine) = &mut world.nodes[node].engine else { return };
    if let NodeInput::Answer(id, _) | NodeInput::WitnessLost(id, _) = &input {
        if engine.ask != Some(*id) {
            return;
        }
        engine.ask = None;
    }
    match &engine.role {
        Role::Primary(_) => {
            let Some(event) = primary_event(input) else { return };
            primary_actions::handle(world, node, event);
        }
        Role::Standby(_) => {
            if let NodeInput::Up(0) = input {
                engine.partial = None;
            }
            let Some(event) = standby_event(input) else { return };
            standby_actions::handle(world, node, event);
        }
    }
    schedule_tick(world, node);
}

/// The event that an input is for a primary; `None` if a primary does not handle it.
fn primary_event(input: NodeInput) -> Option<PrimaryEvent> {
    Some(match input {
        NodeInput::Primary(event) => event,
        NodeInput::Standby(_) | NodeInput::Data(_) | NodeInput::Done(_) => return None,
        NodeInput::Tick => PrimaryEvent::Tick,
        NodeInput::Up(path) => PrimaryEvent::PathUp(path),
        NodeInput::Down(path) => PrimaryEvent::PathDown(path),
        NodeInput::Message(path, bytes) => PrimaryEvent::Peer { path, message: message(&bytes) },
        NodeInput::Answer(_, bytes) => PrimaryEvent::Witness(reply(&bytes)),
        NodeInput::WitnessLost(_, sent) => PrimaryEvent::WitnessLost { sent },
    })
}

/// The event that an input is for a standby; `None` if a standby does not handle it.
fn standby_event(input: NodeInput) -> Option<StandbyEvent> {
    Some(match input {
        NodeInput::Standby(event) => event,
        NodeInput::Primary(_) | NodeInput::Data(_) | NodeInput::Done(_) => return None,
        NodeInput::Tick => StandbyEvent::Tick,
        NodeInput::Up(path) => StandbyEvent::PathUp(path),
        NodeInput::Down(path) => StandbyEvent::PathDown(path),
        NodeInput::Message(path, bytes) => StandbyEvent::Peer { path, message: message(&bytes) },
        NodeInput::Answer(_, bytes) => StandbyEvent::Witness(reply(&bytes)),
        NodeInput::WitnessLost(_, sent) => StandbyEvent::WitnessLost { sent },
    })
}

fn message(bytes: &[u8]) -> PeerMessage {
    PeerMessage::decode(bytes).expect("a message")
}

fn reply(bytes: &[u8]) -> WitnessReply {
    WitnessReply::decode(bytes).expect("a reply")
}

fn schedule_tick(world: &mut World, node: usize) {
    let host = &world.nodes[node];
    let Some(engine) = &host.engine else { return };
    let local_ns = match &engine.role {
        Role::Primary(primary) => primary.deadline_ns(),
        Role::Standby(standby) => standby.deadline_ns(),
    };
    if local_ns == u64::MAX {
        return;
    }
    let engine = engine.id;
    let at_ns = host.true_ns(local_ns).saturating_sub(world.now_ns);
    world.at(at_ns, WorldEvent::Tick { node, engine, local_ns });
}

/// Sends a request to the witness. It counts as lost if it is not answered in time.
fn ask(world: &mut World, node: usize, request: WitnessRequest) {
    let id = world.number();
    let link = 2 + node;
    let Some(engine) = &mut world.nodes[node].engine else { return };
    assert!(engine.ask.is_none(), "two questions at once");
    engine.ask = Some(id);
    let number = engine.id;
    let end = super::net::end_of(link, node);
    if world.links[link].connection[end].is_none() {
        world.came("witness not reached");
        world.at(
            30 * MS,
            WorldEvent::Input { node, engine: number, input: NodeInput::WitnessLost(id, false) },
        );
        return;
    }
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    world.send(link, node, Packet::Ask(id, bytes));
    let patience_ns = world.rng.u64(400 * MS..1000 * MS);
    world.at(
        patience_ns,
        WorldEvent::Input { node, engine: number, input: NodeInput::WitnessLost(id, true) },
    );
}

/// Sends a message to the peer.
fn send_message(world: &mut World, node: usize, path: u8, message: &PeerMessage) {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    world.send(usize::from(path), node, Packet::Message(bytes));
}

/// Orders an operation on the VM; operations are carried out in their order.
fn order_vm(world: &mut World, node: usize, operation: Operation) {
    let wait_ns = world.rng.u64(..VM_NS_MAX / 2);
    let now_ns = world.now_ns;
    let Some(engine) = &mut world.nodes[node].engine else { return };
    let at_ns =
        (engine.vm_at_ns.max(now_ns) + wait_ns).min(now_ns + VM_NS_MAX).max(engine.vm_at_ns);
    engine.vm_at_ns = at_ns;
    world.local(node, at_ns - now_ns, operation);
}

/// Shows clients the held writes of all epochs up to `epoch`.
fn release(world: &mut World, node: usize, epoch: u64) {
    let held = std::mem::take(&mut world.nodes[node].gate.held);
    for (of, write) in held {
        if of <= epoch {
            world.visible(node, write);
        } else {
            world.nodes[node].gate.held.push((of, write));
        }
    }
}

fn fence(world: &mut World, node: usize) {
    let wait_ns = world.rng.u64(100 * MS..400 * MS);
    world.local(node, wait_ns, Operation::Fence);
}
