//! Detects options that a wrapper script between Keyframe and QEMU adds: Keyframe does not see them
//! on the command line.

/// Options that Keyframe must see: those that define disks, networks and consoles, and those whose
/// absence has a default.
const NEEDED: [&str; 32] = [
    "drive",
    "blockdev",
    "device",
    "hda",
    "hdb",
    "hdc",
    "hdd",
    "cdrom",
    "fda",
    "fdb",
    "sd",
    "mtdblock",
    "pflash",
    "usbdevice",
    "virtfs",
    "fsdev",
    "netdev",
    "nic",
    "net",
    "serial",
    "parallel",
    "debugcon",
    "chardev",
    "virtioconsole",
    "monitor",
    "mon",
    "qmp",
    "nographic",
    "nodefaults",
    "icount",
    "smp",
    "incoming",
];

/// Returns the names of the options that a wrapper put before the words `given`, and that Keyframe
/// must see, each once. `line` is the process's command line, with a NUL after each word. The
/// result is empty if the line does not end with `given`.
pub fn options_added_by_wrapper(line: &[u8], given: &[String]) -> Vec<String> {
    let words: Vec<&[u8]> =
        line.strip_suffix(b"\0").unwrap_or(line).split(|byte| *byte == 0).collect();
    let Some(own) = words.len().checked_sub(given.len()).filter(|own| *own > 0) else {
        return Vec::new();
    };
    let (before, after) = words.split_at(own);
    if after.iter().zip(given).any(|(word, given)| *word != given.as_bytes()) {
        return Vec::new();
    }
    let mut found: Vec<String> = Vec::new();
    for word in before {
        let Some(name) = std::str::from_utf8(word).ok().and_then(|word| word.strip_prefix('-'))
        else {
            continue;
        };
        let name = name.strip_prefix('-').unwrap_or(name);
        if NEEDED.contains(&name) && !found.iter().any(|known| known == name) {
            found.push(name.into());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::options_added_by_wrapper as added;

    fn line(words: &[&str]) -> Vec<u8> {
        words.iter().flat_map(|word| word.bytes().chain([0])).collect()
    }

    #[test]
    fn only_needed_options_before_the_given_words_are_found() {
        let given: Vec<String> = ["-m", "1G", "-drive", "file=b"].map(String::from).into();
        let all = [
            "qemu",
            "-L",
            "/roms",
            "-drive",
            "file=a",
            "--drive",
            "file=c",
            "-nodefaults",
            "-m",
            "1G",
            "-drive",
            "file=b",
        ];
        assert_eq!(added(&line(&all), &given), ["drive", "nodefaults"]);
        assert!(
            added(&line(&["qemu", "-L", "/roms", "-m", "1G", "-drive", "file=b"]), &given)
                .is_empty()
        );
        assert!(added(&line(&["qemu", "-m", "1G", "-drive", "file=b"]), &given).is_empty());
        for other in [
            &["qemu", "-drive", "x"][..],
            &[],
            &["-m", "1G", "-drive", "file=b"],
            &["a", "-net", "x", "-m", "2G", "-drive", "file=b"],
        ] {
            assert!(added(&line(other), &given).is_empty(), "{other:?}");
        }
    }
}
