//! Writes the corpora that the targets begin with below the directory that it is given, one folder
//! each: parts of golden files, and the beginnings of conversations.
//!
//! Checksums are left out, as the targets add them; so is what a secret key would be needed for.

use keyframe_fuzz::{golden_store, top};
use std::path::Path;

struct Corpora<'a>(&'a Path);

impl Corpora<'_> {
    fn add(&self, target: &str, name: &str, bytes: &[u8]) {
        let folder = self.0.join(target);
        std::fs::create_dir_all(&folder).expect("make the folder of a corpus");
        std::fs::write(folder.join(name.replace('/', "-")), bytes).expect("write a seed");
    }
}

fn main() {
    let place = std::env::args().nth(1).expect("usage: seeds DIRECTORY");
    let corpora = Corpora(Path::new(&place));
    for (name, bytes) in golden_store() {
        store_file(&corpora, &name, &name, &bytes);
    }
    for (which, (name, bytes)) in golden_store().iter().enumerate() {
        corpora.add("store_store", name, &[&[which as u8], bytes.as_slice()].concat());
    }
    for (name, len) in [("empty", 0), ("short", 40), ("long", 3000), ("blocks", 140_000)] {
        let plain: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        for (way, bytes) in
            ["put", "appended"].iter().zip(keyframe_store_backend::fuzzing::encrypted_seeds(&plain))
        {
            corpora.add("store_container", &format!("{name}-{way}"), &bytes);
        }
    }
    let log = [
        &[0, 0, 0, 9, 9, 28][..],
        &[7; 8],
        &[0, 0, 0, 9, 9, 28],
        &[8; 8],
        &[3],
        &[0; 8],
        &[30, 39],
    ]
    .concat();
    corpora.add("replay_log", "made", &log);
    corpora.add("gdb_packets", "made", b"\x08+$g#67+$T05watch:1000;#b1-\x03$Z2,1000,8#a5");
    let types = [&[0x9f, 0xeb, 1, 0, 24][..], &[0; 15], &[7, 0, 0, 0], b"\0pid\0x\0"].concat();
    corpora.add("analysis_types", "made", &types);
    corpora.add("screen_registers", "bochs", &registers(0, [320, 200, 32]));
    for (name, bits) in [("palette", 8), ("high", 16), ("true", 24)] {
        corpora.add("screen_registers", name, &registers(1, [320, 200, bits]));
    }
    corpora.add("analysis_symbols", "map", b"ffffffff81000000 T _text\nffffffff81000040 t other\n");
    for (number, memory) in keyframe_kallsyms::fuzzing::seeds().enumerate() {
        corpora.add("kallsyms_memory", &format!("tables-{number}"), &memory);
    }
    archive(&corpora);
    qemu(&corpora);
    disk(&corpora);
    net(&corpora);
    served(&corpora);
}

/// A display's kind, a memory of 1 MiB, and a VBE mode: width, height, bits.
fn registers(kind: u8, mode: [u16; 3]) -> Vec<u8> {
    let vbe = [&[0][..], &mode, &[1, 0, 320, 200, 0, 0]].concat();
    let line_bytes = 320 * u32::from(mode[2]) / 8;
    let rest = [&0u32.to_le_bytes()[..], &line_bytes.to_le_bytes(), &[0; 24], &[0x20]].concat();
    [
        &[kind, 20][..],
        &vbe.iter().flat_map(|register| register.to_le_bytes()).collect::<Vec<_>>(),
        &rest,
    ]
    .concat()
}

/// With the numbers of the store itself made zero, which the targets expect.
fn without(bytes: &[u8], store_at: usize) -> Vec<u8> {
    let mut content = bytes[12..bytes.len() - 32].to_vec();
    content[store_at - 12..store_at - 12 + 16].fill(0);
    content
}

fn store_file(corpora: &Corpora<'_>, seed: &str, name: &str, bytes: &[u8]) {
    match name.split('/').next() {
        Some("maps") => corpora.add("store_map", seed, &without(bytes, 48)),
        Some("checkpoints") => corpora.add("store_checkpoint", seed, &without(bytes, 24)),
        Some("tags") => corpora.add("store_small", seed, &[&[0], bytes].concat()),
        Some("packs") => {
            let number = bytes[32];
            let dictionary_bytes = u64::from_le_bytes(bytes[40..48].try_into().expect("8 bytes"));
            let has_dictionary = bytes[12] == 1;
            let mut at = if has_dictionary { 80 + dictionary_bytes as usize } else { 64 };
            while let Some(len) = bytes.get(at + 10..at + 12) {
                let end = at + 28 + usize::from(u16::from_le_bytes([len[0], len[1]]));
                let is_record = bytes.get(at + 8).is_some_and(u8::is_ascii_uppercase);
                let Some(rest) = bytes.get(at + 8..end).filter(|_| is_record) else { break };
                let place = (u64::from(number) << 40 | at as u64).to_le_bytes();
                corpora.add("store_record", &format!("{seed}-{at}"), &[&place[..], rest].concat());
                at = end;
            }
            let trailer = bytes.get(at..bytes.len() - 32).unwrap_or_default();
            corpora.add("store_trailer", seed, &[&bytes[..64], trailer].concat());
        }
        _ if name == "store.json" => {
            let text = String::from_utf8_lossy(bytes);
            corpora.add(
                "store_identity",
                seed,
                text.split(",\n  \"checksum\"").next().unwrap_or("").as_bytes(),
            );
        }
        _ => {}
    }
}

