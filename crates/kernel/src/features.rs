//! What this host permits, found by trying. (being built)
use serde::Serialize;
/// All findings.
#[derive(Clone, Debug, Serialize)]
pub struct Features {
    /// One for each thing looked at.
    pub items: Vec<Feature>,
}
/// One finding.
#[derive(Clone, Debug, Serialize)]
pub struct Feature {
    /// What was looked at.
    pub name: &'static str,
    /// True where it can be used.
    pub available: bool,
    /// What was found.
    pub detail: String,
    /// What would make it available.
    pub fix: Option<String>,
}
/// Tries everything.
pub fn probe() -> Features {
    Features { items: Vec::new() }
}
