//! Reads that may wait for a device. A few threads of each connection serve them, so that later
//! requests do not wait.
//!
//! Invariant: each read is answered once, in the order of completion, or the connection ends.

use super::output::{Output, Sender};
use super::transmission::number;
use super::wire::NbdRequest;
use crate::{Disk, Error, Result};
use keyframe_kernel::cpu_affinity;
use keyframe_locks::IgnorePoison;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// The number of threads. Each holds the content of one read.
const THREADS: usize = 4;
/// The largest number of reads that wait for a thread. More reads wait in the client's socket.
const WAITING_MAX: usize = 64;

/// The threads that serve the slow reads of one connection.
pub struct SlowReads {
    queue: SyncSender<NbdRequest>,
    threads: Vec<JoinHandle<()>>,
}

impl SlowReads {
    /// Starts the threads. They read from `disk` and send the replies by `sender`. Error: a thread
    /// cannot be started.
    pub fn start(disk: &Arc<Disk>, sender: &Sender) -> Result<Self> {
        let (queue, requests) = sync_channel(WAITING_MAX);
        let requests = Arc::new(Mutex::new(requests));
        let thread = |_| {
            let (disk, requests, sender) =
                (Arc::clone(disk), Arc::clone(&requests), sender.clone());
            std::thread::Builder::new()
                .name("nbd-slow".into())
                .spawn(move || serve(&disk, &requests, sender))
        };
        let threads = (0..THREADS).map(thread).collect::<Result<_, _>>();
        Ok(Self {
            queue,
            threads: threads.map_err(Error::io("an NBD client", "start the reading threads of"))?,
        })
    }

    /// Passes the read `request` to the threads. Waits if too many reads wait already. Error: the
    /// threads have ended.
    pub fn read(&self, request: NbdRequest) -> Result<()> {
        self.queue.send(request).map_err(|_| Error::protocol("an NBD client", "it went away"))
    }

    /// Waits until all reads are answered, and ends the threads.
    pub fn end(self) {
        drop(self.queue);
        for thread in self.threads {
            let _ = thread.join();
        }
    }
}

fn serve(disk: &Disk, requests: &Mutex<Receiver<NbdRequest>>, sender: Sender) {
    cpu_affinity::unbind_current_thread();
    let mut output = Output::new(sender);
    loop {
        // One thread waits here, the others wait for the lock.
        let request = requests.lock().ignore_poison().recv();
        let Ok(request) = request else { return };
        let read =
            |buf: &mut [u8]| disk.read(request.offset, buf).map(|()| true).map_err(|e| number(&e));
        if output.data(&request, read).and_then(|_| output.flush()).is_err() {
            return;
        }
    }
}
