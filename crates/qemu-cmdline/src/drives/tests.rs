//! Tests of the rewriting of disks.

use super::*;
use proptest::prelude::*;

fn line(words: &[&str]) -> Vec<Argument> {
    options::parse(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>()).unwrap()
}

fn server() -> DiskServer {
    DiskServer { prefix: "a/".into(), ..DiskServer::at("/run/d.sock".into()) }
}

/// The line in which `names` stay with QEMU.
fn left_out(words: &[&str], names: &[&str]) -> String {
    let server = DiskServer { left_out: DiskNames::of(names.iter().copied()), ..server() };
    let words: Vec<String> =
        rewrite_drives(&line(words), &server).unwrap().iter().flat_map(Argument::words).collect();
    words.join(" ")
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
        &["-drive", "file=a,format=qcow2,offset=512"],
        &["-drive", "driver=null-co,size=1M,id=d"],
        &["-drive", "file.driver=vvfat,file.dir=/tmp,file.rw=on,id=d"],
        &["-blockdev", "driver=luks,node-name=n,key-secret=s,file.driver=file,file.filename=a"],
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
    assert!(!text.contains("s1") && text.contains("f2") && text.contains("/i/base"), "{text}");

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

#[test]
fn a_disk_that_is_left_out_stays_as_the_line_says() {
    let served = "file=a,format=raw,if=none,id=e";
    for words in [
        &["-drive", "file=fat:rw:/tmp,id=d"][..],
        &["-drive", "file=nbd://host/x,if=virtio,id=d"],
        &["-drive", "file=enc.qcow2,format=qcow2,encrypt.key-secret=s,if=none,node-name=d"],
        &["-drive", "file=a.vmdk,format=vmdk,id=d"],
        &["-drive", "driver=null-co,size=1M,id=d"],
        &["-drive", "file=b.raw,format=raw,id=d"],
        &["-blockdev", "null-co,node-name=d,size=1M"],
        &["-blockdev", "nbd,node-name=d,path=/s"],
        &[
            "-blockdev",
            "luks,node-name=d,key-secret=s,file=f",
            "-blockdev",
            "file,node-name=f,filename=a",
        ],
        &["-blockdev", "vmdk,node-name=d,file=f", "-blockdev", "file,node-name=f,filename=a"],
        // The filter above it, the images beneath it, and what is written inside.
        &[
            "-blockdev",
            "throttle,node-name=d,throttle-group=g,file=f",
            "-blockdev",
            "nbd,node-name=f,path=/s",
        ],
        &[
            "-blockdev",
            "throttle,node-name=t,throttle-group=g,file=d",
            "-blockdev",
            "nbd,node-name=d,path=/s",
        ],
        &[
            "-blockdev",
            r#"{"driver":"throttle","node-name":"d","throttle-group":"g","file":{"driver":"luks","key-secret":"s"}}"#,
        ],
        &[
            "-blockdev",
            "file,node-name=f1,filename=a",
            "-blockdev",
            "file,node-name=f2,filename=b",
            "-blockdev",
            "qcow2,node-name=b,file=f2",
            "-blockdev",
            "qcow2,node-name=d,file=f1,backing=b",
        ],
        &[
            "-blockdev",
            "quorum,node-name=d,vote-threshold=1,children.0=q",
            "-blockdev",
            "raw,node-name=q,file.driver=file,file.filename=a",
        ],
    ] {
        assert_eq!(left_out(words, &["d"]), words.join(" "));
        let with_another = [words, &["-drive", served]].concat();
        let text = left_out(&with_another, &["d"]);
        assert!(text.starts_with(&words.join(" ")) && text.contains("export=a/e"), "{text}");
        let all = DiskServer { left_out: DiskNames::All, ..server() };
        assert_eq!(rewrite_drives(&line(&with_another), &all).unwrap(), line(&with_another));
        let found = line_drives(&line(words)).unwrap();
        let of_name = found.iter().filter(|disk| disk.is_in(&DiskNames::of(["d"]))).count();
        assert_eq!(of_name, 1, "{words:?}: {found:?}");
    }
}

#[test]
fn images_that_a_served_disk_shares_with_one_that_is_left_out_stay() {
    let words = [
        "-blockdev",
        "file,node-name=base-file,filename=base",
        "-blockdev",
        "qcow2,node-name=base,file=base-file,read-only=on",
        "-blockdev",
        "qcow2,node-name=d,file.driver=file,file.filename=a,backing=base",
        "-blockdev",
        "qcow2,node-name=e,file.driver=file,file.filename=b,backing=base",
    ];
    let text = left_out(&words, &["d"]);
    assert!(text.starts_with(&words[..6].join(" ")) && text.ends_with("node-name=e"), "{text}");
    assert!(!rewritten(&words).contains("base"));
}

#[test]
fn a_drive_that_is_left_out_keeps_the_overlay_of_snapshot() {
    let words = ["-snapshot", "-drive", "file=a,id=d", "-drive", "file=b,id=e"];
    let text = left_out(&words, &["d"]);
    assert!(text.starts_with("-snapshot -drive file=a,id=d -drive"), "{text}");
    assert!(text.contains("snapshot=off") && text.contains("export=a/e"), "{text}");
    assert!(!rewritten(&words).contains("snapshot"));
}

#[test]
fn a_slice_of_an_image_stays_a_slice_of_what_is_served() {
    let export = "driver=nbd,file.server.type=unix,file.server.path=/run/d.sock,file.export=a/d,file.reconnect-delay=86400";
    let drive = "file=a,format=raw,offset=512,size=1024,if=none,id=d";
    let node = r#"{"driver":"raw","node-name":"d","offset":512,"size":1024,"file":{"driver":"file","filename":"a"}}"#;
    let inner = format!(
        "throttle,node-name=d,throttle-group=g,{}",
        "file.driver=raw,file.offset=512,file.size=1024,file.file.driver=file,file.file.filename=a"
    );
    let inner_export =
        export.replace("file.", "file.file.").replace("driver=", "file.file.driver=");
    for (words, expected) in [
        (
            ["-drive", drive],
            format!(
                "-drive format=raw,offset=512,size=1024,file.{export},discard=unmap,if=none,id=d"
            ),
        ),
        (
            ["-blockdev", node],
            format!(
                "-blockdev driver=raw,offset=512,size=1024,file.{export},file.discard=unmap,discard=unmap,node-name=d"
            ),
        ),
        (
            ["-blockdev", &inner],
            format!(
                "-blockdev file.driver=raw,file.offset=512,file.size=1024,{inner_export},file.file.discard=unmap,file.discard=unmap,discard=unmap,driver=throttle,node-name=d,throttle-group=g"
            ),
        ),
    ] {
        assert_eq!(rewritten(&words), expected);
        let slice = drives(&line(&words)).unwrap()[0].slice.clone().unwrap();
        assert_eq!((slice.offset.as_deref(), slice.size.as_deref()), (Some("512"), Some("1024")));
        // A server of the slice itself.
        let cut = DiskServer { cut_slices: DiskNames::of(["d"]), ..server() };
        let text = rewrite_drives(&line(&words), &cut).unwrap()[0].words().join(" ");
        assert!(!text.contains("512") && text.contains("export=a/d"), "{text}");
    }
    assert_eq!(drives(&line(&["-drive", "file=a,format=raw"])).unwrap()[0].slice, None);
}

#[test]
fn an_image_above_a_served_one_is_not_served() {
    let export = r#"{"driver":"nbd","server":{"type":"unix","path":"/run/d.sock"},"export":"a/d"}"#;
    let is = |file: &str| is_served(file, Path::new("/run/d.sock"));
    assert!(
        is("nbd+unix:///a%2Fd?socket=/run/d.sock") && is("nbd+unix:///d?socket=%2Frun%2Fd.sock")
    );
    for served in [
        format!("json:{export}"),
        format!(r#"json:{{"driver":"raw","offset":512,"file":{export}}}"#),
        format!(r#"json:{{"throttle-group":"g","driver":"throttle","file":{export}}}"#),
        format!(r#"json:{{"driver":"blkreplay","image":{{"driver":"raw","file":{export}}}}}"#),
        format!(r#"json:{{"driver":"mirror_top","backing":{export}}}"#),
    ] {
        assert!(is(&served), "{served}");
        assert!(!is_served(&served, Path::new("/run/e.sock")), "{served}");
    }
    let own = r#"{"driver":"file","filename":"/i/snap"}"#;
    for other in [
        format!(
            r#"json:{{"driver":"qcow2","backing":{{"driver":"raw","file":{export}}},"file":{own}}}"#
        ),
        format!(r#"json:{{"backing":{export},"driver":"qcow2","file":{own}}}"#),
        format!(r#"json:{{"driver":"qcow2","file":"/run/d.sock","backing":{export}}}"#),
        "/run/d.sock".into(),
        "json:{".into(),
        "json:[]".into(),
    ] {
        assert!(!is(&other), "{other}");
    }
}

proptest! {
    #[test]
    fn no_line_panics(values in prop::collection::vec("(file=|id=|if=|a|,|=|\\{|\\}|\"|driver|:|raw){0,8}", 0..5)) {
        let words: Vec<String> = values.into_iter().flat_map(|v| ["-drive".into(), v.clone(), "-blockdev".into(), v]).collect();
        if let Ok(arguments) = options::parse(&words) {
            let _ = rewrite_drives(&arguments, &server());
            let left_out = DiskNames::of(["a", "raw"]);
            let _ = rewrite_drives(&arguments, &DiskServer { left_out, ..server() });
        }
    }
}
