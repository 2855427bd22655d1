//! Puts `blkreplay` above each medium of a line, so that a replayed request completes at the same
//! instruction as when it was recorded.
//!
//! ```text
//!   -drive file=a,if=virtio,id=d        ─▶  -drive file=a,if=none,id=d-image
//!                                           -drive driver=blkreplay,image=d-image,if=virtio,id=d
//!   -blockdev driver=D,node-name=n,...  ─▶  -blockdev driver=D,node-name=n-image,...
//!                                           -blockdev driver=blkreplay,node-name=n,image=n-image
//! ```
//!
//! The upper node has the name that devices use. It is read-only if the lower one is; otherwise
//! QEMU would ask the lower one for the right to write. A node that is another node's file gets no
//! layer.

use super::option;
use crate::drives::is_read_only;
use crate::options::{self, Argument, escape, value_of};
use crate::{CommandLineError, Result};

/// Keys of `-drive` that describe the device and its errors: they move to the upper node.
const OF_DEVICE: &[&str] = &["if", "index", "bus", "unit", "media", "id", "werror", "rerror"];

/// The command line with a `blkreplay` node above each medium.
///
/// Error: [`CommandLineError::Argument`] for a node without a name.
pub(crate) fn add_block_layers(arguments: &[Argument]) -> Result<Vec<Argument>> {
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
        // The guest reads firmware as memory.
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

/// Names of the nodes below a node.
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
        return Err(CommandLineError::Argument {
            argument: argument.display(),
            reason: "this node has no node-name, so Keyframe cannot put a recording layer above it"
                .into(),
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

/// The node's value with another node name, in its own form.
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
        let layered = add_block_layers(&options::parse(&words).unwrap()).unwrap();
        layered.iter().flat_map(Argument::words).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_upper_drive_keeps_the_name_and_the_device_keys() {
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
    fn only_top_nodes_get_a_layer() {
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
        assert!(add_block_layers(&options::parse(&words).unwrap()).unwrap_err().fix().is_some());
    }
}