fn qemu(corpora: &Corpora<'_>) {
    let device = |id: u8, name: &str, body: &[u8]| {
        let head =
            [&[4, 0, 0, 0, id, name.len() as u8], name.as_bytes(), &[0, 0, 0, 0, 0, 0, 0, 12]]
                .concat();
        [&head[..], body, &[0x7e, 0, 0, 0, id]].concat()
    };
    let devices =
        [device(1, "timer", &[0; 24]), device(2, "cpu", &[0; 2000]), device(3, "apic", &[1; 200])];
    let state = [&b"QEVM\0\0\0\x03"[..], &devices.concat(), &[0]].concat();
    corpora.add("qemu_device_state", "made", &state);
    let recorded = include_bytes!("../../crates/firecracker/tests/golden/state-6.0.0.bin");
    corpora.add("firecracker_device_state", "recorded", recorded);
    let mut stream =
        b"QEVM\0\0\0\x03\x07\0\0\0\x02pc\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04".to_vec();
    stream.extend(0x3004u64.to_be_bytes());
    stream.extend(b"\x06pc.ram\0\0\0\0\0\0\x30\0\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02\x03\0\0\0\x02");
    stream.extend(0x1002u64.to_be_bytes());
    stream.extend(b"\x06pc.ram\0");
    stream.extend(0x0028u64.to_be_bytes());
    stream.extend([7; 4096]);
    stream.extend(0x10u64.to_be_bytes());
    stream.extend(b"\x7e\0\0\0\x02");
    stream.extend(&state[8..]);
    stream.extend(b"\x06\0\0\0\x02{}");
    corpora.add("qemu_migration", "made", &stream);
    let lines = [
        r#"{"QMP":{"version":{"qemu":{"micro":22,"minor":2,"major":7}},"capabilities":["oob"]}}"#,
        r#"{"return":{"status":"running","running":true},"id":7}"#,
        r#"{"timestamp":{"seconds":1700000000,"microseconds":264615},"event":"SHUTDOWN","data":{"guest":true,"reason":"guest-shutdown"}}"#,
        r#"{"error":{"class":"GenericError","desc":"no"},"id":8}"#,
        "event STOP at 1795246259.264615 for domain 'kf': <null>",
    ];
    corpora.add("qemu_monitor", "lines", (lines.join("\n") + "\n").as_bytes());
}

