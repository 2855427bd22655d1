//! Bytes as lower-case hexadecimal digits.

/// Returns two lower-case hexadecimal digits for each byte.
pub fn to_hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Parses exactly `N * 2` lower-case hexadecimal digits; returns `None` for any other text.
pub fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |c: &u8| match c {
        b'0'..=b'9' => Some(c - b'0'),
        b'a'..=b'f' => Some(c - b'a' + 10),
        _ => None,
    };
    let mut out = [0; N];
    if text.len() != N * 2 {
        return None;
    }
    for (byte, pair) in out.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = digit(pair.first()?)? << 4 | digit(pair.last()?)?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn hex_comes_back(bytes in any::<[u8; 16]>(), other in "[0-9a-fA-Fxyz]{30,34}") {
            prop_assert_eq!(from_hex::<16>(&to_hex(&bytes)), Some(bytes));
            if let Some(parsed) = from_hex::<16>(&other) {
                prop_assert_eq!(to_hex(&parsed), other);
            }
        }
    }
}
