//! For measurements: serves a raw image as the export `d` on a socket, with an overlay in a
//! directory, until the process is killed.

use keyframe_disk::nbd::{NbdExport, NbdServer};
use keyframe_disk::{Base, Disk, ImageFormat, Lasting, Result};
use std::path::Path;
use std::sync::Arc;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().collect();
    let [_, image, overlay, socket] = words.as_slice() else {
        println!("usage: serve IMAGE.raw OVERLAY-DIR SOCKET");
        return Ok(());
    };
    let base = Base::open(Path::new(image), ImageFormat::Raw)?;
    let disk = Arc::new(Disk::create(Path::new(overlay), base, None, Lasting::Durable)?);
    let _server = NbdServer::start(Path::new(socket), vec![NbdExport { name: "d".into(), disk }])?;
    loop {
        std::thread::park();
    }
}
