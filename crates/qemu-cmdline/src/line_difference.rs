//! The devices and media that two command lines do not share. A running VM can only be put back to
//! a checkpoint whose line makes the same ones.

use crate::line_edits::{file_of, medium_of_line};
use crate::options::{self, Argument, value_of};

/// The first device or medium that only one of two command lines has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineDifference {
    /// Only the first command line has it.
    OnlyFirst(String),
    /// Only the second command line has it.
    OnlySecond(String),
}

/// Compares the devices and removable media of two command lines, the binary first. Returns the
/// first difference, or `None` if they have the same ones. Does not compare network backends,
/// consoles and other options.
pub fn line_difference(first: &[String], second: &[String]) -> Option<LineDifference> {
    let parts = |words: &[String]| {
        let line = options::parse(words.get(1..).unwrap_or_default()).unwrap_or_default();
        let mut parts: Vec<String> = devices(&line).chain(media(&line)).collect();
        parts.sort();
        parts
    };
    let (first, mut second) = (parts(first), parts(second));
    for part in first {
        match second.iter().position(|other| *other == part) {
            Some(at) => drop(second.remove(at)),
            None => return Some(LineDifference::OnlyFirst(part)),
        }
    }
    second.into_iter().next().map(LineDifference::OnlySecond)
}

fn devices(line: &[Argument]) -> impl Iterator<Item = String> + '_ {
    options::devices(line).map(|keys| {
        let driver = value_of(&keys, "driver").unwrap_or_default();
        match value_of(&keys, "id") {
            Some(id) => format!("device {id} ({driver})"),
            None => format!("a device without an id ({driver})"),
        }
    })
}

fn media(line: &[Argument]) -> impl Iterator<Item = String> + '_ {
    let is_removable_drive = |argument: &&Argument| {
        let keys = options::keys(argument.value(), "file");
        let is = |key: &str, value: &str| value_of(&keys, key) == Some(value);
        match argument.name() {
            "cdrom" | "fda" | "fdb" => true,
            "drive" => is("media", "cdrom") || is("if", "floppy"),
            _ => false,
        }
    };
    let in_drives = line.iter().filter(is_removable_drive).filter_map(file_of);
    let in_nodes = options::devices(line).filter_map(|keys| {
        let driver = value_of(&keys, "driver")?;
        let is_removable = driver.ends_with("-cd") || driver == "floppy";
        let id = value_of(&keys, "id").filter(|_| is_removable)?;
        medium_of_line(line, "", id)?
    });
    in_drives.chain(in_nodes).map(|file| format!("medium {file}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(first: &str, second: &str) -> Option<LineDifference> {
        let words = |text: &str| -> Vec<String> {
            ["qemu"].into_iter().chain(text.split_whitespace()).map(str::to_owned).collect()
        };
        line_difference(&words(first), &words(second))
    }

    #[test]
    fn addresses_and_backends_are_no_difference_and_devices_and_media_are() {
        assert_eq!(difference("-device a,id=x -device b", "-device b -device a,id=x,addr=4"), None);
        assert_eq!(difference("-cdrom a.iso", "-drive index=2,media=cdrom,file=a.iso"), None);
        let first = |text: &str| Some(LineDifference::OnlyFirst(text.into()));
        assert_eq!(difference("-device a,id=x", "-m 1"), first("device x (a)"));
        assert_eq!(
            difference("-device a -device a", "-device a"),
            first("a device without an id (a)")
        );
        assert_eq!(difference("-cdrom b", "-drive index=2,media=cdrom"), first("medium b"));
        assert_eq!(
            difference("", "-device a,id=x"),
            Some(LineDifference::OnlySecond("device x (a)".into()))
        );
    }
}
