//! When checkpoints become durable.

use std::time::Duration;

/// The time at which checkpoints become durable. A backend that makes every write durable (object
/// storage) always has [`Durability::Checkpoint`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Before a seal returns.
    #[default]
    Checkpoint,
    /// With the first seal after this time since the last sync; and at the end of the run.
    Every(Duration),
    /// When the kernel writes them; and at the end of the run.
    Never,
}
