//! Compiles what QEMU loads, so that the program carries it: the plugin (`plugins/`), once for each
//! interface that QEMU has had, and `wakeups/`.
//!
//! They have no dependencies and their own panic strategy, and need none of cargo: one call of the
//! compiler each.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // QEMU 7.2 and QEMU 10.0.
    for interface in ["1", "4"] {
        compile(
            "plugins",
            "keyframe_plugin",
            &format!("keyframe_interface=\"{interface}\""),
            &format!("plugin_{interface}"),
        );
    }
    compile("wakeups", "keyframe_wakeups", "keyframe_preloaded", "wakeups");
}

/// The package in `room`, configured with `cfg`, as `OUT_DIR/NAME.so`.
fn compile(room: &str, crate_name: &str, cfg: &str, name: &str) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(room).join("src");
    println!("cargo::rerun-if-changed={}", source.display());
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let rustc = std::env::var_os("RUSTC").expect("cargo sets RUSTC");
    let target = std::env::var("TARGET").expect("cargo sets TARGET");
    // It goes with QEMU's C library, which is the distribution's, also where the program itself has
    // musl linked in.
    let target = target.replace("-musl", "-gnu");
    let status = Command::new(&rustc)
        .args(["--edition", "2024", "--crate-name", crate_name, "--crate-type", "cdylib"])
        .args([
            "-C",
            "opt-level=3",
            "-C",
            "panic=abort",
            "-C",
            "codegen-units=1",
            "-C",
            "strip=symbols",
        ])
        .args(["--target", &target, "--cap-lints", "allow", "--cfg", cfg])
        // Where it was built must not be in it.
        .args(["--remap-path-prefix", &format!("{}={room}/src", source.display())])
        .arg("-o")
        .arg(out.join(format!("{name}.so")))
        .arg(source.join("lib.rs"))
        .status();
    let status = status.unwrap_or_else(|error| panic!("{}: {error}", rustc.display()));
    assert!(status.success(), "compiling {room} with {cfg}: {status}");
}
