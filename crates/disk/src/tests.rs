//! The server with real clients: `qemu-io` and `qemu-img`, and a process that is killed.

mod client;
mod commit;
mod raw;

use crate::process::{DiskHeir, DiskSpec, Disks, ServerEvent};
use crate::{
    BLOCK_BYTES, Base, Content, Disk, DiskBlock, Error, Extent, ImageFormat, Lasting, Layer, Result,
};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const CHILD: &str = "KEYFRAME_TEST_DISKS";

/// The process of another test that serves disks.
#[test]
#[ignore = "a role of another test"]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let control = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned().unwrap();
    crate::serve(&control.into(), |name| {
        Ok(Box::new(Stamp(name.parse().unwrap())) as Box<dyn Layer>)
    })
    .unwrap();
}

/// A layer in which every fourth block is filled with a byte, and the next one is zero.
struct Stamp(u8);

impl Layer for Stamp {
    fn read_block(&self, block: DiskBlock, into: &mut crate::Block) -> Result<Content> {
        Ok(match block.0 % 4 {
            1 => {
                into.fill(self.0);
                Content::Data
            }
            2 => Content::Zero,
            _ => Content::Absent,
        })
    }

    fn next_block(&self, from: DiskBlock) -> Result<Option<DiskBlock>> {
        Ok((from.0..from.0 + 4).find(|block| matches!(block % 4, 1 | 2)).map(DiskBlock))
    }
}

struct Bed {
    dir: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        Self { dir: tempfile::Builder::new().prefix("keyframe-test-disk").tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn spec(&self, base: &str, format: ImageFormat) -> DiskSpec {
        DiskSpec {
            export: "d".into(),
            base: self.path(base),
            format,
            overlay: self.path("overlay"),
            blank_bytes: None,
            layer: None,
            temporary: false,
        }
    }

    fn url(&self) -> String {
        format!("nbd+unix:///d?socket={}", self.path("s").display())
    }

    fn start(&self, spec: &DiskSpec) -> Disks {
        let _ = std::fs::remove_file(self.path("s"));
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["tests::child", "--ignored", "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1");
        Disks::spawn(command, &self.path("s"), std::slice::from_ref(spec)).unwrap()
    }

    /// An image in which each block holds its number.
    fn raw(&self, name: &str, bytes: usize) -> Vec<u8> {
        let image: Vec<u8> = (0..bytes).map(|at| (at / BLOCK_BYTES) as u8 | 1).collect();
        std::fs::write(self.path(name), &image).unwrap();
        image
    }

    fn io(&self, commands: &[&str]) -> String {
        let mut words = vec!["-f".to_owned(), "raw".into()];
        for command in commands {
            words.extend(["-c".into(), (*command).into()]);
        }
        words.push(self.url());
        run("qemu-io", &words)
    }

    fn image(&self) -> Vec<u8> {
        let out = self.path("out.raw");
        run(
            "qemu-img",
            &["convert", "-f", "raw", "-O", "raw", &self.url(), out.to_str().unwrap()]
                .map(String::from),
        );
        std::fs::read(out).unwrap()
    }
}

fn run(program: &str, words: &[String]) -> String {
    let output = Command::new("timeout").arg("60").arg(program).args(words).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !text.contains("failed"), "{program} {words:?}: {text}");
    text
}

