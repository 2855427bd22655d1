//! Files of a command line that have moved since it was run: images, CDs, kernels, firmware.
//!
//! ```text
//!   moved: /old=/new      -drive file=/old/a.img,if=virtio  ─▶  -drive file=/new/a.img,if=virtio
//! ```
//!
//! Only values that name files for reading are rewritten; all other text stays as it is.

use crate::drives::path_of;
use crate::options::{self, Argument};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Options whose whole value is a path.
const PATHS: &[&str] = &[
    "bios", "cdrom", "dtb", "fda", "fdb", "hda", "hdb", "hdc", "hdd", "initrd", "kernel", "pflash",
    "sd",
];
/// Options whose value has keys, with the key of a first part without `=`.
const KEYED: &[(&str, &str)] = &[
    ("acpitable", ""),
    ("blockdev", "driver"),
    ("device", "driver"),
    ("drive", "file"),
    ("fw_cfg", "name"),
    ("option-rom", "romfile"),
    ("smbios", ""),
];
/// Keys whose value is a path. Nested keys end with these (`file.filename`).
const KEYS: &[&str] = &["file", "filename", "romfile"];

/// A file or directory that has moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovedFile {
    /// The path that the command line named.
    pub old: PathBuf,
    /// The absolute path at which it is now.
    pub new: PathBuf,
}

impl std::str::FromStr for MovedFile {
    type Err = String;

    /// Parses `OLD=NEW`. A relative `NEW` begins in the current directory.
    fn from_str(text: &str) -> Result<Self, String> {
        let (old, new) = text
            .split_once('=')
            .filter(|(old, new)| !old.is_empty() && !new.is_empty())
            .ok_or("write OLD=NEW: the path at the checkpoint, and the path now")?;
        let new = std::path::absolute(new).map_err(|e| format!("resolve {new}: {e}"))?;
        Ok(Self { old: old.into(), new })
    }
}

impl MovedFile {
    /// Returns the present path of `path`, if it is the file that moved or lies in the directory
    /// that moved. Relative paths begin in `directory`.
    pub fn apply(&self, path: &Path, directory: &Path) -> Option<PathBuf> {
        let path = directory.join(path);
        let below = path.strip_prefix(directory.join(&self.old)).ok()?;
        Some(if below.as_os_str().is_empty() { self.new.clone() } else { self.new.join(below) })
    }
}

/// Returns the present path of `path` after all of `moved`; `None` if it has not moved. If several
/// apply, the longest old path decides. Relative paths begin in `directory`.
pub fn moved_path(moved: &[MovedFile], path: &Path, directory: &Path) -> Option<PathBuf> {
    let applied = moved.iter().filter_map(|one| {
        let depth = directory.join(&one.old).components().count();
        Some((depth, one.apply(path, directory)?))
    });
    applied.max_by_key(|(depth, _)| *depth).map(|(_, new)| new)
}

/// Returns the command line `words`, the binary first, with the present paths of the files that
/// `moved` names. Relative paths begin in `directory`. A line that cannot be parsed is returned
/// unchanged.
pub fn with_moved_files(words: &[String], directory: &Path, moved: &[MovedFile]) -> Vec<String> {
    let Some((binary, rest)) = words.split_first() else { return Vec::new() };
    let Ok(line) = options::parse(rest) else { return words.to_vec() };
    let rewriter = Rewriter { directory, moved };
    let rewritten = line.into_iter().flat_map(|argument| rewriter.argument(argument).words());
    std::iter::once(binary.clone()).chain(rewritten).collect()
}

struct Rewriter<'a> {
    directory: &'a Path,
    moved: &'a [MovedFile],
}

