//! A server that guests with a network talk to.

use std::io::{Read, Write};
use std::net::TcpListener;

/// Starts an echo server on loopback, and returns its port. It ends with the test program.
pub fn echo() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its number").port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let (mut from, mut to) = (stream.try_clone().expect("clone a socket"), stream);
                let mut buffer = vec![0; 65536];
                while let Ok(n) = from.read(&mut buffer) {
                    if n == 0 || to.write_all(&buffer[..n]).is_err() {
                        break;
                    }
                }
            });
        }
    });
    port
}
