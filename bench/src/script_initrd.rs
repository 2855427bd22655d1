//! Adds a script to the small guest's initial file system.
//!
//! ```text
//!   initramfs.cpio.gz │ zeros to a multiple of 4 │ cpio (newc): /w, TRAILER!!!
//!   Linux unpacks one after the other
//! ```
//!
//! Input to a serial port during a recording must fit its 16 bytes. The script is therefore in the
//! file system, and only its name is typed.

use crate::Error;
use std::path::Path;

/// The name of the script.
pub const NAME: &str = "w";

/// Writes the file system `from`, followed by the script, to `to`.
pub fn write(from: &Path, script: &str, to: &Path) -> Result<(), Error> {
    let mut bytes = std::fs::read(from).map_err(Error::io(format!("read {}", from.display())))?;
    pad(&mut bytes);
    entry(&mut bytes, NAME, 0o100_755, script.as_bytes());
    entry(&mut bytes, "TRAILER!!!", 0, &[]);
    std::fs::write(to, bytes).map_err(Error::io(format!("write {}", to.display())))
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

/// Appends an entry: a header of 13 hexadecimal numbers, the name with its zero, the content.
fn entry(bytes: &mut Vec<u8>, name: &str, mode: u32, content: &[u8]) {
    let numbers = [1, mode, 0, 0, 1, 0, content.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
    bytes.extend_from_slice(b"070701");
    for number in numbers {
        bytes.extend_from_slice(format!("{number:08X}").as_bytes());
    }
    bytes.extend_from_slice(name.as_bytes());
    bytes.push(0);
    pad(bytes);
    bytes.extend_from_slice(content);
    pad(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned() {
        let mut bytes = vec![1; 6];
        pad(&mut bytes);
        entry(&mut bytes, "w", 0o100_755, b"echo");
        assert_eq!(bytes.len(), 8 + 112 + 4);
        assert_eq!(&bytes[8..14], b"070701");
        assert_eq!(&bytes[118..120], b"w\0");
        assert_eq!(&bytes[120..], b"echo");
    }
}
