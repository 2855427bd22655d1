//! Parses QEMU's command line: which words are options, which are their values, and the keys of
//! values like `a=b,c=d`.
//!
//! ```text
//!   -m 1G  -S  --name guest=a,,b,debug-threads=on  disk.img
//!   └ option ┘ flag └ option with keys ──────────┘ image
//! ```
//!
//! Whether a word is a value or the next option depends on the option before it. The options
//! without a value (of QEMU 7.2 and 10.0) are listed here; all others take exactly one value.

use crate::{CommandLineError, Result};

/// Options without a value.
const FLAGS: &[&str] = &[
    "S",
    "alt-grab",
    "audio-help",
    "ctrl-grab",
    "curses",
    "daemonize",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "h",
    "help",
    "jitdump",
    "localtime",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-hpet",
    "no-kvm",
    "no-kvm-irqchip",
    "no-kvm-pit",
    "no-kvm-pit-reinjection",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nodefconfig",
    "nographic",
    "nouserconfig",
    "old-param",
    "one-insn-per-tb",
    "only-migratable",
    "perfmap",
    "portrait",
    "preconfig",
    "rtc-td-hack",
    "s",
    "sdl",
    "semihosting",
    "show-cursor",
    "singlestep",
    "snapshot",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
    "xen-domid-restrict",
];

/// An argument of a QEMU command line, with its value if it takes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// An option without a value, as its name without dashes.
    Flag(String),
    /// An option with a value: its name without dashes, and the value.
    Option(String, String),
    /// A word that is no option: the image of the first disk.
    Image(String),
}

impl Argument {
    /// Returns the option's name without dashes; empty for an image.
    pub fn name(&self) -> &str {
        match self {
            Self::Flag(name) | Self::Option(name, _) => name,
            Self::Image(_) => "",
        }
    }

    /// Returns the option's value, or an image's path; empty for a flag.
    pub fn value(&self) -> &str {
        match self {
            Self::Flag(_) => "",
            Self::Option(_, value) | Self::Image(value) => value,
        }
    }

    /// Returns the argument in one line of text.
    pub fn display(&self) -> String {
        self.words().join(" ")
    }

    /// Returns the words that make this argument.
    pub fn words(&self) -> Vec<String> {
        match self {
            Self::Flag(name) => vec![format!("-{name}")],
            Self::Option(name, value) => vec![format!("-{name}"), value.clone()],
            Self::Image(path) => vec![path.clone()],
        }
    }
}

/// Parses the words after the binary's name.
///
/// Error: [`CommandLineError::Argument`] if the last option lacks its value.
pub fn parse(words: &[String]) -> Result<Vec<Argument>> {
    let mut arguments = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let name = match word.strip_prefix('-') {
            None | Some("") => {
                arguments.push(Argument::Image(word.clone()));
                continue;
            }
            Some(rest) => rest.strip_prefix('-').unwrap_or(rest),
        };
        if FLAGS.contains(&name) {
            arguments.push(Argument::Flag(name.into()));
        } else if let Some(value) = words.next() {
            arguments.push(Argument::Option(name.into(), value.clone()));
        } else {
            return Err(CommandLineError::Argument {
                argument: word.clone(),
                reason: "this option is unknown, or its value is missing".into(),
                fix: "complete the command line; `qemu-system-x86_64 -help` lists the options"
                    .into(),
            });
        }
    }
    Ok(arguments)
}

/// Returns driver, property and value of a `-global`, which has two forms: `driver.property=value`,
/// and `driver=...,property=...,value=...`. `None` for another argument.
pub fn global_property(argument: &Argument) -> Option<[String; 3]> {
    if argument.name() != "global" {
        return None;
    }
    let text = argument.value();
    let short = text.split_once('=').and_then(|(name, value)| {
        let (driver, property) = name.split_once('.')?;
        Some([driver, property, value].map(str::to_owned))
    });
    short.or_else(|| {
        let keys = keys(text, "");
        let value = |key| value_of(&keys, key).map(str::to_owned);
        Some([value("driver")?, value("property")?, value("value")?])
    })
}

/// Returns the keys and values of an option's value such as `first,a=b,c=d`. A first part without
/// `=` is the value of the key `implied`; `,,` stands for a comma. A key without a value is `on`,
/// or with a leading `no`, `off`.
pub fn keys(text: &str, implied: &str) -> Vec<(String, String)> {
    split(text)
        .into_iter()
        .enumerate()
        .filter(|(_, part)| !part.is_empty())
        .map(|(index, part)| match part.split_once('=') {
            Some((key, value)) => (key.to_owned(), value.to_owned()),
            None if index == 0 && !implied.is_empty() => (implied.to_owned(), part),
            None => match part.strip_prefix("no") {
                Some(key) if !key.is_empty() => (key.to_owned(), "off".to_owned()),
                _ => (part, "on".to_owned()),
            },
        })
        .collect()
}

