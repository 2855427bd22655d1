//! The memory that was plugged into a machine since its line was written, in the words that would
//! have put it there.
//!
//! ```text
//!   query-memory-devices ──▶ not named in the line ──▶ -object memory-backend-ram,id=..,size=..
//!                                                      -device pc-dimm,id=..,memdev=..,addr=..,slot=..,node=..
//! ```
//!
//! The backend's kind does not matter: a restore puts the checkpoint's own memory in its place.
//! Address and slot do, for the guest knows them.

use crate::{Error, Qmp, Result};
use keyframe_qemu_cmdline::options::{self, Argument, Object, escape, value_of};
use serde_json::{Value, json};

/// More than any machine has.
const DEVICES_MAX: usize = 4096;

/// A memory device as QEMU lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MemoryDevice {
    kind: String,
    /// Empty if it has none.
    id: String,
    backend: String,
    size_bytes: u64,
    address: u64,
    node: u64,
    slot: Option<u64>,
    /// virtio-mem: how much of it the guest is to use, and in which pieces.
    requested: Option<(u64, u64)>,
}

/// The words for the memory that `line` does not name.
///
/// Error: [`Error::Source`] for a kind of memory device that is not known.
pub(crate) fn memory_words(qmp: &mut Qmp, line: &[Argument]) -> Result<Vec<String>> {
    let answer = qmp.execute("query-memory-devices", None)?;
    let Some(all) = answer.as_array().filter(|all| all.len() <= DEVICES_MAX) else {
        return Err(qmp.unexpected("query-memory-devices", &answer));
    };
    let mut devices = Vec::new();
    for value in all {
        devices.push(parse(value).ok_or_else(|| qmp.unexpected("query-memory-devices", value))?);
    }
    devices.sort_by_key(|device| device.address);
    let mut words = Vec::new();
    for device in devices.iter().filter(|device| !is_named(device, line)) {
        if !has_object(line, &device.backend) {
            let object = format!(
                "memory-backend-ram,id={},size={}",
                escape(&device.backend),
                device.size_bytes
            );
            words.extend(["-object".into(), object]);
        }
        let mut text = device_words(device)?;
        text.push_str(&more_words(qmp, device)?);
        words.extend(["-device".into(), text]);
    }
    Ok(words)
}

/// True for a type of memory device.
pub(crate) fn is_memory(kind: &str) -> bool {
    ["pc-dimm", "nvdimm"].contains(&kind) || kind.starts_with("virtio-mem")
}

fn is_named(device: &MemoryDevice, line: &[Argument]) -> bool {
    options::devices(line).any(|keys| value_of(&keys, "memdev") == Some(device.backend.as_str()))
}

fn has_object(line: &[Argument], id: &str) -> bool {
    let objects = line.iter().filter(|a| a.name() == "object");
    objects.filter_map(|a| Object::parse(a.value())).any(|object| object.id == id)
}

fn parse(value: &Value) -> Option<MemoryDevice> {
    let data = value.get("data")?;
    let number = |key: &str| data.get(key).and_then(Value::as_u64);
    let text = |key: &str| data.get(key).and_then(Value::as_str);
    let backend = text("memdev")?;
    Some(MemoryDevice {
        kind: value.get("type")?.as_str()?.to_owned(),
        id: text("id").unwrap_or_default().to_owned(),
        backend: backend.strip_prefix("/objects/").unwrap_or(backend).to_owned(),
        // What a virtio-mem device has plugged of its whole is a part of its state.
        size_bytes: number("max-size").or_else(|| number("size"))?,
        address: number("addr").or_else(|| number("memaddr"))?,
        node: number("node").unwrap_or(0),
        slot: number("slot"),
        requested: number("requested-size").zip(number("block-size")),
    })
}

