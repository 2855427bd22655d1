//! Tests of the rewriting of disks.

use super::*;
use proptest::prelude::*;

fn line(words: &[&str]) -> Vec<Argument> {
    options::parse(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>()).unwrap()
}

fn server() -> DiskServer {
    DiskServer { socket: "/run/d.sock".into(), prefix: "a/".into() }
}

fn rewritten(words: &[&str]) -> String {
    let words: Vec<String> =
        rewrite_drives(&line(words), &server()).unwrap().iter().flat_map(Argument::words).collect();
    words.join(" ")
}

#[test]
fn a_drive_keeps_the_keys_that_the_guest_sees() {
    let text =
        rewritten(&["-drive", "file=a,,b.img,format=qcow2,if=none,id=d,cache=none,aio=native"]);
    assert_eq!(
        text,
        "-drive format=raw,file.driver=nbd,file.server.type=unix,file.server.path=/run/d.sock,file.export=a/d,file.reconnect-delay=86400,\
         discard=unmap,if=none,id=d,cache.writeback=on,cache.no-flush=off"
    );
    let drive = &drives(&line(&["-drive", "file=a,,b.img,format=qcow2,id=d"])).unwrap()[0];
    assert_eq!((drive.name.as_str(), drive.image.to_str()), ("d", Some("a,b.img")));
    assert_eq!(drive.format.as_deref(), Some("qcow2"));
    assert!(rewritten(&["-drive", "file=a,cache=writethrough"]).contains("cache.writeback=off"));
}

#[test]
fn images_without_a_drive_get_one_at_their_index() {
    assert!(rewritten(&["-m", "64", "a.img"]).contains("index=0,media=disk"));
    let text = rewritten(&["-hdc", "a.img", "-hda", "b.img"]);
    assert!(text.contains("export=a/hd-0") && text.contains("index=2,media=disk"), "{text}");
    assert!(text.contains("export=a/hd-1"), "{text}");
}

#[test]
fn nodes_are_served_in_each_of_their_forms() {
    let two = [
        "-blockdev",
        "driver=file,node-name=f,filename=a",
        "-blockdev",
        "qcow2,node-name=n,file=f",
    ];
    let nbd = "-blockdev driver=nbd,server.type=unix,server.path=/run/d.sock,export=a/n,reconnect-delay=86400,discard=unmap,node-name=n";
    assert_eq!(rewritten(&two), nbd);
    let json = r#"{"driver":"raw","node-name":"n","file":{"driver":"file","filename":"a"}}"#;
    assert_eq!(rewritten(&["-blockdev", json]), nbd);
    assert_eq!(rewritten(&["-blockdev", "file,node-name=n,filename=a"]), nbd);
    assert_eq!(drives(&line(&["-blockdev", json])).unwrap()[0].format.as_deref(), Some("raw"));
}

#[test]
fn read_only_and_empty_drives_are_kept() {
    for words in [
        &["-drive", "file=a,readonly=on"][..],
        &["-drive", "file=a,readonly=yes"],
        &["-drive", "file=a,media=cdrom"],
        &["-drive", "if=floppy"],
        &["-cdrom", "a"],
        &["-blockdev", "raw,node-name=n,read-only=on,file.driver=file,file.filename=a"],
    ] {
        assert_eq!(rewritten(words), words.join(" "));
        assert_eq!(drives(&line(words)).unwrap(), []);
    }
}

#[test]
fn a_snapshot_is_an_overlay_that_is_thrown_away() {
    for words in
        [&["-snapshot", "-drive", "file=a,id=d"][..], &["-drive", "file=a,id=d,snapshot=y"]]
    {
        assert!(!rewritten(words).contains("snapshot"));
        assert!(drives(&line(words)).unwrap()[0].temporary);
    }
}

#[test]
fn exports_that_qemu_reaches_are_disks_too() {
    let served = "-drive format=raw,file.driver=nbd,file.server.type=unix,file.server.path=/run/a.sock,file.export=d,id=d";
    let node = "-blockdev driver=nbd,server.type=unix,server.path=/run/a.sock,export=n,node-name=n";
    let json = r#"{"driver":"raw","node-name":"n","file":{"driver":"nbd","server":{"type":"inet","host":"h","port":"9"}}}"#;
    let below =
        ["-blockdev", "nbd,node-name=f,path=/run/a.sock", "-blockdev", "raw,node-name=n,file=f"];
    let words = |text: &'static str| text.split(' ').collect::<Vec<_>>();
    for (line_words, name, image) in [
        (words(served), "d", "nbd+unix:///d?socket=/run/a.sock"),
        (words(node), "n", "nbd+unix:///n?socket=/run/a.sock"),
        (vec!["-blockdev", json], "n", "nbd://h:9/"),
        (below.to_vec(), "n", "nbd+unix:///?socket=/run/a.sock"),
    ] {
        let found = drives(&line(&line_words)).unwrap();
        assert_eq!(found.len(), 1, "{line_words:?}");
        assert!(found[0].remote && found[0].name == name, "{found:?}");
        assert_eq!(found[0].image, PathBuf::from(image));
        let text = rewritten(&line_words);
        assert!(text.contains("server.path=/run/d.sock") && !text.contains("a.sock"), "{text}");
    }
}

