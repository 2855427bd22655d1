//! What commands print: tables with aligned columns, human units, and JSON.

use crate::Failure;
use serde::Serialize;

/// Prints one JSON value and a line end.
pub fn json<T: Serialize>(value: &T) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| Failure::new(format!("write JSON: {e}")))?;
    print_line(&text)
}

/// Prints a line to standard output; a closed pipe (`| head`) ends the program quietly.
pub fn print_line(text: &str) -> Result<(), Failure> {
    use std::io::Write;
    writeln!(Pipe::new(), "{text}")
        .map_err(|e| Failure::new(format!("write to standard output: {e}")))
}

/// Standard output for data: a closed pipe (`| head`) ends the program quietly.
pub struct Pipe(std::io::StdoutLock<'static>);

impl Pipe {
    /// Nobody else prints from here on.
    pub fn new() -> Self {
        Self(std::io::stdout().lock())
    }
}

impl std::io::Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes).or_else(unless_closed)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush().or_else(unless_closed)
    }
}

fn unless_closed<T>(error: std::io::Error) -> std::io::Result<T> {
    match error.kind() {
        std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        _ => Err(error),
    }
}

/// A number of bytes in binary units: `0 B`, `1023 B`, `1.5 MiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Nanoseconds in a unit that fits: `850 us`, `1.73 ms`, `2.4 s`.
pub fn duration(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{} us", ns / 1000),
        1_000_000..1_000_000_000 => format!("{:.2} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

/// A table: first column to the left, the others to the right, two spaces between.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|h| h.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for (i, (cell, width)) in cells.zip(&widths).enumerate() {
            let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
            match i {
                0 => text.extend([cell, &pad]),
                _ => text.extend(["  ", &pad, cell]),
            }
        }
        text.trim_end().to_owned()
    };
    let mut lines = vec![line(&mut header.iter().copied())];
    lines.extend(rows.iter().map(|row| line(&mut row.iter().map(String::as_str))));
    lines.join("\n")
}

/// The value at `percent` (0 to 100) of a sample: nearest rank. 0 for an empty one.
pub fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0)
}

/// Says, once in the life of this process, that a QEMU which was taken hold of would not have
/// survived our being killed meanwhile.
pub fn warn_unguarded(attached: &keyframe_kernel::attach::Attached, pid: u32) {
    static SAID: std::sync::Once = std::sync::Once::new();
    if let Some(text) = unguarded(attached.guarded, pid) {
        SAID.call_once(|| eprintln!("keyframe: warning: {text}"));
    }
}

fn unguarded(guarded: bool, pid: u32) -> Option<String> {
    (!guarded).then(|| {
        format!(
            "QEMU (pid {pid}) lacks the code by which its main thread gives itself back should Keyframe be killed (SIGKILL, out \
             of memory) in the moment of taking hold of it: that would end QEMU. It went well this time; RAM that is \
             plugged in is taken hold of again"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_attach_that_was_not_guarded_is_warned_of() {
        assert_eq!(unguarded(true, 7), None);
        assert!(
            unguarded(false, 7)
                .is_some_and(|text| text.contains("pid 7") && text.contains("would end QEMU"))
        );
    }

    #[test]
    fn units_fit_their_numbers() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536 * 1024), "1.5 MiB");
        assert_eq!(duration(1_730_000), "1.73 ms");
        assert_eq!(duration(850_400), "850 us");
    }

    #[test]
    fn percentiles_are_nearest_rank() {
        let sample: Vec<u64> = (1..=100).collect();
        assert_eq!(
            (percentile(&sample, 50), percentile(&sample, 99), percentile(&[7], 99)),
            (50, 99, 7)
        );
        assert_eq!(percentile(&[], 50), 0);
    }
}
