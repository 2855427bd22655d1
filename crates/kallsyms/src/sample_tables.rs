//! Tables for tests and fuzzers, as each version of Linux writes them.

use crate::KernelSymbol;

/// The address of the kernel's first symbol.
const BASE: u64 = 0xffff_ffff_9a00_0000;

/// A form of the tables: their order and the form of the addresses, as versions of Linux have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Linux 4.19: markers of 64 bits.
    V4,
    /// Linux 6.1.
    V6_1,
    /// Linux 6.2: seqs before the tokens.
    V6_2,
    /// Linux 6.6: the addresses follow the tokens.
    V6_6,
    /// Linux 6.15: no CPU-local values.
    V6_15,
    /// Without CONFIG_KALLSYMS_BASE_RELATIVE.
    Absolute,
}

/// All of them.
pub const VERSIONS: [Version; 6] =
    [Version::V4, Version::V6_1, Version::V6_2, Version::V6_6, Version::V6_15, Version::Absolute];

/// A token for each character, and a few pairs.
fn token_texts() -> Vec<String> {
    let text = |code: u8| match code {
        b'!'..=b'~' => char::from(code).to_string(),
        1 => "Tsys_".to_owned(),
        2 => "_x".to_owned(),
        200 => "t__".to_owned(),
        _ => String::new(),
    };
    (0..=u8::MAX).map(text).collect()
}

fn compressed(text: &str) -> Vec<u8> {
    let tokens = token_texts();
    let (mut rest, mut out) = (text, Vec::new());
    while !rest.is_empty() {
        let best = (0..256)
            .filter(|code| rest.starts_with(&tokens[*code]))
            .max_by_key(|code| tokens[*code].len());
        let Some(code) = best else { break };
        out.push(code as u8);
        rest = &rest[tokens[code].len()..];
    }
    out
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(8), 0);
}

/// Makes `count` symbols: with `has_values` ten CPU-local values, then code. The length of one name
/// takes two bytes in the tables.
pub fn symbols(count: usize, has_values: bool) -> Vec<KernelSymbol> {
    let long = "very_long_name_".repeat(20);
    let symbol = |number: usize| {
        let is_value = has_values && number < 10;
        let (address, kind) =
            if is_value { (64 * number as u64, 'A') } else { (BASE + 16 * number as u64, 'T') };
        let name = if number == 300 { long.clone() } else { format!("sys_{number:x}_x") };
        KernelSymbol { address, kind: if number.is_multiple_of(3) { 't' } else { kind }, name }
    };
    (0..count).map(symbol).collect()
}

fn address_table(all: &[KernelSymbol], version: Version) -> Vec<u8> {
    let mut out = Vec::new();
    for symbol in all {
        let relative = symbol.address.wrapping_sub(BASE) as u32;
        match version {
            Version::Absolute => out.extend(symbol.address.to_le_bytes()),
            Version::V6_15 => out.extend(relative.to_le_bytes()),
            _ if symbol.address < BASE => out.extend((symbol.address as u32).to_le_bytes()),
            _ => out.extend((-1 - relative as i32).to_le_bytes()),
        }
    }
    pad(&mut out);
    if version != Version::Absolute {
        out.extend(BASE.to_le_bytes());
    }
    out
}

/// Returns the tables of the symbols `all`, as a kernel of `version` has them.
pub fn tables(all: &[KernelSymbol], version: Version) -> Vec<u8> {
    let mut names = (all.len() as u64).to_le_bytes().to_vec();
    let mut markers = Vec::<u8>::new();
    for (number, symbol) in all.iter().enumerate() {
        if number % 256 == 0 {
            let marker = (names.len() - 8) as u64;
            let width = if version == Version::V4 { 8 } else { 4 };
            markers.extend(&marker.to_le_bytes()[..width]);
        }
        let name = compressed(&format!("{}{}", symbol.kind, symbol.name));
        match name.len() {
            len @ 0..0x80 => names.push(len as u8),
            len => names.extend([len as u8 & 0x7f | 0x80, (len >> 7) as u8]),
        }
        names.extend(name);
    }
    pad(&mut names);
    names.extend(markers);
    pad(&mut names);
    let (mut table, mut index) = (Vec::new(), Vec::new());
    for text in token_texts() {
        index.extend((table.len() as u16).to_le_bytes());
        table.extend(text.bytes());
        table.push(0);
    }
    pad(&mut table);
    table.extend(index);
    let mut seqs = vec![7; 3 * all.len()];
    pad(&mut seqs);
    let addresses = address_table(all, version);
    match version {
        Version::V4 | Version::V6_1 | Version::Absolute => [addresses, names, table].concat(),
        Version::V6_2 => [addresses, names, seqs, table].concat(),
        Version::V6_6 | Version::V6_15 => [names, table, addresses, seqs].concat(),
    }
}
