//! The name by which a qcow2 image refers to its backing image, as QEMU reads it.
//!
//! ```text
//!   base.img, /images/base.img                             a file, beside the image if relative
//!   file:/images/base.img                                  a file
//!   json:{"driver":"qcow2","file":{"driver":"file",...}}   a file in a format
//!   nbd://host/export, json:{"driver":"throttle",...}      no file that Keyframe reads
//! ```
//!
//! QEMU looks for a relative path in `file:` and `json:` in its own working directory, which
//! another QEMU does not have. Keyframe does not follow such a reference.

use crate::ImageFormat;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The backing image of a qcow2 image, as the qcow2 image refers to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingReference {
    /// The path of its file.
    pub path: PathBuf,
    /// Its format. `None` if that is not stated.
    pub format: Option<ImageFormat>,
    /// True if the reference is the plain name of the file. False if it begins with `file:` or
    /// `json:`.
    pub is_plain: bool,
}

/// The drivers of plain files and block devices.
const FILES: [&str; 2] = ["file", "host_device"];
/// The keys of a description that do not change what is read.
const HARMLESS: [&str; 7] =
    ["read-only", "auto-read-only", "discard", "detect-zeroes", "node-name", "locking", "aio"];

impl BackingReference {
    /// Parses `name`, the reference to a backing image in the header of an image in the directory
    /// `folder`. A plain relative name is relative to `folder`. The result has a format only if
    /// `name` itself states one.
    ///
    /// Error: the reason, to follow "its backing image NAME", if it is not a local file, if a path
    /// in `file:` or `json:` is relative, or if Keyframe does not support the description.
    pub fn parse(name: &str, folder: &Path) -> Result<Self, String> {
        // As QEMU decides whether a name has a protocol.
        let end = name.find([':', '/']).filter(|at| name[*at..].starts_with(':'));
        let Some((protocol, rest)) = end.map(|at| (&name[..at], &name[at + 1..])) else {
            return Ok(Self { path: folder.join(name), format: None, is_plain: true });
        };
        let (path, format) = match protocol {
            "file" => (PathBuf::from(rest), None),
            "json" => described(rest)?,
            _ => return Err("is no local file".into()),
        };
        if path.is_relative() {
            return Err("names a path that begins in QEMU's working directory".into());
        }
        Ok(Self { path, format, is_plain: false })
    }
}

/// The file that a description in JSON names, and its format. Error: the reason why Keyframe does
/// not support the description.
fn described(json: &str) -> Result<(PathBuf, Option<ImageFormat>), String> {
    let node: Value = serde_json::from_str(json).map_err(|e| format!("is malformed JSON: {e}"))?;
    let mut keys = Vec::new();
    flatten("", &node, &mut keys);
    let take = |keys: &mut Vec<(String, String)>, key: &str| {
        let at = keys.iter().position(|(name, _)| name == key)?;
        Some(keys.remove(at).1)
    };
    let format = take(&mut keys, "driver");
    let format = match format.as_deref() {
        None => None,
        Some(driver) => Some(
            ImageFormat::named(driver)
                .ok_or_else(|| format!("is opened by QEMU's driver {driver}"))?,
        ),
    };
    if let Some(protocol) = take(&mut keys, "file.driver").filter(|p| !FILES.contains(&p.as_str()))
    {
        return Err(format!("is opened by QEMU's driver {protocol}"));
    }
    let path = take(&mut keys, "file.filename").ok_or("names no file")?;
    let is_harmless = |key: &str| {
        let own = key.strip_prefix("file.").unwrap_or(key);
        HARMLESS.contains(&own) || own.starts_with("cache.")
    };
    match keys.iter().find(|(key, _)| !is_harmless(key)) {
        Some((key, _)) => Err(format!("has the option {key}")),
        None => Ok((path.into(), format)),
    }
}

/// The keys and values of a description, nested ones with dots. serde_json bounds the depth.
fn flatten(prefix: &str, value: &Value, keys: &mut Vec<(String, String)>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&key, value, keys);
            }
        }
        Value::String(text) => keys.push((prefix.into(), text.clone())),
        other => keys.push((prefix.into(), other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(name: &str) -> Result<(String, Option<ImageFormat>, bool), String> {
        let found = BackingReference::parse(name, Path::new("/i"))?;
        Ok((found.path.display().to_string(), found.format, found.is_plain))
    }

    #[test]
    fn references_to_files_are_read_as_qemu_reads_them() {
        let (raw, qcow2) = (Some(ImageFormat::Raw), Some(ImageFormat::Qcow2));
        for (name, path, format) in [
            ("file:/a b", "/a b", None),
            (r#"json:{"file.filename":"/a"}"#, "/a", None),
            (
                r#"json:{"driver":"raw","file":{"driver":"file","filename":"/a","locking":"off"}}"#,
                "/a",
                raw,
            ),
            (
                r#"json:{"driver":"qcow2","file.driver":"host_device","file.filename":"/dev/x","cache":{"direct":true}}"#,
                "/dev/x",
                qcow2,
            ),
        ] {
            assert_eq!(parse(name).unwrap(), (path.to_owned(), format, false), "{name}");
        }
        for (name, path) in [("a", "/i/a"), ("/x:y", "/x:y"), ("./x:y", "/i/./x:y")] {
            assert_eq!(parse(name).unwrap(), (path.to_owned(), None, true), "{name}");
        }
    }

    #[test]
    fn other_references_are_refused_with_the_reason() {
        for (name, reason) in [
            ("nbd+unix:///?socket=/n", "no local file"),
            ("file:a", "working directory"),
            (r#"json:{"file.filename":"a"}"#, "working directory"),
            ("json:{", "malformed"),
            ("json:1", "names no file"),
            (r#"json:{"driver":"file","filename":"/a"}"#, "driver file"),
            (r#"json:{"driver":"raw","file":{"driver":"nbd","path":"/n"}}"#, "driver nbd"),
            (r#"json:{"driver":"raw","offset":512,"file":{"filename":"/a"}}"#, "option offset"),
            (r#"json:{"driver":"qcow2","backing":null,"file":{"filename":"/a"}}"#, "backing"),
            (r#"json:{"driver":"raw","file":{"driver":"throttle","file":"x"}}"#, "throttle"),
        ] {
            let refused = parse(name).unwrap_err();
            assert!(refused.contains(reason), "{name}: {refused}");
        }
    }

    proptest! {
        #[test]
        fn no_reference_panics(name in "(json:|file:|[{}\":,/a.])*") {
            let _ = parse(&name);
        }
    }
}
