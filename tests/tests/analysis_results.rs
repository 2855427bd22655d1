//! The results of an analysis: functions are named by the symbols in the guest's RAM, as the guest
//! itself names them, and `keyframe analysis show` prints and draws them.

use keyframe_tests::recording::{end_after, record, recordable_guest};
use keyframe_tests::{TestEnv, chosen_qemus, number, small_guest};
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// Part of the names that are compared: functions that run whenever a process begins.
const COMPARED: &str = "_fork";

/// The guest's first process: it lists symbols, and begins processes without end.
const INIT: &str = "#!/bin/sh
export PATH=/bin
/bin/busybox mount -t devtmpfs dev /dev
exec </dev/console >/dev/console 2>&1
busybox mount -t proc proc /proc
busybox grep _fork /proc/kallsyms
echo KF END
while :; do busybox sleep 0.1; done
";

#[test]
fn functions_have_the_names_that_the_guest_knows_and_are_shown() {
    for qemu in chosen_qemus(2) {
        let env = TestEnv::without_store();
        let initrd = initrd_with(&env, INIT);
        let boot = recordable_guest(&qemu.path, "hash").with(&["-initrd", &initrd]);
        let mut vm = record(&env, &["--checkpoint-every", "600ms"], &boot);
        vm.wait_for("KF END");
        let known = listed_symbols(&vm.lines());
        assert!(known.len() > 10, "{}", vm.report());
        end_after(&env, &mut vm, 4);

        let tool = ["--tool", "hot", "--tool-arg", "symbols=guest", "--tool-arg", "top=100000"];
        let how = ["--out", "A", "--check-sequential", "--json"];
        let report = env.json(&[&["analyze", "R"], &tool[..], &how].concat());
        assert_eq!(report["equals_sequential"], true, "{report:#}");
        let found = std::fs::read_to_string(env.path().join("A/hot-functions.csv")).unwrap();
        let compared: Vec<&str> = found.lines().filter(|line| line.contains(COMPARED)).collect();
        assert!(compared.len() >= 3, "the guest forks: {compared:?}");
        for line in compared {
            let cells: Vec<&str> = line.split(',').collect();
            let address = u64::from_str_radix(cells[0].trim_start_matches("0x"), 16).unwrap();
            let symbol = (address, cells[2].to_owned());
            assert!(known.contains(&symbol), "{symbol:x?} is not in {known:x?}");
        }
        are_shown(&env);
    }
}

/// The symbols of code among the lines of the guest's console.
fn listed_symbols(lines: &[String]) -> BTreeSet<(u64, String)> {
    let symbol = |line: &String| {
        let mut words = line.split_whitespace();
        let address = u64::from_str_radix(words.next()?, 16).ok()?;
        words.next().filter(|kind| ["t", "T", "w", "W"].contains(kind))?;
        Some((address, words.next()?.to_owned()))
    };
    lines.iter().filter_map(symbol).collect()
}

/// The small guest's first file system with another first process: a second archive after the
/// first one, whose file takes the place of the first one's. Typing the command at a shell would
/// not do, as a busy guest loses characters of its console.
fn initrd_with(env: &TestEnv, init: &str) -> String {
    let mut initrd = std::fs::read(small_guest().join("initramfs.cpio.gz")).expect("the initrd");
    let pad = |bytes: &mut Vec<u8>| bytes.resize(bytes.len().next_multiple_of(4), 0);
    pad(&mut initrd);
    for (name, content) in [("init", init), ("TRAILER!!!", "")] {
        let name_bytes = name.len() + 1;
        // inode, mode, user, group, links, time, size, four device numbers, name's length, checksum
        let fields = [1, 0o100_755, 0, 0, 1, 0, content.len(), 0, 0, 0, 0, name_bytes, 0];
        let mut header = "070701".to_owned();
        for field in fields {
            write!(header, "{field:08x}").expect("write to a string");
        }
        initrd.extend(format!("{header}{name}\0").into_bytes());
        pad(&mut initrd);
        initrd.extend(content.as_bytes());
        pad(&mut initrd);
    }
    let path = env.path().join("initrd");
    std::fs::write(&path, initrd).expect("write the initrd");
    path.display().to_string()
}

/// The analysis `A` of `hot` is printed and drawn.
fn are_shown(env: &TestEnv) {
    let text = env.ok(&["analysis", "show", "A", "--top", "5", "--plot", "A.png"]);
    for title in ["Functions that executed most", "Blocks that executed most", "Most used pages"] {
        assert!(text.contains(title), "{text}");
    }
    let shown = env.json(&["analysis", "show", "A", "--top", "5", "--json"]);
    let rows = shown["tables"][0]["rows"].as_array().expect("rows");
    assert_eq!((rows.len(), &shown["tool"]), (5, &"hot".into()), "{shown:#}");
    let executed: Vec<u64> = rows.iter().map(|row| number(row, "executed")).collect();
    assert!(executed.is_sorted_by(|a, b| a >= b) && executed[4] > 0, "{shown:#}");

    let file = std::fs::File::open(env.path().join("A.png")).expect("the picture");
    let mut reader = png::Decoder::new(std::io::BufReader::new(file)).read_info().expect("a PNG");
    let mut pixels = vec![0; reader.output_buffer_size().expect("its size")];
    reader.next_frame(&mut pixels).expect("its pixels");
    let is_coloured = |p: &&[u8]| p.iter().max().unwrap() - p.iter().min().unwrap() > 60;
    let coloured = pixels.chunks(3).filter(is_coloured).count();
    assert!(coloured > 5000, "{coloured} coloured pixels: no functions are drawn");

    env.refused(&["analysis", "show", "A", "--plot", "A.jpg"], 1, &["A.jpg", ".svg or .png"]);
    env.refused(&["analysis", "show", "R"], 1, &["analysis.json", "fix:"]);
    std::fs::write(env.path().join("A/hot-blocks.csv"), "a,b\n1,2\n").expect("damage a result");
    env.refused(&["analysis", "show", "A"], 1, &["hot-blocks.csv", "no column", "fix:"]);
}
