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
//! fields that can be those of a drive.

use crate::registers::Reader;
use crate::{Error, Result};
use crc::{CRC_64_REDIS, Crc};
use keyframe_bytes::ByteReader;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const LENGTH_BYTES: usize = 8;
/// The largest number of a type of cache.
const CACHE_MAX: u32 = 1;
/// The longest path of a file, in bytes.
const PATH_BYTES_MAX: usize = 4096;
/// The sum over all bytes before it: CRC-64 with Jones' polynomial, as of the crate `crc64`.
const SUM: Crc<u64> = Crc::<u64>::new(&CRC_64_REDIS);

/// A drive whose file has another path for a restored VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MovedDrive {
    /// The id of the drive.
    pub name: String,
    /// The path that the device state must have; `None` for any.
    pub former: Option<PathBuf>,
    /// The path that takes its place.
    pub path: PathBuf,
}

/// Returns `state` with the paths of `drives` in place of the former ones. Errors:
/// [`Error::DeviceState`] if the state is damaged, or does not hold each of the drives once with the path
/// that it must have; a path is not UTF-8.
pub(crate) fn with_paths(state: &[u8], drives: &[MovedDrive]) -> Result<Vec<u8>> {
    let (content, sum) = state.split_last_chunk().ok_or_else(|| wrong("it ends too soon"))?;
    if SUM.checksum(content) != u64::from_le_bytes(*sum) {
        return Err(wrong("it is damaged: its sum is not that of its content"));
    }
    let mut content = content.to_vec();
    for drive in drives {
        content = with_path(&content, drive)?;
    }
    let sum = SUM.checksum(&content);
    content.extend(sum.to_le_bytes());
    Ok(content)
}

fn wrong(problem: impl Into<String>) -> Error {
    Error::DeviceState { problem: problem.into() }
}

fn with_path(content: &[u8], drive: &MovedDrive) -> Result<Vec<u8>> {
    let MovedDrive { name, former, path } = drive;
    let id = text(name);
    let ids = content.windows(id.len()).enumerate().filter(|(_, bytes)| *bytes == id);
    let mut places = ids.filter_map(|(at, _)| path_behind(content, at + id.len()));
    let (Some(place), None) = (places.next(), places.next()) else {
        return Err(wrong(format!("it does not hold drive {name} once")));
    };
    let found = content.get(place.clone()).unwrap_or_default();
    let found = found.get(LENGTH_BYTES..).unwrap_or_default();
    if former.as_ref().is_some_and(|former| former.as_os_str().as_bytes() != found) {
        let found = String::from_utf8_lossy(found);
        return Err(wrong(format!("drive {name} has the file {found}, which is not known here")));
    }
    let (before, after) = (content.get(..place.start), content.get(place.end..));
    Ok([before.unwrap_or_default(), &text(utf8(path)?), after.unwrap_or_default()].concat())
}

/// Returns the place of the path, with its length, of the drive whose id ends at `at`. `None` if what
/// follows cannot be a drive.
fn path_behind(content: &[u8], at: usize) -> Option<Range<usize>> {
    let mut reader = Reader(ByteReader::new(content.get(at..)?));
    match reader.0.u8().ok()? {
        0 => {}
        1 => drop(reader.bytes().ok()?),
        _ => return None,
    }
    let (cache, root) = (reader.0.u32_le().ok()?, reader.0.u8().ok()?);
    if cache > CACHE_MAX || root > 1 {
        return None;
    }
    let begin = at + reader.0.position();
    let path = reader.bytes().ok()?;
    let is_path = !path.is_empty() && path.len() < PATH_BYTES_MAX && !path.contains(&0);
    is_path.then(|| begin..at + reader.0.position())
}

/// Returns a text as a device state has it.
fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn utf8(path: &Path) -> Result<&str> {
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
        MovedDrive { name: name.into(), former: Some(former.into()), path: path.into() }
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
        let any = MovedDrive { former: None, ..wanted.clone() };
        let (one, other) = (
            with_paths(&summed(&once), std::slice::from_ref(&wanted)),
            with_paths(&summed(&once), &[any]),
        );
        assert_eq!(one.unwrap(), other.unwrap());
        assert!(refused(&summed(&[&once[..], &once].concat()), &wanted).contains("drive data"));
        let elsewhere = moved("data", "/e.img", "/other");
        assert!(refused(&summed(&once), &elsewhere).contains("/d.img"));
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
