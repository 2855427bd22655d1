//! Entry points of the fuzzers in `fuzz/`. Each gives bytes to a parser of what clients, servers,
//! engines or files contain.
//!
//! Not part of the public interface. Each function takes any bytes. It must neither panic nor take
//! memory out of proportion to them.

use crate::nbd::client::Client;
use crate::nbd::{NbdExport, serve_one};
use crate::overlay::fuzzing::{MemoryFolder, mended};
use crate::process::receive_request;
use crate::{BLOCK_BYTES, Base, Disk, DiskBlock, Overlay};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

/// The number of bytes that a socket holds.
const SOCKET_BYTES_MAX: usize = 64 << 10;
const DISK_BYTES: u64 = 64 * BLOCK_BYTES as u64;

fn at_most(bytes: &[u8]) -> &[u8] {
    bytes.get(..SOCKET_BYTES_MAX).unwrap_or(bytes)
}

/// Gives `bytes` to the NBD server as all that a client sends, including the negotiation.
pub fn nbd_server(bytes: &[u8]) {
    let overlay = Overlay::on(MemoryFolder::folder(Vec::new(), Vec::new()), Some(DISK_BYTES));
    let (Ok(overlay), Ok(base)) = (overlay, Base::blank(DISK_BYTES)) else { return };
    let disk = Arc::new(Disk::new(overlay, base, None));
    let Ok((mut theirs, ours)) = UnixStream::pair() else { return };
    let sent =
        theirs.write_all(at_most(bytes)).and_then(|()| theirs.shutdown(std::net::Shutdown::Write));
    if sent.is_err() {
        return;
    }
    let reader = std::thread::spawn(move || {
        let mut scrap = [0; 4096];
        while theirs.read(&mut scrap).is_ok_and(|len| len > 0) {}
    });
    serve_one(vec![NbdExport { name: "d".into(), disk: Arc::clone(&disk) }], ours);
    let _ = reader.join();
    let mut block = vec![0; BLOCK_BYTES];
    assert!(disk.read(0, &mut block).is_ok(), "what a client sent broke the disk");
}

/// Gives `bytes` to the NBD client as all that a server sends. `socket` is a path at which the
/// function may create a socket.
pub fn nbd_client(bytes: &[u8], socket: &Path) {
    let _ = std::fs::remove_file(socket);
    let Ok(listener) = UnixListener::bind(socket) else { return };
    let bytes = at_most(bytes).to_vec();
    let server = std::thread::spawn(move || {
        let Ok((mut stream, _)) = listener.accept() else { return };
        let sent =
            stream.write_all(&bytes).and_then(|()| stream.shutdown(std::net::Shutdown::Write));
        let mut scrap = [0; 4096];
        while sent.is_ok() && stream.read(&mut scrap).is_ok_and(|len| len > 0) {}
    });
    if let Ok(mut client) = Client::connect(socket, "d", "base:allocation") {
        let end = client.len_bytes();
        if let Ok(found) = client.status(0) {
            assert!(
                found
                    .iter()
                    .all(|part| part.offset.checked_add(part.len).is_some_and(|to| to <= end))
            );
        }
        let _ = client.read(0, &mut [0; 9000]);
    }
    let _ = server.join();
}

/// Opens an overlay with the journal `journal`, beside a data file of some blocks. The journal's
/// checksums are made valid before.
pub fn overlay(journal: &[u8]) {
    let folder = MemoryFolder::folder(mended(journal), vec![7; 16 * BLOCK_BYTES]);
    let Ok(overlay) = Overlay::on(folder, None) else { return };
    let mut block = vec![0; BLOCK_BYTES];
    let blocks = overlay.disk_bytes() / BLOCK_BYTES as u64;
    for at in [0, blocks / 2, blocks.saturating_sub(1)] {
        let _ = overlay.read(at * BLOCK_BYTES as u64, &mut block);
    }
    overlay.status(DiskBlock(0), blocks, &mut |_, _, _| {});
    let _ = overlay.cut().map(|epoch| overlay.pages(epoch, DiskBlock(0), 100).map(drop));
    let _ = (overlay.write(0, &block, &|_, _| Ok(())), overlay.sync());
}

/// Parses `bytes` as the requests that an engine sends to the process that serves its disks.
pub fn engine_requests(bytes: &[u8]) {
    let Ok((mut theirs, ours)) = UnixStream::pair() else { return };
    if theirs.write_all(at_most(bytes)).is_ok() {
        drop(theirs);
        while receive_request(&ours) {}
    }
}
