//! The rate of a network as people write it.

/// Parses the rate of a network, such as `100Mbit`, `2.5 Gbit/s`. Returns it in bits a second. Error: a
/// sentence for users if the text is no rate, or the rate is out of bounds.
pub fn parse_rate(text: &str) -> Result<f64, String> {
    let wrong =
        || format!("{text:?} is no rate: write a number and a unit, as in 100Mbit, 1Gbit, 2.5Gbit");
    let text = text.strip_suffix("/s").unwrap_or(text);
    let units = [("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3), ("bit", 1.0)];
    let (number, unit) = units
        .iter()
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)))
        .ok_or_else(wrong)?;
    let rate = number.trim().parse::<f64>().map_err(|_| wrong())? * unit;
    if rate > 0.0 && rate <= 1e15 {
        Ok(rate)
    } else {
        Err("it must be more than 0, and at most 1e6Gbit".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_units() {
        for (text, rate) in [
            ("1Gbit", 1e9),
            ("2.5 Gbit/s", 2.5e9),
            ("100Mbit", 1e8),
            ("64kbit", 64e3),
            ("8bit", 8.0),
        ] {
            assert_eq!(parse_rate(text), Ok(rate), "{text}");
        }
        for text in ["", "1", "Gbit", "0Mbit", "-1Mbit", "NaNbit", "1GB"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
    }
}
