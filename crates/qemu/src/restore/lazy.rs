//! Loading the RAM of a restored QEMU while the VM runs.

use crate::Error;

pub use keyframe_ram_loading::Lazy;
pub use keyframe_vmm::{Residency, SharedRamSource as SharedSource};

impl From<keyframe_ram_loading::Error> for Error {
    fn from(error: keyframe_ram_loading::Error) -> Self {
        use keyframe_ram_loading::Error as Loading;
        match error {
            Loading::Io { operation, source } => Self::io(operation)(source),
            Loading::PageLost { page, block, offset, source } => {
                Self::PageLost { page, block, offset, source }
            }
            Loading::NotMapped { block, pid, problem } => Self::RamAddress { block, pid, problem },
            Loading::Kernel(error) => error.into(),
        }
    }
}
