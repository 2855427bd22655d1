//! The parts of a benchmark that `--only` selects.
//!
//! A part has the name that keys use (`20k`, `4gib`, `compute_1s`). The beginning of a name before a
//! `_` selects all parts that begin so (`compute`). Without `--only`, all parts are selected. A name
//! that fits no part is refused.

use crate::Error;

/// The selected parts.
pub struct PartSelection<'a> {
    only: &'a [String],
}

impl<'a> PartSelection<'a> {
    /// Selects the parts in `only` from `all` parts of `benchmark`.
    pub fn new(
        benchmark: &'static str,
        only: &'a [String],
        all: impl Iterator<Item = String>,
    ) -> Result<Self, Error> {
        let all: Vec<String> = all.collect();
        match only.iter().find(|part| !all.iter().any(|name| fits(part, name))) {
            Some(part) => {
                Err(Error::NoPart { benchmark, part: part.clone(), parts: all.join(", ") })
            }
            None => Ok(Self { only }),
        }
    }

    /// Returns whether part `name` is selected.
    pub fn has(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| fits(part, name))
    }
}

fn fits(part: &str, name: &str) -> bool {
    name.strip_prefix(part).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [&str; 4] = ["compute_100ms", "compute_1s", "60k_1s", "compile_1s"];

    fn selected(only: &[&str]) -> Result<Vec<&'static str>, Error> {
        let only: Vec<String> = only.iter().map(ToString::to_string).collect();
        let parts = PartSelection::new("overhead", &only, ALL.iter().map(ToString::to_string))?;
        Ok(ALL.into_iter().filter(|name| parts.has(name)).collect())
    }

    #[test]
    fn a_part_is_a_whole_name_or_its_beginning() {
        assert_eq!(selected(&[]).unwrap(), ALL);
        assert_eq!(selected(&["compute"]).unwrap(), ALL[..2]);
        assert_eq!(selected(&["60k", "compute_1s"]).unwrap(), ["compute_1s", "60k_1s"]);
        for wrong in ["comp", "compute_1", "1s", "", "compute_1s_x"] {
            let text = selected(&["60k", wrong]).unwrap_err().to_string();
            assert!(text.contains("no part") && text.contains("compile_1s"), "{text}");
        }
    }
}