fn device_words(device: &MemoryDevice) -> Result<String> {
    let driver = match (device.kind.as_str(), device.slot, device.requested) {
        ("dimm", Some(slot), _) => format!("pc-dimm,addr={:#x},slot={slot}", device.address),
        ("nvdimm", Some(slot), _) => format!("nvdimm,addr={:#x},slot={slot}", device.address),
        ("virtio-mem", _, Some((requested, block))) => {
            format!(
                "virtio-mem-pci,memaddr={:#x},requested-size={requested},block-size={block}",
                device.address
            )
        }
        (kind, ..) => {
            return Err(Error::Source {
                what: format!("plugged memory device {}", device.id),
                problem: format!("Keyframe cannot put a {kind} back"),
            });
        }
    };
    let id =
        if device.id.is_empty() { String::new() } else { format!(",id={}", escape(&device.id)) };
    Ok(format!("{driver},memdev={},node={}{id}", escape(&device.backend), device.node))
}

/// Returns the words that QEMU's list lacks: the labels of an nvdimm, the place of a virtio-mem.
fn more_words(qmp: &mut Qmp, device: &MemoryDevice) -> Result<String> {
    if device.kind == "dimm" {
        return Ok(String::new());
    }
    let path = format!("/machine/peripheral/{}", device.id);
    let mut get = |property: &str| {
        qmp.execute("qom-get", Some(json!({ "path": path, "property": property })))
    };
    if device.kind == "nvdimm" {
        let label_bytes = get("label-size")?;
        let unarmed = if get("unarmed")? == json!(true) { "on" } else { "off" };
        return Ok(format!(",label-size={label_bytes},unarmed={unarmed}"));
    }
    let (bus, address) = (get("parent_bus")?, get("addr")?);
    let bus = bus.as_str().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
    Ok(format!(",bus={},addr={}", escape(bus), address.as_str().unwrap_or_default()))
}

/// Returns the arguments of a command line without the binary's name; none if the line cannot be
/// parsed.
pub(crate) fn arguments(line: &[String]) -> Vec<Argument> {
    options::parse(line.get(1..).unwrap_or_default()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Vec<Argument> {
        options::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    fn dimm(kind: &str) -> Value {
        let data = json!({
            "id": "dimm1", "memdev": "/objects/mem1", "addr": 0x1_0000_0000_u64, "size": 134_217_728,
            "slot": 1, "node": 0, "hotplugged": true, "hotpluggable": true
        });
        json!({ "type": kind, "data": data })
    }

    #[test]
    fn a_dimm_is_put_back_where_the_guest_knows_it() {
        let device = parse(&dimm("dimm")).unwrap();
        assert_eq!(
            device_words(&device).unwrap(),
            "pc-dimm,addr=0x100000000,slot=1,memdev=mem1,node=0,id=dimm1"
        );
        assert!(!is_named(&device, &line("-device pc-dimm,id=dimm1,memdev=mem0")));
        for named in
            ["-device pc-dimm,memdev=mem1", r#"-device {"driver":"pc-dimm","memdev":"mem1"}"#]
        {
            assert!(is_named(&device, &line(named)), "{named}");
        }
        assert!(has_object(&line("-object memory-backend-ram,id=mem1,size=1"), "mem1"));
        let unknown = parse(&dimm("sgx-epc")).unwrap();
        assert!(device_words(&unknown).unwrap_err().to_string().contains("sgx-epc"));
        assert_eq!(parse(&json!({ "type": "dimm", "data": {} })), None);
    }

    #[test]
    fn a_virtio_mem_keeps_its_whole_size() {
        let data = json!({
            "id": "vm0", "memdev": "/objects/m", "memaddr": 4096, "size": 0, "max-size": 8192,
            "requested-size": 4096, "block-size": 2048, "node": 1
        });
        let device = parse(&json!({ "type": "virtio-mem", "data": data })).unwrap();
        assert_eq!(device.size_bytes, 8192);
        assert!(
            device_words(&device)
                .unwrap()
                .contains("requested-size=4096,block-size=2048,memdev=m,node=1,id=vm0")
        );
    }
}
