//! The paths of the drives' files in a device state: a restored VM opens other files than the VM that
//! was saved.
//!
//! ```text
//!   state     magic │ version │ ... │ drives │ ... │ CRC64
//!   a drive   id, text │ partuuid, optional text │ cache type u32 │ root device u8 │ path, text │ ...
//! ```
//!
//! Firecracker opens the files under the paths of the state as it loads it, and its API cannot name
//! others before. A drive is `VirtioBlockState` of Firecracker's `virtio/block/virtio/persist.rs`; how
//! its fields are written is described in [`crate::registers`].
//!
//! The fields before the drives differ between versions. So a drive is found by its id, followed by
//! fields that can be those of a drive, and by the path that its configuration has.

use crate::{Error, Result};
use crc::{CRC_64_REDIS, Crc};
use std::path::PathBuf;

const LENGTH_BYTES: usize = 8;
/// The cache type and whether the drive is the root device.
const BETWEEN_BYTES: usize = 5;
/// The sum over all bytes before it: CRC-64 with Jones' polynomial, as of the crate `crc64`.
const SUM: Crc<u64> = Crc::<u64>::new(&CRC_64_REDIS);

/// A drive whose file has another path for a restored VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MovedDrive {
    /// The id of the drive.
    pub name: String,
    /// The path in the device state.
    pub former: PathBuf,
    /// The path that takes its place.
    pub path: PathBuf,
}

/// Returns `state` with the paths of `drives` in place of the former ones. Errors:
/// [`Error::DeviceState`] if the state is damaged, or does not hold each of the drives once; a path is
/// not UTF-8.
pub(crate) fn with_paths(state: &[u8], drives: &[MovedDrive]) -> Result<Vec<u8>> {
    let fail = |problem: &str| Error::DeviceState { problem: problem.into() };
    let (content, sum) = state.split_last_chunk().ok_or_else(|| fail("it ends too soon"))?;
    if SUM.checksum(content) != u64::from_le_bytes(*sum) {
        return Err(fail("it is damaged: its sum is not that of its content"));
    }
    let mut content = content.to_vec();
    for drive in drives {
        content = with_path(&content, drive)?;
    }
    let sum = SUM.checksum(&content);
    content.extend(sum.to_le_bytes());
    Ok(content)
}

fn with_path(content: &[u8], drive: &MovedDrive) -> Result<Vec<u8>> {
    let (name, former) = (text(&drive.name), text(utf8(&drive.former)?));
    let ids = content.windows(name.len()).enumerate().filter(|(_, bytes)| *bytes == name);
    let mut paths = ids.filter_map(|(at, _)| path_behind(content, at + name.len(), &former));
    let (Some(at), None) = (paths.next(), paths.next()) else {
        return Err(Error::DeviceState {
            problem: format!(
                "it does not hold drive {} with the file {} once",
                drive.name,
                drive.former.display()
            ),
        });
    };
    let (before, after) = content.split_at(at);
    let after = after.get(former.len()..).unwrap_or_default();
    Ok([before, &text(utf8(&drive.path)?), after].concat())
}

/// Returns the place of the path `former` of the drive whose id ends at `at`. `None` if no drive with
/// that path is there.
fn path_behind(content: &[u8], at: usize, former: &[u8]) -> Option<usize> {
    let partuuid = at.checked_add(1)?;
    let behind_partuuid = match content.get(at)? {
        0 => partuuid,
        1 => {
            let length = content.get(partuuid..)?.first_chunk::<LENGTH_BYTES>()?;
            let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
            partuuid.checked_add(LENGTH_BYTES)?.checked_add(length)?
        }
        _ => return None,
    };
    let path = behind_partuuid.checked_add(BETWEEN_BYTES)?;
    content.get(path..)?.starts_with(former).then_some(path)
}

/// Returns a text as a device state has it.
fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn utf8(path: &std::path::Path) -> Result<&str> {
    path.to_str().ok_or_else(|| Error::Restore {
        problem: format!(
            "the path {} is not UTF-8, and Firecracker takes no other",
            path.display()
        ),
        fix: "use directories with names in UTF-8".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn summed(content: &[u8]) -> Vec<u8> {
        [content, &SUM.checksum(content).to_le_bytes()].concat()
    }

    fn drive(id: &str, partuuid: Option<&str>, path: &str) -> Vec<u8> {
        let partuuid = partuuid.map_or_else(|| vec![0], |uuid| [vec![1], text(uuid)].concat());
        [text(id), partuuid, vec![0, 0, 0, 0, 1], text(path), vec![7; 9]].concat()
    }

    fn moved(name: &str, former: &str, path: &str) -> MovedDrive {
        MovedDrive { name: name.into(), former: former.into(), path: path.into() }
    }

    /// The polynomial's known answer. That Firecracker has it, the tests on real VMs show.
    #[test]
    fn the_sum_is_that_of_jones() {
        assert_eq!(SUM.checksum(b"123456789"), 0xe9c6_d914_c4b8_d9ca);
    }

    #[test]
    fn paths_are_exchanged_and_all_else_stays() {
        // The id of one drive is the path of the other.
        let state = |first: &str, second: &str| {
            let drives = [drive("a", None, first), drive("rootfs", Some("0-1"), second)].concat();
            summed(&[&b"begin"[..], &text("rootfs"), &drives, b"end"].concat())
        };
        let drives = [moved("rootfs", "a", "/tmp/own.img"), moved("a", "rootfs", "b")];
        assert_eq!(with_paths(&state("rootfs", "a"), &drives).unwrap(), state("b", "/tmp/own.img"));
    }

    #[test]
    fn a_drive_that_is_not_there_or_twice_and_damage_are_errors() {
        let once = drive("data", None, "/d.img");
        let refused = |state: &[u8], drive: &MovedDrive| {
            with_paths(state, std::slice::from_ref(drive)).unwrap_err().to_string()
        };
        let wanted = moved("data", "/d.img", "/other");
        assert!(with_paths(&summed(&once), std::slice::from_ref(&wanted)).is_ok());
        assert!(refused(&summed(&[&once[..], &once].concat()), &wanted).contains("drive data"));
        let elsewhere = moved("data", "/e.img", "/other");
        assert!(refused(&summed(&once), &elsewhere).contains("/e.img"));
        let mut damaged = summed(&once);
        damaged[3] ^= 1;
        assert!(refused(&damaged, &wanted).contains("damaged"));
        assert!(refused(b"short", &wanted).contains("ends too soon"));
    }

    proptest! {
        #[test]
        fn no_state_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0usize..60) {
            let content = [&bytes[..], &drive("data", Some("x"), "/d.img")].concat();
            let content = &content[..content.len() - cut.min(content.len())];
            let _ = with_paths(&summed(content), &[moved("data", "/d.img", "/other")]);
        }
    }
}
