//! The instructions at which a log has interrupts and exceptions, read as the replay advances.

use keyframe_replay::Result;
use keyframe_replay::log::{LogEvent, LogReader};
use std::collections::VecDeque;
use std::io::Read;

/// Reads the deliveries of a log in order.
pub(super) struct Deliveries<R> {
    log: LogReader<R>,
    /// The instructions with deliveries that were read and not passed, in order.
    points: VecDeque<DeliveryPoint>,
    /// A delivery that was read, but belongs to a later instruction than `points`.
    read_ahead: Option<u64>,
}

/// An instruction before which the processor takes interrupts or exceptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DeliveryPoint {
    icount: u64,
    /// The number of interrupts and exceptions.
    count: usize,
}

impl<R: Read> Deliveries<R> {
    pub fn new(log: LogReader<R>) -> Self {
        Self { log, points: VecDeque::new(), read_ahead: None }
    }

    /// Returns the first instruction with deliveries at or after `icount`; `None` if there is none.
    /// Later calls must not ask for what lies before `icount`. Error: the log cannot be read.
    pub fn next(&mut self, icount: u64) -> Result<Option<u64>> {
        loop {
            match self.points.front() {
                Some(point) if point.icount >= icount => return Ok(Some(point.icount)),
                Some(_) => drop(self.points.pop_front()),
                None => match self.read_point()? {
                    Some(point) => self.points.push_back(point),
                    None => return Ok(None),
                },
            }
        }
    }

    /// Returns the number of deliveries at instruction `icount`, which is not long after that of
    /// the last call of [`Deliveries::next`]. Error: the log cannot be read.
    pub fn count_at(&mut self, icount: u64) -> Result<usize> {
        while self.points.back().is_none_or(|point| point.icount < icount) {
            let Some(point) = self.read_point()? else { return Ok(0) };
            self.points.push_back(point);
        }
        let here = self.points.iter().find(|point| point.icount == icount);
        Ok(here.map_or(0, |point| point.count))
    }

    fn read_point(&mut self) -> Result<Option<DeliveryPoint>> {
        let first = match self.read_ahead.take() {
            Some(icount) => Some(icount),
            None => self.read_delivery()?,
        };
        let Some(icount) = first else { return Ok(None) };
        let mut count = 1;
        while let Some(next) = self.read_delivery()? {
            if next != icount {
                self.read_ahead = Some(next);
                break;
            }
            count += 1;
        }
        Ok(Some(DeliveryPoint { icount, count }))
    }

    fn read_delivery(&mut self) -> Result<Option<u64>> {
        while let Some(event) = self.log.next_event()? {
            if event.event == LogEvent::Delivery {
                return Ok(Some(event.icount));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_replay::log::LogVersion;
    use std::path::Path;

    #[test]
    fn deliveries_are_counted_by_instruction() {
        let instructions = |count: u8| [0, 0, 0, 0, count];
        let (interrupt, exception) = ([1], [2]);
        let bytes = [
            &instructions(10)[..],
            &interrupt,
            &exception,
            &instructions(5),
            &instructions(5),
            &interrupt,
            &instructions(1),
            &exception,
        ]
        .concat();
        let log = || LogReader::new(&bytes[..], Path::new("replay.log"), LogVersion::QEMU_10);
        let mut all = Deliveries::new(log());
        for (icount, next, count) in
            [(0, Some(10), 0), (10, Some(10), 2), (11, Some(20), 0), (20, Some(20), 1)]
        {
            assert_eq!(all.next(icount).unwrap(), next, "at or after {icount}");
            assert_eq!(all.count_at(icount).unwrap(), count, "at {icount}");
        }
        // What was looked at ahead is not lost.
        assert_eq!((all.count_at(21).unwrap(), all.count_at(22).unwrap()), (1, 0));
        assert_eq!((all.next(20).unwrap(), all.next(21).unwrap()), (Some(20), Some(21)));
        assert_eq!(all.next(22).unwrap(), None);
        assert_eq!(Deliveries::new(log()).next(15).unwrap(), Some(20));
    }
}