fn img(words: &[&str]) -> String {
    run("qemu-img", &words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
}

fn fill(image: &mut [u8], offset: usize, len: usize, byte: u8) {
    image[offset..offset + len].fill(byte);
}

#[test]
fn clients_read_write_zero_and_discard_and_the_base_stays() {
    let bed = Bed::new();
    let mut image = bed.raw("base.raw", 8 << 20);
    let base = image.clone();
    let disks = bed.start(&bed.spec("base.raw", ImageFormat::Raw));
    bed.io(&[
        "write -P 7 4096 65536",
        "write -P 9 1000000 512",
        "write -f -P 8 2097152 1M",
        "write -z 2100000 70000",
        "write -z -u 4194304 1M",
        "discard 5242880 1M",
        "flush",
        "read -P 7 4096 65536",
        "read -P 8 2097152 2048",
        "read -P 0 4194304 2M",
        "aio_write -P 5 7M 4k",
        "aio_flush",
    ]);
    fill(&mut image, 4096, 65536, 7);
    // qemu-io works in sectors.
    fill(&mut image, 1_000_000 / 512 * 512, 0, 9);
    fill(&mut image, 1_000_000, 512, 9);
    fill(&mut image, 2_097_152, 1 << 20, 8);
    fill(&mut image, 2_100_000, 70_000, 0);
    fill(&mut image, 4 << 20, 2 << 20, 0);
    fill(&mut image, 7 << 20, 4096, 5);
    assert!(bed.image() == image, "what was written is what is read");
    let map = img(&["map", "--output=json", "-f", "raw", &bed.url()]);
    assert!(map.contains("\"zero\": true"), "zeroes show as holes: {map}");
    disks.end().unwrap();
    assert!(std::fs::read(bed.path("base.raw")).unwrap() == base, "the base is untouched");
    let disks = bed.start(&bed.spec("base.raw", ImageFormat::Raw));
    assert!(bed.image() == image, "after a restart");
    disks.end().unwrap();
}

#[test]
fn qcow2_with_backing_files_and_compressed_clusters_reads_as_qemu_reads_it() {
    let bed = Bed::new();
    bed.raw("a.raw", 3 << 20);
    let (raw, mid, top) = (bed.path("a.raw"), bed.path("b.qcow2"), bed.path("c.qcow2"));
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    img(&["convert", "-c", "-O", "qcow2", &path(&raw), &path(&mid)]);
    img(&["create", "-q", "-f", "qcow2", "-b", &path(&mid), "-F", "qcow2", &path(&top), "5M"]);
    run(
        "qemu-io",
        &["-f", "qcow2", "-c", "write -P 3 1M 300k", "-c", "write -z 2M 128k", &path(&top)]
            .map(String::from),
    );
    let disks = bed.start(&bed.spec("c.qcow2", ImageFormat::Qcow2));
    img(&["compare", "-f", "qcow2", "-F", "raw", &path(&top), &bed.url()]);
    bed.io(&["write -P 77 100000 3000"]);
    disks.end().unwrap();
    assert!(Base::open(&top, ImageFormat::Qcow2).unwrap().disk_bytes() == 5 << 20);
}

#[test]
fn what_cannot_be_read_is_refused_with_a_way_out() {
    let bed = Bed::new();
    let luks = bed.path("luks.qcow2");
    img(&["create", "-q", "-f", "qcow2", luks.to_str().unwrap(), "1M"]);
    // Creating a real LUKS image runs a benchmark, which fails on a busy machine.
    let mut bytes = std::fs::read(&luks).unwrap();
    bytes[35] = 2;
    std::fs::write(&luks, bytes).unwrap();
    let error = Base::open(&luks, ImageFormat::Qcow2).unwrap_err();
    assert!(error.to_string().contains("encrypted"), "{error}");
    assert!(error.fix().unwrap().contains("qemu-img convert"), "{error:?}");
    let vmdk = bed.path("x.vmdk");
    img(&["create", "-q", "-f", "vmdk", vmdk.to_str().unwrap(), "1M"]);
    let error = ImageFormat::probe(&vmdk).unwrap_err();
    assert!(error.to_string().contains("VMDK"), "{error}");
    assert!(error.fix().unwrap().contains("qemu-img convert"), "{error:?}");
    std::fs::write(bed.path("short"), b"QFI\xfb").unwrap();
    assert!(Base::open(&bed.path("short"), ImageFormat::Qcow2).is_err());
    std::fs::write(bed.path("empty"), b"").unwrap();
    assert!(Base::open(&bed.path("empty"), ImageFormat::Qcow2).is_err());
    assert_eq!(Base::open(&bed.path("empty"), ImageFormat::Raw).unwrap().disk_bytes(), 0);
}

#[test]
fn epochs_arrive_and_failed_ones_arrive_again() {
    let bed = Bed::new();
    bed.raw("base.raw", 4 << 20);
    let mut spec = bed.spec("base.raw", ImageFormat::Raw);
    spec.layer = Some("200".into());
    let mut disks = bed.start(&spec);
    bed.io(&["read -P 200 4096 4096", "read -P 0 8192 4096", "write -P 1 0 8192"]);
    disks.prepare().unwrap();
    disks.pause(Duration::from_secs(10)).unwrap();
    let first = disks.cut().unwrap();
    bed.io(&["flush", "write -P 2 4096 8192"]);
    disks.settled().unwrap();
    let second = disks.cut().unwrap();
    let slots = disks.slot_file(0).unwrap();
    let content = |disks: &mut Disks, epoch| {
        let extents: Vec<_> = disks.pages(0, epoch).map(|extent| extent.unwrap()).collect();
        extents
            .iter()
            .flat_map(|extent| {
                (0..extent.blocks)
                    .map(|i| {
                        let mut page = [0u8; BLOCK_BYTES];
                        slots
                            .read(crate::Slot(extent.slot.unwrap().0 + i as u32), &mut page)
                            .unwrap();
                        (extent.block.0 + i, page[0], page[4095])
                    })
                    .collect::<Vec<_>>()
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(content(&mut disks, first[0]), [(0, 1, 1), (1, 1, 1)]);
    assert_eq!(content(&mut disks, second[0]), [(1, 2, 2), (2, 2, 2)]);
    disks.give_back(&first).unwrap();
    disks.release(&second).unwrap();
    assert!(disks.release(&second).is_err());
    let third = disks.cut().unwrap();
    assert_eq!(content(&mut disks, third[0]), [(0, 1, 1), (1, 2, 2)]);
    let stats = disks.stats().unwrap();
    assert!(
        stats.flushes > 0 && stats.written_bytes == 16384 && stats.disks[0].in_flight == 1,
        "{stats:?}"
    );
    disks.end().unwrap();
}

#[test]
fn a_cut_that_the_engine_does_not_wait_for_is_answered() {
    let bed = Bed::new();
    bed.raw("base.raw", 4 << 20);
    let mut disks = bed.start(&bed.spec("base.raw", ImageFormat::Raw));
    assert!(disks.finish_cut().is_none());
    bed.io(&["write -P 1 0 8192"]);
    disks.pause(Duration::from_secs(10)).unwrap();
    disks.begin_cut().unwrap();
    let (epochs, settled) = disks.finish_cut().unwrap();
    settled.unwrap();
    let blocks = |disks: &mut Disks, epoch| {
        disks
            .pages(0, epoch)
            .map(|extent| extent.unwrap())
            .map(|extent| (extent.block.0, extent.blocks))
            .collect::<Vec<_>>()
    };
    assert_eq!(blocks(&mut disks, epochs.unwrap()[0]), [(0, 2)]);
    assert!(disks.finish_cut().is_none());
    // Other requests follow, and do not get its responses.
    bed.io(&["write -P 2 4096 4096"]);
    disks.begin_cut().unwrap();
    assert_eq!(disks.stats().unwrap().disks[0].in_flight, 2);
    let (epochs, settled) = disks.finish_cut().unwrap();
    settled.unwrap();
    assert_eq!(blocks(&mut disks, epochs.unwrap()[0]), [(1, 1)]);
    disks.begin_cut().unwrap();
    disks.begin_cut().unwrap();
    assert!(disks.finish_cut().is_some_and(|(epochs, settled)| epochs.is_ok() && settled.is_ok()));
    assert_eq!(
        disks.stats().unwrap().disks[0].in_flight,
        3,
        "epochs that were not taken are given back"
    );
    disks.end().unwrap();
}

#[test]
fn a_killed_server_is_started_again_with_all_that_it_acknowledged() {
    let bed = Bed::new();
    let mut image = bed.raw("base.raw", 2 << 20);
    for round in 1..12u8 {
        let mut disks = bed.start(&bed.spec("base.raw", ImageFormat::Raw));
        let at = usize::from(round) * 40_960 + 512;
        bed.io(&[
            &format!("write -P {round} {at} 20000"),
            "flush",
            &format!("write -f -P {} 0 512", 100 + round),
        ]);
        let old = disks.cut().unwrap();
        let (tell, restarted) = std::sync::mpsc::channel();
        disks.observe(Arc::new(move |event| drop(tell.send(event))));
        fill(&mut image, at, 20_000, round);
        fill(&mut image, 0, 512, 100 + round);
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(disks.pid() as i32).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        let event = restarted.recv_timeout(Duration::from_mins(2)).unwrap();
        assert!(matches!(event, ServerEvent::Restarted { .. }), "{event:?}");
        assert!(bed.image() == image, "after kill {round}");
        // The epochs of the old server are void, and the next cut covers all blocks.
        assert!(matches!(disks.require_current(&old), Err(Error::CutLost)));
        assert!(disks.pages_from(0, old[0], DiskBlock(0)).is_err());
        disks.give_back(&old).unwrap();
        let new = disks.cut().unwrap();
        let blocks = |extent: Result<Extent>| extent.unwrap().blocks;
        let covered: u64 = disks.pages(0, new[0]).map(blocks).sum();
        assert_eq!(covered, 6 * u64::from(round) + 1, "block 0, and six of each round");
        disks.require_current(&new).unwrap();
        disks.end().unwrap();
    }
}

#[test]
fn the_guest_keeps_its_disk_when_the_engine_dies() {
    let bed = Bed::new();
    bed.raw("base.raw", 2 << 20);
    let disks = bed.start(&bed.spec("base.raw", ImageFormat::Raw));
    // The client connects before the engine goes, and writes after that.
    let mut client = Command::new("timeout")
        .arg("60")
        .arg("qemu-io")
        .args(["-f", "raw", &bed.url()])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = client.stdin.take().unwrap();
    let mut disks = disks;
    let deadline = std::time::Instant::now() + Duration::from_mins(2);
    while disks.stats().unwrap().clients == 0 && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(disks);
    std::io::Write::write_all(
        &mut input,
        b"write -P 66 8192 4096\nflush\nread -P 66 8192 4096\nquit\n",
    )
    .unwrap();
    drop(input);
    let output = client.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && !text.contains("failed") && text.contains("read 4096/4096"),
        "{text}"
    );
    // Then the server ends by itself and unlocks the overlay.
    let deadline = std::time::Instant::now() + Duration::from_mins(2);
    let overlay = loop {
        match crate::Overlay::open(&bed.path("overlay")) {
            Ok(overlay) => break overlay,
            Err(_) if std::time::Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => panic!("{error}"),
        }
    };
    let disk =
        Disk::new(overlay, Base::open(&bed.path("base.raw"), ImageFormat::Raw).unwrap(), None);
    let mut block = [0u8; BLOCK_BYTES];
    disk.read(8192, &mut block).unwrap();
    assert_eq!(block, [66; BLOCK_BYTES]);
    let (out, mut image) = (bed.path("commit.raw"), std::fs::read(bed.path("base.raw")).unwrap());
    fill(&mut image, 8192, 4096, 66);
    crate::commit::to_new_raw(&disk, &out).unwrap();
    assert!(std::fs::read(&out).unwrap() == image);
    assert!(crate::commit::to_new_raw(&disk, &out).is_err(), "nothing is overwritten");
}

/// As for a rollback: another overlay replaces the served one, and back.
#[test]
fn disks_are_exchanged_under_a_client_and_come_back() {
    let bed = Bed::new();
    std::fs::write(bed.path("base.raw"), vec![1; 1 << 20]).unwrap();
    let base = || Base::open(&bed.path("base.raw"), ImageFormat::Raw).unwrap();
    let disk = Disk::create(&bed.path("first"), base(), None, Lasting::Durable).unwrap();
    let block = || {
        let mut block = [0u8; BLOCK_BYTES];
        disk.read(8192, &mut block).unwrap();
        block[0]
    };
    disk.write(8192, &[2; BLOCK_BYTES]).unwrap();
    let other =
        crate::disk::Stack::create(&bed.path("second"), base(), None, Lasting::Durable).unwrap();
    let mut other = Arc::new(other);
    disk.exchange(&mut other);
    assert_eq!(block(), 1);
    disk.write(8192, &[3; BLOCK_BYTES]).unwrap();
    assert_eq!((block(), disk.size().dirty_blocks), (3, 1));
    disk.exchange(&mut other);
    assert_eq!(block(), 2);
}

/// A rollback whose engine dies: the heir sees which disks the server serves, exchanges them, and
/// dismisses the others.
#[test]
fn an_heir_ends_the_rollback_of_an_engine_that_has_died() {
    for is_exchanged in [false, true] {
        let bed = Bed::new();
        bed.raw("base.raw", 2 << 20);
        let former = bed.spec("base.raw", ImageFormat::Raw);
        let staged = DiskSpec { overlay: bed.path("second"), ..former.clone() };
        let mut disks = bed.start(&former);
        assert!(DiskHeir::connect(&bed.path("s")).is_err(), "no disks are staged");
        disks.stage(std::slice::from_ref(&staged)).unwrap();
        if is_exchanged {
            disks.exchange().unwrap();
        }
        drop(disks);
        let heir = DiskHeir::connect(&bed.path("s")).unwrap();
        let served = |heir: &DiskHeir| heir.staging().unwrap().served;
        let [now, other] =
            if is_exchanged { [&staged, &former] } else { [&former, &staged] }.map(|s| &s.overlay);
        assert_eq!(served(&heir), std::slice::from_ref(now));
        heir.exchange().unwrap();
        assert_eq!(served(&heir), std::slice::from_ref(other));
        assert_eq!(heir.staging().unwrap().written_bytes, 0);
        heir.dismiss().unwrap();
        assert!(!heir.staging().unwrap().is_staged && heir.exchange().is_err());
        assert!(crate::Overlay::open(now).is_ok(), "it is closed");
        assert!(crate::Overlay::open(other).is_err(), "it is served");
        assert!(DiskHeir::connect(&bed.path("s")).is_err(), "no further heir is waited for");
    }
}
