//! The plugin's arguments `name=value`, as QEMU passes them. Each known name may be given once.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int};

/// The arguments by name.
pub struct Arguments {
    all: BTreeMap<String, String>,
    taken: std::collections::BTreeSet<String>,
}

impl Arguments {
    /// Copies QEMU's arguments.
    ///
    /// # Safety
    /// `values` points to `count` strings that end in a zero byte.
    pub unsafe fn new(count: c_int, values: *const *const c_char) -> Result<Self, String> {
        let texts = (0..usize::try_from(count).unwrap_or(0)).map(|index| {
            // SAFETY: the caller's promise, and the index is below the count.
            unsafe { CStr::from_ptr(*values.add(index)) }.to_string_lossy().into_owned()
        });
        Self::parse(texts)
    }

    fn parse(texts: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut all = BTreeMap::new();
        for text in texts {
            let Some((name, value)) = text.split_once('=') else {
                return Err(format!("argument {text:?} is not name=value"));
            };
            if all.insert(name.to_owned(), value.to_owned()).is_some() {
                return Err(format!("argument {name} is given twice"));
            }
        }
        Ok(Self { all, taken: std::collections::BTreeSet::new() })
    }

    /// The value of a required argument.
    pub fn text(&mut self, name: &str) -> Result<String, String> {
        self.taken.insert(name.to_owned());
        self.all.get(name).cloned().ok_or_else(|| format!("argument {name} is missing"))
    }

    /// The value of a required argument as a number, decimal or with 0x.
    pub fn number(&mut self, name: &str) -> Result<u64, String> {
        let text = self.text(name)?;
        number(&text).ok_or_else(|| format!("argument {name}={text} is not a number"))
    }

    /// Refuses arguments that no tool has asked for.
    pub fn done(self) -> Result<(), String> {
        match self.all.keys().find(|&name| !self.taken.contains(name)) {
            Some(name) => Err(format!("argument {name} is unknown")),
            None => Ok(()),
        }
    }
}

/// Parses a number, decimal or hexadecimal with 0x.
pub fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_known_name_once() {
        let parse = |all: &[&str]| Arguments::parse(all.iter().map(|&one| one.to_owned()));
        let mut arguments = parse(&["tool=x", "at=0x10", "n=12", "odd=a=b"]).unwrap();
        assert_eq!(arguments.text("tool").unwrap(), "x");
        assert_eq!(arguments.number("at"), Ok(16));
        assert_eq!(arguments.number("n"), Ok(12));
        assert_eq!(arguments.text("odd").unwrap(), "a=b");
        assert!(arguments.number("m").unwrap_err().contains("missing"));
        arguments.done().unwrap();
        assert!(parse(&["a=1"]).unwrap().done().unwrap_err().contains("a is unknown"));
        assert!(parse(&["a=1", "a=2"]).is_err());
        assert!(parse(&["a"]).is_err());
        assert!(parse(&["a=0xg"]).unwrap().number("a").is_err());
    }
}
