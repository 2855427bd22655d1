//! Finds the media of a command line that the guest can only read, and rewrites the line so that a
//! disk server of Keyframe serves each of them.
//!
//! ```text
//!   user's     -drive file=root.img,readonly=on,id=r,if=none
//!              -cdrom a.iso
//!   recorded   -drive format=raw,file.driver=nbd,...,read-only=on,id=r,if=none
//!              -drive ...,index=2,media=cdrom
//! ```
//!
//! QEMU reads such images with threads, and its main loop takes their answers. A recorded guest
//! that has halted meanwhile gets an answer at its next timer only. A server on the guest's core
//! answers before QEMU looks for the answer (`keyframe-disk`, `affinity`). This is for speed only:
//! the guest sees the same, and QEMU itself reads a medium that is not found here.
//!
//! Not served: `-blockdev`, firmware, floppies by `-fda`, images that are no files or neither raw
//! nor qcow2.

use crate::Result;
use crate::drives::{DiskServer, export_keys, is_one_of, is_read_only_drive, path_of};
use crate::options::{self, Argument, value_of};
use std::path::PathBuf;

/// A medium that the guest can only read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Medium {
    /// The medium's name, unique in the command line.
    pub name: String,
    /// The image, as the command line names it.
    pub image: PathBuf,
    /// The image's format; `None` if the command line does not name it.
    pub format: Option<String>,
}

/// Keys of `-drive` that tell how QEMU opens the image. They have no meaning for a served medium.
const OPENING: &[&str] = &[
    "file",
    "format",
    "driver",
    "aio",
    "cache",
    "cache.direct",
    "auto-read-only",
    "force-share",
    "read-only",
    "readonly",
    "discard",
    "file.driver",
    "file.filename",
    "file.locking",
    "file.aio",
];

/// Keys of `-drive` that are kept.
const KEPT: &[&str] =
    &["if", "id", "index", "bus", "unit", "media", "werror", "rerror", "node-name"];
const THROTTLING: &[&str] = &["throttling", "bps", "iops"];

type Keys = Vec<(String, String)>;

/// Returns the read-only media of the command line `words`, without the binary. Error: the line is
/// malformed.
pub fn media_of(words: &[String]) -> Result<Vec<Medium>> {
    Ok(media(&options::parse(words)?))
}

/// Returns the read-only media of a parsed command line.
pub fn media(arguments: &[Argument]) -> Vec<Medium> {
    found_media(arguments).into_iter().flatten().map(|(medium, _)| medium).collect()
}

/// The command line with its read-only media served by `server`.
pub(crate) fn rewrite_media(arguments: &[Argument], server: &DiskServer) -> Result<Vec<Argument>> {
    let served = |(argument, medium): (&Argument, Option<(Medium, Keys)>)| {
        let Some((medium, kept)) = medium else { return Ok(argument.clone()) };
        let mut keys = export_keys("file.", server, &medium.name)?;
        keys.insert(0, ("format".into(), "raw".into()));
        keys.push(("read-only".into(), "on".into()));
        keys.extend(kept);
        Ok(Argument::Option("drive".into(), options::joined(&keys)))
    };
    arguments.iter().zip(found_media(arguments)).map(served).collect()
}

/// For each argument, the medium that it defines and the keys that are kept.
fn found_media(arguments: &[Argument]) -> Vec<Option<(Medium, Keys)>> {
    let mut count = 0;
    let mut of = |argument: &Argument| {
        let (image, format, kept) = match argument.name() {
            "cdrom" => (argument.value().to_owned(), None, cdrom()),
            "drive" => of_drive(argument)?,
            _ => return None,
        };
        let image = path_of(&image)?;
        count += 1;
        Some((Medium { name: format!("medium-{count}"), image, format }, kept))
    };
    arguments.iter().map(&mut of).collect()
}

/// The keys that QEMU uses for `-cdrom`.
fn cdrom() -> Keys {
    vec![("index".into(), "2".into()), ("media".into(), "cdrom".into())]
}

/// Image, format and kept keys of a drive that the guest can only read.
fn of_drive(argument: &Argument) -> Option<(String, Option<String>, Keys)> {
    let keys = options::keys(argument.value(), "file");
    let is_elsewhere = value_of(&keys, "file.driver").is_some_and(|driver| driver != "file");
    if !is_read_only_drive(&keys) || is_elsewhere || value_of(&keys, "if") == Some("pflash") {
        return None;
    }
    let image = value_of(&keys, "file").or_else(|| value_of(&keys, "file.filename"));
    let image = image.filter(|image| !image.is_empty())?.to_owned();
    let format = value_of(&keys, "format").or_else(|| value_of(&keys, "driver")).map(str::to_owned);
    let mut kept = Keys::new();
    for (key, value) in keys {
        if is_one_of(&key, KEPT, THROTTLING) {
            kept.push((key, value));
        } else if !OPENING.contains(&key.as_str()) {
            return None;
        }
    }
    Some((image, format, kept))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Vec<Argument> {
        options::parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    fn rewritten(text: &str) -> String {
        let server = DiskServer::at("/r/m.sock".into());
        let words: Vec<String> =
            rewrite_media(&line(text), &server).unwrap().iter().flat_map(Argument::words).collect();
        words.join(" ")
    }

    #[test]
    fn a_medium_keeps_the_keys_that_the_guest_sees() {
        let nbd = "file.driver=nbd,file.server.type=unix,file.server.path=/r/m.sock";
        assert_eq!(
            rewritten(
                "-m 64 -drive file=a,,b,format=raw,readonly=on,aio=native,cache=none,if=none,id=r -cdrom c.iso"
            ),
            format!(
                "-m 64 -drive format=raw,{nbd},file.export=medium-1,file.reconnect-delay=86400,read-only=on,if=none,id=r \
                 -drive format=raw,{nbd},file.export=medium-2,file.reconnect-delay=86400,read-only=on,index=2,media=cdrom"
            )
        );
        let found =
            media(&line("-drive file=a,,b,format=qcow2,read-only=on -drive file=w -cdrom c.iso"));
        let shown: Vec<_> = found
            .iter()
            .map(|m| (&*m.name, m.image.to_str().unwrap(), m.format.as_deref()))
            .collect();
        assert_eq!(shown, [("medium-1", "a,b", Some("qcow2")), ("medium-2", "c.iso", None)]);
    }

    #[test]
    fn other_drives_are_kept() {
        for text in [
            "-drive file=a,if=virtio",
            "-drive file=a,readonly=on,if=pflash",
            "-drive file=a,readonly=on,snapshot=on",
            "-drive file=a,readonly=on,copy-on-read=on",
            "-drive file=nbd:localhost:1,readonly=on",
            "-drive file.driver=nbd,file.path=/s,readonly=on",
            "-drive media=cdrom,if=none,id=empty",
            "-cdrom http://a/b.iso",
            "-blockdev driver=file,node-name=f,filename=a,read-only=on",
        ] {
            assert_eq!(rewritten(text), text);
            assert_eq!(media(&line(text)), []);
        }
    }
}
