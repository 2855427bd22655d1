//! Serves a raw image under `d` on a socket, with an overlay in a directory, until it is killed:
//! for measuring.

use keyframe_disk::nbd::{Export, Server};
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
    let _server = Server::start(Path::new(socket), vec![Export { name: "d".into(), disk }])?;
    loop {
        std::thread::park();
    }
}
