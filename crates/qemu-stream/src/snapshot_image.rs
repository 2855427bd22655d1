//! A qcow2 image with one internal snapshot and no disk: the form in which a running QEMU takes a
//! machine's state.
//!
//! ```text
//!   cluster  0 header │ 1 refcount table │ 2 refcounts │ 3 L1, active │ 4 L1 of the snapshot │ 5 L2 │ 6 snapshot │ 7.. state
//!                                                          (empty)        [0] disk: none        ▲
//!                                                                         [1] ──────────────────┘ ──▶ 7, 8, 9 ...
//! ```
//!
//! One table of each kind, a cluster long, is enough: for 512 MiB with clusters of 64 KiB, and for
//! 512 GiB with clusters of 2 MiB. QEMU reads whole tables, so a small state has small clusters.
//! The state lies behind the (empty) disk of one cluster, as qcow2 has it: at the second entry of
//! L1.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

/// Clusters before the state.
const HEAD_CLUSTERS: u64 = 7;
/// The name of the snapshot in the image from which QEMU loads a state.
pub const SNAPSHOT: &str = "keyframe";
/// Its id.
const SNAPSHOT_ID: &str = "1";

/// The size of an image's clusters, as a power of two.
#[derive(Clone, Copy)]
struct ClusterSize {
    bits: u32,
}

impl ClusterSize {
    /// The size for a state of about `state_bytes`.
    fn for_state(state_bytes: u64) -> Self {
        let small = Self { bits: 16 };
        if state_bytes <= small.state_bytes_max() / 2 { small } else { Self { bits: 21 } }
    }

    fn bytes(self) -> u64 {
        1 << self.bits
    }

    /// The longest state: as many clusters as one L2 table addresses.
    fn state_bytes_max(self) -> u64 {
        self.bytes() / 8 * self.bytes()
    }
}

/// Writes a qcow2 image with one snapshot into the empty `file`. `state` writes the content of the
/// snapshot, about `about_bytes`. Errors: those of `state`; one that `failed` makes if `file` cannot
/// be written, or if the content is too long: over 512 GiB, or over 512 MiB if `about_bytes` is at
/// most 256 MiB.
pub fn write<E>(
    file: &mut File,
    about_bytes: u64,
    failed: impl Fn(io::Error) -> E,
    state: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<(), E> {
    let size = ClusterSize::for_state(about_bytes);
    let head_bytes = HEAD_CLUSTERS * size.bytes();
    file.seek(SeekFrom::Start(head_bytes)).map_err(&failed)?;
    let mut out = io::BufWriter::with_capacity(1 << 20, &mut *file);
    state(&mut out)?;
    out.flush().map_err(&failed)?;
    drop(out);
    let end = file.stream_position().map_err(&failed)?;
    finish(file, size, end - head_bytes).map_err(&failed)
}

fn finish(file: &File, size: ClusterSize, state_bytes: u64) -> io::Result<()> {
    if state_bytes > size.state_bytes_max() {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("the state is larger than {} MiB", size.state_bytes_max() >> 20),
        ));
    }
    let cluster_bytes = size.bytes();
    let all = HEAD_CLUSTERS + state_bytes.div_ceil(cluster_bytes);
    file.set_len(all * cluster_bytes)?;
    file.write_all_at(&header(size), 0)?;
    file.write_all_at(&(2 * cluster_bytes).to_be_bytes(), cluster_bytes)?;
    let refcounts: Vec<u8> = (0..all).flat_map(|_| 1_u16.to_be_bytes()).collect();
    file.write_all_at(&refcounts, 2 * cluster_bytes)?;
    file.write_all_at(&(5 * cluster_bytes).to_be_bytes(), 4 * cluster_bytes + 8)?;
    let state: Vec<u8> =
        (HEAD_CLUSTERS..all).flat_map(|n| (n * cluster_bytes).to_be_bytes()).collect();
    file.write_all_at(&state, 5 * cluster_bytes)?;
    file.write_all_at(&snapshot(size, state_bytes), 6 * cluster_bytes)
}

/// Version 3, refcounts of 16 bits, a disk of one cluster.
fn header(size: ClusterSize) -> Vec<u8> {
    let cluster_bytes = size.bytes();
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
    u32s(&mut out, &[0, size.bits]);
    u64s(&mut out, &[cluster_bytes]);
    // No encryption; two entries of L1.
    u32s(&mut out, &[0, 2]);
    u64s(&mut out, &[3 * cluster_bytes, cluster_bytes]);
    // One cluster of the refcount table; one snapshot.
    u32s(&mut out, &[1, 1]);
    u64s(&mut out, &[6 * cluster_bytes]);
    // No features.
    u64s(&mut out, &[0, 0, 0]);
    // Refcounts of 1 << 4 bits; the header's length.
    u32s(&mut out, &[4, 104]);
    out
}

fn snapshot(size: ClusterSize, state_bytes: u64) -> Vec<u8> {
    let mut out = (4 * size.bytes()).to_be_bytes().to_vec();
    out.extend_from_slice(&2_u32.to_be_bytes());
    out.extend_from_slice(&(SNAPSHOT_ID.len() as u16).to_be_bytes());
    out.extend_from_slice(&(SNAPSHOT.len() as u16).to_be_bytes());
    // When it was taken, of which nothing is known here: date, its nanoseconds, the VM's clock.
    out.extend_from_slice(&[0; 16]);
    // The state's length is among what follows, where it has room.
    out.extend_from_slice(&0_u32.to_be_bytes());
    out.extend_from_slice(&24_u32.to_be_bytes());
    // No count of instructions.
    for value in [state_bytes, size.bytes(), u64::MAX] {
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
        let (small, large) = (64 << 10, 2 << 20);
        for (about_bytes, state_bytes) in [
            (1, 1),
            (small, small),
            (small, 3 * small + 5),
            (1 << 30, large),
            (1 << 30, 3 * large + 5),
            // More than was foretold.
            (small, 40 << 20),
        ] {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            write(file.as_file_mut(), about_bytes, std::convert::identity, |out| {
                out.write_all(&vec![7; state_bytes as usize])
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
