//! A store of one image, and the queue of its encoder.

use super::*;

/// A store of one image.
pub(super) struct Image {
    pub vm: Vm,
    pub sealed: BTreeMap<u64, u64>,
    pub put: BTreeMap<u64, u64>,
    /// As in the store: after an error the image takes nothing before `abandon`.
    pub broken: bool,
    /// The block's pages in the checkpoint sealed last.
    pub used_pages: u64,
}

impl Image {
    fn call(&mut self, what: &str) -> Result<(), BoxError> {
        if self.broken {
            return Err("broken before".into());
        }
        let result = self.vm.world().call(what);
        self.broken = result.is_err();
        result
    }
}

impl CheckpointSink for Image {
    type Label = Vec<u64>;
    type Sealed = ();
    fn put(&mut self, pages: &[(PageIndex, &Page)]) -> Result<(), BoxError> {
        for (page, content) in pages {
            assert!(self.vm.world().running, "the sink was used while the VM was paused");
            self.call("put")?;
            self.put.insert(page.0, u64::from_le_bytes(content[..8].try_into().unwrap()));
        }
        Ok(())
    }
    fn seal(&mut self, captured: &CapturedCheckpoint, _: Vec<u64>) -> Result<(), BoxError> {
        self.call("seal")?;
        assert_eq!(captured.dirty_pages, self.put.len() as u64);
        self.sealed.append(&mut self.put);
        self.used_pages = captured.ram.blocks()[0].used_bytes / PAGE_BYTES as u64;
        Ok(())
    }
    fn abandon(&mut self) {
        self.broken = false;
        self.put.clear();
    }
}

/// A queue before an encoder that works on demand, or at once.
pub(super) struct Queue {
    pub messages: VecDeque<EncoderMessage<Vec<u64>>>,
    pub encoder: CheckpointEncoder<Image>,
    pub reports: Vec<EncodeReport<()>>,
    pub at_once: bool,
    /// True if the encoder is busy until a capture is given up.
    pub idle_at_abandon: bool,
}

impl Queue {
    pub fn handle(&mut self, messages: usize) {
        for message in self.messages.drain(..messages.min(self.messages.len())) {
            self.reports.extend(self.encoder.handle(message));
        }
    }
}

impl EncoderQueue<Vec<u64>> for Queue {
    fn send(&mut self, message: EncoderMessage<Vec<u64>>) -> Result<(), BoxError> {
        self.at_once |= self.idle_at_abandon && matches!(message, EncoderMessage::Abandon { .. });
        self.messages.push_back(message);
        if self.at_once {
            self.handle(usize::MAX);
        }
        Ok(())
    }
}
