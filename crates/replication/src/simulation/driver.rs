//! The driver of a role: hands it events and carries out its actions.

use super::Mutant;
use super::net::{Data, MS, Packet};
use super::node::{Engine, Input, Replica, Role, Vm};
use super::world::{Event, Local, World};
use crate::{
    Epoch, PeerMessage, Primary, PrimaryAction, PrimaryEvent, PrimaryStart, RunPermit,
    StandbyAction, StandbyEvent, WitnessReply, WitnessRequest,
};
use std::rc::Rc;

/// A VM is stopped, resumed or killed within so long: well within what the lease leaves of the
/// detection time.
const VM_NS_MAX: u64 = 50 * MS;
const IN_FLIGHT_MAX: u64 = 3;

/// Handles one input, carries out its actions, and schedules the next tick.
pub fn input(world: &mut World, node: usize, input: Input) {
    let now_ns = world.nodes[node].local_ns(world.now_ns);
    let input = match input {
        Input::Done(what) => return done(world, node, what),
        Input::Data(data) => {
            let whole = world.nodes[node].engine.as_mut().and_then(|engine| engine.receive(data));
            let Some(whole) = whole else { return };
            Input::Standby(whole)
        }
        input => input,
    };
    let Some(engine) = &mut world.nodes[node].engine else { return };
    let answer = match &input {
        Input::Answer(id, _) | Input::WitnessLost(id, _) if engine.ask != Some(*id) => return,
        Input::Answer(_, bytes) => {
            engine.ask = None;
            Some(WitnessReply::decode(bytes).expect("a reply"))
        }
        Input::WitnessLost(..) => {
            engine.ask = None;
            None
        }
        _ => None,
    };
    let message = match &input {
        Input::Message(_, bytes) => Some(PeerMessage::decode(bytes).expect("a message")),
        _ => None,
    };
    let id = engine.id;
    match &mut engine.role {
        Role::Primary(primary) => {
            let input = match input {
                Input::Primary(input) => input,
                Input::Standby(_) | Input::Data(_) | Input::Done(_) => return,
                Input::Tick => PrimaryEvent::Tick,
                Input::Up(path) => PrimaryEvent::PathUp(path),
                Input::Down(path) => PrimaryEvent::PathDown(path),
                Input::Message(path, _) => {
                    PrimaryEvent::Peer { path, message: message.expect("decoded") }
                }
                Input::Answer(..) => PrimaryEvent::Witness(answer.expect("decoded")),
                Input::WitnessLost(_, sent) => PrimaryEvent::WitnessLost { sent },
            };
            let before = primary.state();
            let outputs = primary.handle(now_ns, input);
            let state = primary.state();
            if state != before {
                world.tell(&format!("{node} is {state:?}"));
            }
            for output in outputs {
                primary_output(world, node, id, output);
            }
        }
        Role::Standby(standby) => {
            let input = match input {
                Input::Standby(input) => input,
                Input::Primary(_) | Input::Data(_) | Input::Done(_) => return,
                Input::Tick => StandbyEvent::Tick,
                Input::Up(path) => {
                    if path == 0 {
                        engine.partial = None;
                    }
                    StandbyEvent::PathUp(path)
                }
                Input::Down(path) => StandbyEvent::PathDown(path),
                Input::Message(path, _) => {
                    StandbyEvent::Peer { path, message: message.expect("decoded") }
                }
                Input::Answer(..) => StandbyEvent::Witness(answer.expect("decoded")),
                Input::WitnessLost(_, sent) => StandbyEvent::WitnessLost { sent },
            };
            let before = standby.state();
            let outputs = standby.handle(now_ns, input);
            let (state, term) = (standby.state(), standby.term());
            if state != before {
                world.tell(&format!("{node} is {state:?}"));
            }
            if state != crate::StandbyState::Active {
                world.nodes[node].term = term;
            }
            for output in outputs {
                standby_output(world, node, id, output);
            }
        }
    }
    schedule_tick(world, node);
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
    world.at(at_ns, Event::Tick { node, engine, local_ns });
}

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
            Event::Input { node, engine: number, input: Input::WitnessLost(id, false) },
        );
        return;
    }
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    world.send(link, node, Packet::Ask(id, bytes));
    let patience_ns = world.rng.u64(400 * MS..1000 * MS);
    world.at(
        patience_ns,
        Event::Input { node, engine: number, input: Input::WitnessLost(id, true) },
    );
}

