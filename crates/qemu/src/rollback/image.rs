//! A qcow2 image with one internal snapshot and no disk: the form in which a running QEMU takes a
//! machine's state.
//!
//! ```text
//!   cluster  0 header │ 1 refcount table │ 2 refcounts │ 3 L1, active │ 4 L1 of the snapshot │ 5 L2 │ 6 snapshot │ 7.. state
//!                                                          (empty)        [0] disk: none        ▲
//!                                                                         [1] ──────────────────┘ ──▶ 7, 8, 9 ...
//! ```
//!
//! With clusters of 2 MiB one table of each kind is enough for 512 GiB. The state lies behind the
//! (empty) disk of one cluster, as qcow2 has it: at the second entry of L1.

use crate::{Error, Result};
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

const CLUSTER_BITS: u32 = 21;
const CLUSTER_BYTES: u64 = 1 << CLUSTER_BITS;
/// Clusters before the state.
const HEAD_CLUSTERS: u64 = 7;
/// The most clusters of the state: as many as one L2 table addresses.
const STATE_CLUSTERS_MAX: u64 = CLUSTER_BYTES / 8;
/// The name of the snapshot in the image from which QEMU loads a state.
pub const SNAPSHOT: &str = "keyframe";
/// Its id.
const SNAPSHOT_ID: &str = "1";

/// Writes a qcow2 image with one snapshot into the empty `file`. `state` writes the content of the
/// snapshot. Errors: those of `state`; [`Error::Io`] if `file` cannot be written, or if the content
/// exceeds 512 GiB.
pub fn write(file: &mut File, state: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let operation = "write the machine's state to a temporary image";
    file.seek(SeekFrom::Start(HEAD_CLUSTERS * CLUSTER_BYTES)).map_err(Error::io(operation))?;
    let mut out = io::BufWriter::with_capacity(1 << 20, &mut *file);
    state(&mut out)?;
    out.flush().map_err(Error::io(operation))?;
    drop(out);
    let end = file.stream_position().map_err(Error::io(operation))?;
    finish(file, end - HEAD_CLUSTERS * CLUSTER_BYTES).map_err(Error::io(operation))
}

fn finish(file: &File, state_bytes: u64) -> io::Result<()> {
    let clusters = state_bytes.div_ceil(CLUSTER_BYTES);
    if clusters > STATE_CLUSTERS_MAX {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            "the state is larger than 512 GiB",
        ));
    }
    let all = HEAD_CLUSTERS + clusters;
    file.set_len(all * CLUSTER_BYTES)?;
    file.write_all_at(&header(), 0)?;
    file.write_all_at(&(2 * CLUSTER_BYTES).to_be_bytes(), CLUSTER_BYTES)?;
    let refcounts: Vec<u8> = (0..all).flat_map(|_| 1_u16.to_be_bytes()).collect();
    file.write_all_at(&refcounts, 2 * CLUSTER_BYTES)?;
    file.write_all_at(&(5 * CLUSTER_BYTES).to_be_bytes(), 4 * CLUSTER_BYTES + 8)?;
    let state: Vec<u8> =
        (HEAD_CLUSTERS..all).flat_map(|n| (n * CLUSTER_BYTES).to_be_bytes()).collect();
    file.write_all_at(&state, 5 * CLUSTER_BYTES)?;
    file.write_all_at(&snapshot(state_bytes), 6 * CLUSTER_BYTES)
}

/// Version 3, refcounts of 16 bits, a disk of one cluster.
fn header() -> Vec<u8> {
    let mut out = b"QFI\xfb".to_vec();
    let u32s = |out: &mut Vec<u8>, values: &[u32]| {
        out.extend(values.iter().flat_map(|v| v.to_be_bytes()));
    };
    let u64s = |out: &mut Vec<u8>, values: &[u64]| {
        out.extend(values.iter().flat_map(|v| v.to_be_bytes()));
    };
    u32s(&mut out, &[3]);
    // No backing file.
    u64s(&mut out, &[0]);
    u32s(&mut out, &[0, CLUSTER_BITS]);
    u64s(&mut out, &[CLUSTER_BYTES]);
    // No encryption; two entries of L1.
    u32s(&mut out, &[0, 2]);
    u64s(&mut out, &[3 * CLUSTER_BYTES, CLUSTER_BYTES]);
    // One cluster of the refcount table; one snapshot.
    u32s(&mut out, &[1, 1]);
    u64s(&mut out, &[6 * CLUSTER_BYTES]);
    // No features.
    u64s(&mut out, &[0, 0, 0]);
    // Refcounts of 1 << 4 bits; the header's length.
    u32s(&mut out, &[4, 104]);
    out
}

fn snapshot(state_bytes: u64) -> Vec<u8> {
    let mut out = (4 * CLUSTER_BYTES).to_be_bytes().to_vec();
    out.extend_from_slice(&2_u32.to_be_bytes());
    out.extend_from_slice(&(SNAPSHOT_ID.len() as u16).to_be_bytes());
    out.extend_from_slice(&(SNAPSHOT.len() as u16).to_be_bytes());
    // When it was taken, of which nothing is known here: date, its nanoseconds, the VM's clock.
    out.extend_from_slice(&[0; 16]);
    // The state's length is among what follows, where it has room.
    out.extend_from_slice(&0_u32.to_be_bytes());
    out.extend_from_slice(&24_u32.to_be_bytes());
    // No count of instructions.
    for value in [state_bytes, CLUSTER_BYTES, u64::MAX] {
        out.extend_from_slice(&value.to_be_bytes());
    }
    out.extend_from_slice(SNAPSHOT_ID.as_bytes());
    out.extend_from_slice(SNAPSHOT.as_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Against the tool of those whose format it is.
    #[test]
    fn qemu_finds_nothing_wrong_with_it() {
        for state_bytes in [1, CLUSTER_BYTES, 3 * CLUSTER_BYTES + 5] {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            write(file.as_file_mut(), |out| {
                out.write_all(&vec![7; state_bytes as usize]).map_err(Error::io("write"))
            })
            .unwrap();
            let qemu_img = |args: &[&str]| {
                let output = Command::new("qemu-img").args(args).arg(file.path()).output().unwrap();
                assert!(
                    output.status.success(),
                    "{args:?}: {}",
                    String::from_utf8_lossy(&output.stderr)
                );
                String::from_utf8_lossy(&output.stdout).into_owned()
            };
            qemu_img(&["check", "-q"]);
            assert!(qemu_img(&["snapshot", "-l"]).contains(SNAPSHOT));
        }
    }
}
