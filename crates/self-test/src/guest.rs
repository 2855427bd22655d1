//! The guest of the self-test: a firmware payload that checks its memory and registers.

use keyframe_machine::Accelerator;
use std::path::Path;

/// The payload's image, for QEMU's `-bios`. `guests/payload/README.md` describes what it prints.
pub(crate) const PAYLOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/payload.bin"));
/// The guest's RAM, in MiB.
const RAM_MIB: u32 = 64;
/// The pages of the pattern that each pass of the guest writes.
const PAGES_PER_PASS: u32 = 200;

/// A VM with the payload.
#[derive(Clone, Copy)]
pub(crate) struct Guest<'a> {
    pub qemu: &'a str,
    pub accelerator: Accelerator,
    pub payload: &'a Path,
}

impl Guest<'_> {
    /// QEMU's command line. The console goes to the file `console`.
    pub fn command(&self, console: &Path, backing: &Backing) -> Vec<String> {
        let mut words: Vec<String> = vec![
            self.qemu.into(),
            "-nodefaults".into(),
            "-no-user-config".into(),
            "-display".into(),
            "none".into(),
            "-machine".into(),
            match backing.object {
                Some(_) => "pc,memory-backend=ram".into(),
                None => "pc".into(),
            },
            "-accel".into(),
            self.accelerator.to_string(),
            "-m".into(),
            format!("{RAM_MIB}M"),
            "-bios".into(),
            self.payload.display().to_string(),
            "-fw_cfg".into(),
            format!("name=opt/keyframe/dirty,string={PAGES_PER_PASS}"),
            "-serial".into(),
            format!("file:{}", console.display()),
        ];
        if let Some(object) = backing.object {
            let size = format!("{object},id=ram,size={RAM_MIB}M");
            let place = console.with_extension("ram");
            let path = match object {
                "memory-backend-file" => format!(",share=on,mem-path={}", place.display()),
                _ => String::new(),
            };
            words.extend(["-object".into(), format!("{size}{}{path}", backing.options)]);
        }
        words
    }
}

/// How QEMU holds the guest's RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Backing {
    /// Its name for people.
    pub name: &'static str,
    /// The type of the memory backend; `None` for QEMU's default.
    pub object: Option<&'static str>,
    /// Further options of the backend, each with a comma before it.
    pub options: &'static str,
}

/// Private memory without a backend: QEMU's default.
pub(crate) const DEFAULT_RAM: Backing =
    Backing { name: "QEMU's default", object: None, options: "" };

/// The number of passes on a console. Fails if the guest has found an error.
pub(crate) fn passes(console: &Path) -> Result<usize, String> {
    let text = std::fs::read(console).map_err(|e| format!("read {}: {e}", console.display()))?;
    let text = String::from_utf8_lossy(&text);
    match text.lines().find(|line| line.contains("KF ERROR")) {
        Some(error) => Err(format!("the guest has found an error: {error}")),
        None => Ok(text.lines().filter(|line| line.starts_with("pass ")).count()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_guest_is_found() {
        let dir = std::env::temp_dir().join(format!("keyframe-passes-{}", std::process::id()));
        std::fs::write(&dir, "KF READY\npass 1 ok sum=1\npass 2 ok sum=2\n").unwrap();
        assert_eq!(passes(&dir), Ok(2));
        std::fs::write(&dir, "pass 1 ok sum=1\nKF ERROR payload: pass 2 page 3\n").unwrap();
        assert!(passes(&dir).unwrap_err().contains("page 3"));
        std::fs::remove_file(&dir).unwrap();
        assert!(passes(&dir).is_err());
    }

    #[test]
    fn the_payload_is_a_firmware_image() {
        assert_eq!(PAYLOAD.len(), 64 << 10);
        // The processor begins at the reset vector, 16 bytes before the end.
        assert!(PAYLOAD[PAYLOAD.len() - 16..].iter().any(|byte| *byte != 0));
    }
}