fn say(world: &mut World, node: usize, path: u8, message: &PeerMessage) {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    world.send(usize::from(path), node, Packet::Message(bytes));
}

/// Orders an operation on the VM; operations are carried out in their order.
fn vm(world: &mut World, node: usize, what: Local) {
    let wait_ns = world.rng.u64(..VM_NS_MAX / 2);
    let now_ns = world.now_ns;
    let Some(engine) = &mut world.nodes[node].engine else { return };
    let at_ns =
        (engine.vm_at_ns.max(now_ns) + wait_ns).min(now_ns + VM_NS_MAX).max(engine.vm_at_ns);
    engine.vm_at_ns = at_ns;
    world.local(node, at_ns - now_ns, what);
}

fn primary_output(world: &mut World, node: usize, id: u64, output: PrimaryAction) {
    if !world.is_engine(node, id) {
        return;
    }
    if !matches!(
        output,
        PrimaryAction::Send { .. }
            | PrimaryAction::SetRunPermit(RunPermit::Until(_))
            | PrimaryAction::Release { .. }
    ) {
        world.tell(&format!("{node}: {output:?}"));
    }
    match output {
        PrimaryAction::Send { path, message } => say(world, node, path, &message),
        PrimaryAction::AskWitness(request) => ask(world, node, request),
        PrimaryAction::SetRunPermit(permit) => {
            world.nodes[node].permit = permit;
            if let RunPermit::Until(until_ns) = permit {
                let at_ns = world.nodes[node].true_ns(until_ns).saturating_sub(world.now_ns);
                let late_ns = world.rng.u64(..VM_NS_MAX);
                world.at(at_ns + late_ns, Event::Guard { node });
            }
        }
        PrimaryAction::StopVm => vm(world, node, Local::Stop),
        PrimaryAction::ResumeVm => vm(world, node, Local::Resume),
        PrimaryAction::KillVm => {
            world.nodes[node].gate = super::node::Gate::default();
            world.nodes[node].gate.holding = true;
            vm(world, node, Local::Kill);
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
            world.local(node, wait_ns, Local::Capture { last: false });
        }
        PrimaryAction::Capture { last } => {
            let wait_ns = world.rng.u64(MS..15 * MS);
            world.local(node, wait_ns, Local::Capture { last });
        }
        PrimaryAction::Owe { after } => {
            let term = world.nodes[node].primary().expect("primary").term();
            let len_of = |epoch: Epoch| world.snapshots.get(&(term, epoch.0)).map(|log| log.len());
            let sent = after.and_then(|epoch| Some((len_of(epoch)?, epoch.0)));
            if let Some(engine) = &mut world.nodes[node].engine {
                engine.sent = sent;
            }
            world.came("owed");
        }
        PrimaryAction::MayCapture(may) => {
            if let Some(engine) = &mut world.nodes[node].engine
                && std::mem::replace(&mut engine.may_capture, may) != may
                && may
            {
                world.local(node, 30 * MS, Local::Scheduled);
            }
        }
        PrimaryAction::Fence => fence(world, node),
        PrimaryAction::Notify(notice) => {
            if notice == crate::Notice::Protected {
                world.came("protected");
                world.nodes[node].insisted = false;
            }
        }
        PrimaryAction::Ended { deposed_by } => {
            if let Some(term) = deposed_by {
                world.nodes[node].term = term;
                world.came("deposed");
            }
            world.nodes[node].insisted = false;
            world.lose_engine(node);
            world.nodes[node].vm = None;
            let wait_ns = world.rng.u64(50 * MS..500 * MS);
            world.at(wait_ns, Event::StartEngine { node, attached: false });
        }
    }
}

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
    world.local(node, wait_ns, Local::Fence);
}

