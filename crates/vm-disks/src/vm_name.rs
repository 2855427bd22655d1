//! Names of VMs, which directories, files and sockets carry too.

/// The longest name, in bytes.
const NAME_BYTES_MAX: usize = 64;
/// The length of the hash, and the `-` before it.
const HASH_BYTES: usize = 9;

/// Returns whether a VM's name may contain the character `c`: a letter or digit of any script, `-`,
/// `_` or `.`.
pub fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '-' | '_' | '.')
}

/// Returns a VM name for any text: at most 64 bytes of letters, digits, `-`, `_` and `.`, not
/// beginning with a dot. A text that is such a name stays as it is. In any other text, other
/// characters become `-`, and a hash of the text follows, so that two texts do not become one name.
pub fn name_from(text: &str) -> String {
    name_of_at_most(text, NAME_BYTES_MAX)
}

/// Returns the VM name `NAME-NUMBER`. A `name` that is too long for that is shortened as in
/// [`name_from`].
pub fn numbered_name(name: &str, number: impl std::fmt::Display) -> String {
    let suffix = format!("-{number}");
    name_of_at_most(name, NAME_BYTES_MAX.saturating_sub(suffix.len())) + &suffix
}

fn name_of_at_most(text: &str, bytes_max: usize) -> String {
    if text.is_empty() {
        return "vm".into();
    }
    let mapped: String = text.chars().map(|c| if is_name_char(c) { c } else { '-' }).collect();
    let mut name = mapped.trim_start_matches('.');
    if name == text && name.len() <= bytes_max {
        return name.into();
    }
    let mut end = name.len().min(bytes_max - HASH_BYTES);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name = name.get(..end).unwrap_or_default();
    let hash: String = blake3::hash(text.as_bytes()).to_hex().chars().take(8).collect();
    if name.is_empty() { format!("vm-{hash}") } else { format!("{name}-{hash}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_numbered_name_is_a_name() {
        assert_eq!(numbered_name("web", 2), "web-2");
        let long = "n".repeat(64);
        let (first, other) = (numbered_name(&long, 1), numbered_name(&long, 12));
        assert!(first.ends_with("-1") && other.ends_with("-12") && first != other);
        for name in [first, other] {
            assert_eq!(name_from(&name), name);
        }
    }

    #[test]
    fn a_name_stays_as_it_is_and_no_two_texts_become_one() {
        let long = "p".repeat(64);
        let names = ["web", "a-b_c.1", "日本", "中国", "日本語", "Grüße", &*long];
        for name in names {
            assert_eq!(name_from(name), name);
        }
        assert_eq!(name_from(""), "vm");
        let (longer, other) = (format!("{long}1"), format!("{long}2"));
        let wide = ["語".repeat(40), "語".repeat(41)];
        let texts = [
            "a b c",
            "a-b c",
            "x/y",
            "../../etc",
            "..",
            "...",
            "🐧",
            "🦀",
            "-r f",
            "a\nb",
            &longer,
            &other,
            &wide[0],
            &wide[1],
        ];
        let made: BTreeSet<String> = texts.iter().map(|text| name_from(text)).collect();
        assert_eq!(made.len(), texts.len());
        for name in &made {
            assert!(name.len() <= NAME_BYTES_MAX && !name.starts_with('.'), "{name}");
            assert!(name.chars().all(is_name_char), "{name}");
            assert_eq!(&name_from(name), name);
        }
    }
}
