//! The standby's answers to the control socket, its status, and the primary's connections.

use super::{StandbyEngine, StandbyEngineEvent};
use crate::event::FailoverEvent;
use crate::frames::{FrameKind, MachineFrame, ReadyFrame, epoch_parts, text, unmarked};
use keyframe_link::{Channel, FrameBuffer};
use keyframe_locks::IgnorePoison;
use keyframe_replication::{Epoch, PeerMessage, StandbyEvent, StandbyState};
use keyframe_session::control::server::Pending;
use keyframe_session::control::{
    EngineRequest, EngineResponse, ReplicationState, ReplicationStatus,
};
use keyframe_units::error_chain;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const READ_WAIT: Duration = Duration::from_millis(200);

impl StandbyEngine {
    pub(super) fn answer(&mut self, pending: &Pending, interrupted: &AtomicBool) {
        let state = self.ready.as_ref().map(|ready| ready.core.state());
        let response = match pending.request {
            EngineRequest::FailOver { force: true }
                if self.ready.as_ref().is_some_and(|ready| ready.devices.is_some()) =>
            {
                self.handle(StandbyEvent::FailOver { force: true });
                EngineResponse::Done("this standby takes over".into())
            }
            EngineRequest::FailOver { force } => match state.filter(|_| !force) {
                Some(StandbyState::Armed | StandbyState::Following) if self.control.is_some() => {
                    self.handle(StandbyEvent::SwitchOver);
                    EngineResponse::Done("the primary is asked to let the VM go over".into())
                }
                Some(StandbyState::Armed | StandbyState::Following) => {
                    self.handle(StandbyEvent::FailOver { force: false });
                    EngineResponse::Done("the arbiter is asked whether this standby may take over".into())
                }
                _ if self.ready.as_ref().is_some_and(|ready| ready.devices.is_some()) => EngineResponse::Failed(
                    "the primary is silent, and no arbiter decides who takes over; if the other host is off for sure, run: keyframe failover --force"
                        .into(),
                ),
                _ => EngineResponse::Failed("this standby holds no whole epoch of a VM".into()),
            },
            EngineRequest::Stop { .. } => {
                interrupted.store(true, Ordering::Relaxed);
                EngineResponse::Stopping
            }
            _ => EngineResponse::Failed("this is a standby; ask the host where the VM runs".into()),
        };
        let _ = pending.answer.send(response);
    }

    /// A primary has connected and described its machine.
    pub(super) fn take_control(
        &mut self,
        number: u64,
        machine: MachineFrame,
        channel: Arc<Channel>,
    ) {
        let known = self.ready.as_ref().is_some_and(|ready| ready.machine == machine);
        let answer = if known { Ok(()) } else { self.prepare(machine) };
        let is_ready = answer.is_ok();
        let frame = match answer {
            Ok(()) => {
                self.refusals.forget();
                ReadyFrame::Ready
            }
            Err(error) => {
                let (problem, fix) = (error_chain(&error), error.fix());
                self.refusals.tell(
                    &*self.options.setup.events,
                    error,
                    FailoverEvent::PrimaryRefused,
                );
                ReadyFrame::Refused { problem, fix }
            }
        };
        let sent =
            text(&frame).is_ok_and(|text| channel.send(FrameKind::Ready as u8, &[&text]).is_ok());
        if !is_ready || !sent {
            channel.close();
            return;
        }
        if let Some((_, old)) = self.control.take() {
            old.close();
            self.handle(StandbyEvent::PathDown(0));
        }
        if let Some(ready) = &mut self.ready {
            ready.streams.connected(number);
            ready.coming = None;
        }
        self.read(Arc::clone(&channel), 0, number);
        self.control = Some((number, channel));
        self.handle(StandbyEvent::PathUp(0));
    }

    /// Reads a connection until it breaks.
    pub(super) fn read(&self, channel: Arc<Channel>, path: u8, number: u64) {
        let (sender, ends) = (self.sender.clone(), Arc::clone(&self.ends));
        let unread = Arc::clone(&channel);
        let work = move || {
            let mut input = FrameBuffer::default();
            while !ends.load(Ordering::Relaxed) {
                let frame = match channel.receive(&mut input, READ_WAIT) {
                    Ok(None) => continue,
                    Ok(Some(frame)) => frame,
                    Err(_) => break,
                };
                let said = match FrameKind::of(frame.kind) {
                    Some(FrameKind::Core) => PeerMessage::decode(&frame.payload)
                        .ok()
                        .map(|message| StandbyEngineEvent::Received { path, number, message }),
                    Some(FrameKind::Epoch) => {
                        unmarked(&frame.payload).and_then(|(session, epoch, rest)| {
                            let (head, devices) = epoch_parts(rest)?;
                            Some(StandbyEngineEvent::Epoch {
                                number,
                                session,
                                epoch: Epoch(epoch),
                                head,
                                devices: devices.to_vec(),
                            })
                        })
                    }
                    _ => None,
                };
                // A peer that sends malformed messages is no primary.
                let Some(said) = said else { break };
                if sender.send(said).is_err() {
                    break;
                }
            }
            channel.close();
            let _ = sender.send(StandbyEngineEvent::Broken { path, number });
        };
        if std::thread::Builder::new().name("link".into()).spawn(work).is_err() {
            unread.close();
            let _ = self.sender.send(StandbyEngineEvent::Broken { path, number });
        }
    }

    pub(super) fn show(&mut self) {
        let Some(ready) = &self.ready else { return };
        let state = match ready.core.state() {
            StandbyState::Alone => ReplicationState::Waiting,
            StandbyState::Joining => ReplicationState::Syncing,
            StandbyState::Following => ReplicationState::Following,
            StandbyState::Armed => ReplicationState::ReadyToTakeOver,
            StandbyState::Asking => ReplicationState::Asking,
            StandbyState::Active => ReplicationState::Active,
        };
        let (held, term) = (ready.core.held().map(|epoch| epoch.0), ready.core.term().0);
        let (vm, qemu, connected) =
            (ready.machine.name.clone(), ready.prepared.pid(), self.control.is_some());
        if let Ok(mut status) = self.status.lock() {
            status.qemu_pid = qemu;
        }
        self.update(|status| {
            status.state = state;
            (status.acknowledged, status.term, status.connected) = (held, term, connected);
            status.protects = Some(vm);
        });
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut ReplicationStatus)) {
        let mut status = self.status.lock().ignore_poison();
        change(status.replication.get_or_insert_default());
    }
}
