//! Reads that take waiting for a device: a few threads of a connection, so that what comes behind
//! them does not wait too.
//!
//! Invariant: each read is answered once, as it gets done, or the connection is over.

use super::output::{Output, Sender};
use super::transmission::number;
use super::wire::Request;
use crate::{Disk, Error, Result};
use keyframe_kernel::cpu_affinity;
use keyframe_locks::IgnorePoison;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Each holds the content of one read.
const THREADS: usize = 4;
/// How many reads may wait for a thread; more wait in the client's socket.
const WAITING_MAX: usize = 64;

/// The threads, which are started by the first read that needs one.
pub struct Slow {
    orders: SyncSender<Request>,
    threads: Vec<JoinHandle<()>>,
}

impl Slow {
    pub fn start(disk: &Arc<Disk>, sender: &Sender) -> Result<Self> {
        let (orders, requests) = sync_channel(WAITING_MAX);
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
            orders,
            threads: threads.map_err(Error::io("an NBD client", "start the reading threads of"))?,
        })
    }

    /// Hands a read over.
    pub fn read(&self, request: Request) -> Result<()> {
        self.orders.send(request).map_err(|_| Error::protocol("an NBD client", "it went away"))
    }

    /// Waits until all that was handed over is answered.
    pub fn end(self) {
        drop(self.orders);
        for thread in self.threads {
            let _ = thread.join();
        }
    }
}

fn serve(disk: &Disk, requests: &Mutex<Receiver<Request>>, sender: Sender) {
    cpu_affinity::unbind_current_thread();
    let mut output = Output::new(sender);
    loop {
        // One of them waits in here, the others for the lock.
        let request = requests.lock().ignore_poison().recv();
        let Ok(request) = request else { return };
        let read =
            |buf: &mut [u8]| disk.read(request.offset, buf).map(|()| true).map_err(|e| number(&e));
        if output.data(&request, read).and_then(|_| output.flush()).is_err() {
            return;
        }
    }
}
