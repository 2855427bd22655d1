//! The errors of reading a checkpoint's contents, and what the user can do about them.

use keyframe_units::CheckpointId;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device state cannot be read.
    #[error(transparent)]
    DeviceState(#[from] keyframe_qemu::stream::StreamError),
    /// The registers in a device state of Firecracker cannot be read.
    #[error("checkpoint {checkpoint}: {source}")]
    Registers {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The reason.
        source: Box<keyframe_firecracker::Error>,
    },
    /// The RAM cannot be laid out as the guest sees it.
    #[error("checkpoint {checkpoint}: {source}")]
    Image {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The reason.
        source: keyframe_image::Error,
    },
    /// The checkpoint of a group names other members than it holds states of.
    #[error(
        "checkpoint {checkpoint}: its list of members and its device states contradict each other"
    )]
    MembersContradict {
        /// The checkpoint.
        checkpoint: CheckpointId,
    },
    /// A member of a group must be named.
    #[error("checkpoint {checkpoint} is of a group, {group}, of the VMs {members}")]
    GroupNeedsMember {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The group.
        group: String,
        /// Its members, separated by commas.
        members: String,
    },
    /// A member was named, and the checkpoint is of one VM.
    #[error("checkpoint {checkpoint} is of one VM, {vm}: it has no member {member}")]
    NotAGroup {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The VM.
        vm: String,
        /// The member that was asked for.
        member: String,
    },
    /// The group has no such member.
    #[error("checkpoint {checkpoint} of group {group} has no member {member}")]
    NoMember {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The group.
        group: String,
        /// The member that was asked for.
        member: String,
        /// The members that there are, separated by commas.
        members: String,
    },
    /// The VM has no display.
    #[error("{vm} has no display")]
    NoDisplay {
        /// The VM.
        vm: String,
    },
    /// The VM has a display that Keyframe cannot draw.
    #[error("{vm}: {reason}")]
    NotDrawn {
        /// The VM.
        vm: String,
        /// The reason why not.
        reason: String,
    },
    /// The memory of the display cannot be read.
    #[error("read the display's memory of checkpoint {checkpoint}: {source}")]
    DisplayMemory {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The error of the read.
        source: std::io::Error,
    },
    /// An export cannot be written.
    #[error("write the export: {0}")]
    Export(#[from] std::io::Error),
    /// A picture cannot be encoded.
    #[error("write the picture: {0}")]
    Png(#[from] png::EncodingError),
}

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::DeviceState(error) => error.fix(),
            Self::Image { source, .. } => source.fix(),
            Self::Registers { .. } => Some("use its raw RAM: --format raw".into()),
            Self::GroupNeedsMember { .. } => Some("say which one with --member NAME".into()),
            Self::NotAGroup { .. } => Some("leave --member out".into()),
            Self::NoMember { members, .. } => Some(format!("its members are {members}")),
            Self::NoDisplay { .. } => Some("its console may be on a serial line".into()),
            Self::NotDrawn { .. } => Some(
                "restore it, and look at its display; checkpoints can show that of -vga std".into(),
            ),
            Self::MembersContradict { .. }
            | Self::DisplayMemory { .. }
            | Self::Export(_)
            | Self::Png(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let checkpoint = CheckpointId(5);
        let (group, member) = ("g".to_owned(), "a".to_owned());
        let errors = [
            Error::MembersContradict { checkpoint },
            Error::Registers {
                checkpoint,
                source: Box::new(keyframe_firecracker::registers::read(b"short").unwrap_err()),
            },
            Error::GroupNeedsMember { checkpoint, group: group.clone(), members: "a, b".into() },
            Error::NotAGroup { checkpoint, vm: "vm".into(), member: member.clone() },
            Error::NoMember { checkpoint, group, member, members: "b, c".into() },
            Error::NoDisplay { vm: "VM vm in checkpoint 5".into() },
            Error::NotDrawn { vm: "VM vm in checkpoint 5".into(), reason: "a cirrus card".into() },
            Error::DisplayMemory { checkpoint, source: std::io::ErrorKind::UnexpectedEof.into() },
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
