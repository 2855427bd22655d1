//! Which parts of a benchmark are wanted.
//!
//! A part is called as the keys call it (`20k`, `4gib`, `compute_1s`), and the beginning of its
//! name before a `_` stands for all that begin so (`compute`). Without a choice all are wanted; a
//! name that fits nothing is refused.

use crate::Error;

/// The wanted ones.
pub struct Parts<'a> {
    only: &'a [String],
}

impl<'a> Parts<'a> {
    /// Out of `all` parts of `benchmark`, those in `only`.
    pub fn choose(
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

    /// Whether `name` is wanted.
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

    fn wanted(only: &[&str]) -> Result<Vec<&'static str>, Error> {
        let only: Vec<String> = only.iter().map(ToString::to_string).collect();
        let parts = Parts::choose("overhead", &only, ALL.iter().map(ToString::to_string))?;
        Ok(ALL.into_iter().filter(|name| parts.has(name)).collect())
    }

    #[test]
    fn a_part_is_a_whole_name_or_its_beginning() {
        assert_eq!(wanted(&[]).unwrap(), ALL);
        assert_eq!(wanted(&["compute"]).unwrap(), ALL[..2]);
        assert_eq!(wanted(&["60k", "compute_1s"]).unwrap(), ["compute_1s", "60k_1s"]);
        for wrong in ["comp", "compute_1", "1s", "", "compute_1s_x"] {
            let text = wanted(&["60k", wrong]).unwrap_err().to_string();
            assert!(text.contains("no part") && text.contains("compile_1s"), "{text}");
        }
    }
}