/// Splits the value of an option that takes JSON too (`-object`, `-device`, `-netdev`, `-blockdev`)
/// into keys and values. A nested JSON value becomes its text. Returns `None` if the value begins
/// like JSON and is malformed.
pub fn properties(value: &str, implied: &str) -> Option<Vec<(String, String)>> {
    if !value.trim_start().starts_with('{') {
        return Some(keys(value, implied));
    }
    let object: serde_json::Map<String, serde_json::Value> = serde_json::from_str(value).ok()?;
    let text = |v: serde_json::Value| match v {
        serde_json::Value::String(text) => text,
        serde_json::Value::Bool(on) => if on { "on" } else { "off" }.into(),
        other => other.to_string(),
    };
    Some(object.into_iter().map(|(k, v)| (k, text(v))).collect())
}

/// Returns the keys and values of each `-device` of `line`, in its order. Leaves out malformed
/// ones.
pub fn devices(line: &[Argument]) -> impl Iterator<Item = Vec<(String, String)>> + '_ {
    let devices = line.iter().filter(|argument| argument.name() == "device");
    devices.filter_map(|device| properties(device.value(), "driver"))
}

/// Returns the value of the last entry whose key is `key`; `None` if there is none.
pub fn value_of<'a>(keys: &'a [(String, String)], key: &str) -> Option<&'a str> {
    keys.iter().rev().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
}

/// Returns true if the value of `key` is one of QEMU's words for on.
pub fn is_on(keys: &[(String, String)], key: &str) -> bool {
    matches!(value_of(keys, key), Some("on" | "yes" | "true" | "y"))
}

/// Returns `value` as it must be written in `key=value`: each comma doubled.
pub fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

/// Returns the value of one option that has these keys and values.
pub fn joined(keys: &[(String, String)]) -> String {
    keys.iter().map(|(key, value)| format!("{key}={}", escape(value))).collect::<Vec<_>>().join(",")
}

/// Splits at single commas; a double comma becomes one comma.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if c == ',' && rest.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(last) = parts.last_mut() {
            last.push(c);
        }
    }
    parts
}

/// An object that `-object` defines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// The object's type (`memory-backend-memfd`, `iothread`, ...).
    pub qom_type: String,
    /// The object's id.
    pub id: String,
    /// The other keys and values; a nested JSON value as its text.
    pub properties: Vec<(String, String)>,
}

impl Object {
    /// Reads an option's value `type,id=X,...` or `{"qom-type": "type", "id": "X", ...}`; `None` if
    /// it is neither.
    pub fn parse(value: &str) -> Option<Self> {
        let mut all = properties(value, "qom-type")?;
        let mut take = |key: &str| {
            let found = value_of(&all, key).map(str::to_owned);
            all.retain(|(k, _)| k != key);
            found
        };
        let (qom_type, id) = (take("qom-type")?, take("id")?);
        Some(Self { qom_type, id, properties: all })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_value_that_looks_like_an_option_is_a_value() {
        let line = parse(&words("-append -S --name x -S disk.img -")).unwrap();
        let option = |n: &str, v: &str| Argument::Option(n.into(), v.into());
        assert_eq!(
            line,
            [
                option("append", "-S"),
                option("name", "x"),
                Argument::Flag("S".into()),
                Argument::Image("disk.img".into()),
                Argument::Image("-".into())
            ]
        );
        assert!(
            matches!(parse(&words("-S -m")), Err(CommandLineError::Argument { argument, .. }) if argument == "-m")
        );
    }

    #[test]
    fn doubled_commas_belong_to_the_value() {
        let keys = keys("a,,b,debug-threads=on,x=1,,2,wait,noserver", "guest");
        assert_eq!(value_of(&keys, "guest"), Some("a,b"));
        assert_eq!(value_of(&keys, "x"), Some("1,2"));
        assert_eq!(value_of(&keys, "wait"), Some("on"));
        assert_eq!(value_of(&keys, "server"), Some("off"));
    }

    #[test]
    fn objects_are_read_in_both_forms() {
        let plain = Object::parse("memory-backend-ram,id=m0,size=64M,prealloc=on").unwrap();
        let json = Object::parse(
            r#"{"qom-type":"memory-backend-ram","id":"m0","size":67108864,"prealloc":true}"#,
        );
        let json = json.unwrap();
        assert_eq!((&plain.qom_type, &plain.id), (&json.qom_type, &json.id));
        assert_eq!(value_of(&plain.properties, "prealloc"), value_of(&json.properties, "prealloc"));
        assert_eq!(value_of(&json.properties, "size"), Some("67108864"));
        assert_eq!(Object::parse("iothread"), None, "no id");
        assert_eq!(Object::parse("{"), None);
    }

    proptest! {
        #[test]
        fn no_line_panics(line in prop::collection::vec("[-,={}\"a-zS]{0,12}", 0..12)) {
            let _ = parse(&line);
            for word in &line {
                let _ = Object::parse(word);
            }
        }

        /// An escaped value is parsed to the original.
        #[test]
        fn escaping_is_undone(value in "[a,=]{0,12}") {
            let text = format!("k={},z=1", escape(&value));
            let keys = keys(&text, "");
            prop_assert_eq!(value_of(&keys, "k"), Some(value.as_str()));
        }

        /// Parsing loses no word.
        #[test]
        fn words_come_back(line in prop::collection::vec("(-S|-m|-snapshot|a|b=c|-name)", 0..12)) {
            if let Ok(arguments) = parse(&line) {
                let back: Vec<String> = arguments.iter().flat_map(Argument::words).collect();
                prop_assert_eq!(back, line);
            }
        }
    }
}
