//! Compares the fabric with a naive model over random sends, holds, deliveries and disconnects.

use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

const LIMITS: SwitchLimits = SwitchLimits { port_bytes_max: 400, total_bytes_max: 1 << 20 };
const SLOTS: usize = 4;

#[derive(Clone, Debug)]
enum Op {
    Send { from: usize, to: u8 },
    Deliver { to: usize, frames: usize },
    Hold,
    Release,
    Connect { slot: usize, lan: usize },
    Disconnect { slot: usize },
}

fn op() -> impl Strategy<Value = Op> {
    let slot = 0..SLOTS;
    prop_oneof![
        12 => (slot.clone(), 0u8..=SLOTS as u8).prop_map(|(from, to)| Op::Send { from, to }),
        6 => (slot.clone(), 1usize..6).prop_map(|(to, frames)| Op::Deliver { to, frames }),
        1 => Just(Op::Hold),
        2 => Just(Op::Release),
        1 => (slot.clone(), 0usize..2).prop_map(|(slot, lan)| Op::Connect { slot, lan }),
        1 => slot.prop_map(|slot| Op::Disconnect { slot }),
    ]
}

/// The address of slot N is N; `SLOTS` is broadcast.
fn frame(from: usize, to: u8, number: u32) -> Frame {
    let to = if usize::from(to) == SLOTS { [255; 6] } else { [2, 0, 0, 0, 0, to] };
    Frame::new(&[&to[..], &[2, 0, 0, 0, 0, from as u8], &number.to_be_bytes()].concat()).unwrap()
}

/// The specification of the fabric in its simplest form.
#[derive(Default)]
struct Model {
    /// The port in each slot: its key and its LAN.
    ports: [Option<(PortKey, usize)>; SLOTS],
    learnt: HashMap<(usize, u8), usize>,
    queues: [Vec<Frame>; SLOTS],
    dropped: [u64; SLOTS],
    held: bool,
}

impl Model {
    fn is_full(&self, slot: usize) -> bool {
        self.queues[slot].iter().map(cost).sum::<usize>() >= LIMITS.port_bytes_max
    }

    fn send(&mut self, from: usize, to: u8, frame: &Frame) {
        let Some((_, lan)) = self.ports[from] else { return };
        self.learnt.insert((lan, from as u8), from);
        let others: Vec<usize> = (0..SLOTS)
            .filter(|s| *s != from && self.ports[*s].is_some_and(|(_, l)| l == lan))
            .collect();
        match self.learnt.get(&(lan, to)) {
            Some(known) => {
                if *known != from {
                    self.queues[*known].push(frame.clone());
                }
            }
            None => {
                for slot in others {
                    if !self.held && self.is_full(slot) {
                        self.dropped[slot] += 1;
                    } else {
                        self.queues[slot].push(frame.clone());
                    }
                }
            }
        }
    }

