//! Each medium of a line behind `blkreplay`, which has requests complete at the instruction at
//! which they did.
//!
//! ```text
//!   -drive file=a,if=virtio,id=d        ─▶  -drive file=a,if=none,id=d-image  -drive driver=blkreplay,image=d-image,if=virtio,id=d
//!   -blockdev driver=D,node-name=n,...  ─▶  -blockdev driver=D,node-name=n-image,...  -blockdev driver=blkreplay,node-name=n,image=n-image
//! ```
//!
//! The upper one has the name that devices use, and is read-only where the lower one is: else QEMU
//! asks that one for the right to write. Of nodes only those are layered that are no other's file.

use super::option;
use crate::drives::is_read_only;
use crate::options::{self, Argument, escape, value_of};
use crate::{Error, Result};

/// Keys of `-drive` that say what the device is, and those for errors: they go with the upper one.
const OF_DEVICE: &[&str] = &["if", "index", "bus", "unit", "media", "id", "werror", "rerror"];

/// The line with all its media so.
pub fn layer(arguments: &[Argument]) -> Result<Vec<Argument>> {
    let files: Vec<String> =
        arguments.iter().filter(|a| a.name() == "blockdev").flat_map(names_below).collect();
    let mut out = Vec::with_capacity(arguments.len() + 4);
    let mut unnamed = 0;
    for argument in arguments {
        match argument.name() {
            "drive" => drive(argument, &mut unnamed, &mut out),
            "cdrom" => cdrom(argument, &mut out),
            "blockdev" => node(argument, &files, &mut out)?,
            _ => out.push(argument.clone()),
        }
    }
    Ok(out)
}

fn drive(argument: &Argument, unnamed: &mut usize, out: &mut Vec<Argument>) {
    let keys = options::keys(argument.value(), "file");
    let has_medium = ["file", "file.driver", "file.filename"]
        .iter()
        .any(|key| value_of(&keys, key).is_some_and(|v| !v.is_empty()));
    if !has_medium || value_of(&keys, "if") == Some("pflash") {
        // Firmware is read as memory.
        out.push(argument.clone());
        return;
    }
    let (mut upper, mut lower): (Vec<_>, Vec<_>) =
        keys.into_iter().partition(|(key, _)| OF_DEVICE.contains(&key.as_str()));
    let image = if let Some(id) = value_of(&upper, "id") {
        format!("{id}-image")
    } else {
        *unnamed += 1;
        format!("keyframe-{unnamed}-image")
    };
    upper.extend(is_read_only(&lower).then(|| ("readonly".into(), "on".into())));
    lower.extend([("if".into(), "none".into()), ("id".into(), image.clone())]);
    upper.splice(0..0, [("driver".into(), "blkreplay".into()), ("image".into(), image)]);
    out.extend([
        option("drive", options::joined(&lower)),
        option("drive", options::joined(&upper)),
    ]);
}

fn cdrom(argument: &Argument, out: &mut Vec<Argument>) {
    let lower = [
        ("file", argument.value()),
        ("if", "none"),
        ("id", "keyframe-cdrom-image"),
        ("readonly", "on"),
    ];
    let upper = [
        ("driver", "blkreplay"),
        ("image", "keyframe-cdrom-image"),
        ("index", "2"),
        ("media", "cdrom"),
    ];
    for keys in [lower, upper] {
        let keys: Vec<_> =
            keys.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        out.push(option("drive", options::joined(&keys)));
    }
}

/// Nodes that a node is over.
fn names_below(argument: &Argument) -> Vec<String> {
    let keys = options::properties(argument.value(), "driver").unwrap_or_default();
    ["file", "backing", "image"]
        .iter()
        .filter_map(|key| value_of(&keys, key).map(str::to_owned))
        .filter(|name| !name.starts_with('{'))
        .collect()
}

fn node(argument: &Argument, files: &[String], out: &mut Vec<Argument>) -> Result<()> {
    let keys = options::properties(argument.value(), "driver").unwrap_or_default();
    let Some(name) = value_of(&keys, "node-name").map(str::to_owned) else {
        return Err(Error::CommandLine {
            argument: argument.display(),
            reason: "this node has no node-name, so that nothing can be put before it".into(),
            fix: "name it with node-name=".into(),
        });
    };
    if files.contains(&name) {
        out.push(argument.clone());
        return Ok(());
    }
    let image = format!("{name}-image");
    out.push(option("blockdev", renamed(argument.value(), &name, &image)));
    let read_only = if is_read_only(&keys) { ",read-only=on" } else { "" };
    out.push(option(
        "blockdev",
        format!("driver=blkreplay,node-name={},image={}{read_only}", escape(&name), escape(&image)),
    ));
    Ok(())
}

/// The node's words with another node name, in the form that they have.
fn renamed(value: &str, name: &str, image: &str) -> String {
    if value.trim_start().starts_with('{')
        && let Ok(serde_json::Value::Object(mut object)) = serde_json::from_str(value)
    {
        object.insert("node-name".into(), image.into());
        return serde_json::Value::Object(object).to_string();
    }
    let mut keys = options::keys(value, "driver");
    for (key, value) in &mut keys {
        if key == "node-name" && value == name {
            image.clone_into(value);
        }
    }
    options::joined(&keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layered(line: &str) -> String {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let layered = layer(&options::parse(&words).unwrap()).unwrap();
        layered.iter().flat_map(Argument::words).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_device_finds_the_upper_one_by_its_old_name() {
        assert_eq!(
            layered("-drive format=raw,file.driver=nbd,file.export=d,id=d,if=virtio,discard=unmap"),
            "-drive format=raw,file.driver=nbd,file.export=d,discard=unmap,if=none,id=d-image -drive driver=blkreplay,image=d-image,id=d,if=virtio"
        );
        assert_eq!(
            layered("-drive file=/a,,b,readonly=on"),
            "-drive file=/a,,b,readonly=on,if=none,id=keyframe-1-image -drive driver=blkreplay,image=keyframe-1-image,readonly=on"
        );
        assert_eq!(layered("-drive if=pflash,file=x"), "-drive if=pflash,file=x");
        assert_eq!(
            layered("-drive if=ide,media=cdrom"),
            "-drive if=ide,media=cdrom",
            "an empty one"
        );
    }

    #[test]
    fn nodes_are_layered_at_the_top() {
        let line = r#"-blockdev {"driver":"file","filename":"/a","node-name":"f"} -blockdev driver=raw,file=f,node-name=r"#;
        assert_eq!(
            layered(line),
            r#"-blockdev {"driver":"file","filename":"/a","node-name":"f"} -blockdev driver=raw,file=f,node-name=r-image -blockdev driver=blkreplay,node-name=r,image=r-image"#
        );
        assert_eq!(
            layered(
                r#"-blockdev {"driver":"file","filename":"/a","node-name":"f","read-only":true}"#
            ),
            r#"-blockdev {"driver":"file","filename":"/a","node-name":"f-image","read-only":true} -blockdev driver=blkreplay,node-name=f,image=f-image,read-only=on"#
        );
        let words = vec!["-blockdev".to_owned(), "driver=null-co".to_owned()];
        assert!(layer(&options::parse(&words).unwrap()).unwrap_err().fix().is_some());
    }
}
