//! Commits: new images as QEMU reads them, and commits in place whose process is killed.

use super::{Bed, Stamp, img, run};
use crate::commit::{self, InPlace};
use crate::{BLOCK_BYTES, Base, Below, Disk, Error, ImageFormat, Lasting, Overlay, Result};
use std::path::Path;
use std::process::Command;

const CHILD: &str = "KEYFRAME_TEST_COMMIT";

/// The process of another test: commits in that test's directory, and kills itself after a number
/// of bytes.
#[test]
#[ignore = "a role of another test"]
fn child() {
    let Ok(words) = std::env::var(CHILD) else { return };
    let (dir, words) = words.split_once(' ').unwrap();
    let (format, limit) = words.split_once(' ').unwrap();
    let limit: u64 = limit.parse().unwrap();
    let mut killed = |done: u64| {
        if done >= limit {
            let own = rustix::process::getpid();
            rustix::process::kill_process(own, rustix::process::Signal::KILL).unwrap();
        }
        Ok(())
    };
    in_place(Path::new(dir), ImageFormat::named(format).unwrap(), &mut killed).unwrap();
}

fn in_place(
    dir: &Path,
    format: ImageFormat,
    watch: commit::ProgressCallback<'_>,
) -> Result<commit::Amount> {
    let overlay = Overlay::open(&dir.join("overlay"))?;
    let image = InPlace::begin(&dir.join("base"), format, overlay.disk_bytes(), "the overlay")?;
    let amount = image.write(&overlay, overlay.disk_bytes(), watch)?;
    image.finish()?;
    overlay.clear()?;
    image.unmark()?;
    Ok(amount)
}

/// An overlay with data, zeros and discards over the base. Returns the disk's content.
fn overlay(bed: &Bed, format: ImageFormat) -> Vec<u8> {
    let base = Base::open(&bed.path("base"), format).unwrap();
    let disk = Disk::create(&bed.path("overlay"), base, None, Lasting::Durable).unwrap();
    let bytes = disk.disk_bytes();
    for i in 0..400u64 {
        let at = i * 7919 * 512 % (bytes - 9000);
        disk.write(at, &vec![i as u8 | 1; 512 + (i as usize * 37) % 8000]).unwrap();
    }
    disk.write(bytes - 700, &[3; 700]).unwrap();
    disk.zero(300_000, 100_000).unwrap();
    disk.discard(700_000, 200_000).unwrap();
    disk.sync().unwrap();
    let mut now = vec![0; bytes as usize];
    disk.read(0, &mut now).unwrap();
    now
}

const DISK_BYTES: usize = (4 << 20) + 1536;

fn base(bed: &Bed, format: ImageFormat) {
    bed.raw("base.raw", DISK_BYTES);
    let (raw, path) = (bed.path("base.raw"), bed.path("base"));
    let words = ["convert", "-O", if format == ImageFormat::Raw { "raw" } else { "qcow2" }];
    img(&[&words[..], &[raw.to_str().unwrap(), path.to_str().unwrap()]].concat());
}

fn content(path: &Path, format: ImageFormat) -> Vec<u8> {
    let base = Base::open(path, format).unwrap();
    let mut now = vec![0; base.disk_bytes() as usize];
    base.read(0, &mut now).unwrap();
    now
}

