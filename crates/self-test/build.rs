//! Builds the firmware payload (`guests/payload`), which the self-test boots.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/payload");
    for changed in ["build.rs", &source.display().to_string()] {
        println!("cargo::rerun-if-changed={changed}");
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let status = Command::new(source.join("build.sh")).arg(&out).arg(&out).status();
    let status = status.unwrap_or_else(|error| panic!("{}: {error}", source.display()));
    assert!(status.success(), "building the firmware payload: {status}; it needs gcc and binutils");
}
