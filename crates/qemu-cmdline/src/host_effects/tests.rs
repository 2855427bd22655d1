use super::*;
use crate::restored_line::restorable_line;
use std::collections::BTreeSet;

/// A host with these names in use.
#[derive(Default)]
struct Host {
    files: BTreeSet<&'static str>,
    open: BTreeSet<&'static str>,
    served: BTreeSet<&'static str>,
    ports: BTreeSet<u16>,
    taps: BTreeSet<&'static str>,
}

impl HostProbe for Host {
    fn exists(&self, path: &Path) -> bool {
        path.to_str().is_some_and(|p| {
            self.files.contains(p) || self.open.contains(p) || self.served.contains(p)
        })
    }
    fn is_open(&self, path: &Path) -> bool {
        path.to_str().is_some_and(|path| self.open.contains(path))
    }
    fn is_served(&self, path: &Path) -> bool {
        path.to_str().is_some_and(|path| self.served.contains(path))
    }
    fn port_in_use(&self, _: &str, port: u16, _: bool) -> bool {
        self.ports.contains(&port)
    }
    fn tap_in_use(&self, name: &str) -> bool {
        self.taps.contains(name)
    }
}

fn line(text: &str) -> Vec<Argument> {
    options::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).unwrap()
}

fn run_again(text: &str, added: &str, host: &Host, line_use: LineUse<'_>) -> Result<String> {
    let made = restorable_line(&line(text), &line(added), host, line_use)?;
    let words: Vec<_> = made.arguments.iter().flat_map(Argument::words).collect();
    Ok(words.join(" "))
}

fn restored(text: &str, host: &Host) -> Result<String> {
    run_again(text, "", host, LineUse::default())
}

#[test]
fn files_are_appended_to_or_made_anew() {
    let host = Host {
        files: ["/q.log", "/n.pcap", "/con", "/q.log.restored"].into(),
        open: ["/busy"].into(),
        ..Host::default()
    };
    for (kept, expected) in [
        ("-D /q.log", "-D /q.log.restored-2"),
        ("-D /new.log", "-D /new.log"),
        ("-D /q-%d.log", "-D /q-%d.log"),
        (
            "-object filter-dump,id=f,netdev=n,file=/n.pcap",
            "-object filter-dump,id=f,netdev=n,file=/n.pcap.restored",
        ),
        (
            "-serial file:/con -serial file:/busy",
            "-chardev file,id=keyframe-serial-file-0,path=/con,append=on -serial \
             chardev:keyframe-serial-file-0 -chardev \
             file,id=keyframe-serial-file-1,path=/busy.restored,append=on -serial \
             chardev:keyframe-serial-file-1",
        ),
        ("-serial file:/dev/stdout", "-serial file:/dev/stdout"),
        ("-chardev file,id=c,path=/con", "-chardev file,id=c,path=/con,append=on"),
        (
            "-chardev socket,id=c,path=/s,server=on,logfile=/busy",
            "-chardev socket,id=c,path=/s,server=on,logfile=/busy.restored,logappend=on",
        ),
        ("-trace memory*", "-trace memory*"),
    ] {
        assert_eq!(restored(kept, &host).unwrap(), expected);
    }
    let replayed = run_again(
        "-D /q.log -object filter-dump,id=f,netdev=n,file=/n.pcap -m 64",
        "",
        &host,
        LineUse::Replay,
    );
    assert_eq!(replayed.unwrap(), "-m 64", "a replay writes no files");
}

#[test]
fn sockets_in_use_stay_their_owners() {
    let host = Host { served: ["/u"].into(), ..Host::default() };
    for (kept, expected) in [
        ("-qmp unix:/u,server=on,wait=off", "-qmp unix:/u.restored,server=on,wait=off"),
        ("-serial mon:unix:/u,server=on", "-serial mon:unix:/u.restored,server=on"),
        ("-serial unix:/u", "-serial unix:/u"),
        ("-vnc unix:/u", "-vnc unix:/u.restored"),
        ("-vnc unix:/free", "-vnc unix:/free"),
        (
            "-chardev socket,id=c,path=/u,server=on,wait=off",
            "-chardev socket,id=c,server=on,wait=off,path=/u.restored",
        ),
        ("-chardev socket,id=c,path=/u", "-chardev socket,id=c,path=/u"),
    ] {
        assert_eq!(restored(kept, &host).unwrap(), expected);
    }
}

#[test]
fn a_port_in_use_is_refused_with_the_option_that_replaces_it() {
    let ports = [1234, 2222, 5901, 4444].into();
    let host = Host { ports, taps: ["t0"].into(), ..Host::default() };
    for (kept, fix) in [
        ("-netdev user,id=n,hostfwd=tcp::2222-:22", "`-- -netdev user,id=n`"),
        ("-nic user,hostfwd=tcp::2222-:22", "keyframe branch"),
        ("-vnc :1", "`-- -vnc "),
        ("-s", "`-- -gdb "),
        ("-gdb tcp::4444", "`-- -gdb "),
        ("-spice port=4444", "`-- -spice "),
        ("-monitor telnet:127.0.0.1:4444,server=on,wait=off", "`-- -monitor "),
        ("-serial tcp::4444,server=on", "`-- -serial "),
        ("-chardev socket,id=c,host=::1,port=4444,server=on", "`-- -chardev null,id=c`"),
        ("-netdev tap,id=n,ifname=t0", "`-- -netdev tap,id=n,"),
    ] {
        let error = restored(kept, &host).unwrap_err();
        assert!(error.to_string().contains("is in use"), "{error}");
        let text = error.fix().unwrap();
        assert!(text.contains(fix), "{text}");
        assert_eq!(text.matches('`').count() % 2, 0, "{text}");
    }
    for (kept, added) in [
        ("-netdev user,id=n,hostfwd=tcp::2222-:22", "-netdev user,id=n"),
        ("-vnc :1", "-vnc :2"),
        ("-s", "-gdb none"),
        ("-spice port=4444", "-spice port=4445"),
        ("-monitor tcp::4444,server=on", "-monitor none"),
    ] {
        assert_eq!(run_again(kept, added, &host, LineUse::default()).unwrap(), "", "{kept}");
    }
    // A client and a free port.
    for kept in ["-serial tcp::4444", "-vnc :2", "-netdev user,id=n,hostfwd=tcp::23-:23"] {
        assert_eq!(restored(kept, &host).unwrap(), kept);
    }
}

#[test]
fn clones_and_lazy_restores_lock_no_memory() {
    let kept = "-overcommit mem-lock=on,cpu-pm=on -overcommit mem-lock=on -overcommit mem-lock=off";
    let lazy = LineUse::Restore { lazy: true };
    let host = Host::default();
    let expected = "-overcommit cpu-pm=on -overcommit mem-lock=off";
    assert_eq!(run_again(kept, "", &host, lazy).unwrap(), expected);
    assert_eq!(run_again(kept, "", &host, LineUse::Clone(Path::new("/c"))).unwrap(), expected);
    assert_eq!(restored(kept, &host).unwrap(), kept);
}

#[test]
fn a_clones_files_are_in_its_directory() {
    let host = Host { files: ["/a/q.log"].into(), ..Host::default() };
    let clone = LineUse::Clone(Path::new("/c"));
    let made = run_again("-D /a/q.log -D /b/q.log -D /c/own", "", &host, clone).unwrap();
    assert_eq!(made, "-D /c/q.log -D /c/q.log.restored -D /c/own");
}
