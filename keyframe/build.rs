//! Tells the program the commit that it was built from, for `keyframe --version`.

use std::path::Path;
use std::process::Command;

fn main() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.git");
    // A source archive has none. The log has a line for each commit.
    for part in ["HEAD", "logs/HEAD"] {
        let part = repository.join(part);
        if part.exists() {
            println!("cargo::rerun-if-changed={}", part.display());
        }
    }
    println!("cargo::rerun-if-changed=build.rs");
    let version = env!("CARGO_PKG_VERSION");
    let version = match commit().filter(|_| repository.exists()) {
        Some(commit) => format!("{version} ({commit})"),
        None => version.to_owned(),
    };
    println!("cargo::rustc-env=KEYFRAME_VERSION={version}");
}

fn commit() -> Option<String> {
    let asked = Command::new("git").args(["rev-parse", "--short=10", "HEAD"]).output().ok()?;
    let text = String::from_utf8(asked.stdout).ok()?;
    (asked.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}
