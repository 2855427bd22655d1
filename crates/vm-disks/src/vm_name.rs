//! Names of VMs, which directories, files and sockets carry too.

/// Returns whether a VM's name may contain the character `c`.
pub fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

/// Turns any text into a VM name: at most 64 letters, digits, `-`, `_` and `.`, not beginning with
/// a dot. Other characters become `-`.
pub fn name_from(text: &str) -> String {
    let name: String =
        text.chars().map(|c| if is_name_char(c) { c } else { '-' }).take(64).collect();
    let name = name.trim_start_matches('.').to_owned();
    if name.is_empty() { "vm".into() } else { name }
}
