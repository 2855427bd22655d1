//! Links the databases whose libraries are installed. The program lacks the others.

use std::process::Command;

const LIBRARIES: [(&str, &str); 4] =
    [("rocksdb", "rocksdb"), ("leveldb", "leveldb"), ("lmdb", "lmdb"), ("kyoto", "kyotocabinet")];

fn main() {
    // This file never exists, so that each build searches the libraries.
    println!("cargo:rerun-if-changed=never");
    for (peer, library) in LIBRARIES {
        let file = format!("lib{library}.so");
        // The C compiler prints the path of a library that it finds, and otherwise the given name.
        let found = Command::new("cc").arg(format!("-print-file-name={file}")).output();
        if found.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).trim() != file) {
            println!("cargo:rustc-cfg=has_{peer}");
            println!("cargo:rustc-link-lib={library}");
        }
    }
}