#[test]
fn a_new_image_is_what_the_disk_was() {
    let bed = Bed::new();
    base(&bed, ImageFormat::Qcow2);
    let expected = overlay(&bed, ImageFormat::Qcow2);
    let overlay = Overlay::open(&bed.path("overlay")).unwrap();
    let amount = commit::measure(&overlay).unwrap();
    assert!(amount.data_bytes > 1 << 20 && amount.zero_bytes > 200_000, "{amount:?}");
    let disk = Disk::new(overlay, Base::open(&bed.path("base"), ImageFormat::Qcow2).unwrap(), None);
    for format in [ImageFormat::Raw, ImageFormat::Qcow2] {
        let path = bed.path(&format!("new.{format}"));
        let mut told = 0;
        let mut watch = |done| {
            told = done;
            Ok(())
        };
        commit::to_new(&disk, &path, format, &mut watch).unwrap();
        assert_eq!(told, DISK_BYTES as u64);
        assert!(content(&path, format) == expected, "{format}");
        // The image as QEMU reads it.
        let raw = bed.path("again.raw");
        let words = ["convert", "-f", &format.to_string(), "-O", "raw"];
        img(&[&words[..], &[path.to_str().unwrap(), raw.to_str().unwrap()]].concat());
        assert!(std::fs::read(raw).unwrap() == expected, "{format} as QEMU reads it");
        assert!(
            commit::to_new(&disk, &path, format, &mut |_| Ok(())).is_err(),
            "nothing is overwritten"
        );
    }
    img(&["check", "-q", "-f", "qcow2", bed.path("new.qcow2").to_str().unwrap()]);
    let mut stop = |_| Err(Error::protocol("the user", "gave up"));
    assert!(commit::to_new(&disk, &bed.path("never"), ImageFormat::Raw, &mut stop).is_err());
    let left: Vec<_> =
        std::fs::read_dir(bed.dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(
        left.iter().all(|name| name != "never" && !name.to_string_lossy().starts_with('.')),
        "{left:?}"
    );
}

/// A checkpoint's disk: a layer over an image, without an overlay.
#[test]
fn a_layer_over_an_image_becomes_a_file_or_a_stream() {
    let bed = Bed::new();
    base(&bed, ImageFormat::Qcow2);
    let mut expected = content(&bed.path("base"), ImageFormat::Qcow2);
    for (number, block) in expected.chunks_mut(BLOCK_BYTES).enumerate() {
        match number % 4 {
            1 => block.fill(9),
            2 => block.fill(0),
            _ => {}
        }
    }
    let image = Base::open(&bed.path("base"), ImageFormat::Qcow2).unwrap();
    let disk = Below::new(image, Some(Box::new(Stamp(9))));
    for format in [ImageFormat::Raw, ImageFormat::Qcow2] {
        let path = bed.path("new");
        std::fs::write(&path, "what was there").unwrap();
        assert!(
            commit::to_file(&disk, &path, format, false, &mut |_| Ok(())).is_err(),
            "not asked to replace"
        );
        commit::to_file(&disk, &path, format, true, &mut |_| Ok(())).unwrap();
        assert!(content(&path, format) == expected, "{format}");
    }
    img(&["check", "-q", "-f", "qcow2", bed.path("new").to_str().unwrap()]);
    let mut streamed = Vec::new();
    commit::to_stream(&disk, &mut streamed, &mut |_| Ok(())).unwrap();
    assert!(streamed == expected, "the stream differs");
}

#[test]
fn a_killed_commit_in_place_goes_on_and_its_image_is_refused_until_then() {
    for format in [ImageFormat::Raw, ImageFormat::Qcow2] {
        let bed = Bed::new();
        base(&bed, format);
        let expected = overlay(&bed, format);
        for limit in [0, 4096, 100_000, 900_000, 1_500_000] {
            let status = Command::new(std::env::current_exe().unwrap())
                .args([
                    "tests::commit::child",
                    "--ignored",
                    "--exact",
                    "--nocapture",
                    "--test-threads=1",
                ])
                .env(CHILD, format!("{} {format} {limit}", bed.dir.path().display()))
                .status()
                .unwrap();
            assert!(!status.success(), "{format}: it was to be killed at {limit}");
            let error = Base::open(&bed.path("base"), format).unwrap_err().to_string();
            assert!(error.contains("the overlay") && error.contains("interrupted"), "{error}");
            let other = InPlace::begin(&bed.path("base"), format, DISK_BYTES as u64, "another")
                .err()
                .unwrap()
                .to_string();
            assert!(other.contains("the overlay"), "{other}");
            if format == ImageFormat::Qcow2 {
                no_corruption(&bed.path("base"));
            }
        }
        let amount = in_place(bed.dir.path(), format, &mut |_| Ok(())).unwrap();
        assert!(amount.data_bytes > 1 << 20, "{amount:?}");
        assert!(content(&bed.path("base"), format) == expected, "{format}");
        let overlay = Overlay::open(&bed.path("overlay")).unwrap();
        assert_eq!((overlay.next(crate::DiskBlock(0)), overlay.size().data_bytes), (None, 0));
        assert!(!bed.path("base.keyframe-commit").exists());
        if format == ImageFormat::Qcow2 {
            no_corruption(&bed.path("base"));
        }
    }
}

/// `qemu-img check` exits with 3 if clusters leak, which costs space, and with 2 if content is
/// damaged.
fn no_corruption(path: &Path) {
    let output = Command::new("timeout")
        .args(["60", "qemu-img", "check", "-f", "qcow2"])
        .arg(path)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}: {text}", output.status);
}

