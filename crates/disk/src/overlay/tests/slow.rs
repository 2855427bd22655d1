//! The overlay on a device that makes readers wait.

use super::*;

/// A directory whose data file makes readers wait until the gate is open.
struct SlowFolder {
    folder: Arc<SimFolder>,
    gate: Arc<(Mutex<bool>, std::sync::Condvar)>,
}

struct SlowFile(Arc<dyn OverlayFile>, Arc<(Mutex<bool>, std::sync::Condvar)>);

const PATIENCE: std::time::Duration = std::time::Duration::from_mins(2);

impl OverlayFile for SlowFile {
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let _open = self.1.1.wait_timeout_while(locked(&self.1.0), PATIENCE, |open| !*open);
        self.0.read(offset, buf)
    }

    fn read_now(&self, offset: u64, buf: &mut [u8]) -> Result<bool> {
        if *locked(&self.1.0) { self.0.read_now(offset, buf) } else { Ok(false) }
    }

    fn write(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.0.write(offset, buf)
    }

    fn sync(&self) -> Result<()> {
        self.0.sync()
    }

    fn len_bytes(&self) -> Result<u64> {
        self.0.len_bytes()
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.0.set_len(len_bytes)
    }
}

impl OverlayFolder for SlowFolder {
    fn name(&self) -> String {
        self.folder.name()
    }

    fn open(&self, name: &str) -> Result<Arc<dyn OverlayFile>> {
        let file = self.folder.open(name)?;
        Ok(if name == DATA { Arc::new(SlowFile(file, Arc::clone(&self.gate))) } else { file })
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
    let gate: Arc<(Mutex<bool>, std::sync::Condvar)> = Arc::default();
    let folder = Arc::new(SlowFolder { folder: Arc::default(), gate: Arc::clone(&gate) });
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
        *locked(&gate.0) = true;
        gate.1.notify_all();
        assert_eq!(reader.join().unwrap(), [1; 4096]);
    });
    assert_eq!(overlay.size().free_bytes, BLOCK, "then it is free");
}
