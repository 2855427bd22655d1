//! Findings of an audit: properties of a machine that prevent exact checkpoints.

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The VM cannot be checkpointed exactly; Keyframe refuses it.
    Refused,
    /// The VM can be checkpointed exactly if its RAM is scanned for written pages only while it is
    /// paused. Keyframe refuses it where that is not possible.
    ScansInPauses,
    /// The VM can be checkpointed, as far as Keyframe knows.
    Warning,
}

/// A device, drive or option that prevents exact checkpoints, or may do so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditFinding {
    /// The device, drive or option.
    pub subject: String,
    /// The reason why it is a problem.
    pub reason: String,
    /// What the user can do about it.
    pub fix: String,
    /// The severity of the finding.
    pub severity: Severity,
}
