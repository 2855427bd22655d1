//! Stop and copy: every dirty page is copied in the pause. The simplest, and the peer of all
//! others.

use super::{Hands, Strategy};
use crate::cycle::CycleError;

/// Copies everything in the pause.
#[derive(Debug, Default)]
pub struct StopCopy;

impl Strategy for StopCopy {
    fn name(&self) -> &'static str {
        "stop-copy"
    }

    fn before(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        // The guest writes on between the count and the pause.
        let expected = hands.expected_pages();
        hands.relieve(expected)?;
        let expected = expected.unwrap_or(0);
        hands.prepare_memory(expected + expected / 4 + 4096)
    }

    fn freeze(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        hands.take_the_rest()
    }
}
