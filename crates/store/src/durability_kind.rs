//! When checkpoints become durable.

use std::time::Duration;

/// The time at which checkpoints become durable. A backend that makes every write durable (object
/// storage) always has [`Durability::Checkpoint`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// A checkpoint is durable before its seal returns.
    #[default]
    Checkpoint,
    /// Checkpoints become durable with the first seal after this time since the last sync, and at
    /// the end of the run.
    Every(Duration),
    /// Checkpoints become durable when the kernel writes them, and at the end of the run.
    Never,
}
