//! Formats numbers with units for people.

/// Formats a number of bytes in binary units: `0 B`, `1023 B`, `1.5 MiB`.
pub fn human_bytes(n: u64) -> String {
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

/// Formats nanoseconds in a unit that fits: `850 us`, `1.73 ms`, `2.4 s`.
pub fn human_duration(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{} us", ns / 1000),
        1_000_000..1_000_000_000 => format!("{:.2} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

/// Returns the percentile `percent` (0 to 100) of a sorted sample, by the nearest-rank method;
/// 0 if the sample is empty.
pub fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_fit_their_numbers() {
        assert_eq!(human_bytes(1023), "1023 B");
        assert_eq!(human_bytes(1536 * 1024), "1.5 MiB");
        assert_eq!(human_duration(1_730_000), "1.73 ms");
        assert_eq!(human_duration(850_400), "850 us");
    }

    #[test]
    fn percentiles_are_nearest_rank() {
        let sample: Vec<u64> = (1..=100).collect();
        let percentiles = (percentile(&sample, 50), percentile(&sample, 99), percentile(&[7], 99));
        assert_eq!(percentiles, (50, 99, 7));
        assert_eq!(percentile(&[], 50), 0);
    }
}