fn standby_output(world: &mut World, node: usize, id: u64, output: StandbyAction) {
    if !world.is_engine(node, id) {
        return;
    }
    if !matches!(output, StandbyAction::Send { .. } | StandbyAction::Apply { .. }) {
        world.tell(&format!("{node}: {output:?}"));
    }
    match output {
        StandbyAction::Send { path, message } => say(world, node, path, &message),
        StandbyAction::AskWitness(request) => ask(world, node, request),
        StandbyAction::Receive { session } => {
            if let Some(engine) = &mut world.nodes[node].engine {
                engine.receives = Some(session);
                engine.partial = None;
            }
        }
        StandbyAction::Apply { epoch } => {
            if world.mutant == Some(Mutant::AcknowledgesEarly) {
                let applied = Input::Standby(StandbyEvent::Applied { epoch });
                world.at(0, Event::Input { node, engine: id, input: applied });
            }
            let wait_ns = world.rng.u64(MS..20 * MS);
            let now_ns = world.now_ns;
            let Some(engine) = &mut world.nodes[node].engine else { return };
            engine.apply_at_ns = engine.apply_at_ns.max(now_ns) + wait_ns;
            let at_ns = engine.apply_at_ns - now_ns;
            world.local(node, at_ns, Local::Apply { epoch: epoch.0 });
        }
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

fn activate(world: &mut World, node: usize, epoch: Epoch, term: crate::Term, forced: bool) {
    world.check_activation(node, epoch, term, forced);
    world.came(if forced { "forced" } else { "taken over" });
    let host = &mut world.nodes[node];
    let replica = host.replica.take().expect("a replica");
    host.vm = Some(Vm { log: replica.log.to_vec(), running: false });
    host.gate = super::node::Gate::default();
    host.permit = RunPermit::Free;
    host.epoch = epoch.0;
    host.term = term;
    host.insisted = forced;
    let config = world.config(node);
    world
        .start(node, Role::Primary(Primary::new(config, PrimaryStart::TakenOver { term, forced })));
    vm(world, node, Local::Launch);
}

/// An operation that the engine began is done.
fn done(world: &mut World, node: usize, what: Local) {
    match what {
        Local::Stop => {
            if let Some(vm) = &mut world.nodes[node].vm {
                vm.running = false;
            }
            world.input(node, Input::Primary(PrimaryEvent::VmStopped));
        }
        Local::Resume | Local::Launch => {
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
                    world.input(node, Input::Primary(told));
                }
            }
        }
        Local::Kill => world.nodes[node].vm = None,
        Local::Capture { last } => capture(world, node, last),
        Local::Scheduled => scheduled(world, node),
        Local::Apply { epoch } => apply(world, node, epoch),
        Local::Fence => {
            let off = !world.fence_broken;
            world.tell(&format!("{node} fences: {off}"));
            if off {
                world.came("fenced");
                world.power_off(1 - node);
            }
            let input = match world.nodes[node].engine.as_ref().map(|engine| &engine.role) {
                Some(Role::Primary(_)) => Input::Primary(PrimaryEvent::Fenced(off)),
                _ => Input::Standby(StandbyEvent::Fenced(off)),
            };
            world.input(node, input);
        }
    }
}

fn scheduled(world: &mut World, node: usize) {
    let Some(Engine { may_capture: true, .. }) = &world.nodes[node].engine else { return };
    let wait_ns = world.rng.u64(20 * MS..60 * MS);
    world.local(node, wait_ns, Local::Scheduled);
    let acked = world.nodes[node].primary().and_then(Primary::acknowledged);
    let is_late = acked.is_some_and(|acked| world.nodes[node].epoch > acked.0 + IN_FLIGHT_MAX);
    if !is_late {
        capture(world, node, false);
    }
}

fn capture(world: &mut World, node: usize, last: bool) {
    let fails = world.chance(100);
    let host = &mut world.nodes[node];
    let Some(Role::Primary(primary)) = host.engine.as_ref().map(|engine| &engine.role) else {
        return;
    };
    let Some(vm) = host.vm.as_ref().filter(|vm| !(fails || last && vm.running)) else {
        world.input(node, Input::Primary(PrimaryEvent::CaptureFailed));
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
    world.input(node, Input::Primary(PrimaryEvent::Captured { epoch: Epoch(epoch) }));
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
        world.input(node, Input::Standby(StandbyEvent::ApplyFailed { reason: "disk full".into() }));
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
    world.input(node, Input::Standby(StandbyEvent::Applied { epoch: Epoch(epoch) }));
}
