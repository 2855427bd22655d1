//! Compiles QEMU's plugin (`plugins/`), once for each interface that QEMU has had, so that the program carries it.
//!
//! The plugin has no dependencies and its own panic strategy, and needs none of cargo: one call of the compiler each.

use std::path::{Path, PathBuf};
use std::process::Command;

/// QEMU 7.2 and QEMU 10.0.
const INTERFACES: [&str; 2] = ["1", "4"];

fn main() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../plugins/src");
    println!("cargo::rerun-if-changed={}", source.display());
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let rustc = std::env::var_os("RUSTC").expect("cargo sets RUSTC");
    let target = std::env::var("TARGET").expect("cargo sets TARGET");
    // It goes with QEMU's C library, which is the distribution's, also where the program itself has musl linked in.
    let target = target.replace("-musl", "-gnu");
    for interface in INTERFACES {
        let status = Command::new(&rustc)
            .args(["--edition", "2024", "--crate-name", "keyframe_plugin", "--crate-type", "cdylib"])
            .args(["-C", "opt-level=3", "-C", "panic=abort", "-C", "codegen-units=1", "-C", "strip=symbols"])
            .args(["--target", &target, "--cap-lints", "allow"])
            .args(["--cfg", &format!("keyframe_interface=\"{interface}\"")])
            // Where it was built must not be in it.
            .args(["--remap-path-prefix", &format!("{}=plugins/src", source.display())])
            .arg("-o")
            .arg(out.join(format!("keyframe_plugin_{interface}.so")))
            .arg(source.join("lib.rs"))
            .status();
        let status = status.unwrap_or_else(|error| panic!("{}: {error}", rustc.display()));
        assert!(status.success(), "compiling the plugin for interface {interface}: {status}");
    }
}