impl Rewriter<'_> {
    fn argument(&self, argument: Argument) -> Argument {
        match argument {
            Argument::Image(path) => Argument::Image(self.path(&path).unwrap_or(path)),
            Argument::Option(name, value) => {
                let value = if PATHS.contains(&name.as_str()) {
                    self.path(&value).unwrap_or(value)
                } else if let Some((_, implied)) = KEYED.iter().find(|(keyed, _)| *keyed == name) {
                    self.keyed(value, implied)
                } else {
                    value
                };
                Argument::Option(name, value)
            }
            flag @ Argument::Flag(_) => flag,
        }
    }

    /// The present path of the file `text`, which may begin with `file:`.
    fn path(&self, text: &str) -> Option<String> {
        let new = moved_path(self.moved, &path_of(text)?, self.directory)?;
        new.to_str().map(str::to_owned)
    }

    fn keyed(&self, value: String, implied: &str) -> String {
        if value.trim_start().starts_with('{') {
            let Ok(mut json) = serde_json::from_str(&value) else { return value };
            self.json(&mut json);
            return json.to_string();
        }
        let parts = raw_parts(&value).into_iter().enumerate().map(|(at, part)| {
            let (key, text) = match part.split_once('=') {
                Some((key, text)) => (key, text),
                None if at == 0 => (implied, part),
                None => return part.to_owned(),
            };
            let new = if is_path(key) { self.path(&text.replace(",,", ",")) } else { None };
            match new {
                Some(new) => format!("{key}={}", options::escape(&new)),
                None => part.to_owned(),
            }
        });
        parts.collect::<Vec<_>>().join(",")
    }

    fn json(&self, value: &mut Value) {
        match value {
            Value::Object(all) => {
                for (key, value) in all {
                    match value {
                        Value::String(text) if is_path(key) => {
                            if let Some(new) = self.path(text) {
                                *text = new;
                            }
                        }
                        other => self.json(other),
                    }
                }
            }
            Value::Array(all) => all.iter_mut().for_each(|one| self.json(one)),
            _ => {}
        }
    }
}

fn is_path(key: &str) -> bool {
    key.rsplit('.').next().is_some_and(|last| KEYS.contains(&last))
}

/// The parts between single commas, as they are written.
fn raw_parts(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut begin, mut at) = (0, 0);
    let bytes = text.as_bytes();
    while at < bytes.len() {
        if bytes[at..].starts_with(b",,") {
            at += 2;
        } else if bytes[at] == b',' {
            parts.push(&text[begin..at]);
            at += 1;
            begin = at;
        } else {
            at += 1;
        }
    }
    parts.push(&text[begin..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(text: &str) -> MovedFile {
        text.parse().unwrap()
    }

    fn rewritten(line: &str, all: &[&str]) -> String {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let all: Vec<_> = all.iter().map(|one| moved(one)).collect();
        with_moved_files(&words, Path::new("/vm"), &all).join(" ")
    }

    #[test]
    fn the_files_of_each_option_get_their_present_paths() {
        let line = "q -drive file=/o/a,,b.img,if=virtio -drive /o/c.img -cdrom file:cd.iso -kernel /o/k \
                    -blockdev driver=qcow2,node-name=n,file.driver=file,file.filename=/o/d.qcow2 \
                    -blockdev {\"driver\":\"raw\",\"file\":{\"driver\":\"file\",\"filename\":\"/o/e\"}} \
                    -fw_cfg name=opt/x,file=/o/f -device virtio-net-pci,romfile=/o/rom /o/g.img";
        let expected = "q -drive file=/n/a,,b.img,if=virtio -drive file=/n/c.img -cdrom /iso/cd.iso -kernel /n/k \
                    -blockdev driver=qcow2,node-name=n,file.driver=file,file.filename=/n/d.qcow2 \
                    -blockdev {\"driver\":\"raw\",\"file\":{\"driver\":\"file\",\"filename\":\"/n/e\"}} \
                    -fw_cfg name=opt/x,file=/n/f -device virtio-net-pci,romfile=/n/rom /n/g.img";
        assert_eq!(rewritten(line, &["/o=/n", "cd.iso=/iso/cd.iso"]), expected);
    }

    #[test]
    fn all_other_text_stays() {
        let line = "q -drive file=/old/a.img,serial=/o -drive file=nbd:/o:1 -name /o,debug-threads=on -S \
                    -serial file:/o/log -device virtio-blk-pci,drive=/o -drive if=none,id=x,,y";
        assert_eq!(rewritten(line, &["/o=/n"]), line);
        let broken = ["q".to_owned(), "-drive".to_owned()];
        assert_eq!(with_moved_files(&broken, Path::new("/"), &[moved("/o=/n")]), broken);
        assert!(with_moved_files(&[], Path::new("/"), &[]).is_empty());
    }

    #[test]
    fn the_longest_old_path_decides() {
        let all = [moved("/o=/n"), moved("/o/deep/a=/x")];
        let at = |path: &str| moved_path(&all, Path::new(path), Path::new("/"));
        assert_eq!(at("/o/deep/a"), Some("/x".into()));
        assert_eq!(at("/o/deep/b"), Some("/n/deep/b".into()));
        assert_eq!(at("/older"), None);
    }

    #[test]
    fn a_move_names_both_paths() {
        for wrong in ["/o", "=/n", "/o=", ""] {
            assert!(wrong.parse::<MovedFile>().unwrap_err().contains("OLD=NEW"), "{wrong}");
        }
        let relative = moved("/o=here/a.img");
        assert!(relative.new.is_absolute() && relative.new.ends_with("here/a.img"));
    }
}
