//! The overlay on a device that makes readers wait.

use super::*;

/// Makes threads wait until it is open.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: std::sync::Condvar,
}

impl Gate {
    fn pass(&self) {
        let is_closed = |open: &mut bool| !*open;
        drop(self.opened.wait_timeout_while(locked(&self.is_open), PATIENCE, is_closed));
    }

    fn open(&self) {
        *locked(&self.is_open) = true;
        self.opened.notify_all();
    }
}

/// A directory whose data file makes readers and syncs wait, each until their gate is open.
#[derive(Default)]
struct SlowFolder {
    folder: Arc<SimFolder>,
    reads: Arc<Gate>,
    syncs: Arc<Gate>,
}

struct SlowFile {
    file: Arc<dyn OverlayFile>,
    reads: Arc<Gate>,
    syncs: Arc<Gate>,
}

const PATIENCE: std::time::Duration = std::time::Duration::from_mins(2);

impl OverlayFile for SlowFile {
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.reads.pass();
        self.file.read(offset, buf)
    }

    fn read_now(&self, offset: u64, buf: &mut [u8]) -> Result<bool> {
        if *locked(&self.reads.is_open) { self.file.read_now(offset, buf) } else { Ok(false) }
    }

    fn write(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.file.write(offset, buf)
    }

    fn sync(&self) -> Result<()> {
        self.syncs.pass();
        self.file.sync()
    }

    fn len_bytes(&self) -> Result<u64> {
        self.file.len_bytes()
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.file.set_len(len_bytes)
    }
}

impl OverlayFolder for SlowFolder {
    fn name(&self) -> String {
        self.folder.name()
    }

    fn open(&self, name: &str) -> Result<Arc<dyn OverlayFile>> {
        let file = self.folder.open(name)?;
        if name != DATA {
            return Ok(file);
        }
        let (reads, syncs) = (Arc::clone(&self.reads), Arc::clone(&self.syncs));
        Ok(Arc::new(SlowFile { file, reads, syncs }))
    }

    fn replace(&self, from: &str, to: &str) -> Result<()> {
        self.folder.replace(from, to)
    }

    fn sync(&self) -> Result<()> {
        self.folder.sync()
    }

    fn boot_seed(&self) -> Result<u64> {
        Ok(0)
    }
}

/// Other operations go on meanwhile. The slot that is read is not reused, although no map names it
/// any more.
#[test]
fn a_read_that_waits_for_the_device_gets_its_own_block() {
    let folder = Arc::new(SlowFolder::default());
    let reads = Arc::clone(&folder.reads);
    folder.syncs.open();
    let overlay = Overlay::on(folder, Some(BYTES)).unwrap();
    overlay.write(0, &[1; 4096], &read_below).unwrap();
    let epoch = overlay.cut().unwrap();
    let mut buf = [0u8; 4096];
    assert_eq!(overlay.read_now(0, &mut buf).unwrap(), None);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut buf = [0u8; 4096];
            overlay.read(0, &mut buf).unwrap();
            buf
        });
        let deadline = std::time::Instant::now() + PATIENCE;
        while overlay.map().slots.has_no_reader() && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        overlay.write(0, &[2; 4096], &read_below).unwrap();
        overlay.release(epoch).unwrap();
        overlay.cut().unwrap();
        overlay.release_all();
        overlay.sync().unwrap();
        assert_eq!(overlay.size().free_bytes, 0, "its slot is free while it is read");
        overlay.write(8 * BLOCK, &[3; 4096], &read_below).unwrap();
        assert!(!reader.is_finished(), "it was to wait");
        reads.open();
        assert_eq!(reader.join().unwrap(), [1; 4096]);
    });
    assert_eq!(overlay.size().free_bytes, BLOCK, "then it is free");
}

/// The engine kills a server that does not answer.
#[test]
fn the_sizes_are_known_while_a_sync_waits_for_the_device() {
    let folder = Arc::new(SlowFolder::default());
    let syncs = Arc::clone(&folder.syncs);
    let overlay = Overlay::on(folder, Some(BYTES)).unwrap();
    overlay.write(0, &[1; 4096], &read_below).unwrap();
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| overlay.sync());
        let deadline = std::time::Instant::now() + PATIENCE;
        while overlay.data_dirty.load(Ordering::Acquire) && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(overlay.size().syncs, 0);
        assert!(!syncing.is_finished(), "the sizes waited for the sync");
        syncs.open();
        syncing.join().unwrap().unwrap();
    });
    assert_eq!(overlay.size().syncs, 1);
}