fn disk(corpora: &Corpora<'_>) {
    let option = |number: u32, data: &[u8]| {
        let len = (data.len() as u32).to_be_bytes();
        [b"IHAVEOPT", &number.to_be_bytes()[..], &len, data].concat()
    };
    let request = |command: u16, cookie: u64, offset: u64, len: u32| {
        let head = [&0x2560_9513u32.to_be_bytes()[..], &[0, 0], &command.to_be_bytes()].concat();
        [&head[..], &cookie.to_be_bytes(), &offset.to_be_bytes(), &len.to_be_bytes()].concat()
    };
    let context = b"\0\0\0\x01d\0\0\0\x01\0\0\0\x0fbase:allocation";
    let talk = [
        b"\0\0\0\x03".to_vec(),
        option(8, b""),
        option(10, context),
        option(3, b""),
        option(7, b"\0\0\0\x01d\0\0"),
        request(1, 1, 4000, 8),
        b"datadata".to_vec(),
        request(0, 2, 0, 9000),
        request(7, 3, 0, 65536),
        request(6, 4, 4096, 8192),
        request(4, 5, 8192, 4096),
        request(3, 6, 0, 0),
        request(2, 7, 0, 0),
    ];
    corpora.add("disk_nbd_server", "talk", &talk.concat());
    let reply = |about: u32, kind: u32, data: &[u8]| {
        let head = [0x0003_e889_0455_65a9u64.to_be_bytes().to_vec(), about.to_be_bytes().to_vec()]
            .concat();
        [&head[..], &kind.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
    };
    let chunk = |flags: u16, kind: u16, cookie: u64, data: &[u8]| {
        let head =
            [&0x668e_33efu32.to_be_bytes()[..], &flags.to_be_bytes(), &kind.to_be_bytes()].concat();
        [&head[..], &cookie.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
    };
    let data = [&0u64.to_be_bytes()[..], &[5; 9000]].concat();
    let answers = [
        b"NBDMAGICIHAVEOPT\0\x03".to_vec(),
        reply(8, 1, b""),
        reply(10, 4, b"\0\0\0\x01base:allocation"),
        reply(10, 1, b""),
        reply(7, 3, b"\0\0\0\0\0\0\0\x04\0\0\0\x01"),
        reply(7, 1, b""),
        chunk(1, 5, 1, b"\0\0\0\x01\0\0\x40\0\0\0\0\x03\0\x03\xc0\0\0\0\0\0"),
        chunk(1, 1, 2, &data),
    ];
    corpora.add("disk_nbd_client", "answers", &answers.concat());
    let mut journal = b"KFDISK\r\n\x01\0\0\0\0\x10\0\0\0\0\x04\0\0\0\0\0".to_vec();
    journal.resize(64, 0);
    for number in 1..3u64 {
        journal.extend([0x3142_464bu32.to_le_bytes(), 2u32.to_le_bytes()].concat());
        journal.extend([number.to_le_bytes(), [0; 8]].concat());
        for (block, blocks, slot, kind) in
            [(number * 4, 2u64, number as u32 * 2, 0u32), (20, number, 0, 1)]
        {
            journal.extend([block.to_le_bytes(), blocks.to_le_bytes()].concat());
            journal.extend([slot.to_le_bytes(), kind.to_le_bytes()].concat());
        }
    }
    corpora.add("disk_overlay", "two-batches", &journal);
    let orders = [
        r#""Prepare""#,
        r#"{"Pause":{"limit_ms":5}}"#,
        r#"{"Pages":{"disk":0,"epoch":1,"from":2}}"#,
        r#"{"Release":{"epochs":[1,2]}}"#,
    ];
    let orders: Vec<u8> = orders
        .iter()
        .flat_map(|order| [&(order.len() as u32).to_le_bytes()[..], order.as_bytes()].concat())
        .collect();
    corpora.add("disk_orders", "some", &orders);
}

fn net(corpora: &Corpora<'_>) {
    let golden = std::fs::read(top().join("crates/net/tests/golden/in-flight-v1.bin"))
        .expect("a golden file");
    corpora.add("net_in_flight", "v1", &golden[..golden.len() - 32]);
    corpora.add("net_frames", "two", b"\x03\0\0\0\x10destinatsource!!\0\0\0\x01x");
    let messages: Vec<u8> = [r#"{"hold":{"limit_ms":10000}}"#, r#""collect""#, r#""done""#]
        .iter()
        .flat_map(|json| {
            [&(json.len() as u32).to_le_bytes()[..], &[0; 4], json.as_bytes()].concat()
        })
        .collect();
    corpora.add("net_control", "some", &messages);
}

fn archive(corpora: &Corpora<'_>) {
    let store = std::env::temp_dir().join(format!("keyframe-seeds-{}", std::process::id()));
    for (name, bytes) in golden_store() {
        let path = store.join(&name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("make it");
        std::fs::write(path, bytes).expect("write a file");
    }
    let file = store.join("archive");
    let open = std::fs::File::create_new(&file).expect("a file");
    let written = keyframe_store_backend::archive::write_archive(&store, &open, &mut |_| ());
    written.expect("an archive");
    corpora.add("store_archive", "golden", &std::fs::read(file).expect("the archive"));
    std::fs::remove_dir_all(store).expect("remove the directory");
}

fn served(corpora: &Corpora<'_>) {
    corpora.add("served_request", "hello", b"\x01KFSERVE\n\x01\0\x06\0secret");
    corpora.add("served_request", "list", b"\x02\x05packs");
    let range = [&b"\x05\x13packs/00000001.pack"[..], &[7; 8], &[0; 8], &[0, 0, 2, 0, 1], &[9; 32]]
        .concat();
    corpora.add("served_request", "range", &range);
    corpora.add("served_request", "look", b"\x04\x02\0\x13packs/00000001.pack\x0astore.json");
    corpora.add("served_request", "join", &[&b"\x07"[..], &[3; 16], b"\x02\0me"].concat());
    let act = |act: &[u8]| [&b"\x08"[..], &[3; 16], &[1, 0, 0, 0, 0, 0, 0, 0], act].concat();
    let acts: [(&str, &[u8]); 5] = [
        ("tell", b"\x02\x02\0\0\0{}"),
        ("create", b"\x03\x13packs/00000001.pack"),
        ("append", b"\x04\x13packs/00000001.pack\0\0\0\0\0\0\0\0\x03\0\0\0abc"),
        ("put", b"\x09\x06tags/a\x01\0\0\0\0\0\0\0\0\x01\0\0\0x"),
        ("remove", b"\x0b\x04maps\x01\0\x0e0000000001.map"),
    ];
    for (name, bytes) in acts {
        corpora.add("served_request", name, &act(bytes));
    }
    corpora.add("served_request", "renew", &[&b"\x09"[..], &[3; 16], &[1]].concat());
    let answer = |asked: u8, kind: &[u8; 4], body: &[u8]| {
        let len = (body.len() as u64).to_le_bytes();
        [&[asked][..], kind, &len, &len, body].concat()
    };
    corpora.add(
        "served_answer",
        "names",
        &answer(10, &[0; 4], b"\x0d00000001.pack\x0d00000002.pack"),
    );
    let look = [&[1][..], &[5; 24], &[4], b"head", &[0]].concat();
    corpora.add("served_answer", "looks", &answer(2 + 32 * 7, &[0; 4], &look));
    corpora.add("served_answer", "refused", &answer(1, &[2, 0, 3, 0], b"no"));
}
