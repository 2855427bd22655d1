//! Compiles the shared libraries that QEMU loads: the plugin (`plugins/`), once for each plugin
//! interface of QEMU, and `eventfd-coalesce/`.
//!
//! They have no dependencies and a panic strategy of their own, so one call of the compiler builds
//! each.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // QEMU 7.2, 10.0 and 11.1.
    for interface in ["1", "4", "7"] {
        compile(
            "plugins",
            "keyframe_plugin",
            &format!("keyframe_interface=\"{interface}\""),
            &format!("plugin_{interface}"),
        );
    }
    compile(
        "eventfd-coalesce",
        "keyframe_eventfd_coalesce",
        "keyframe_preloaded",
        "eventfd_coalesce",
    );
}

/// Compiles the package in folder `package`, configured with `cfg`, to `OUT_DIR/NAME.so`.
fn compile(package: &str, crate_name: &str, cfg: &str, name: &str) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(package).join("src");
    println!("cargo::rerun-if-changed={}", source.display());
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let rustc = std::env::var_os("RUSTC").expect("cargo sets RUSTC");
    let target = std::env::var("TARGET").expect("cargo sets TARGET");
    // It must use QEMU's C library, which is the distribution's, even if the program itself is
    // linked with musl.
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
        // The build path must not be in the library.
        .args(["--remap-path-prefix", &format!("{}={package}/src", source.display())])
        .arg("-o")
        .arg(out.join(format!("{name}.so")))
        .arg(source.join("lib.rs"))
        .status();
    let status = status.unwrap_or_else(|error| panic!("{}: {error}", rustc.display()));
    assert!(status.success(), "compiling {package} with {cfg}: {status}");
}