fn begin(bed: &Bed, source: &str) -> Result<()> {
    InPlace::begin(&bed.path("base"), ImageFormat::Raw, DISK_BYTES as u64, source).map(drop)
}

#[test]
fn the_mark_of_an_interrupted_commit_is_not_written_again() {
    let bed = Bed::new();
    base(&bed, ImageFormat::Raw);
    let mark = bed.path("base.keyframe-commit");
    // A mark that was not complete when its host failed counts for nothing.
    std::fs::write(bed.path("base.keyframe-commit.new"), "the ov").unwrap();
    Base::open(&bed.path("base"), ImageFormat::Raw).unwrap();
    begin(&bed, "the overlay").unwrap();
    assert_eq!(std::fs::read_to_string(&mark).unwrap(), "the overlay\n");
    assert!(!bed.path("base.keyframe-commit.new").exists());
    let then = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1);
    std::fs::File::options().write(true).open(&mark).unwrap().set_modified(then).unwrap();
    begin(&bed, "the overlay").unwrap();
    assert_eq!(std::fs::metadata(&mark).unwrap().modified().unwrap(), then);
}

/// The image may be half written.
#[test]
fn an_image_whose_mark_cannot_be_understood_is_neither_served_nor_written() {
    let bed = Bed::new();
    base(&bed, ImageFormat::Raw);
    let mark = bed.path("base.keyframe-commit");
    let refused = |what: &str| {
        assert!(Base::open(&bed.path("base"), ImageFormat::Raw).is_err(), "{what}: it is served");
        assert!(begin(&bed, "the overlay").is_err(), "{what}: it is written");
    };
    std::fs::write(&mark, b"\xff\xfe").unwrap();
    refused("a mark that is no text");
    std::fs::write(&mark, "").unwrap();
    refused("an empty mark");
    std::fs::remove_file(&mark).unwrap();
    std::fs::create_dir(&mark).unwrap();
    refused("a mark that cannot be read");
    std::fs::remove_dir(&mark).unwrap();
    begin(&bed, "the overlay").unwrap();
}

#[test]
fn an_image_in_use_is_not_written() {
    let bed = Bed::new();
    base(&bed, ImageFormat::Raw);
    overlay(&bed, ImageFormat::Raw);
    let before = std::fs::read(bed.path("base")).unwrap();
    let begin_with = |bytes: u64| {
        InPlace::begin(&bed.path("base"), ImageFormat::Raw, bytes, "the overlay").map(drop)
    };
    let begin = || begin_with(DISK_BYTES as u64);
    // Another VM under Keyframe runs over the image.
    let served = Base::open(&bed.path("base"), ImageFormat::Raw).unwrap();
    assert!(matches!(begin(), Err(Error::Locked { .. })));
    drop(served);
    // A QEMU has the image open, for reading.
    let socket = bed.path("q");
    let mut holder = Command::new("timeout")
        .args(["60", "qemu-nbd", "--persistent", "-r", "-f", "raw", "-k"])
        .args([&socket, &bed.path("base")])
        .spawn()
        .unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_mins(2);
    while !socket.exists() && std::time::Instant::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // qemu-nbd answers after it has opened the image; its socket exists before.
    run("qemu-img", &["info".into(), format!("nbd+unix:///?socket={}", socket.display())]);
    let locked = begin();
    let pid = rustix::process::Pid::from_child(&holder);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    holder.wait().unwrap();
    assert!(matches!(locked, Err(Error::Locked { .. })), "{locked:?}");
    assert!(
        !bed.path("base.keyframe-commit").exists()
            && std::fs::read(bed.path("base")).unwrap() == before
    );
    // An image of another size is neither written nor marked.
    assert!(matches!(begin_with(512), Err(Error::Refused { .. })));
    assert!(!bed.path("base.keyframe-commit").exists());
    // During a commit, no other Keyframe reads the image.
    let image =
        InPlace::begin(&bed.path("base"), ImageFormat::Raw, DISK_BYTES as u64, "the overlay")
            .unwrap();
    let error = Base::open(&bed.path("base"), ImageFormat::Raw).unwrap_err().to_string();
    assert!(error.contains("under way"), "{error}");
    let wrong = image.write(&Overlay::open(&bed.path("overlay")).unwrap(), 512, &mut |_| Ok(()));
    assert!(matches!(wrong, Err(Error::Refused { .. })));
    drop(image);
}
