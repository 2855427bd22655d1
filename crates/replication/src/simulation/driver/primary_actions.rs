//! Carries out the actions of a primary.

use super::{VM_NS_MAX, ask, fence, order_vm, release, send_message};
use crate::simulation::Mutant;
use crate::simulation::net::MS;
use crate::simulation::node::{PacketGate, Role};
use crate::simulation::world::{Operation, World, WorldEvent};
use crate::{Epoch, Notice, PrimaryAction, PrimaryEvent, RunPermit, Term};

/// Hands an event to the node's primary and carries out the actions.
pub(super) fn handle(world: &mut World, node: usize, event: PrimaryEvent) {
    let now_ns = world.nodes[node].local_ns(world.now_ns);
    let Some(engine) = &mut world.nodes[node].engine else { return };
    let id = engine.id;
    let Role::Primary(primary) = &mut engine.role else { return };
    let before = primary.state();
    let actions = primary.handle(now_ns, event);
    let state = primary.state();
    if state != before {
        world.tell(&format!("{node} is {state:?}"));
    }
    for action in actions {
        // An earlier action may have ended the engine.
        if world.is_engine(node, id) {
            tell(world, node, &action);
            carry_out(world, node, action);
        }
    }
}

/// Adds an action to the story, except the frequent ones.
fn tell(world: &mut World, node: usize, action: &PrimaryAction) {
    if !matches!(
        action,
        PrimaryAction::Send { .. }
            | PrimaryAction::SetRunPermit(RunPermit::Until(_))
            | PrimaryAction::Release { .. }
    ) {
        world.tell(&format!("{node}: {action:?}"));
    }
}

fn carry_out(world: &mut World, node: usize, action: PrimaryAction) {
    match action {
        PrimaryAction::Send { path, message } => send_message(world, node, path, &message),
        PrimaryAction::AskWitness(request) => ask(world, node, request),
        PrimaryAction::SetRunPermit(permit) => set_run_permit(world, node, permit),
        PrimaryAction::StopVm => order_vm(world, node, Operation::Stop),
        PrimaryAction::ResumeVm => order_vm(world, node, Operation::Resume),
        PrimaryAction::KillVm => {
            world.nodes[node].gate = PacketGate::default();
            world.nodes[node].gate.holding = true;
            order_vm(world, node, Operation::Kill);
        }
        PrimaryAction::HoldOutput => {
            world.nodes[node].gate.holding = world.mutant != Some(Mutant::HoldsNothing);
        }
        PrimaryAction::Release { epoch } => release(world, node, epoch.0),
        PrimaryAction::ReleaseAll => {
            release(world, node, u64::MAX);
            world.nodes[node].gate.holding = false;
        }
        PrimaryAction::BeginSync { .. } => {
            if let Some(engine) = &mut world.nodes[node].engine {
                engine.sent = None;
            }
            let wait_ns = world.rng.u64(5 * MS..60 * MS);
            world.local(node, wait_ns, Operation::Capture { last: false });
        }
        PrimaryAction::Capture { last } => {
            let wait_ns = world.rng.u64(MS..15 * MS);
            world.local(node, wait_ns, Operation::Capture { last });
        }
        PrimaryAction::Owe { after } => owe(world, node, after),
        PrimaryAction::MayCapture(may) => allow_captures(world, node, may),
        PrimaryAction::Fence => fence(world, node),
        PrimaryAction::Notify(Notice::Protected) => {
            world.came("protected");
            world.nodes[node].insisted = false;
        }
        PrimaryAction::Notify(_) => {}
        PrimaryAction::Ended { deposed_by } => end(world, node, deposed_by),
    }
}

/// Sets the VM's permit, and has the guard look soon after its end.
fn set_run_permit(world: &mut World, node: usize, permit: RunPermit) {
    world.nodes[node].permit = permit;
    if let RunPermit::Until(until_ns) = permit {
        let at_ns = world.nodes[node].true_ns(until_ns).saturating_sub(world.now_ns);
        let late_ns = world.rng.u64(..VM_NS_MAX);
        world.at(at_ns + late_ns, WorldEvent::Guard { node });
    }
}

/// Makes the next transfer build on `after`; `None`: it holds all of the VM.
fn owe(world: &mut World, node: usize, after: Option<Epoch>) {
    let term = world.nodes[node].primary().expect("primary").term();
    let len_of = |epoch: Epoch| world.snapshots.get(&(term, epoch.0)).map(|log| log.len());
    let sent = after.and_then(|epoch| Some((len_of(epoch)?, epoch.0)));
    if let Some(engine) = &mut world.nodes[node].engine {
        engine.sent = sent;
    }
    world.came("owed");
}

/// Begins or ends the captures that no action asks for.
fn allow_captures(world: &mut World, node: usize, may: bool) {
    if let Some(engine) = &mut world.nodes[node].engine
        && std::mem::replace(&mut engine.may_capture, may) != may
        && may
    {
        world.local(node, 30 * MS, Operation::Scheduled);
    }
}

/// Ends the engine and its VM. A new engine starts later.
fn end(world: &mut World, node: usize, deposed_by: Option<Term>) {
    if let Some(term) = deposed_by {
        world.nodes[node].term = term;
        world.came("deposed");
    }
    world.nodes[node].insisted = false;
    world.lose_engine(node);
    world.nodes[node].vm = None;
    let wait_ns = world.rng.u64(50 * MS..500 * MS);
    world.at(wait_ns, WorldEvent::StartEngine { node, attached: false });
}