    fn disconnect(&mut self, slot: usize) {
        self.ports[slot] = None;
        self.queues[slot].clear();
        self.dropped[slot] = 0;
        self.learnt.retain(|_, at| *at != slot);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn every_frame_waits_once_in_order_for_each_of_its_destinations(ops in prop::collection::vec(op(), 1..200)) {
        let (mut fabric, mut model) = (Fabric::new(LIMITS), Model::default());
        let lans = [fabric.add_lan(), fabric.add_lan()];
        for slot in 0..SLOTS {
            model.ports[slot] = Some((fabric.connect(lans[0]), 0));
        }
        for (number, op) in ops.into_iter().enumerate() {
            match op {
                Op::Send { from, to } => {
                    let Some((key, _)) = model.ports[from] else { continue };
                    if !fabric.may_read(key) {
                        // Only a full unicast queue causes back pressure.
                        prop_assert!(!model.held);
                        continue;
                    }
                    let frame = frame(from, to, number as u32);
                    model.send(from, to, &frame);
                    let overflow = fabric.receive(key, &frame);
                    prop_assert!(overflow.is_none() || model.held);
                    let any_full = (0..SLOTS).any(|s| model.queues[s].last() == Some(&frame) && model.is_full(s));
                    prop_assert_eq!(overflow.is_some(), model.held && any_full);
                }
                Op::Deliver { to, frames } => {
                    let Some((key, _)) = model.ports[to] else { continue };
                    for _ in 0..frames {
                        let expected =
                            (!model.held && !model.queues[to].is_empty()).then(|| model.queues[to].remove(0));
                        prop_assert_eq!(fabric.next(key), expected);
                    }
                }
                Op::Hold => { fabric.hold(); model.held = true }
                Op::Release => { fabric.release(); model.held = false }
                Op::Connect { slot, lan } => {
                    if model.ports[slot].is_none() {
                        model.ports[slot] = Some((fabric.connect(lans[lan]), lan));
                    }
                }
                Op::Disconnect { slot } => {
                    if let Some((key, _)) = model.ports[slot] {
                        fabric.disconnect(key);
                        model.disconnect(slot);
                    }
                }
            }
            for slot in 0..SLOTS {
                let Some((key, _)) = model.ports[slot] else { continue };
                let pending: Vec<Frame> = fabric.pending(key).cloned().collect();
                prop_assert_eq!(&pending, &model.queues[slot]);
                prop_assert_eq!(fabric.dropped(key), model.dropped[slot]);
                // Each sender may exceed the bound by one frame that it had begun. While held, the
                // bound is what the test sends.
                let bytes: usize = pending.iter().map(cost).sum();
                prop_assert!(model.held || bytes < LIMITS.port_bytes_max + 52 * 200);
            }
            prop_assert_eq!(fabric.total_bytes, model.queues.iter().flatten().map(cost).sum::<usize>());
        }
        // After all frames are delivered, every port is read again.
        fabric.release();
        for (key, _) in model.ports.iter().flatten() {
            while fabric.next(*key).is_some() {}
        }
        for (key, _) in model.ports.iter().flatten() {
            prop_assert!(fabric.may_read(*key));
        }
        prop_assert_eq!(fabric.total_bytes, 0);
    }
}

#[test]
fn a_full_queue_stalls_its_sender_and_no_other() {
    let mut fabric = Fabric::new(LIMITS);
    let lan = fabric.add_lan();
    let ports: Vec<PortKey> = (0..3).map(|_| fabric.connect(lan)).collect();
    for (slot, port) in ports.iter().enumerate() {
        assert_eq!(fabric.receive(*port, &frame(slot, SLOTS as u8, 0)), None);
        while fabric.next(ports[(slot + 1) % 3]).is_some()
            || fabric.next(ports[(slot + 2) % 3]).is_some()
        {}
    }
    let mut sent = 0;
    while fabric.may_read(ports[0]) {
        assert_eq!(fabric.receive(ports[0], &frame(0, 1, sent)), None);
        sent += 1;
        assert!(sent < 100, "never stalled");
    }
    assert!(fabric.may_read(ports[1]) && fabric.may_read(ports[2]));
    // Broadcasts skip the port that reads nothing.
    assert_eq!(fabric.receive(ports[2], &frame(2, SLOTS as u8, 0)), None);
    assert_eq!((fabric.dropped(ports[1]), fabric.pending(ports[0]).len()), (1, 1));
    assert!(fabric.may_read(ports[2]));
    // A held fabric reads every port, and reports that the hold must end.
    fabric.hold();
    assert!(fabric.may_read(ports[0]));
    assert_eq!(fabric.receive(ports[0], &frame(0, 1, sent)), Some(Overflow(ports[1])));
    fabric.release();
    let delivered = std::iter::from_fn(|| fabric.next(ports[1])).count();
    assert_eq!(delivered as u32, sent + 1);
    assert!(fabric.may_read(ports[0]));
}
