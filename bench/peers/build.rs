//! Links the databases whose libraries are installed; those that are not are left out of the
//! program, which says so.

use std::process::Command;

const LIBRARIES: [(&str, &str); 4] =
    [("rocksdb", "rocksdb"), ("leveldb", "leveldb"), ("lmdb", "lmdb"), ("kyoto", "kyotocabinet")];

fn main() {
    // A file that is never there: what is installed is looked at in each build.
    println!("cargo:rerun-if-changed=never");
    for (peer, library) in LIBRARIES {
        let file = format!("lib{library}.so");
        // The C compiler names the whole path of a library that it finds, and else only what it was
        // asked for.
        let found = Command::new("cc").arg(format!("-print-file-name={file}")).output();
        if found.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).trim() != file) {
            println!("cargo:rustc-cfg=has_{peer}");
            println!("cargo:rustc-link-lib={library}");
        }
    }
}