#[test]
fn disks_that_cannot_be_served_are_refused_with_a_fix() {
    for words in [
        &["-drive", "file=fat:rw:/tmp,id=d"][..],
        &["-drive", "file=nbd://host/x"],
        &["-drive", "file=json:{},if=virtio"],
        &["-drive", "file=a,encrypt.key-secret=s"],
        &["-drive", "file=a,offset=512"],
        &["-blockdev", "driver=rbd,node-name=n,pool=p,image=i"],
        &["-blockdev", "driver=qcow2,node-name=n,file=gone"],
        &["-blockdev", "driver=qcow2,node-name=n,backing=b,file.driver=file,file.filename=a"],
        &["-blockdev", "{"],
    ] {
        let error = drives(&line(words)).unwrap_err();
        assert!(error.fix().is_some(), "{words:?}: {error}");
    }
}

#[test]
fn images_beneath_a_disk_are_those_that_the_line_names() {
    let storage = r#"{"driver":"file","filename":"/i/top","node-name":"s1","auto-read-only":true}"#;
    let top = r#"{"node-name":"d","read-only":false,"driver":"qcow2","file":"s1","backing":"f2"}"#;
    let below_storage = r#"{"driver":"file","filename":"/i/base","node-name":"s2"}"#;
    let below =
        r#"{"node-name":"f2","read-only":true,"driver":"qcow2","file":"s2","backing":null}"#;
    let words = |device: &'static str| {
        let nodes = [below_storage, below, storage, top].map(|node| ["-blockdev", node]).concat();
        [nodes, vec!["-device", device]].concat()
    };
    let image =
        |path: &str, format: &str| BackingImage { image: path.into(), format: Some(format.into()) };
    let found = drives(&line(&words("virtio-blk,drive=d"))).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].name.as_str(), found[0].image.to_str()), ("d", Some("/i/top")));
    assert_eq!(
        found[0].backing,
        Backing { images: vec![image("/i/base", "qcow2")], complete: true }
    );
    // Nodes that nothing else uses go with the disk.
    let text = rewritten(&words("virtio-blk,drive=d"));
    assert!(!text.contains("s1") && !text.contains("f2") && !text.contains("s2"), "{text}");
    let text = rewritten(&words("virtio-blk,drive=f2"));
    assert!(!text.contains("s1") && text.contains("f2") && text.contains("s2"), "{text}");

    for (text, expected) in [
        ("qcow2,node-name=d,file.driver=file,file.filename=a", Backing::default()),
        (
            r#"{"driver":"qcow2","node-name":"d","file":{"driver":"file","filename":"a"},"backing":null}"#,
            Backing { images: vec![], complete: true },
        ),
        (
            "qcow2,node-name=d,file.driver=file,file.filename=a,backing.driver=raw,backing.file.driver=file,backing.file.filename=b",
            Backing { images: vec![image("b", "raw")], complete: false },
        ),
    ] {
        assert_eq!(drives(&line(&["-blockdev", text])).unwrap()[0].backing, expected, "{text}");
    }
    let drive = &drives(&line(&["-drive", "file=a,id=d,backing.file.filename=b"])).unwrap()[0];
    assert_eq!(drive.backing.images, [BackingImage { image: "b".into(), format: None }]);
    let drive = "file=a,format=qcow2,backing.driver=qcow2,backing.file.filename=b,id=d";
    let drive = &drives(&line(&["-drive", drive])).unwrap()[0];
    assert_eq!(drive.backing, Backing { images: vec![image("b", "qcow2")], complete: false });
}

#[test]
fn a_disk_inside_a_filter_or_inside_json_is_served() {
    let filter = r#"{"driver":"throttle","node-name":"d","throttle-group":"g","file":{"driver":"qcow2","file":{"driver":"file","filename":"a"}}}"#;
    let found = drives(&line(&["-blockdev", filter])).unwrap();
    assert_eq!((found[0].name.as_str(), found[0].format.as_deref()), ("d", Some("qcow2")));
    let text = rewritten(&["-blockdev", filter]);
    assert!(text.contains("driver=throttle") && text.contains("file.driver=nbd"), "{text}");
    assert!(!text.contains("filename"), "{text}");
    let drive =
        r#"file=json:{"driver":"qcow2",,"file":{"driver":"file",,"filename":"a"}},if=none,id=d"#;
    let found = drives(&line(&["-drive", drive])).unwrap();
    assert_eq!((found[0].image.to_str(), found[0].format.as_deref()), (Some("a"), Some("qcow2")));
    assert!(!rewritten(&["-drive", drive]).contains("filename"));
}

proptest! {
    #[test]
    fn no_line_panics(values in prop::collection::vec("(file=|id=|if=|a|,|=|\\{|\\}|\"|driver|:|raw){0,8}", 0..5)) {
        let words: Vec<String> = values.into_iter().flat_map(|v| ["-drive".into(), v.clone(), "-blockdev".into(), v]).collect();
        if let Ok(arguments) = options::parse(&words) {
            let _ = rewrite_drives(&arguments, &server());
        }
    }
}
